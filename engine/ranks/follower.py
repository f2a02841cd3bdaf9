"""A rank beside the first: a process that starts as the first one does, and then does as it does.

Goes in: `python -m engine.ranks.follower RANK LOOKAHEAD SOCKET LIFELINE STORE MEMORY CONFIG`, of
which four are inherited files, and then messages on the socket.  Comes out: its part of every
collective, and word of copies that have ended.  It schedules nothing, samples nothing and reads no
files but the weights.  It ends with the first rank, whatever becomes of that one: the other end of
LIFELINE closes then.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from engine.adapters.copier import CudaCopier, ThreadCopier
from engine.adapters.host import pin
from engine.adapters.slots import SlotRow
from engine.assembly import make_planner, make_runner, warm_up_steps
from engine.batch import Packed
from engine.collector import spare_what_is_there
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.kernels.lora_meta import LoraClass, LoraMeta, Segment
from engine.last_words import tell
from engine.messages import PackedManifest
from engine.models.ranks import Ranks
from engine.ranks.crew import shared_bytes
from engine.ranks.told import (
    Cancel,
    Copied,
    Copy,
    Failed,
    Kind,
    Reader,
    Serve,
    Slot,
    Step,
    Stop,
    Told,
    frame,
    words_of,
)
from engine.recency import Usage
from engine.runner import Runner
from engine.startup import device_of, prepare

#: While copies are under way: nobody rings when one has ended.
COPYING_SECONDS = 0.0005


class Follower:
    """Everything of one rank.  Carries messages out one by one, in order."""

    def __init__(
        self, config: EngineConfig, ranks: Ranks, memory_fd: int, lookahead: bool | None
    ) -> None:
        ground = prepare(config, progress=lambda *_: None, ranks=ranks)
        config, self._arena, self._rank = ground.config, ground.arena, ranks.rank
        cuda = self._arena.device.type == "cuda"
        if lookahead is None:
            lookahead = cuda and not config.deterministic
        self._rows: dict[int, SlotRow] = {}
        self._manifests: dict[str, PackedManifest] = {}
        self._planner = make_planner(
            config, self._arena, self._rows, self._manifests.__getitem__, ground.model.room
        )
        self._runner = make_runner(
            config,
            ground.model,
            self._arena,
            self._planner,
            ground.vocab_size,
            lookahead=lookahead,
        )
        warm_up_steps(self._runner, None, config, ground.layout, lambda *_: None)
        tell(ground.memory_plan().table())
        self._kinds: dict[int, LoraClass] = {}
        self._memory_fd = memory_fd
        self._host = _Shards(ranks.rank, self._arena.block_bytes)
        fences = _Fences(self._runner)
        self.copier: CudaCopier | ThreadCopier
        if cuda:
            self.copier = CudaCopier(self._arena, self._host, fences)
        else:
            self.copier = ThreadCopier(self._arena, self._host)

    def do(self, told: Told, payload: bytes) -> None:
        """Carry out one message but Stop."""
        match told:
            case Step():
                self._step(told, payload)
            case Slot():
                self._take_slot(told)
            case Kind():
                self._kinds[told.number] = told.kind
            case Copy():
                self._host.begin(told.rev, told.place, len(told.blocks))
                self.copier.start(told.rev, told.blocks)
            case Cancel():
                self.copier.cancel(told.rev)
            case Serve():
                self._host.open(self._memory_fd, pinned=self._arena.device.type == "cuda")
            case _:
                raise AssertionError(f"{told} is not for a rank beside the first")

    def _step(self, told: Step, payload: bytes) -> None:
        words = words_of(told, payload)
        packed = Packed(told.seqs, told.rows, told.draws, told.width, words)
        segments = [Segment(*segment) for segment in told.segments]
        kind = self._kinds[told.kind] if told.kind >= 0 else None
        lora: LoraMeta | None = self._planner.told(segments, kind)
        self._runner.follow(packed, lora, told.owners, told.owed)

    def _take_slot(self, told: Slot) -> None:
        """Mirror the row; what the device has to know of it is copied ahead of the next step."""
        before = self._rows.get(told.slot)
        if before is not None:
            self._manifests.pop(before.rev, None)
        self._manifests[told.manifest.rev] = told.manifest
        self._rows[told.slot] = SlotRow(
            slot=told.slot,
            rev=told.manifest.rev,
            blocks=told.blocks,
            pinned=False,
            priority=0,
            usage=Usage(0.0),
            loaded_at=0.0,
            generation=told.generation,
            ready=True,
        )
        with torch.inference_mode():
            self._planner.bring(told.slot)


class _Shards:
    """This rank's shards in host memory, as a copier asks for them."""

    def __init__(self, rank: int, block_bytes: int) -> None:
        self._rank, self._block_bytes = rank, block_bytes
        self._arena = torch.empty(0, block_bytes, dtype=torch.uint8)
        self._places: dict[str, tuple[int, int]] = {}

    def open(self, fd: int, *, pinned: bool) -> None:
        """Once it has its size."""
        size = os.fstat(fd).st_size
        self._arena = shared_bytes(fd, size).view(-1, self._block_bytes) if size else self._arena
        if pinned and size:
            pin(self._arena)

    def begin(self, rev: str, place: int, blocks: int) -> None:
        self._places[rev] = place + self._rank * blocks, blocks

    def hold(self, rev: str) -> int:
        start, _ = self._places[rev]
        return self._arena.data_ptr() + start * self._block_bytes

    def held(self, rev: str) -> Tensor:
        start, blocks = self._places[rev]
        return self._arena[start : start + blocks]

    def let_go(self, rev: str) -> None:
        del self._places[rev]


class _Fences:
    """What a copy waits for here: every step that was told before it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def take_fences(self, blocks: Sequence[int]) -> tuple[object, ...]:
        return () if self._runner.fence is None else (self._runner.fence,)

    def fence(self, blocks: Sequence[int], event: object) -> None:
        """A copy that could not begin ends this rank, and all others with it."""


def follow(follower: Follower, sock: socket.socket) -> None:
    """Carry out what comes until Stop."""
    reader = Reader(sock)
    while True:
        for rev in follower.copier.poll():
            sock.sendall(frame(Copied(rev)))
        if follower.copier.in_flight and not reader.has_more:
            ready, _, _ = select.select([sock], [], [], COPYING_SECONDS)
            if not ready:
                continue
        said = reader.next()
        if said is None or isinstance(said[0], Stop):
            return
        follower.do(*said)


def _end_with(lifeline: socket.socket) -> None:
    """On a thread: the main one may be in a collective that never ends."""
    lifeline.recv(1)
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """The process; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the daemon's to judge
    rank, lookahead, sock_fd, lifeline_fd, store_fd, memory_fd, encoded = arguments
    lifeline = socket.socket(fileno=int(lifeline_fd))
    threading.Thread(target=_end_with, args=(lifeline,), name="lorad-lifeline", daemon=True).start()
    config = msgspec.json.decode(encoded, type=EngineConfig)
    ahead = {"auto": None, "on": True, "off": False}[lookahead]
    sock = socket.socket(fileno=int(sock_fd))
    try:
        device = torch.device(device_of(config))
        ranks = Ranks(int(rank), config.tensor_parallel, store_fd=int(store_fd), device=device)
        follower = Follower(config, ranks, int(memory_fd), ahead)
        spare_what_is_there()  # all ranks wait for the one that collects
        follow(follower, sock)
        ranks.close()
    except EngineError as error:
        with contextlib.suppress(OSError):
            sock.sendall(frame(Failed(error.code, error.message, error.hint)))
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run() -> NoReturn:
    """Follow, then leave at once: threads of torch and ours need no farewell."""
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()

"""The first rank's view of the others: it starts them, tells them every step, and hears of copies.

Goes in: a configuration, then what the step loop does that the others have to do too.  Comes out:
the same on every rank, and revisions whose copies have ended on all of them.  A rank that dies
takes the engine with it: `on_death` is called from the thread that noticed.  Knows no requests.
"""

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.adapters.slots import SlotRow
from engine.batch import Packed
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDied, EngineError, NoDevice
from engine.kernels.lora_meta import LoraClass, LoraMeta
from engine.messages import PackedManifest
from engine.models.ranks import ENVIRONMENT, Ranks
from engine.models.shard import split
from engine.models.spec import read_spec
from engine.ranks.told import (
    SOCKET_BYTES,
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
)
from engine.startup import device_of

#: How long the others may take to end after they were told to.
FAREWELL_SECONDS = 10.0
#: What one rank finds wrong at the start, all of them do, but for what is wrong with its card: the
#: first one has so long to say it by itself.
GRACE_SECONDS = 3.0
#: Classes of plans that have a number at a time: steps that are not padded bring new ones without
#: end.  Then all are told anew, which is some hundred bytes for each that comes again.
KINDS = 1024


@dataclass(frozen=True, slots=True)
class _Other:
    """One rank beside the first.  It ends when `lifeline` closes, whatever it is at."""

    rank: int
    process: subprocess.Popen[bytes]
    sock: socket.socket
    lifeline: socket.socket


class Crew:
    """Every rank but the first, from `muster` to `close`.  Used from the step loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        lookahead: bool | None,
        wake: Callable[[], None],
        on_death: Callable[[EngineError], None] | None = None,
    ) -> None:
        """Start the processes and wait until all have met.  Raises ConfigError, NoDevice or
        ModelUnsupported before that, EngineDied if one does not get so far."""
        split(read_spec(Path(config.model)), config.tensor_parallel)
        if Ranks.taken():
            raise ConfigError(
                f"tensor_parallel = {config.tensor_parallel}: this process has one already",
                hint="close the other engine first, or give each a process of its own",
            )
        device = torch.device(device_of(config))
        if device.type == "cuda":
            _check_cards(config.tensor_parallel)
        self.size = config.tensor_parallel
        self._wake = wake
        self._on_death = on_death or _die
        self._over = threading.Event()
        self._serving = False
        self._reports: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._kinds: dict[LoraClass, int] = {}
        self._memory = os.memfd_create("lorad-adapters", os.MFD_CLOEXEC)
        # Open as long as the group is: whoever leaves it looks there once more.
        self._store = store = os.memfd_create("lorad-ranks", os.MFD_CLOEXEC)
        self._others: list[_Other] = []
        try:
            for rank in range(1, self.size):
                self._others.append(self._start(rank, config, lookahead, store))
            for other in self._others:
                threading.Thread(
                    target=self._listen, args=(other,), name=f"lorad-rank-{other.rank}", daemon=True
                ).start()
            #: This rank among them.
            self.ranks = Ranks(0, self.size, store_fd=store, device=device)
        except BaseException:
            self._end(0.0)
            raise

    def _start(self, rank: int, config: EngineConfig, lookahead: bool | None, store: int) -> _Other:
        ours, theirs = socket.socketpair()
        held, lifeline = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        fds = theirs.fileno(), lifeline.fileno(), store, self._memory
        told = {None: "auto", True: "on", False: "off"}[lookahead]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "engine.ranks.follower", str(rank), told),
                *map(str, fds),
                msgspec.json.encode(config).decode(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,  # results are printed by others; whatever it says is log
            pass_fds=fds,
            env=_environment(rank, self.size),
        )
        theirs.close()
        lifeline.close()
        return _Other(rank, process, ours, held)

    # ------------------------------------------------------------- host memory
    def memory(self, num_bytes: int) -> Tensor:
        """So many bytes that all ranks see, (num_bytes,) uint8; once."""
        os.ftruncate(self._memory, num_bytes)
        return shared_bytes(self._memory, num_bytes)

    # ------------------------------------------------------------- telling
    def serve(self) -> None:
        """All ranks have started alike; from now on the others do what they are told."""
        self._serving = True
        self._tell(frame(Serve()))

    def slot(self, row: SlotRow, manifest: PackedManifest) -> None:
        """A step is about to use a slot that was given anew."""
        self._tell(frame(Slot(row.slot, row.generation, tuple(row.blocks), manifest)))

    def step(
        self,
        packed: Packed,
        lora: LoraMeta | None,
        owners: list[tuple[int, int]] | None,
        owed: list[tuple[int, int]],
    ) -> None:
        """See `runner.Crew`."""
        device = lora.device if lora is not None else None
        segments = lora.segments if lora is not None else ()
        told = Step(
            packed.seqs,
            packed.rows,
            packed.draws,
            packed.width,
            tuple(part.size for part in packed.words),
            tuple(part.dtype.str for part in packed.words),
            self._number(device.kind) if device is not None else -1,
            tuple((s.start, s.end, s.slot) for s in segments),
            owners,
            owed,
        )
        self._tell(frame(told, packed.words))

    def copy(self, rev: str, place: int, blocks: tuple[int, ...]) -> None:
        self._tell(frame(Copy(rev, place, blocks)))

    def cancel(self, rev: str) -> None:
        self._tell(frame(Cancel(rev)))

    def reports(self) -> list[str]:
        """Revisions whose copies have ended on one of the others, once for each of these."""
        found = []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def close(self) -> None:
        """End the others.  Nothing may be under way."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._tell(frame(Stop()))
        self.ranks.close()
        self._end(FAREWELL_SECONDS)

    def abandon(self) -> None:
        """End the others whatever they are at."""
        self._end(0.0)

    # ------------------------------------------------------------- one level down
    def _number(self, kind: LoraClass) -> int:
        number = self._kinds.get(kind)
        if number is None:
            if len(self._kinds) >= KINDS:
                self._kinds.clear()  # the others write over what a number meant before
            number = self._kinds[kind] = len(self._kinds)
            self._tell(frame(Kind(number, kind)))
        return number

    def _tell(self, data: bytes) -> None:
        for other in self._others:
            try:
                other.sock.sendall(data)
            except OSError as error:
                raise EngineDied(f"rank {other.rank} is gone: {error}") from error

    def _listen(self, other: _Other) -> None:
        """On a thread of each rank's own."""
        reader = Reader(other.sock)
        error: EngineError | None = None
        with contextlib.suppress(OSError):  # reset instead of closed
            while (said := reader.next()) is not None:
                told: Told = said[0]
                if isinstance(told, Failed):
                    error = EngineError(f"rank {other.rank}: {told.message}", hint=told.hint)
                    error.code = told.code
                else:
                    assert isinstance(told, Copied)
                    self._reports.put(told.rev)
                    self._wake()
        if self._over.wait(0.0 if self._serving else GRACE_SECONDS):
            return
        other.process.wait()
        how = _how(other.process.returncode)
        self._on_death(error or EngineError(f"rank {other.rank} has died: {how}"))

    def _end(self, seconds: float) -> None:
        self._over.set()
        limit = time.monotonic() + seconds
        for other in self._others:
            try:
                other.process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                other.process.kill()
                other.process.wait()
            other.lifeline.close()
            with contextlib.suppress(OSError):
                other.sock.shutdown(socket.SHUT_RDWR)  # its listener is in a read
            other.sock.close()
        os.close(self._memory)
        os.close(self._store)


def shared_bytes(fd: int, num_bytes: int) -> Tensor:
    """The file's bytes, (num_bytes,) uint8, as every process sees them."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


def _check_cards(ranks: int) -> None:
    cards = torch.cuda.device_count()
    if ranks > cards:
        raise NoDevice(
            f"tensor_parallel = {ranks}: this process sees {cards} GPU{'s' * (cards != 1)}",
            hint="lower it, or let CUDA_VISIBLE_DEVICES name more of them",
        )


def _environment(rank: int, size: int) -> dict[str, str]:
    """Ours, in which a rank sees its own card first, as this one does, and then the others'."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in visible.split(",") if name.strip()]
    cards = [*named, *map(str, range(len(named), size))][:size]
    own = ",".join((cards[rank], *cards[:rank], *cards[rank + 1 :]))
    root = str(Path(__file__).parent.parent.parent)
    rest = os.environ.get("PYTHONPATH", "")
    path = f"{root}{os.pathsep}{rest}" if rest else root
    return {**ENVIRONMENT, **os.environ, "CUDA_VISIBLE_DEVICES": own, "PYTHONPATH": path}


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _die(error: EngineError) -> None:
    """The step loop may wait for the dead for ever: nothing else ends it."""
    print(f"lorad engine: {error.message}", file=sys.stderr, flush=True)
    os._exit(1)

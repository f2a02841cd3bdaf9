"""The copy engine: a revision's packed bytes from host memory into its blocks of the arena.

Goes in: a revision that lies in host memory, and the blocks that were claimed for it.  Comes
out, later, the revision's name from `poll`.  One copy for a few blocks in a row, in place; nothing
waits: on CUDA a copy stream runs beside the compute stream, on the CPU one thread beside the loop.
Knows nothing of states, slots or why a revision is wanted.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.adapters.copy_calls import CopyCalls, Piece, each_piece
from engine.errors import NoRoom
from engine.memory.arena import Arena

log = logging.getLogger(__name__)

#: Bytes of one copy at the most.  Forty calls of the driver for 2 MiB each take 0.11 ms of the step
#: loop (an H200), ten for 8 MiB 0.05.
RUN_BYTES = 8 << 20


def runs(blocks: Sequence[int], most: int) -> list[Piece]:
    """(index, first block, count) of blocks that lie in a row, at most `most` of them at a time.

    Blocks that one adapter left are free in the order in which it held them, so that the next one
    of its size finds most of them in a row again.
    """
    found: list[Piece] = []
    for index, block in enumerate(blocks):
        if found:
            start, first, count = found[-1]
            if block == first + count and count < most:
                found[-1] = start, first, count + 1
                continue
        found.append((index, block, 1))
    return found


class Source(Protocol):
    """Host memory: `HostCache`, or what another rank sees of it."""

    def hold(self, rev: str) -> int:
        """The address of its first block; valid until `let_go`."""
        ...

    def held(self, rev: str) -> torch.Tensor:
        """(num_blocks, block_bytes) of what is held."""
        ...

    def let_go(self, rev: str) -> None: ...


class Fences(Protocol):
    """Of blocks: `BlockPool`'s, or another rank's."""

    def fence(self, blocks: Sequence[int], event: object) -> None: ...
    def take_fences(self, blocks: Sequence[int]) -> tuple[object, ...]: ...


class CudaCopier:
    """Copies on a stream of its own.  Used from the step loop's thread only.

    Through `calls` of the driver; through torch where there is none, or once it has refused one.
    """

    def __init__(self, arena: Arena, host: Source, pool: Fences) -> None:
        self.calls: CopyCalls | None = each_piece()
        self._arena = arena
        self._host = host
        self._pool = pool
        self._target = arena.bytes.data_ptr()
        self._most = max(1, RUN_BYTES // arena.block_bytes)  # blocks of a copy
        self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
        self._events: dict[str, torch.cuda.Event] = {}
        self._spare: list[torch.cuda.Event] = []  # of copies that have ended

    def start(self, rev: str, blocks: Sequence[int]) -> None:
        """Queue the copies of `rev`; they begin when the blocks' last readers have ended.

        Raises NoRoom when the device has no memory left for it; nothing is under way then.
        """
        source = self._host.hold(rev)
        fences = self._pool.take_fences(blocks)
        try:
            self._events[rev] = self._queue(rev, source, blocks, fences)
        except torch.OutOfMemoryError as error:
            for fence in fences:
                self._pool.fence(blocks, fence)  # they are given back, and wait as before
            self._stream.synchronize()  # what was queued may not write into blocks of others
            self._host.let_go(rev)
            raise NoRoom(
                f"the device has no memory left to load it: {error}",
                hint="lower gpu_memory_utilization; nvidia-smi says who else holds its memory",
            ) from error

    def _queue(
        self, rev: str, source: int, blocks: Sequence[int], fences: Sequence[object]
    ) -> torch.cuda.Event:
        for fence in fences:
            assert isinstance(fence, torch.cuda.Event)
            self._stream.wait_event(fence)
        pieces = runs(blocks, self._most)
        if self.calls is None or not self._called(self.calls, source, pieces):
            self._copy(self._host.held(rev), pieces)
        event = self._spare.pop() if self._spare else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _called(self, calls: CopyCalls, source: int, pieces: Sequence[Piece]) -> bool:
        """False if the driver refused; what is queued by then is copied once more, to the same."""
        size, stream = self._arena.block_bytes, self._stream.cuda_stream
        result = calls.queue(self._target, source, pieces, size, stream)
        if result:
            log.warning("the driver refuses copies with error %d; torch makes them now", result)
            self.calls = None
        return not result

    def _copy(self, source: torch.Tensor, pieces: Sequence[Piece]) -> None:
        with torch.cuda.stream(self._stream):
            for i, block, count in pieces:
                target = self._arena.bytes[block : block + count]
                target.copy_(source[i : i + count], non_blocking=True)

    def poll(self) -> list[str]:
        """Revisions whose copies are complete, each reported once."""
        ended = [rev for rev, event in self._events.items() if event.query()]  # type: ignore[no-untyped-call]
        for rev in ended:
            self._spare.append(self._events.pop(rev))
            self._host.let_go(rev)
        return ended

    def busy(self, rev: str) -> bool:
        """Whether copies of `rev` are still under way: its blocks may not change owner yet."""
        return rev in self._events

    def cancel(self, rev: str) -> None:
        """Nothing to stop: queued copies run out within milliseconds, then `poll` reports them."""

    @property
    def in_flight(self) -> int:
        return len(self._events)

    def close(self) -> None:
        """Wait for what is queued, so that the host arena can be freed."""
        self._stream.synchronize()


@dataclass(slots=True)
class _Copy:
    rev: str
    blocks: tuple[int, ...]
    source: torch.Tensor  # (num_blocks, block_bytes)
    cancelled: threading.Event = field(default_factory=threading.Event)


class ThreadCopier:
    """Copies on one worker thread.  `wake` is called from that thread when a copy ends."""

    def __init__(
        self, arena: Arena, host: Source, *, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._arena = arena
        self._host = host
        self._wake = wake
        self._copies: dict[str, _Copy] = {}
        self._jobs: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lorad-copier", daemon=True)
        self._thread.start()

    def start(self, rev: str, blocks: Sequence[int]) -> None:
        """Queue the copies of `rev`.  CPU steps end before their blocks are freed: no fence."""
        self._host.hold(rev)
        copy = _Copy(rev, tuple(blocks), self._host.held(rev))
        self._copies[rev] = copy
        self._jobs.put(copy)

    def poll(self) -> list[str]:
        """Revisions whose copies have ended, each reported once; a cancelled one too."""
        done = []
        while not self._done.empty():
            rev = self._done.get()
            del self._copies[rev]
            self._host.let_go(rev)
            done.append(rev)
        return done

    def busy(self, rev: str) -> bool:
        """Whether the thread may still write into blocks of `rev`."""
        return rev in self._copies

    def cancel(self, rev: str) -> None:
        """Skip the blocks that were not copied yet; `poll` still reports `rev`."""
        if rev in self._copies:
            self._copies[rev].cancelled.set()

    @property
    def in_flight(self) -> int:
        return len(self._copies)

    def close(self) -> None:
        """End the thread after the copy that it is in."""
        for copy in self._copies.values():
            copy.cancelled.set()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (copy := self._jobs.get()) is not None:
            for i, block in enumerate(copy.blocks):
                if copy.cancelled.is_set():
                    break
                self._arena.bytes[block].copy_(copy.source[i])
            self._done.put(copy.rev)
            self._wake()

"""HostCache: packed adapters in host memory, under a byte budget (the `ram` tier).

Goes in: a revision and the path of its packed file.  Comes out: later, from `poll`, that the read
is done or why it failed; then `hold` gives the bytes to the copier.  The arena is one allocation
(pinned on CUDA) made at birth, cut into extents of whole blocks; `adapters/reader.py` has threads
that fill them, so the step loop never touches a file.  Everything but that happens on the step
loop's thread.  Knows nothing of states, slots or priorities.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.adapters.reader import Readers
from engine.adapters.tiers import HostDone
from engine.config import VerifyOnLoad


class ExtentAllocator:
    """First fit over `total` blocks; neighbours that are free become one extent again."""

    def __init__(self, total: int) -> None:
        self.free: list[tuple[int, int]] = [(0, total)] if total else []  # (start, count), sorted

    def take(self, count: int) -> int | None:
        """The start of `count` blocks in a row, or None."""
        for i, (start, size) in enumerate(self.free):
            if size >= count:
                rest = (start + count, size - count)
                self.free[i : i + 1] = [rest] if rest[1] else []
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Put an extent back."""
        merged: list[tuple[int, int]] = []
        for extent in sorted([*self.free, (start, count)]):
            if merged and merged[-1][0] + merged[-1][1] == extent[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + extent[1])
            else:
                merged.append(extent)
        self.free = merged


@dataclass(slots=True)
class _Entry:
    start: int  # first block of the extent
    blocks: int
    worth: int = 50
    ready: bool = False
    protected: bool = False
    holds: int = 0  # copies that read it
    dropped: bool = False  # leaves as soon as neither reader nor copier uses it


class HostCache:
    """The `ram` tier.  Implements `tiers.HostTier`.

    `budget_bytes` is what may stay; `staging_bytes` is a floor for the arena, so that loads pass
    through host memory even where nothing may stay there.  `memory` gives as many bytes as it is
    asked for, for an arena that others see too.  `wake`, `verify` and `slow_seconds` are those of
    the readers (`adapters/reader.py`).
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        budget_bytes: int,
        staging_bytes: int = 0,
        pinned: bool = False,
        memory: Callable[[int], Tensor] | None = None,
        wake: Callable[[], None] = lambda: None,
        verify: VerifyOnLoad = "off",
        slow_seconds: float = 0.0,
    ) -> None:
        self.block_bytes = block_bytes
        self._budget = budget_bytes
        total = max(budget_bytes, staging_bytes) // block_bytes
        self.limit_bytes = total * block_bytes
        size = self.limit_bytes
        arena = torch.empty(size, dtype=torch.uint8) if memory is None else memory(size)
        self._arena = arena.view(total, block_bytes)
        self._address = arena.data_ptr()
        if pinned and total:
            pin(self._arena)
        self._extents = ExtentAllocator(total)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._reading: dict[str, _Entry] = {}
        self._used = 0  # blocks of all entries
        self._lost: list[str] = []
        self._readers = Readers(
            block_bytes=block_bytes, wake=wake, verify=verify, slow_seconds=slow_seconds
        )

    # ------------------------------------------------------------- HostTier
    def want(self, rev: str, path: str, num_bytes: int) -> bool:
        """Start reading unless `rev` is here or on its way; False: no room now."""
        entry = self._entries.get(rev)
        if entry is not None and not entry.dropped:
            self._entries.move_to_end(rev)
            return True
        if entry is not None:  # dropped, but its bytes are still being read or copied
            return False
        blocks = -(-num_bytes // self.block_bytes)
        start = self._make_room(blocks)
        if start is None:
            return False
        entry = self._entries[rev] = self._reading[rev] = _Entry(start, blocks)
        self._used += blocks
        self._readers.read(rev, path, self._view(entry).view(-1).numpy().data[:num_bytes])
        return True

    def cancel(self, rev: str) -> None:
        """End a read that has not begun; its room is free with the next `poll`."""
        self._readers.cancel(rev)

    def ready(self, rev: str) -> bool:
        """Whether the bytes of `rev` are here, whole."""
        entry = self._entries.get(rev)
        return entry is not None and entry.ready and not entry.dropped

    def arrived(self, rev: str) -> int | None:
        """Bytes of a read under way that are here; None without one."""
        return self._readers.arrived(rev)

    def protect(self, rev: str, on: bool) -> None:
        """A protected entry is never evicted to make room.  Unknown revisions are ignored."""
        entry = self._entries.get(rev)
        if entry is not None:
            entry.protected = on
            if not on:
                self._trim()

    def appraise(self, rev: str, worth: int) -> None:
        """Of those that may go, what is worth least goes first, of equals the least recently used.

        Unknown revisions are ignored.
        """
        entry = self._entries.get(rev)
        if entry is not None:
            entry.worth = worth

    def touch(self, rev: str) -> None:
        """It was used just now.  Unknown revisions are ignored."""
        if rev in self._entries:
            self._entries.move_to_end(rev)

    def drop(self, rev: str) -> None:
        """Forget `rev`; its room comes back once no read or copy uses it."""
        entry = self._entries.get(rev)
        if entry is not None:
            entry.dropped = True
            self._sweep(rev, entry)

    @property
    def used_bytes(self) -> int:
        """Bytes of whole blocks taken by entries, reads under way included."""
        return self._used * self.block_bytes

    def poll(self) -> list[HostDone]:
        """Reads that ended since the last call; one that failed or never began leaves no entry."""
        done = self._readers.poll()
        for read in done:
            entry = self._reading.pop(read.rev)
            entry.ready = not (read.error or read.cancelled)
            entry.dropped = entry.dropped or not entry.ready
            self._sweep(read.rev, entry)
        return done

    def take_lost(self) -> list[str]:
        """Revisions that made room for others since the last call."""
        lost, self._lost = self._lost, []
        return lost

    # ------------------------------------------------------------- for the copier
    def hold(self, rev: str) -> int:
        """The address of the first block of `rev`; its bytes stay valid until `let_go`.

        A view of them would be the dearest part of a load's bookkeeping (`copy_calls`).
        """
        entry = self._entries[rev]
        assert entry.ready, f"copy of {rev} before its read ended"
        entry.holds += 1
        self._entries.move_to_end(rev)
        return self._address + entry.start * self.block_bytes

    def held(self, rev: str) -> Tensor:
        """(num_blocks, block_bytes) of what is held."""
        entry = self._entries[rev]
        assert entry.holds, f"{rev} is not held"
        return self._view(entry)

    def place(self, rev: str) -> int:
        """Where in the arena the blocks of `rev` begin; it does not move while it is held."""
        return self._entries[rev].start

    def let_go(self, rev: str) -> None:
        """The copy that held `rev` has ended."""
        entry = self._entries[rev]
        entry.holds -= 1
        self._sweep(rev, entry)
        self._trim()

    @property
    def in_flight(self) -> int:
        """Reads under way."""
        return len(self._reading)

    def close(self) -> None:
        """End the readers after the reads that they are in, and give pinned memory back."""
        ended = self._readers.close()
        if ended and self._arena.numel() and self._arena.is_pinned():
            _cudart().cudaHostUnregister(self._arena.data_ptr())

    # ------------------------------------------------------------- room
    def _view(self, entry: _Entry) -> Tensor:
        return self._arena[entry.start : entry.start + entry.blocks]

    def _make_room(self, blocks: int) -> int | None:
        while (start := self._extents.take(blocks)) is None:
            victim = self._victim()
            if victim is None:
                return None
            self._lose(victim)
        return start

    def _victim(self) -> str | None:
        victim, least = None, math.inf
        for rev, entry in self._entries.items():
            free = entry.ready and not (entry.protected or entry.holds or entry.dropped)
            if free and entry.worth < least:
                victim, least = rev, entry.worth
        return victim

    def _trim(self) -> None:
        while self.used_bytes > self._budget and (victim := self._victim()) is not None:
            self._lose(victim)

    def _lose(self, victim: str) -> None:
        self.drop(victim)
        self._lost.append(victim)

    def _sweep(self, rev: str, entry: _Entry) -> None:
        if entry.dropped and not entry.holds and rev not in self._reading:
            del self._entries[rev]
            self._used -= entry.blocks
            self._extents.give(entry.start, entry.blocks)


def pin(arena: Tensor) -> None:
    """Page-lock exactly these bytes (torch's own pinned allocator rounds up to a power of two)."""
    size = arena.numel() * arena.element_size()
    result = _cudart().cudaHostRegister(arena.data_ptr(), size, 0)
    torch.cuda.check_error(int(result))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

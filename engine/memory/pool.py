"""BlockPool: who owns which block of the arena.

Goes in: how many blocks somebody needs.  Comes out: their numbers, and with `take_fences` the
events that their new owner has to wait for.  Knows nothing of bytes, tokens or tensors, nor of
who should give way when it is empty (`memory/reclaim.py`).

A block is free, held by an adapter, in use by one or more sequences, or *cached*: KV that no
sequence uses, which the prefix index asked to keep.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple


class Owner(Enum):
    """What a block that is not free holds."""

    KV = "kv"
    ADAPTER = "adapter"


class PoolCounts(NamedTuple):
    """Blocks by use; they add up to the pool."""

    free: int
    kv_active: int
    kv_cached: int
    adapter: int


class BlockPool:
    """Free list, reference counts and fences of `num_blocks` blocks.

    Misuse (freeing twice, sharing what is not KV) raises AssertionError: it is our own fault.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._stamp: tuple[int, object] | None = None
        # First freed, first reused: the longer a block rests, the sooner its fences are over.
        self._free: deque[int] = deque(range(num_blocks))
        self._owner: list[Owner | None] = [None] * num_blocks
        self._refs = [0] * num_blocks
        self._kept: set[int] = set()
        self._fences: dict[int, list[object]] = {}
        #: Of free blocks, and of new ones; the later, the greater.
        self._stamps: list[tuple[int, object] | None] = [None] * num_blocks
        self._num_stamps = 0
        self._num_cached = 0
        self._num_adapter = 0

    # ------------------------------------------------------------- asking
    @property
    def stamp(self) -> object | None:
        """What orders a freed block's next use behind work already launched; None = nothing to wait
        for.  The core sets it to the event of each step that it launches, and who waits for one of
        these has waited for those before it."""
        return self._stamp[1] if self._stamp else None

    @stamp.setter
    def stamp(self, stamp: object | None) -> None:
        self._num_stamps += 1
        self._stamp = None if stamp is None else (self._num_stamps, stamp)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def counts(self) -> PoolCounts:
        """Blocks by use, now."""
        active = self.num_blocks - self.num_free - self._num_cached - self._num_adapter
        return PoolCounts(self.num_free, active, self._num_cached, self._num_adapter)

    def owner(self, block: int) -> Owner | None:
        """None = free."""
        return self._owner[block]

    def refs(self, block: int) -> int:
        """Users of a block: sequences, or one adapter."""
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        """KV that is kept though no sequence uses it."""
        return self._owner[block] is Owner.KV and self._refs[block] == 0

    # ------------------------------------------------------------- acting
    def allocate(self, count: int, owner: Owner) -> list[int]:
        """`count` free blocks, each with one reference.  Ask `num_free` first.

        An adapter's are in order of their numbers: those in a row are one copy.
        """
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        take, owners, refs = self._free.popleft, self._owner, self._refs
        blocks = [take() for _ in range(count)]
        for block in blocks:
            owners[block] = owner
            refs[block] = 1
        if owner is Owner.ADAPTER:
            self._num_adapter += count
            blocks.sort()
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence uses these KV blocks."""
        for block in blocks:
            assert self._owner[block] is Owner.KV, f"block {block} holds no KV"
            self._num_cached -= self._refs[block] == 0
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Give up one reference to each; returns those that are now cached."""
        cached = []
        refs, kept = self._refs, self._kept
        for block in blocks:
            left = refs[block] - 1
            assert left >= 0, f"block {block} is freed twice"
            refs[block] = left
            if left:
                continue
            if block in kept:
                self._num_cached += 1
                cached.append(block)
            else:
                self._put_back(block)
        return cached

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free an adapter's blocks."""
        refs, owners, stamps, stamp = self._refs, self._owner, self._stamps, self._stamp
        for block in blocks:
            assert refs[block] == 1 and owners[block] is Owner.ADAPTER, (
                f"block {block} is another's"
            )
            refs[block], owners[block] = 0, None
            if stamp is not None:
                stamps[block] = stamp
        self._free.extend(blocks)
        self._num_adapter -= len(blocks)

    def keep(self, block: int) -> None:
        """Do not free this KV block when its last user leaves."""
        assert self._owner[block] is Owner.KV, f"block {block} holds no KV"
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Undo `keep`: a cached block is free at once, one in use when its last user leaves."""
        self._kept.remove(block)
        if self._refs[block] == 0:
            self._num_cached -= 1
            self._put_back(block)

    # ------------------------------------------------------------- fences
    def fence(self, blocks: Iterable[int], event: object) -> None:
        """The next owner of these blocks has to wait for `event`."""
        for block in blocks:
            held = self._fences.setdefault(block, [])
            if event not in held:
                held.append(event)

    def take_fences(self, blocks: Sequence[int]) -> tuple[object, ...]:
        """What the owner of newly allocated blocks waits for, each once; forgotten here.

        Of stamps the latest alone: 40 blocks that as many steps have freed would be as many calls.
        """
        found: list[object] = []
        fences, stamps, latest = self._fences, self._stamps, None
        for block in blocks:
            if block in fences:
                found.extend(e for e in fences.pop(block) if e not in found)
            stamp = stamps[block]
            if stamp is not None:
                stamps[block] = None
                if latest is None or stamp[0] > latest[0]:
                    latest = stamp
        if latest is not None and latest[1] not in found:
            found.append(latest[1])
        return tuple(found)

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one place."""
        free, kept = set(self._free), self._kept
        assert len(free) == len(self._free), "a block is twice in the free list"
        used = [block for block, owner in enumerate(self._owner) if owner is not None]
        assert len(used) + len(free) == self.num_blocks, "owners and free list differ"
        assert free.isdisjoint(used), f"blocks {free.intersection(used)}: owned and free"
        assert min(self._refs) >= 0, f"{min(self._refs)} references"
        cached = adapter = 0
        for block in used:
            refs = self._refs[block]
            if self._owner[block] is Owner.ADAPTER:
                adapter += 1
                assert refs == 1 and block not in kept, f"adapter block {block}: {refs} references"
            else:
                cached += refs == 0
                assert refs > 0 or block in kept, f"KV block {block} is lost"
        assert free.isdisjoint(kept), f"free blocks {free & kept} are kept"
        owned = sum(self._refs[block] for block in used)
        assert owned == sum(self._refs), "references to free blocks"
        assert (cached, adapter) == (self._num_cached, self._num_adapter), "counts drifted"

    def _put_back(self, block: int) -> None:
        self._num_adapter -= self._owner[block] is Owner.ADAPTER
        self._owner[block] = None
        self._free.append(block)
        if self._stamp is not None:
            self._stamps[block] = self._stamp

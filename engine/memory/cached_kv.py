"""CachedKv: which cached block leaves next, kept in order while they are used and left.

Goes in: a PrefixIndex, which tells of identities whose oldest block may be another than before, and
priorities.  Comes out: the entry that leaves first of all, without a look at every identity: there
are as many as adapters with something cached.  Knows nothing of adapters' own blocks.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from engine.memory.prefix import Entry, PrefixIndex


@dataclass(slots=True, eq=False)
class _Head:
    """The oldest of an identity, as long as it is `live`."""

    entry: Entry
    priority: int
    live: bool = True


class CachedKv:
    """Over `prefix`.  Call `reprice` whenever `priority_of` an identity is another than before."""

    def __init__(self, prefix: PrefixIndex, priority_of: Callable[[str], int]) -> None:
        self._prefix = prefix
        self._priority_of = priority_of
        self._heads: dict[str, _Head] = {}
        self._heap: list[tuple[int, float, bytes, int, _Head]] = []  # mostly live
        self._repriced: set[str] = set(prefix.identities())
        self._serial = count()

    def reprice(self, identity: str) -> None:
        """Its priority may have changed."""
        self._repriced.add(identity)

    def first(self) -> Entry | None:
        """The next to leave: of the oldest of each identity the least, by priority, then by heat;
        what bringing a block back takes is the same for all."""
        self._catch_up()
        heap = self._heap
        while heap and not heap[0][-1].live:
            heapq.heappop(heap)
        return heap[0][-1].entry if heap else None

    def check(self) -> None:
        """Raise AssertionError unless a look at every identity finds the same."""
        self._catch_up()
        for identity in {*self._heads, *self._prefix.identities()}:
            head, oldest = self._heads.get(identity), self._prefix.oldest(identity)
            assert (head and head.entry) is oldest, f"{identity}: another is the oldest"
            priority = head and head.priority
            assert not head or priority == self._priority_of(identity), f"{identity}: {priority}"

    def _catch_up(self) -> None:
        changed = self._prefix.take_changed()
        if self._repriced:
            changed |= self._repriced
            self._repriced = set()
        for identity in changed:
            self._look_at(identity)
        if len(self._heap) > 2 * len(self._heads) + 64:
            self._heap = [entry for entry in self._heap if entry[-1].live]
            heapq.heapify(self._heap)

    def _look_at(self, identity: str) -> None:
        head, oldest = self._heads.pop(identity, None), self._prefix.oldest(identity)
        if head is not None:
            head.live = False
        if oldest is None:
            return
        head = self._heads[identity] = _Head(oldest, self._priority_of(identity))
        rank = head.priority, oldest.usage.heat, oldest.key, next(self._serial)
        heapq.heappush(self._heap, (*rank, head))

"""IdleAdapters: which idle adapter leaves next, kept in order while they come and go.

Goes in: each adapter when it becomes idle, is idle no more, or is ranked otherwise.  Comes out:
the one that leaves first, after a look at one of each *kind*: with thousands of them as with ten.
Knows nothing of blocks' owners, nor why somebody has to leave (`memory/reclaim.py`).

What a load costs is measured all the time, and each measurement moves all adapters in the order.
But it moves those of one size and one tier alike.  So each kind has a heap of its own, by what
stays while an adapter is idle, and only the first of each are ranked by what holds now.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from engine.config import EvictionPolicy
from engine.recency import HALF_LIFE_SECONDS, Usage


class IdleAdapter(Protocol):
    """A resident adapter: a row of the slot table."""

    @property
    def rev(self) -> str: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def priority(self) -> int: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def loaded_at(self) -> float: ...
    @property
    def generation(self) -> int:
        """Of several that are worth the same, the least leaves first; no two are alike."""
        ...

    @property
    def idle(self) -> bool:
        """It may leave: unpinned, and nobody runs on it."""
        ...

    @property
    def awaited(self) -> bool:
        """Requests for it are queued: it goes last."""
        ...

    @property
    def served(self) -> int:
        """Requests that have run on it since it came up."""
        ...

    @property
    def hold(self) -> float:
        """0 to 1: how much others are evicted before it, until `held_until`."""
        ...

    @property
    def held_until(self) -> float: ...


Rank = tuple[bool, int, float]

#: Which of two idle adapters goes first, given log2 of what they cost; smaller goes.
POLICIES: dict[EvictionPolicy, Callable[[IdleAdapter, float], float]] = {
    "cost": lambda adapter, cost: cost,
    "lru": lambda adapter, cost: adapter.usage.last,
    "fifo": lambda adapter, cost: adapter.loaded_at,
    "lfu": lambda adapter, cost: adapter.usage.heat,  # a count that ages
}
#: What a hold of 1 adds: as if it were used twice as often, or a half-life later.  Enough where all
#: are used alike; one that is used more than twice as often still stays before it.
HOLDS: dict[EvictionPolicy, float] = {
    "cost": 1.0,
    "lru": HALF_LIFE_SECONDS,
    "fifo": HALF_LIFE_SECONDS,
    "lfu": 1.0,
}

Kind = tuple[int, bool, bool]  # blocks, whether in host memory, whether held


@dataclass(slots=True, eq=False)
class _Place:
    """Where an adapter is filed."""

    row: IdleAdapter
    kind: Kind
    awaited: bool
    live: bool = True


@dataclass(slots=True)
class _Group:
    """Those of one kind, the first to leave first.  Places that are not live are skipped."""

    heap: list[tuple[Rank, int, int, _Place]] = field(default_factory=list)
    num: int = 0  # live ones


class IdleAdapters:
    """`in_ram` tells of a revision whether host memory has a copy.  One that is on the GPU may lose
    its copy before that is said, and gets none back before it has left."""

    def __init__(self, policy: EvictionPolicy, in_ram: Callable[[str], bool]) -> None:
        self._policy = policy
        self._in_ram = in_ram
        self._places: dict[str, _Place] = {}
        self._groups: dict[Kind, _Group] = {}
        self._serial = count()
        self._holds: list[tuple[float, int, _Place]] = []  # when they end, the soonest first
        self.awaited: dict[str, IdleAdapter] = {}
        self.blocks = self.awaited_blocks = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[IdleAdapter]:
        """All, in no order."""
        return (place.row for place in self._places.values())

    def find(self, rev: str | None) -> IdleAdapter | None:
        """The idle adapter of `rev`, if there is one."""
        place = self._places.get(rev) if rev is not None else None
        return place.row if place else None

    def update(self, row: IdleAdapter) -> None:
        """It is idle or not, or is ranked otherwise than before."""
        self.remove(row)
        if row.idle:
            self._file(row, held=row.hold > 0.0)

    def remove(self, row: IdleAdapter) -> None:
        """Forget it, if it is here."""
        place = self._places.get(row.rev)
        if place is None or place.row is not row:
            return
        del self._places[row.rev]
        place.live = False
        self.blocks -= place.kind[0]
        if place.awaited:
            self.awaited_blocks -= place.kind[0]
            del self.awaited[row.rev]
        group = self._groups[place.kind]
        group.num -= 1
        if not group.num:
            del self._groups[place.kind]
        elif len(group.heap) > 2 * group.num + 64:  # mostly stale: room has not been short for long
            group.heap = [entry for entry in group.heap if entry[-1].live]
            heapq.heapify(group.heap)

    @contextmanager
    def without(self, rows: Iterable[IdleAdapter]) -> Iterator[None]:
        """As if these were not idle."""
        rows = list(rows)
        for row in rows:
            self.remove(row)
        try:
            yield
        finally:
            for row in rows:
                self.update(row)

    def end_holds(self, now: float) -> None:
        """Before `first`: time has passed."""
        while self._holds and self._holds[0][0] <= now:
            place = heapq.heappop(self._holds)[2]
            if place.live:
                self.remove(place.row)
                self._file(place.row, held=False)

    def first(self, rank: Callable[[IdleAdapter], Rank]) -> IdleAdapter | None:
        """Who leaves next, of all.  `rank` adds to what orders a kind the same for all of it."""
        for kind in [kind for kind in self._groups if kind[1]]:
            self._move_lost(kind)
        heads = [self._head(group) for group in self._groups.values()]
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=lambda row: (rank(row), row.generation))

    def check(self) -> None:
        """Raise AssertionError unless sums, places and rows agree."""
        places = self._places.values()
        assert all(place.live and place.row.idle for place in places), "filed, and not idle"
        assert self.blocks == sum(len(p.row.blocks) for p in places), "idle blocks drifted"
        awaited = {p.row.rev: p.row for p in places if p.row.awaited}
        assert awaited == self.awaited, "awaited ones drifted"
        assert self.awaited_blocks == sum(len(row.blocks) for row in awaited.values())
        assert sum(group.num for group in self._groups.values()) == len(places)
        if self._policy == "cost":
            regained = [p.row.rev for p in places if self._in_ram(p.row.rev) > p.kind[1]]
            assert not regained, f"{regained}: host copies that nobody spoke of"

    def _file(self, row: IdleAdapter, *, held: bool) -> None:
        place = _Place(row, self._kind(row, held), row.awaited)
        self._places[row.rev] = place
        self.blocks += place.kind[0]
        if place.awaited:
            self.awaited_blocks += place.kind[0]
            self.awaited[row.rev] = row
        value = POLICIES[self._policy](row, row.usage.heat)
        if held:
            value += HOLDS[self._policy] * row.hold
            heapq.heappush(self._holds, (row.held_until, next(self._serial), place))
        group = self._groups.get(place.kind)
        if group is None:
            group = self._groups[place.kind] = _Group()
        group.num += 1
        order = row.generation, next(self._serial)  # a stale place of the same row may be there too
        heapq.heappush(group.heap, ((row.awaited, row.priority, value), *order, place))

    def _kind(self, row: IdleAdapter, held: bool) -> Kind:
        # A host copy makes no difference to the other policies.
        return len(row.blocks), self._policy == "cost" and self._in_ram(row.rev), held

    def _move_lost(self, kind: Kind) -> None:
        """File the first of `kind` under another as long as it has lost its host copy.  It is
        dearer without: to notice that once it comes first is enough."""
        while (group := self._groups.get(kind)) is not None:
            row = self._head(group)
            if self._in_ram(row.rev):
                return
            self.remove(row)
            self._file(row, held=kind[2])

    def _head(self, group: _Group) -> IdleAdapter:
        """The first of a group, which has some."""
        while not group.heap[0][-1].live:
            heapq.heappop(group.heap)
        return group.heap[0][-1].row

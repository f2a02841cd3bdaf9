"""Thrash: adapters that come back to the GPU soon after they made way, and what is done about it.

Goes in: who leaves for want of room, who has come up, who is used.  Comes out: counts, and on the
rows of those that came back a *hold*, for which eviction prefers others for a while.  Knows nothing
of requests, nor of who leaves (`memory/reclaim.py` looks at the holds).

Why a hold: where more adapters take turns than there is room for, the one that is needed next is
always the one that left last, and nobody is ever found on the GPU.  Holds are of different
strength, so that some stay and are found, however many are in use at the same time; the others come
and go as before.  A hold only orders those that are idle: nobody waits longer for it.
"""

from engine.adapters.revision import Revision
from engine.adapters.slots import SlotRow

#: Holds are given where loads serve less than two requests each.  Below that, who comes back is
#: mostly who is seldom asked for: holding those made LRU find 70% instead of 73% of adapters that
#: are asked for by Zipf's law (`benchmarks/policies.py`).
MANY_FRESH, FRESH_BLEND = 0.5, 1 / 32
#: Evictions that nobody asked for: these alone show that there is too little room.
FOR_ROOM = frozenset({"cost", "lru", "fifo", "lfu", "starvation"})
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly


class Thrash:
    """`window`: seconds within which a return counts, and for which it is held."""

    def __init__(self, window: float) -> None:
        self._window = window
        self.total = 0
        self.fresh = 0.0  # of requests of late, those whose adapter had come up for them

    @property
    def damping(self) -> bool:
        """Those that come back now are held."""
        return self.fresh > MANY_FRESH

    def used(self, row: SlotRow) -> None:
        """A request begins on `row`."""
        self.fresh += FRESH_BLEND * ((row.served == 1) - self.fresh)

    def left(self, revision: Revision, cause: str, now: float) -> None:
        """It is not on the GPU any more."""
        revision.made_way = now if cause in FOR_ROOM else None

    def returned(self, revision: Revision, row: SlotRow, now: float) -> float | None:
        """It has come up; seconds since it made way, if that counts as thrash."""
        left, revision.made_way = revision.made_way, None
        if left is None or now - left > self._window:
            return None
        self.total += 1
        revision.num_thrashes += 1
        if self.damping:
            row.hold = self.total * _GOLDEN % 1.0
            row.held_until = now + self._window
        return now - left

"""ReuseLog: what the prefix cache was asked for, what it had, and what a larger one would have had.

Goes in: each look-up of a new request, each block that is filed or evicted.  Comes out: tokens
asked, hit and lost and the seconds that hits have saved, in total and for each revision, and at
what distance blocks come back.  Decides nothing and holds no block.

The *distance* of a reuse is the number of blocks that anybody filed since the block's last user
left it, 0 while it has one: about the number of blocks that a cache must hold to still have it.
Evicted blocks are remembered for a while, so that the distance of what came too late is known as
well: a request that asks for one has *lost* its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Distances are counted by powers of two: bucket 0 is 0, bucket n from 2**(n - 1) to 2**n - 1.
NUM_BUCKETS = 32
#: However seldom blocks come back, which of them do is not known before.
LEAST_EXPECTED = 1 / 64


@dataclass(slots=True)
class HitCount:
    """Prompt tokens looked up; those found; those that had been there and were evicted for room."""

    asked: int = 0
    hit: int = 0
    lost: int = 0
    saved_seconds: float = 0.0  # of prefill, that hits have made unnecessary

    def add(self, other: "HitCount") -> None:
        """`other` too."""
        self.asked += other.asked
        self.hit += other.hit
        self.lost += other.lost
        self.saved_seconds += other.saved_seconds


@dataclass(slots=True)
class Distances:
    """Blocks by the distance at which they were asked for again."""

    buckets: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    total: int = 0  # of all distances

    def add(self, distance: int) -> None:
        """One block."""
        self.total += distance
        self.buckets[min(distance.bit_length(), NUM_BUCKETS - 1)] += 1

    def trimmed(self) -> tuple[int, ...]:
        """Without the empty buckets at the end."""
        last = max((n for n, count in enumerate(self.buckets) if count), default=-1)
        return tuple(self.buckets[: last + 1])


class ReuseLog:
    """Remembers `most` evicted blocks.  Revisions are named by `who`; "" is the base."""

    def __init__(self, most: int) -> None:
        self.now = 0  # blocks filed so far: the clock of distances
        self.total = HitCount()
        self.num_evicted = 0
        self.found = Distances()
        self.lost = Distances()
        self._by_who: dict[str, HitCount] = {}
        self._most = most
        self._filed = self._asked = float(most)  # lately; as if each had been asked for once more
        self._evicted: dict[bytes, int] = {}  # key -> its last use; oldest eviction first

    def filed(self, key: bytes) -> None:
        """A block has entered the index."""
        self.now += 1
        self._filed += 1.0
        if self._filed > 4 * self._most:
            self._filed, self._asked = self._filed / 2, self._asked / 2
        self._evicted.pop(key, None)

    def evicted(self, key: bytes, last_use: int) -> None:
        """A block has left the index for want of room."""
        self.num_evicted += 1
        self._evicted[key] = last_use
        if len(self._evicted) > self._most:
            del self._evicted[next(iter(self._evicted))]

    def note(
        self,
        who: str,
        asked: int,
        found: Iterable[int],
        missed: Sequence[bytes],
        *,
        block_size: int,
        token_seconds: float,
    ) -> None:
        """A request of `asked` prompt tokens is admitted for the first time.

        `found`: the last use of each block that was there; `missed`: the keys of its further full
        blocks, in order.
        """
        hit = lost = 0
        for last_use in found:
            hit += block_size
            self._asked += 1.0
            self.found.add(self.now - last_use)
        for key in missed:
            if key not in self._evicted:
                break  # what continues it cannot have been found either
            lost += block_size
            self._asked += 1.0
            self.lost.add(self.now - self._evicted[key])
        count = HitCount(asked, hit, lost, hit * token_seconds)
        self.total.add(count)
        self._by_who.setdefault(who, HitCount()).add(count)

    @property
    def expectation(self) -> float:
        """How often a block is asked for again, judged by those of late: what its first use counts.

        Where no two prompts begin alike, a block that was used once is worth nothing, and must not
        take the place of an adapter that was used once, which is.
        """
        return min(max(self._asked / self._filed, LEAST_EXPECTED), 1.0)

    def of(self, who: str) -> HitCount:
        """What `note` added up for `who`."""
        return self._by_who.get(who, HitCount())

    def forget(self, who: str) -> None:
        """`who` is gone; the total keeps its share."""
        self._by_who.pop(who, None)

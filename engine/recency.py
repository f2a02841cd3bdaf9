"""Usage: how often, and how lately, a thing was used, as one number.

Goes in: touches with their times (seconds of any monotonic clock).  Comes out: `heat`, whose order
is the order of expected reuse, and `rate`, which is that reuse in uses a second.  Knows nothing of
what is counted: cached KV and adapters share it.
"""

import math

#: A use counts half after this many seconds.
HALF_LIFE_SECONDS = 300.0


class Usage:
    """A use count that ages.  All counts age alike, so the order of two `heat`s never changes
    between touches: a ranking stays valid until something is used."""

    __slots__ = ("count", "heat", "last")

    def __init__(self, now: float, count: float = 1.0) -> None:
        self.count = count  # as of `last`
        self.last = now
        #: log2 of the aged count, up to a term that is the same for everything.
        self.heat = self._heat()

    def touch(self, now: float) -> None:
        """One more use."""
        self.count = self.at(now) + 1.0
        self.last = now
        self.heat = self._heat()

    def at(self, now: float) -> float:
        """The count, aged until `now`."""
        age: float = 2.0 ** ((self.last - now) / HALF_LIFE_SECONDS)
        return self.count * age

    def rate(self, now: float) -> float:
        """Uses a second: what was used evenly at this rate for long would have this count."""
        return self.at(now) * math.log(2.0) / HALF_LIFE_SECONDS

    def _heat(self) -> float:
        if not self.count:
            return -math.inf  # never used
        return math.log2(self.count) + self.last / HALF_LIFE_SECONDS

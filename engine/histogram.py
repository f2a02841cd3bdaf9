"""Histogram: how many values lie at or below each of a few bounds, and their sum.

Goes in: numbers.  Comes out: counts by bound, never smaller than before.  One thread writes; others
may copy.  Knows neither what is measured nor how it is shown.  An observation takes 0.12 µs (2
cores), where a lock and labels would take ten times that: some of these count every token.
"""

from bisect import bisect_left

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
#: Of loads, drains, pulls and other moves: a millisecond, and by 2x until it is past ten seconds.
LOAD_SECONDS = tuple(0.001 * 2**n for n in range(15))
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
ADAPTERS = (0.0, *(float(2**n) for n in range(11)))
#: 64 KiB to 64 GiB.
BYTES = tuple(float(1 << n) for n in range(16, 37, 2))


class Histogram:
    """`counts[i]` values lie above `bounds[i - 1]` and at or below `bounds[i]`; the last ones lie
    above every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of all values

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

"""Windows: how much counters have grown within the last minute, and percentiles of it.

Goes in: the totals of some counters, about once a second.  Comes out: their growth over the window,
rates, numbers by second, and a `Spread` of a histogram's counts.  Knows nothing of what is counted.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lorad.wire_stream import WINDOW_SECONDS, Spread


class Growing:
    """A total that goes on growing when its counter begins anew, as an engine's does."""

    def __init__(self) -> None:
        self.total = 0
        self._last = 0

    def take(self, value: int) -> int:
        """The counter shows `value` now."""
        self.total += value - self._last if value >= self._last else value
        self._last = value
        return self.total


class Window:
    """Of counters that only grow.  One sample is kept from before the window, so that its growth
    is of the whole window and not of what lies between the samples in it."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._seconds = seconds
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def add(self, now: float, totals: Sequence[int]) -> None:
        """All totals at `now`, which is later than the last one."""
        self._samples.append((now, tuple(totals)))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._seconds:
            self._samples.popleft()

    @property
    def span(self) -> float:
        """Seconds between the first sample and the last."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def grown(self) -> tuple[int, ...]:
        """Of each counter; () before the first sample."""
        if not self._samples:
            return ()
        first, last = self._samples[0][1], self._samples[-1][1]
        return tuple(b - a for a, b in zip(first, last, strict=True))

    def rates(self) -> tuple[float, ...]:
        """A second; zeros until there are two samples."""
        span = self.span
        return tuple(count / span if span else 0.0 for count in self.grown())

    def history(self, index: int) -> tuple[float, ...]:
        """What the counter grew by, a second, between each two samples, the oldest first."""
        return tuple(
            (b[index] - a[index]) / (later - before)
            for (before, a), (later, b) in pairwise(self._samples)
        )


def spread(bounds: Sequence[float], counts: Sequence[int]) -> Spread:
    """Percentiles of a histogram's counts, each as far into its bucket as its rank is.

    A value above every bound counts as the last bound: that is all that is known of it.
    """
    total = sum(counts)
    if not total:
        return Spread()
    below = [0, *accumulate(counts)]

    def percentile(share: float) -> float:
        rank = share * total
        at = next(n for n, count in enumerate(below[1:]) if count >= rank and counts[n])
        if at >= len(bounds):
            return bounds[-1]
        low = bounds[at - 1] if at else 0.0
        return low + (bounds[at] - low) * (rank - below[at]) / counts[at]

    return Spread(count=total, p50=percentile(0.5), p90=percentile(0.9), p99=percentile(0.99))

"""Sharing: tokens a second of names whose content others have too, counted by name.

Goes in: the meter's counters about once a second, and which names share a revision.  Comes out: the
rate of each of these.  What the engine counts is all names' together.
"""

from collections.abc import Iterable, Mapping

from lorad.board.windows import Window
from lorad.service.meter import NameCounts


class NameRates:
    """Keeps nothing of names that have their content alone."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}

    def tick(self, now: float, names: Iterable[str], counts: Mapping[str, NameCounts]) -> None:
        """`now` in seconds of a monotonic clock; `names`: those that share."""
        windows = {name: self._windows.get(name) or Window() for name in names}
        for name, window in windows.items():
            counted = counts.get(name)
            tokens = counted.generated_tokens + counted.pooled_tokens if counted else 0
            window.add(now, (tokens,))
        self._windows = windows

    def tokens_per_second(self, name: str) -> float:
        """Generated, and of inputs that are pooled once their request is answered."""
        window = self._windows.get(name)
        return round(window.rates()[0], 2) if window else 0.0

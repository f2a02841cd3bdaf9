"""What the meter has counted by name, as raw series: of those names that have moved.

Goes in: the meter's counts by adapter or by tenant.  Comes out: uses, and (name, other labels) ->
count.  Of 10,000 names few ask between two scrapes, and to build and to fold three series of all
of them took a third of a scrape.  One a kind of name; one scrape at a time.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter

from lorad.metrics.labels import Key
from lorad.service.meter import NameCounts

#: One of them grows whenever anything is counted.  In C: it is asked of every name at every scrape.
_far: Callable[[NameCounts], tuple[int, ...]] = attrgetter(
    "sequences", "prompt_tokens", "generated_tokens", "ended"
)


class Moved:
    """Remembers how far each name was at the last look."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[NameCounts, tuple[int, ...]]] = {}

    def since(self, counts: Mapping[str, NameCounts]) -> dict[str, NameCounts]:
        """Those that counted anything since the last look, or were forgotten and began again."""
        seen, moved = self._seen, {}
        for name, count in counts.items():
            far = _far(count)
            was = seen.get(name)
            if was is None or was[1] != far or was[0] is not count:
                seen[name] = (count, far)
                moved[name] = count
        if len(seen) > len(counts):
            self._seen = {name: seen[name] for name in counts}
        return moved


def uses(counts: Mapping[str, NameCounts]) -> dict[str, float]:
    """Sequences by name."""
    return {name: float(c.sequences) for name, c in counts.items()}


def series(counts: Mapping[str, NameCounts], prefix: str = "") -> dict[str, Mapping[Key, float]]:
    """By the metric's name, which begins with `prefix`."""
    return {
        f"{prefix}requests_total": {
            (name, reason): number
            for name, c in counts.items()
            for reason, number in dict(c.finished).items()
        },
        f"{prefix}prompt_tokens_total": {(n,): c.prompt_tokens for n, c in counts.items()},
        f"{prefix}generation_tokens_total": {(n,): c.generated_tokens for n, c in counts.items()},
    }

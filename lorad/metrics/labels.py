"""Labels: which adapters have one of their own, and what their counters show.

Goes in: who is pinned, resident and used, and counters by name that only grow.  Comes out: at most
`limit` names, and series of which each only grows: what an adapter counts while it has no label
goes to `__other__`, and stays there.  An adapter that gets one begins at 0, one that loses it or is
removed takes its series along.  Knows no metric.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Set

from lorad.metrics.table import OTHER

#: A use counts half after so many seconds.
HALF_LIFE_SECONDS = 3600.0
#: Who has a label keeps it until another is used so much more: series should not come and go.
STICKINESS = 2.0

Key = tuple[str, ...]  # an adapter's name, then the other labels


class Labelled:
    """The choice.  Pinned ones come first, then resident ones, then the most used."""

    def __init__(self, limit: int) -> None:
        self.names: frozenset[str] = frozenset()
        self._limit = limit
        self._uses: dict[str, float] = {}  # as of `_looked`
        self._seen: Mapping[str, float] = {}
        self._looked = 0.0

    def choose(
        self,
        known: Collection[str],
        pinned: Set[str],
        resident: Set[str],
        uses: Mapping[str, float],
        now: float,
    ) -> frozenset[str]:
        """At most `limit` of `known`; `uses` since the start, by name; `now` in seconds."""
        self._age(known, uses, now)
        kept, aged = self.names, self._uses

        def rank(name: str) -> tuple[bool, bool, float, bool, str]:
            use = aged.get(name, 0.0)
            has = name in kept
            return name in pinned, name in resident, use * STICKINESS if has else use, has, name

        candidates = {*pinned, *resident, *aged, *kept}
        candidates.intersection_update(known)
        self.names = frozenset(heapq.nlargest(self._limit, candidates, key=rank))
        return self.names

    def _age(self, known: Collection[str], uses: Mapping[str, float], now: float) -> None:
        keep = 0.5 ** (max(now - self._looked, 0.0) / HALF_LIFE_SECONDS)
        before, old = self._seen, self._uses
        self._uses = {
            name: old.get(name, 0.0) * keep + max(count - before.get(name, 0.0), 0.0)
            for name, count in uses.items()
            if name in known
        }
        self._seen, self._looked = dict(uses), now


class Series:
    """One counter with an adapter label."""

    def __init__(self) -> None:
        self._seen: dict[Key, float] = {}
        self._shown: dict[Key, float] = {}

    def fold(self, raw: Mapping[Key, float], labelled: Set[str], known: Collection[str]) -> None:
        """Add what `raw` has grown by since the last time.

        `known`: every name that exists; those beyond are forgotten.  What shrank was forgotten by
        its owner and began again.
        """
        seen, shown, present = self._seen, self._shown, 0
        for key, value in raw.items():
            name = key[0]
            if name not in known:
                continue
            present += 1
            before = seen.get(key)
            if value != before:
                grown = value if before is None or value < before else value - before
                target = key if name in labelled else (OTHER, *key[1:])
                shown[target] = shown.get(target, 0.0) + grown
                seen[key] = value
        if len(seen) > present:  # some are gone
            self._seen = {k: v for k, v in seen.items() if k in raw and k[0] in known}
        lasting = {OTHER, *labelled}
        self._shown = {key: value for key, value in shown.items() if key[0] in lasting}

    def __iter__(self) -> Iterator[tuple[Key, float]]:
        return iter(self._shown.items())


def summed(values: Mapping[str, float], labelled: Set[str]) -> dict[str, float]:
    """A gauge by adapter: those with a label, and the sum of the rest."""
    shown: dict[str, float] = {}
    for name, value in values.items():
        label = name if name in labelled else OTHER
        shown[label] = shown.get(label, 0.0) + value
    return shown

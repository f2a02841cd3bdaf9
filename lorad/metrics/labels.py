"""Labels: which adapters have one of their own, and what their counters show.

Goes in: who is pinned, resident and used, and counters by name that only grow.  Comes out: at most
`limit` names, and series of which each only grows: what an adapter counts while it has no label
goes to `__other__`, or to its model's where there are several, and stays there.  An adapter that
gets one begins at 0, one that loses it or is removed takes its series along.  Knows no metric.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Set

from lorad.metrics.metric import OTHER

#: A use counts half after so many seconds.
HALF_LIFE_SECONDS = 3600.0
#: From time to time all is counted anew, so that no number grows without end.
_REBASE_SECONDS = 100 * HALF_LIFE_SECONDS
#: Who has a label keeps it until another is used so much more: series should not come and go.
STICKINESS = 2.0

Key = tuple[str, ...]  # an adapter's name, then the other labels


class Labelled:
    """The choice.  Pinned ones come first, then resident ones, then the most used."""

    def __init__(self, limit: int) -> None:
        self.names: frozenset[str] = frozenset()
        self._limit = limit
        self._uses: dict[str, float] = {}  # times `_worth` of when they were seen
        self._seen: dict[str, float] = {}
        self._since = 0.0

    def choose(
        self,
        known: Set[str],
        pinned: Set[str],
        resident: Set[str],
        uses: Mapping[str, float],
        now: float,
    ) -> frozenset[str]:
        """At most `limit` of `known`; `now` in seconds.

        `uses` since the start, by name; those that are as they were may be left out.
        """
        self._add(known, uses, now)
        kept, aged = self.names, self._uses

        def rank(name: str) -> tuple[bool, bool, float, bool, str]:
            use = aged.get(name, 0.0)
            has = name in kept
            return name in pinned, name in resident, use * STICKINESS if has else use, has, name

        candidates = (pinned | resident) & known
        if len(candidates) < self._limit:  # else no other has a chance
            candidates = {*candidates, *aged, *(kept & known)}
        self.names = frozenset(heapq.nlargest(self._limit, candidates, key=rank))
        return self.names

    def _add(self, known: Set[str], uses: Mapping[str, float], now: float) -> None:
        """New uses are worth more, instead of old ones less: only what has moved is touched."""
        seen, aged = self._seen, self._uses
        for name in seen.keys() - known:
            del seen[name], aged[name]
        if now - self._since > _REBASE_SECONDS:
            self._rebase(now)
        worth = 2.0 ** ((now - self._since) / HALF_LIFE_SECONDS)
        for name, count in uses.items():
            if name in known:
                grown = max(count - seen.get(name, 0.0), 0.0)
                aged[name] = aged.get(name, 0.0) + grown * worth
                seen[name] = count

    def _rebase(self, now: float) -> None:
        less = 0.5 ** ((now - self._since) / HALF_LIFE_SECONDS)
        self._uses = {name: use * less for name, use in self._uses.items()}
        self._since = now


class Series:
    """One counter with an adapter label."""

    def __init__(self) -> None:
        self._seen: dict[Key, float] = {}
        self._names: set[str] = set()  # of those
        self._shown: dict[Key, float] = {}
        self._rests = {OTHER}  # where names without a label have counted

    def fold(
        self,
        raw: Mapping[Key, float],
        labelled: Set[str],
        known: Set[str],
        rest_of: Callable[[str], str] = lambda name: OTHER,
    ) -> None:
        """Add what `raw` has grown by since the last time; what is as it was may be left out.

        `known`: every name that exists; those beyond are forgotten.  What shrank was forgotten by
        its owner and began again.  `rest_of`: where a name counts that has no label.
        """
        if gone := self._names - known:
            self._seen = {key: value for key, value in self._seen.items() if key[0] not in gone}
            self._names -= gone
        seen, shown = self._seen, self._shown
        for key, value in raw.items():
            before = seen.get(key)
            if value == before or (name := key[0]) not in known:
                continue
            grown = value if before is None or value < before else value - before
            target = key if name in labelled else (rest_of(name), *key[1:])
            shown[target] = shown.get(target, 0.0) + grown
            seen[key] = value
            self._names.add(name)
            if name not in labelled:
                self._rests.add(target[0])
        lasting = self._rests | labelled
        self._shown = {key: value for key, value in shown.items() if key[0] in lasting}

    def __iter__(self) -> Iterator[tuple[Key, float]]:
        return iter(self._shown.items())


def summed(values: Mapping[str, float], labelled: Set[str], other: str = OTHER) -> dict[str, float]:
    """A gauge by adapter: those with a label, and under `other` the sum of the rest."""
    shown: dict[str, float] = {}
    for name, value in values.items():
        label = name if name in labelled else other
        shown[label] = shown.get(label, 0.0) + value
    return shown

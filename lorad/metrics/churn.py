"""Churn: adapters that come and go, counted from the engine's transitions.

Goes in: every AdapterEvent, on the event loop.  Comes out: loads, evictions, returns, failures and
drains as counters that only grow; another thread may copy them.  A replaced revision counts for the
name that it served.
"""

from collections import Counter
from collections.abc import Callable

from engine.adapters.states import RESIDENT, State
from engine.histogram import LOAD_SECONDS, Histogram
from engine.messages import AdapterEvent
from lorad.metrics.labels import Key

#: What the engine calls a cause -> what an operator reads, where that differs.
REASONS = {"starvation": "drain"}
#: Somebody asked for it, or another adapter starved.
DRAIN_REASONS = ("manual", "drain")
DRAIN_OUTCOMES = ("done", "aborted", "undone")
FAILURES = {"error": "load_failed", "damaged": "adapter_damaged"}
#: Revision -> (name, whether the name means it still), or None if no name is known for it.
Named = Callable[[str], tuple[str, bool] | None]


class Churn:
    """`named` knows names; `drained` holds revisions whose drain has ended requests."""

    def __init__(self, named: Named, drained: set[str]) -> None:
        self.loads: Counter[Key] = Counter()  # name, source
        self.evictions: Counter[Key] = Counter()  # name, reason
        self.thrashes: Counter[Key] = Counter()  # name
        self.failures: Counter[str] = Counter()
        self.load_bytes = 0
        self.load_seconds = {"disk": Histogram(LOAD_SECONDS), "ram": Histogram(LOAD_SECONDS)}
        self.drain_seconds = Histogram(LOAD_SECONDS)
        self._named, self._drained = named, drained
        self._drains: Counter[Key] = Counter()  # reason, outcome
        self._draining: dict[str, str] = {}  # revision -> why
        self._ended: list[tuple[str, str]] = []  # revision, why: requests may be told after it

    def take(self, event: AdapterEvent) -> None:
        """One transition."""
        if event.source:
            self._note_load(event)
        if is_eviction(event):
            self._note_eviction(event)
        if event.before == State.LOADING and event.cause in FAILURES:
            self.failures[FAILURES[event.cause]] += 1
        if event.after == State.DRAINING:
            self._draining[event.rev] = "drain" if event.cause == "starvation" else "manual"
        elif event.before == State.DRAINING:
            self._note_drain(event)

    def drains(self) -> Counter[Key]:
        """Ended drains by reason and outcome; call it on the event loop."""
        for rev, reason in self._ended:
            aborted = rev in self._drained
            self._drains[reason, "aborted" if aborted else "done"] += 1
            self._drained.discard(rev)
        self._ended.clear()
        return self._drains.copy()

    def keep(self, names: set[str]) -> None:
        """Forget every adapter that is not among `names`."""
        for counts in (self.loads, self.evictions, self.thrashes):
            for key in [key for key in counts if key[0] not in names]:
                del counts[key]

    def _note_load(self, event: AdapterEvent) -> None:
        self.load_bytes += event.num_bytes
        self.load_seconds[event.source].observe(event.load_seconds)
        if (named := self._named(event.rev)) is not None:
            self.loads[named[0], event.source] += 1
            self.thrashes[named[0],] += event.away_seconds is not None

    def _note_eviction(self, event: AdapterEvent) -> None:
        named = self._named(event.rev)
        if named is None:
            return
        name, meant = named
        self.evictions[name, reason_of(event, meant=meant)] += 1

    def _note_drain(self, event: AdapterEvent) -> None:
        self.drain_seconds.observe(event.seconds)
        reason = self._draining.pop(event.rev, "manual")
        if event.after in RESIDENT:
            self._drains[reason, "undone"] += 1
        else:
            self._ended.append((event.rev, reason))


def is_eviction(event: AdapterEvent) -> bool:
    """It leaves the GPU."""
    return event.before in RESIDENT and event.after not in RESIDENT


def reason_of(event: AdapterEvent, *, meant: bool) -> str:
    """Why it was evicted, in an operator's words; `meant`: a name means the revision still."""
    if event.cause == "remove" and not meant:
        return "replace"
    return REASONS.get(event.cause, event.cause)

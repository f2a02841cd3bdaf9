"""Drains: what runs down now, and how far it is.

Goes in: looks at the gate, at the requests and at the engine's revisions, about once a second.
Comes out: a `Drain` for each: a revision that was evicted or replaced, a name or the daemon that an
operator holds.  Changes nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.adapters.states import State
from engine.status_messages import RevisionStatus
from lorad.metrics.churn import REASONS
from lorad.service.catalog import Catalog
from lorad.service.gate import STOPPING, Gate
from lorad.wire_stream import Drain

#: Drains of which it is known how they began; a look forgets those that have ended.
MOST_UNSEEN = 256


class Requests(Protocol):
    """Of RequestService; `name` None means all requests."""

    def running(self, name: str | None = None) -> int: ...


@dataclass(slots=True)
class _Begun:
    at: float
    most: int  # requests at the most since


class Drains:
    """`limit`: seconds that the daemon's own drain may take."""

    def __init__(
        self, gate: Gate, requests: Requests, catalog: Catalog, limit: Callable[[], float]
    ) -> None:
        self._gate, self._requests, self._catalog = gate, requests, catalog
        self._limit = limit
        self._begun: dict[str, _Begun] = {}

    def begin(self, name: str, now: float) -> None:
        """An operator drains a name, or "" all, at this moment."""
        self._note(name, _Begun(now, self._requests.running(name or None)))

    def begin_revision(self, rev: str, status: RevisionStatus | None, now: float) -> None:
        """The engine drains it; `status` is what was known of it before."""
        leases = status.leases if status is not None else 0
        self._note(self._catalog.label(rev), _Begun(now, leases))

    def look(self, now: float, held: Iterable[RevisionStatus]) -> dict[str, Drain]:
        """All of them, by name.  `now` in seconds of a monotonic clock; `held`: revisions that are
        resident or leased."""
        found = [*self._names(now), *self._revisions(now, held)]
        drains: dict[str, Drain] = {}
        for drain in found:
            # A held name may have a revision that drains, too: the operator's word is the name's.
            drains.setdefault(drain.name, drain)
        for key in self._begun.keys() - drains.keys():
            del self._begun[key]
        return drains

    def _note(self, key: str, begun: _Begun) -> None:
        """Where nobody looks, drains end unseen: one was kept for each revision."""
        self._begun.pop(key, None)
        if len(self._begun) >= MOST_UNSEEN:
            del self._begun[next(iter(self._begun))]
        self._begun[key] = begun

    def _names(self, now: float) -> list[Drain]:
        """Those that an operator holds, and the daemon."""
        held = []
        for name in sorted(self._gate.held) + [""] * bool(self._gate.closed):
            stopping = not name and self._gate.closed == STOPPING
            begun, running = self._progress(name, self._requests.running(name or None), now)
            held.append(
                Drain(
                    name=name,
                    cause="stop" if stopping else "operator",
                    running=running,
                    begun_with=begun.most,
                    seconds=now - begun.at,
                    limit_seconds=self._limit() if stopping else None,
                    held=not stopping,
                )
            )
        return held

    def _revisions(self, now: float, held: Iterable[RevisionStatus]) -> list[Drain]:
        """Those that the engine drains, and replaced ones that still have requests."""
        found = []
        for status in held:
            replaced = bool(status.leases) and not self._catalog.names_of(status.rev)
            if status.state == State.DRAINING or replaced:
                found.append(self._revision(status, now))
        return found

    def _revision(self, status: RevisionStatus, now: float) -> Drain:
        rev, catalog = status.rev, self._catalog
        label = catalog.label(rev)
        cause = REASONS.get(status.drain_cause, status.drain_cause) or "replace"
        begun, running = self._progress(label, status.leases, now)
        seconds = now - begun.at if status.drain_seconds is None else status.drain_seconds
        left = status.drain_left_seconds
        name = catalog.name_of(rev)
        entry = catalog.get(name) if name else None
        means = entry.rev if entry is not None else None
        return Drain(
            name=label,
            rev=rev,
            next_rev=means if means is not None and means != rev else "",
            cause=cause,
            running=running,
            begun_with=begun.most,
            seconds=seconds,
            limit_seconds=None if left is None else round(seconds + left, 3),
        )

    def _progress(self, key: str, running: int, now: float) -> tuple[_Begun, int]:
        begun = self._begun.setdefault(key, _Begun(now, running))
        begun.most = max(begun.most, running)
        return begun, running

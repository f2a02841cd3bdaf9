"""Counting: how full a member is, between two looks at it.

Goes in: the requests that this gateway sends there, and what the member says of itself now and
then.  Comes out: what the router looks at.  Own requests are counted as they come and go, since a
look is up to a second old; what else runs there, other gateways' requests, is of the last look.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lorad import wire
from lorad.routing import affinity
from lorad.wire_status import Status

#: As the daemon's rows say where a revision is.
_HELD, _LOADING = ("active", "idle"), ("loading",)


@dataclass(frozen=True, slots=True)
class Look:
    """What one member said of itself."""

    resident: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    num_waiting: int = 0
    num_running: int = 0
    free_bytes: int = 1  # before anything is known there is room


class Count:
    """Of one member."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: Counter[str] = Counter()  # by revision
        self.num_waiting = self.num_running = 0
        self._look = Look()
        self._others_waiting = self._others_running = 0

    def take(self, look: Look) -> None:
        """It has said so just now."""
        self._look = look
        self._others_waiting = max(0, look.num_waiting - self.num_waiting)
        self._others_running = max(0, look.num_running - self.num_running)

    def enter(self, rev: str | None) -> None:
        """One more waits there."""
        self.num_waiting += 1
        if rev is not None:
            self.waiting[rev] += 1

    def begin(self, rev: str | None) -> None:
        """Its answer has begun."""
        self._begun(rev)
        self.num_running += 1

    def leave(self, rev: str | None, *, began: bool) -> None:
        if began:
            self.num_running -= 1
        else:
            self._begun(rev)

    def seen(self, *, alive: bool) -> affinity.Replica:
        return affinity.Replica(
            name=self.name,
            alive=alive,
            resident=self._look.resident,
            loading=self._look.loading,
            waiting=self.waiting,
            num_waiting=self.num_waiting + self._others_waiting,
            num_running=self.num_running + self._others_running,
            free_bytes=self._look.free_bytes,
        )

    def _begun(self, rev: str | None) -> None:
        self.num_waiting -= 1
        if rev is not None:
            self.waiting[rev] -= 1
            if not self.waiting[rev]:
                del self.waiting[rev]


def look_of(status: Status, slots: Iterable[wire.Adapter]) -> Look:
    """From what `GET /admin/v1/status` and `/slots` say."""
    rows = list(slots)
    pools = [model.pool for model in status.models if model.pool is not None] or [status.pool]
    free = sum((p.free + p.kv_cached + p.adapter_idle) * p.block_bytes for p in pools)
    return Look(
        resident=_revs(rows, _HELD),
        loading=_revs(rows, _LOADING),
        num_waiting=status.waiting,
        num_running=status.running,
        free_bytes=free,
    )


def _revs(rows: Iterable[wire.Adapter], states: Collection[str]) -> frozenset[str]:
    return frozenset(row.rev for row in rows if row.rev is not None and row.state in states)

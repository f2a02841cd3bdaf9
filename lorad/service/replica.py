"""Replica: one of several engines of a model, as requests are routed to it.

Goes in: its link, its picture, where its revisions are; each request that is sent to it, begins and
ends there.  Comes out: what the router looks at.  Decides nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from engine.adapters.states import State
from engine.messages import EngineInfo, Submit
from engine.pooling.requests import PoolRequest, PoolResult
from engine.status_messages import EngineSnapshot
from lorad.routing import affinity
from lorad.routing.affinity import Reason
from lorad.service.engine_face import LinkState
from lorad.service.flights import OnDelta

#: States in which a replica is chosen; one that is drained there has been told to leave.
_HELD = (State.ACTIVE, State.IDLE)


class Link(Protocol):
    """Of EngineLink."""

    state: LinkState
    progress: str
    info: EngineInfo | None
    restarts: int
    last_step_at: float
    starts_per_second: float
    hanging: asyncio.Event

    @property
    def pid(self) -> int | None: ...
    def check(self) -> None: ...
    def submit(self, submit: Submit, on_delta: OnDelta) -> None: ...
    def abort(self, request_id: str) -> None: ...
    async def pool(self, request: PoolRequest) -> PoolResult: ...
    def take_back(self, request_id: str) -> None: ...


class Looked(Protocol):
    """Of Picture."""

    @property
    def snapshot(self) -> EngineSnapshot | None: ...


class _In:
    """Revisions that are in one of some states; looked at, never copied."""

    def __init__(self, tiers: Mapping[str, State], states: Collection[State]) -> None:
        self._tiers, self._states = tiers, states

    def __contains__(self, rev: object) -> bool:
        return self._tiers.get(rev) in self._states  # type: ignore[call-overload]


class Replica:
    """One engine: `name` is its number."""

    def __init__(self, name: str, link: Link, picture: Looked) -> None:
        self.name, self.link, self.picture = name, link, picture
        self.waiting: Counter[str] = Counter()  # by revision
        self.num_waiting = self.num_running = 0
        self.routed: Counter[Reason] = Counter()
        self.watch({})

    def watch(self, tiers: Mapping[str, State]) -> None:
        """`tiers`: where its revisions are, kept by its Revisions."""
        self._resident, self._loading = _In(tiers, _HELD), _In(tiers, (State.LOADING,))

    def seen(self, without: Collection[str] = ()) -> affinity.Replica:
        """As the router looks at it; one of `without` is as good as lost."""
        return affinity.Replica(
            name=self.name,
            alive=self.link.state == "ready" and self.name not in without,
            resident=self._resident,
            loading=self._loading,
            waiting=self.waiting,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            free_bytes=_room(self.picture.snapshot),
        )

    @property
    def num_queued(self) -> int:
        """Sequences that its engine has no place for, when that was looked at last."""
        snapshot = self.picture.snapshot
        return snapshot.waiting if snapshot is not None else 0

    def enter(self, rev: str | None) -> None:
        """One more waits."""
        self.num_waiting += 1
        if rev is not None:
            self.waiting[rev] += 1

    def leave(self, rev: str | None, *, began: bool) -> None:
        """It has ended here."""
        if began:
            self.num_running -= 1
        else:
            self._begun(rev)

    def begin(self, rev: str | None) -> None:
        """It waits no longer."""
        self._begun(rev)
        self.num_running += 1

    def _begun(self, rev: str | None) -> None:
        self.num_waiting -= 1
        if rev is not None:
            self.waiting[rev] -= 1
            if not self.waiting[rev]:
                del self.waiting[rev]


def _room(snapshot: EngineSnapshot | None) -> int:
    """Bytes without a user; before the first picture of an engine there is room."""
    if snapshot is None:
        return 1
    pool = snapshot.pool
    return (pool.free + pool.kv_cached + pool.adapter_idle) * pool.block_bytes

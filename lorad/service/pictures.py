"""Pictures: the newest snapshots of all engines, each by itself and all together.

Goes in: one Picture a model, or a replica of one.  Comes out: sums, and the revisions of all of
them; of one alone its very snapshot.  Blocks of different sizes are counted in the largest size
that divides them all; a revision that several replicas know is one, with what it does on all.
"""

import asyncio
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from msgspec import structs

from engine.adapters.states import RESIDENT, State
from engine.status_messages import EngineSnapshot, PoolStatus, PrefixStatus, RevisionStatus


class Looked(Protocol):
    """Of Picture, and of the Pictures of a model's replicas."""

    @property
    def snapshot(self) -> EngineSnapshot | None: ...
    @property
    def by_rev(self) -> Mapping[str, RevisionStatus]: ...
    def changed(self) -> None: ...
    async def refresh(self) -> None: ...
    async def look(self) -> None: ...


class Pictures:
    """`by_model`: at least one, in the order of the configuration; or by replica, with `replicas`.
    `pid` of several is 0: it is no process's."""

    def __init__(self, by_model: Mapping[str, Looked], *, replicas: bool = False) -> None:
        self.by_model, self._replicas = dict(by_model), replicas
        self._every = tuple(by_model.values())
        self._seen: tuple[EngineSnapshot | None, ...] = (None,)
        self._snapshot: EngineSnapshot | None = None
        self._by_rev: Mapping[str, RevisionStatus] = {}

    @property
    def snapshot(self) -> EngineSnapshot | None:
        """None while no engine is there."""
        self._look()
        return self._snapshot

    @property
    def by_rev(self) -> Mapping[str, RevisionStatus]:
        if len(self._every) == 1:
            return self._every[0].by_rev
        self._look()
        return self._by_rev

    def places(self, rev: str) -> tuple[str, ...]:
        """The replicas that have it on their device; () for a model with one engine."""
        if not self._replicas:
            inner = (one.places(rev) for one in self._every if isinstance(one, Pictures))
            return next(filter(None, inner), ())
        each = self.by_model.items()
        status = {name: found for name, one in each if (found := one.by_rev.get(rev))}
        return tuple(name for name, found in status.items() if found.state in RESIDENT)

    def changed(self) -> None:
        """Something moved: look again soon."""
        for one in self._every:
            one.changed()

    async def refresh(self) -> None:
        """Returns with snapshots that were taken after this call, of engines that answer."""
        await asyncio.gather(*(one.refresh() for one in self._every))

    async def look(self) -> None:
        """As `refresh`, for somebody who looks; an engine in a long step is not waited for."""
        await asyncio.gather(*(one.look() for one in self._every))

    def _look(self) -> None:
        """Threads look, too: what was seen is set last."""
        seen = tuple(one.snapshot for one in self._every)
        if len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen)):
            return
        snapshot = together([s for s in seen if s is not None])
        if len(seen) > 1 and snapshot is not None:
            snapshot = structs.replace(snapshot, pid=0)
            if self._replicas:
                snapshot = structs.replace(snapshot, revisions=merged(snapshot.revisions))
        self._snapshot = snapshot
        told = self._snapshot.revisions if self._snapshot is not None else ()
        self._by_rev = {status.rev: status for status in told}
        self._seen = seen


def together(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot | None:
    """Their sums; None of none.  Steps are the first one's: they are shown by model."""
    if len(snapshots) < 2:
        return snapshots[0] if snapshots else None
    first = snapshots[0]
    added = {
        name: sum(getattr(s, name) for s in snapshots)
        for name, value in structs.asdict(first).items()
        if isinstance(value, int)
    }
    return structs.replace(
        first,
        **added
        | {
            "pool": _pool([s.pool for s in snapshots]),
            "prefix": _prefix([s.prefix for s in snapshots]),
            "revisions": tuple(status for s in snapshots for status in s.revisions),
            "base": _base([s.base for s in snapshots]),
        },
    )


#: A revision that several replicas know is where it is best off: the first of these.
_BEST = (*(State.ACTIVE, State.IDLE, State.DRAINING, State.LOADING, State.RAM), State.REGISTERED)
_ADDED = (
    *("gpu_bytes", "ram_bytes", "leases", "running", "waiting"),
    *(
        "loads",
        "evictions",
        "thrashes",
        "generated_tokens",
        "draft_tokens",
        "accepted_tokens",
        "pooled_tokens",
    ),
    *("prefix_query_tokens", "prefix_hit_tokens", "prefix_lost_tokens", "prefix_saved_seconds"),
)


def merged(statuses: Sequence[RevisionStatus]) -> tuple[RevisionStatus, ...]:
    """One of each revision."""
    by_rev: dict[str, list[RevisionStatus]] = {}
    for status in statuses:
        by_rev.setdefault(status.rev, []).append(status)
    return tuple(_one(each) if len(each) > 1 else each[0] for each in by_rev.values())


def _one(each: Sequence[RevisionStatus]) -> RevisionStatus:
    best = min(each, key=lambda status: _BEST.index(State(status.state)))
    idle = [status.idle_seconds for status in each if status.idle_seconds is not None]
    return structs.replace(
        best,
        pinned=any(status.pinned for status in each),
        idle_seconds=min(idle, default=None),
        **{name: sum(getattr(status, name) for status in each) for name in _ADDED},
    )


def _pool(pools: Sequence[PoolStatus]) -> PoolStatus:
    unit = math.gcd(*(pool.block_bytes for pool in pools))
    keep_kv = [pool for pool in pools if pool.block_size]  # of a model that pools it is 0
    # Of other blocks than the engines' own nobody can say how many tokens are in one.
    tokens = {pool.block_size if pool.block_bytes == unit else 0 for pool in keep_kv}
    counts = {
        name: sum(getattr(pool, name) * (pool.block_bytes // max(unit, 1)) for pool in pools)
        for name in structs.asdict(pools[0])
        if name not in ("block_bytes", "block_size")
    }
    block_size = tokens.pop() if len(tokens) == 1 else 0
    return PoolStatus(**counts, block_bytes=unit, block_size=block_size)


def _prefix(all: Sequence[PrefixStatus]) -> PrefixStatus:
    """Counts, seconds, and distances by powers of two blocks, whichever engine's."""
    summed: dict[str, Any] = {
        name: sum(getattr(prefix, name) for prefix in all)
        for name, value in structs.asdict(all[0]).items()
        if isinstance(value, int | float)
    }
    for name in ("found_blocks", "lost_blocks"):
        each = zip_longest(*(getattr(prefix, name) for prefix in all), fillvalue=0)
        summed[name] = tuple(map(sum, each))
    return structs.replace(all[0], **summed)


_OF_BASES = (
    *("running", "waiting", "generated_tokens", "draft_tokens", "accepted_tokens", "pooled_tokens"),
    *("prefix_query_tokens", "prefix_hit_tokens", "prefix_lost_tokens", "prefix_saved_seconds"),
)


def _base(all: Sequence[RevisionStatus]) -> RevisionStatus:
    return structs.replace(
        all[0],
        **{name: sum(getattr(base, name) for base in all) for name in _OF_BASES},
    )

"""Listing: rows and pages of adapters, the registry's words beside the engine's numbers.

Goes in: filters, sorting and cursors of a client.  Comes out: `wire` values, paged in SQLite so
that ten thousand names cost what a page costs.  Reads only; the engine's part is `Picture`'s.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol

from engine.adapters.states import STORED, State
from engine.messages import EngineInfo
from engine.status_messages import EngineSnapshot, RevisionStatus
from lorad import wire, wire_status
from lorad.errors import LoradError
from lorad.lifecycle import shown_state
from lorad.registry.records import AdapterRecord, Packing, Page, RevisionRecord
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog
from lorad.service.events import EventRing, rfc3339
from lorad.service.kinds import from_mlx, kinds_of, scalings_of
from lorad.service.live import Live, Running
from lorad.service.names import Names, model_of
from lorad.service.whose import Whose
from lorad.spelling import split_digest

#: Events and earlier revisions in one detail.
DETAIL_EVENTS, DETAIL_HISTORY = 20, 20
_HELD = (State.LOADING, State.ACTIVE, State.IDLE, State.DRAINING)


class Looked(Protocol):
    """Of Pictures: all engines together; `snapshot` None: none is there."""

    @property
    def snapshot(self) -> EngineSnapshot | None: ...
    @property
    def by_rev(self) -> Mapping[str, RevisionStatus]: ...
    def places(self, rev: str) -> tuple[str, ...]: ...


class Listing:
    """`info` is that of a model's running engine, None before it is known, and of a model that is
    not served; `asks` says by model whose form a pair of texts is put into, "" or none for the
    tokenizer's own.  `crowd`: the requests that have not ended, and who asked."""

    def __init__(
        self,
        names: Names,
        picture: Looked,
        events: EventRing,
        *,
        info: Callable[[str], EngineInfo | None],
        asks: Mapping[str, str] = MappingProxyType({}),
        crowd: Iterable[tuple[Running, Live]] = (),
    ) -> None:
        self._names, self._picture, self._events = names, picture, events
        self._registry: Registry = names.registry
        self._catalog: Catalog = names.catalog
        self._info, self._asks, self._crowd = info, asks, crowd

    def page(
        self,
        *,
        state: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        q: str | None = None,
        sort: str = "name",
        limit: int = 100,
        cursor: str | None = None,
    ) -> wire.AdapterPage:
        """One page; `state` may be a derived one.  invalid_value for what is unknown."""
        filters = _state_filter(state, self._picture.by_rev, set(self._registry.store.remote))
        self._names.check_model(model or "")
        if len(self._names.models) == 1:
            model = None  # all are its, whatever it was called when they came
        page: Page = self._registry.list(
            tenant=tenant,
            model=model,
            q=q,
            sort=sort,
            limit=limit,
            cursor=cursor,
            packing=self._packing(),
            **filters,
        )
        return wire.AdapterPage(
            items=self._rows(page.items),
            total=page.total,
            cursor=page.cursor,
            inbox_waits=() if cursor else self._inbox_waits(),
            inbox_nested=() if cursor else tuple(sorted(self._names.inbox_nested.copy())),
        )

    def detail(self, name: str) -> wire.AdapterDetail:
        """Everything about one name; `name@digest` is accepted for its serving revision."""
        record = self._names.known(split_digest(name)[0])
        info = self._info_of(record)
        revisions = self._revisions_of(record)
        serving = revisions.get(record.serving_rev or "")
        candidate = revisions.get(record.candidate_rev or "")
        return wire.AdapterDetail(
            adapter=self._row(record, serving, self._whose()),
            serving=self._revision(serving, info),
            candidate=self._revision(candidate, info),
            history=self._registry.revisions_of(record.name)[:DETAIL_HISTORY],
            events=self._events_of(record.name),
            inbox_nested=self._names.inbox_nested.get(record.name, ""),
            pooling=self.pooling(model_of(record, self._names.models)),
        )

    def _inbox_waits(self) -> tuple[str, ...]:
        """Copied, as pages are made on a thread of their own.  What has a record is a row."""
        waits = self._names.inbox_waits.copy()
        return tuple(name for name in sorted(waits) if self._registry.get(name) is None)

    def pooling(self, model: str) -> wire_status.PoolingPicture | None:
        """How a model pools; None: it generates, or its engine is not there yet."""
        return _pooling_of(self._info(model), self._asks.get(model, ""))

    def slots(self) -> wire.SlotPage:
        """Resident or loading, in slot order; a revision without a name shows as name@digest."""
        held = [s for s in self._picture.by_rev.values() if s.state in _HELD]
        held.sort(key=lambda s: (s.slot is None, s.slot, s.rev))
        names = [name for s in held for name in self._catalog.names_of(s.rev)]
        records = {name: record for name in names if (record := self._registry.get(name))}
        revisions = self._registry.revisions(s.rev for s in held)
        items, whose = [], self._whose()
        for status in held:
            revision = revisions.get(status.rev)
            for name in self._catalog.names_of(status.rev):
                if name in records:
                    items.append(self._row(records[name], revision, whose, status))
            if not self._catalog.names_of(status.rev):
                items.append(self._nameless(status, revision))
        snapshot = self._picture.snapshot
        return wire.SlotPage(
            items=tuple(items),
            slots_total=snapshot.slots_total if snapshot else 0,
            slots_used=snapshot.slots_used if snapshot else 0,
        )

    def counts(self) -> dict[str, int]:
        """How many names are in each printed state."""
        counts = {state.value: number for state, number in self._registry.counts().items()}
        for status in self._picture.by_rev.values():
            if status.state != State.REGISTERED:
                number = len(self._catalog.names_of(status.rev))
                if number:
                    counts[status.state] = counts.get(status.state, 0) + number
                    counts["registered"] = counts.get("registered", 0) - number
        away = tuple(self._registry.store.remote)  # metrics ask from a thread of their own
        if remote := sum(len(self._catalog.names_of(rev)) for rev in away):
            counts["remote"] = remote
            counts["registered"] = counts.get("registered", 0) - remote
        return {state: number for state, number in counts.items() if number > 0}

    def vocabularies(self, model: str) -> tuple[int, int]:
        """Of names that serve on `model`: ids behind the base's of the one that has most, and how
        many have a tokenizer of their own."""
        by_model = self._registry.vocabularies()
        alone = len(self._names.models) == 1  # then all are its, as in `model_of`
        found = list(by_model.values()) if alone else [by_model.get(model, (0, 0))]
        most, own = max((most for most, _ in found), default=0), sum(own for _, own in found)
        info = self._info(model)
        return max(0, most - info.vocab_size) if info else 0, own

    # ------------------------------------------------------------- rows
    def _rows(self, records: tuple[AdapterRecord, ...]) -> tuple[wire.Adapter, ...]:
        revs = [record.serving_rev for record in records if record.serving_rev is not None]
        revisions = self._registry.revisions(revs)
        whose = self._whose()
        return tuple(self._row(r, revisions.get(r.serving_rev or ""), whose) for r in records)

    def _whose(self) -> Whose:
        return Whose(self._crowd)

    def _row(
        self,
        record: AdapterRecord,
        revision: RevisionRecord | None,
        whose: Whose,
        status: RevisionStatus | None = None,
    ) -> wire.Adapter:
        if status is None and not self._names.elsewhere(record):
            status = self._picture.by_rev.get(record.serving_rev or "")
        if status is not None and record.name in (names := self._catalog.names_of(status.rev)):
            status = whose.of(record.name, status, names)
        return wire.Adapter(
            name=record.name,
            tenant=record.tenant,
            model=model_of(record, self._names.models) or record.model,
            state=shown_state(record, status, remote=self._is_remote(record)).value,
            pinned=record.pinned,
            priority=record.priority,
            rev=record.serving_rev,
            candidate_rev=record.candidate_rev,
            rank=revision.rank if revision else None,
            num_bytes=self._packed_bytes(revision, self._info_of(record)),
            source=record.source,
            labels=dict(record.labels),
            reason=record.reason,
            reason_message=record.reason_message,
            created_at=_time(record.created_at),
            last_used_at=_time(used) if (used := self._names.last_used(record)) else None,
            targets=revision.targets if revision else (),
            own_tokenizer=revision is not None and revision.own_tokenizer,
            extra_tokens=_extra_tokens(revision, self._info_of(record)),
            display_name=record.display_name,
            replicas=self._picture.places(record.serving_rev or ""),
            **_live(status),
        )

    def _nameless(self, status: RevisionStatus, revision: RevisionRecord | None) -> wire.Adapter:
        """A replaced revision that still serves its requests."""
        model = self._catalog.model_of(status.rev) or self._names.models[0]
        return wire.Adapter(
            name=self._catalog.label(status.rev),
            tenant=None,
            model=model,
            state=status.state,
            pinned=status.pinned,
            priority=status.priority,
            rev=status.rev,
            candidate_rev=None,
            rank=status.max_rank,
            num_bytes=self._packed_bytes(revision, self._info(model)),
            source="-",
            labels={},
            reason=None,
            reason_message=None,
            created_at=_time(revision.created_at) if revision else "",
            last_used_at=None,
            targets=revision.targets if revision else (),
            replicas=self._picture.places(status.rev),
            **_live(status),
        )

    def _revision(
        self, record: RevisionRecord | None, info: EngineInfo | None
    ) -> wire.Revision | None:
        if record is None:
            return None
        packed = record.packed_for(info)
        mlx = from_mlx(self._registry.store.path(record.rev))
        return wire.Revision(
            rev=record.rev,
            rank=record.rank,
            ranks=dict(record.ranks),
            alpha=None if mlx else record.alpha,
            rslora=record.rslora,
            targets=record.targets,
            num_layers=record.num_layers,
            dtype=record.dtype,
            file_bytes=record.file_bytes,
            packed_bytes=self._packed_bytes(record, info) or 0,
            num_blocks=packed.num_blocks if packed else 0,
            changes_kv=record.changes_kv,
            keeps_kv=info is None or info.generates,
            kinds=kinds_of(record, mlx=mlx),
            scalings=scalings_of(record),
            alora_tokens=record.alora_tokens,
            num_tokens=record.num_tokens,
            own_tokenizer=record.own_tokenizer,
            extra_tokens=_extra_tokens(record, info),
            warnings=record.warnings,
            created_at=_time(record.created_at),
        )

    def _is_remote(self, record: AdapterRecord) -> bool:
        return record.serving_rev in self._registry.store.remote

    def _info_of(self, record: AdapterRecord) -> EngineInfo | None:
        return self._info(model_of(record, self._names.models))

    def _packing(self) -> Packing | None:
        """By what `_packed_bytes` measures; None before the engine is known.  Of several models
        each has blocks of its own: then files are what sizes are ordered by."""
        info = self._info(self._names.models[0])
        if info is None or self._picture.snapshot is None or len(self._names.models) > 1:
            return None
        return Packing.of(info, info.packed_block_bytes)

    def _packed_bytes(self, revision: RevisionRecord | None, info: EngineInfo | None) -> int | None:
        """Whole blocks once it is packed, its file's bytes before."""
        if revision is None:
            return None
        packed = revision.packed_for(info)
        if packed is None or info is None or self._picture.snapshot is None:
            return revision.file_bytes
        return packed.num_blocks * info.packed_block_bytes

    def _revisions_of(self, record: AdapterRecord) -> Mapping[str, RevisionRecord]:
        wanted = [r for r in (record.serving_rev, record.candidate_rev) if r is not None]
        return self._registry.revisions(wanted)

    def _events_of(self, name: str) -> tuple[wire.EventItem, ...]:
        """This daemon's events; before it has any, what the registry remembers."""
        if live := self._events.of(name, DETAIL_EVENTS):
            return live
        stored = self._registry.events(DETAIL_EVENTS, name)
        return tuple(
            wire.EventItem(
                id=0,
                time=_time(event.time),
                level="warn" if event.level == "warn" else "info",
                type=event.type,
                name=event.name,
                rev=event.rev,
                cause=event.cause,
                message=event.message,
            )
            for event in reversed(stored)
        )


def _state_filter(
    state: str | None, live: Mapping[str, RevisionStatus], remote: set[str]
) -> dict[str, Any]:
    """Which names of the registry are in a printed state now."""
    if state is None:
        return {}
    if state not in set(State):
        known = ", ".join(sorted(State))
        raise LoradError("invalid_value", f"no state {state!r}; known: {known}", param="state")
    if state == State.REGISTERED:
        moved = {rev for rev, status in live.items() if status.state != State.REGISTERED}
        return {"state": state, "without_revs": moved | remote}
    if state == State.REMOTE:
        return {"state": State.REGISTERED.value, "revs": remote}
    if state in STORED:
        return {"state": state}
    there = {rev for rev, status in live.items() if status.state == state}
    return {"state": State.REGISTERED.value, "revs": there}


def _live(status: RevisionStatus | None) -> dict[str, Any]:
    if status is None:
        return {}
    return {
        "slot": status.slot,
        "running": status.running,
        "waiting": status.waiting,
        "loads": status.loads,
        "evictions": status.evictions,
        "thrashes": status.thrashes,
        "idle_seconds": status.idle_seconds,
        "loaded_seconds": status.loaded_seconds,
        "prefix_query_tokens": status.prefix_query_tokens,
        "prefix_hit_tokens": status.prefix_hit_tokens,
        "prefix_lost_tokens": status.prefix_lost_tokens,
        "prefix_saved_seconds": status.prefix_saved_seconds,
        "generated_tokens": status.generated_tokens,
        "draft_tokens": status.draft_tokens,
        "accepted_tokens": status.accepted_tokens,
    }


def _extra_tokens(record: RevisionRecord | None, info: EngineInfo | None) -> int:
    """Ids behind the base's; none before the engine has said how many that are."""
    if record is None or info is None:
        return 0
    return max(0, record.num_tokens - info.vocab_size)


def _time(seconds: float) -> str:
    return rfc3339(datetime.fromtimestamp(seconds, UTC))


def _pooling_of(info: EngineInfo | None, asks: str) -> wire_status.PoolingPicture | None:
    if info is None or info.pooling is None:
        return None
    pooling = info.pooling
    return wire_status.PoolingPicture(
        kinds=pooling.kinds,
        origin=pooling.pooling_origin,
        width=pooling.width,
        normalizes=pooling.normalizes,
        labels=() if pooling.score_tokens else pooling.labels,
        score_tokens=pooling.score_tokens,
        asks=asks,
    )

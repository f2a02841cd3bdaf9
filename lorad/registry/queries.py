"""Every question to the registry, as a function of an open connection.

Goes in: a connection (one snapshot) and plain values.  Comes out: the frozen records.  Filters,
order and paging happen in SQLite, over indexes; a page continues after the last row of the one
before, so that it costs the same at row 10 and at row 10,000.
"""

import base64
import binascii
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, func, select, tuple_
from sqlalchemy.sql import literal

from engine.adapters.states import STORED, State
from engine.messages import PackedModule
from lorad.errors import LoradError
from lorad.registry.models import adapters, audit, events, facts, history, packed, revisions
from lorad.registry.models import tombstones as tombstones_table
from lorad.registry.records import (
    AdapterRecord,
    AuditRecord,
    EventRecord,
    PackedRecord,
    PackedUse,
    Packing,
    Page,
    RevisionRecord,
    Serving,
    Tombstone,
)
from lorad.registry.store import Store

MAX_PAGE = 1000

#: `sort=` -> the column; a leading "-" turns the order round, and the name breaks ties.
SORTS: Mapping[str, ColumnElement[Any]] = {
    "name": adapters.c.name,
    "tenant": adapters.c.tenant,
    "state": adapters.c.state,
    "pinned": adapters.c.pinned,
    "priority": adapters.c.priority,
    "created": adapters.c.created_at,
    "last_used": adapters.c.last_used_at,
    "rank": func.coalesce(revisions.c.rank, 0),
    "size": func.coalesce(revisions.c.file_bytes, 0),
}


class _ModuleRow(msgspec.Struct, array_like=True):
    """A PackedModule in the `modules` column."""

    layer: int
    module: str
    rank: int
    scaling: float
    bias: bool = False
    gain: bool = False
    tokens: tuple[int, ...] = ()


# ----------------------------------------------------------------- adapters
def adapter(connection: Connection, name: str) -> AdapterRecord | None:
    row = connection.execute(_adapters().where(adapters.c.name == name)).first()
    return None if row is None else _adapter(row)


def page(
    connection: Connection,
    *,
    state: str | None = None,
    tenant: str | None = None,
    q: str | None = None,
    labels: Mapping[str, str] | None = None,
    revs: Collection[str] | None = None,
    without_revs: Collection[str] | None = None,
    sort: str = "name",
    limit: int = 100,
    cursor: str | None = None,
    packing: Packing | None = None,
) -> Page:
    """One page of names.  invalid_value for an unknown state or sort, or a broken cursor."""
    filters = _filters(state, tenant, q, labels, revs, without_revs)
    total = connection.execute(select(func.count()).select_from(adapters).where(*filters)).scalar()
    limit = max(1, min(limit, MAX_PAGE))
    statement, key = page_statement(filters, sort=sort, limit=limit, cursor=cursor, packing=packing)
    rows = connection.execute(statement).all()
    more = len(rows) > limit
    rows = rows[:limit]
    following = _encode_cursor(sort, rows[-1]._mapping[key], rows[-1].name) if more else None
    return Page(items=tuple(_adapter(r) for r in rows), total=total or 0, cursor=following)


def page_statement(
    filters: Sequence[ColumnElement[bool]],
    *,
    sort: str,
    limit: int,
    cursor: str | None,
    packing: Packing | None = None,
) -> tuple[Select[Any], str]:
    """The SELECT of one page, one row more than `limit`; and the label of its sort key.

    With `packing`, size is that of a revision's blocks where it is packed, as the list shows it.
    """
    word = sort.removeprefix("-")
    if word not in SORTS:
        raise _invalid("sort", f"unknown sort {sort!r}; known: {', '.join(SORTS)}")
    column, descending = SORTS[word], sort.startswith("-")
    if word == "size" and packing is not None:
        column = func.coalesce(_blocks(packing) * packing.block_bytes, column)
    statement = _adapters().add_columns(column.label("sort_key")).where(*filters)
    if word in ("rank", "size"):
        statement = statement.outerjoin(revisions, revisions.c.rev == adapters.c.serving_rev)
    by = [adapters.c.name] if word == "name" else [column, adapters.c.name]
    if cursor is not None:
        value, name = _decode_cursor(cursor, sort)
        last = [literal(name)] if word == "name" else [literal(value), literal(name)]
        here, there = tuple_(*by), tuple_(*last)
        statement = statement.where(here < there if descending else here > there)
    order = [c.desc() for c in by] if descending else by
    return statement.order_by(*order).limit(limit + 1), "sort_key"


def _blocks(packing: Packing) -> ColumnElement[Any]:
    """Blocks of a row's serving revision; null if it is not packed for that engine."""
    files = select(func.max(packed.c.num_blocks)).where(
        packed.c.rev == revisions.c.rev, packed.c.layout.in_(packing.streams)
    )
    return files.correlate(revisions).scalar_subquery()


def names_of(connection: Connection, rev: str) -> tuple[str, ...]:
    """Names that serve `rev` or have it as their candidate."""
    points = (adapters.c.serving_rev == rev) | (adapters.c.candidate_rev == rev)
    return tuple(connection.execute(select(adapters.c.name).where(points)).scalars())


def pointing(connection: Connection) -> tuple[AdapterRecord, ...]:
    """Every name that points to a revision, by name."""
    points = adapters.c.serving_rev.is_not(None) | adapters.c.candidate_rev.is_not(None)
    rows = connection.execute(_adapters().where(points).order_by(adapters.c.name))
    return tuple(_adapter(row) for row in rows)


def packed_files(
    connection: Connection, layouts: Collection[str]
) -> tuple[tuple[str, str, int], ...]:
    """(rev, layout, blocks) of every packed file of these layouts."""
    columns = (packed.c.rev, packed.c.layout, packed.c.num_blocks)
    rows = connection.execute(select(*columns).where(packed.c.layout.in_(tuple(layouts))))
    return tuple((row.rev, row.layout, row.num_blocks) for row in rows)


def serving(connection: Connection, store: Store) -> tuple[Serving, ...]:
    """Every name that points to a revision, by name."""
    points = adapters.c.serving_rev.is_not(None) | adapters.c.candidate_rev.is_not(None)
    rows = connection.execute(_adapters().where(points).order_by(adapters.c.name)).all()
    known = _revisions(connection, store, None)
    return tuple(
        Serving(
            adapter=_adapter(row),
            revision=known.get(row.serving_rev),
            candidate=known.get(row.candidate_rev),
        )
        for row in rows
    )


def changed_since(connection: Connection, since: int) -> list[tuple[AdapterRecord, int]]:
    """Names that a transaction after `since` changed, each with the number of the last one."""
    rows = connection.execute(_adapters().where(adapters.c.generation > since)).all()
    return [(_adapter(row), row.generation) for row in rows]


def counts(connection: Connection) -> dict[State, int]:
    """How many names are in each stored state."""
    rows = connection.execute(select(adapters.c.state, func.count()).group_by(adapters.c.state))
    return {State(state): count for state, count in rows}


def quarantined(connection: Connection) -> dict[str, int]:
    """How many names are quarantined, by reason code."""
    where = adapters.c.state == State.QUARANTINED.value
    rows = connection.execute(
        select(adapters.c.reason, func.count()).where(where).group_by(adapters.c.reason)
    )
    return {reason or "": count for reason, count in rows}


def live_revs(connection: Connection) -> set[str]:
    """Revisions that some name serves or waits for."""
    both = (adapters.c.serving_rev, adapters.c.candidate_rev)
    return {r for c in both for r in connection.execute(select(c)).scalars() if r is not None}


def served_revs(connection: Connection) -> set[str]:
    """Revisions that a registered name serves."""
    served = select(adapters.c.serving_rev).where(adapters.c.state == State.REGISTERED)
    return {rev for rev in connection.execute(served).scalars() if rev is not None}


# ----------------------------------------------------------------- revisions
def revisions_by_rev(
    connection: Connection, store: Store, revs: Iterable[str]
) -> dict[str, RevisionRecord]:
    """Those of `revs` that exist."""
    return _revisions(connection, store, list(revs))


def revisions_of(connection: Connection, name: str) -> tuple[str, ...]:
    """Revisions that `name` served before this one, newest first."""
    earlier = select(history.c.rev).where(history.c.name == name).order_by(history.c.id.desc())
    return tuple(connection.execute(earlier).scalars())


def known_revs(connection: Connection) -> set[str]:
    return set(connection.execute(select(revisions.c.rev)).scalars())


def unused_revs(connection: Connection, leased: Collection[str]) -> set[str]:
    """Revisions that no name points to and nobody has leased."""
    return known_revs(connection) - live_revs(connection) - set(leased)


def packed_by_use(connection: Connection) -> tuple[PackedUse, ...]:
    """Every packed file, those first that were not used for longest."""
    last = func.max(func.coalesce(adapters.c.last_used_at, 0.0), packed.c.created_at)
    used = func.max(last).label("used_at")
    files = packed.outerjoin(adapters, adapters.c.serving_rev == packed.c.rev)
    by = (packed.c.rev, packed.c.layout)
    rows = connection.execute(
        select(*by, used).select_from(files).group_by(*by).order_by("used_at", *by)
    )
    return tuple(PackedUse(**row._mapping) for row in rows)


# ----------------------------------------------------------------- the rest
def tombstone(connection: Connection, name: str) -> Tombstone | None:
    row = connection.execute(
        select(tombstones_table).where(tombstones_table.c.name == name)
    ).first()
    return None if row is None else Tombstone(**row._mapping)


def event_page(
    connection: Connection, *, limit: int, name: str | None, since: int
) -> tuple[EventRecord, ...]:
    """The newest `limit` events after id `since`, newest first."""
    statement = select(events).where(events.c.id > since).order_by(events.c.id.desc())
    if name is not None:
        statement = statement.where(events.c.name == name)
    return tuple(EventRecord(**r._mapping) for r in connection.execute(statement.limit(limit)))


def audit_page(
    connection: Connection, *, limit: int, after: float, actor: str, action: str, name: str
) -> tuple[AuditRecord, ...]:
    """The newest `limit` audit rows that fit, newest first; "" is any."""
    statement = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if after:
        statement = statement.where(audit.c.time >= after)
    if actor:
        statement = statement.where(func.instr(audit.c.actor, actor) > 0)
    if action:
        statement = statement.where(func.substr(audit.c.action, 1, len(action)) == action)
    if name:
        statement = statement.where(audit.c.name == name)
    return tuple(AuditRecord(**r._mapping) for r in connection.execute(statement))


def generation(connection: Connection) -> int:
    """How many write transactions there have been."""
    value = select(facts.c.value).where(facts.c.key == "generation")
    return connection.execute(value).scalar() or 0


# ----------------------------------------------------------------- rows to records
def _adapters() -> Select[Any]:
    joined = adapters.outerjoin(tombstones_table, tombstones_table.c.name == adapters.c.name)
    return select(adapters, tombstones_table.c.digest).select_from(joined)


def _adapter(row: Row[Any]) -> AdapterRecord:
    return AdapterRecord(
        name=row.name,
        tenant=row.tenant or None,
        model=row.model,
        stored_state=State(row.state),
        pinned=row.pinned,
        priority=row.priority,
        labels=msgspec.json.decode(row.labels, type=dict[str, str]),
        source=row.source,
        serving_rev=row.serving_rev,
        candidate_rev=row.candidate_rev,
        reason=row.reason,
        reason_message=row.reason_message,
        display_name=row.display_name,
        created_at=row.created_at,
        last_used_at=row.last_used_at or None,
        tombstone_digest=row.digest,
    )


def _revisions(
    connection: Connection, store: Store, revs: list[str] | None
) -> dict[str, RevisionRecord]:
    """`revs` None: all of them."""
    rows, files = select(revisions), select(packed)
    if revs is not None:
        rows = rows.where(revisions.c.rev.in_(_json_set(revs)))
        files = files.where(packed.c.rev.in_(_json_set(revs)))
    by_rev: dict[str, dict[str, PackedRecord]] = {}
    for row in connection.execute(files):
        by_rev.setdefault(row.rev, {})[row.layout] = PackedRecord(
            layout=row.layout,
            path=str(store.packed(row.rev, row.layout)),
            num_blocks=row.num_blocks,
            true_bytes=row.true_bytes,
        )
    return {row.rev: _revision(row, by_rev.get(row.rev, {})) for row in connection.execute(rows)}


def _revision(row: Row[Any], files: Mapping[str, PackedRecord]) -> RevisionRecord:
    return RevisionRecord(
        rev=row.rev,
        rank=row.rank,
        ranks=msgspec.json.decode(row.ranks, type=dict[str, int]),
        alpha=row.alpha,
        rslora=row.rslora,
        targets=msgspec.json.decode(row.targets, type=tuple[str, ...]),
        num_layers=row.num_layers,
        dtype=row.dtype,
        file_bytes=row.file_bytes,
        changes_kv=row.changes_kv,
        modules=decode_modules(row.modules),
        alora_tokens=msgspec.json.decode(row.alora_tokens, type=tuple[int, ...]),
        warnings=msgspec.json.decode(row.warnings, type=tuple[str, ...]),
        packed=files,
        created_at=row.created_at,
    )


def encode_modules(modules: Iterable[PackedModule]) -> str:
    """The `modules` column: rows without field names, a tenth of the bytes that matter."""
    rows = [
        (m.layer, m.module, m.rank, m.scaling)
        + ((m.bias, m.gain) if m.bias or m.gain or m.tokens else ())
        + ((m.tokens,) if m.tokens else ())
        for m in modules
    ]
    return msgspec.json.encode(rows).decode()


@lru_cache(maxsize=512)
def decode_modules(text: str) -> tuple[PackedModule, ...]:
    """Adapters of one recipe share one tuple: 10,000 of them would be millions of objects."""
    rows = msgspec.json.decode(text, type=list[_ModuleRow])
    return tuple(PackedModule(*msgspec.structs.astuple(row)) for row in rows)


# ----------------------------------------------------------------- filters and cursors
def _filters(
    state: str | None,
    tenant: str | None,
    q: str | None,
    labels: Mapping[str, str] | None,
    revs: Collection[str] | None,
    without_revs: Collection[str] | None,
) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    if state is not None:
        if state not in STORED:
            raise _invalid("state", f"{state!r} is not stored; stored: {', '.join(sorted(STORED))}")
        filters.append(adapters.c.state == state)
    if tenant is not None:
        filters.append(adapters.c.tenant == tenant)
    if q:
        filters.append(func.instr(adapters.c.name, q.lower()) > 0)
    for key, value in (labels or {}).items():
        pairs = func.json_each(adapters.c.labels).table_valued("key", "value")
        filters.append(
            select(literal(1)).where(pairs.c.key == key, pairs.c.value == value).exists()
        )
    if revs is not None:
        filters.append(adapters.c.serving_rev.in_(_json_set(revs)))
    if without_revs is not None:
        rev = func.coalesce(adapters.c.serving_rev, "")
        filters.append(rev.not_in(_json_set(without_revs)))
    return filters


def _json_set(values: Iterable[str]) -> Select[Any]:
    """Any number of values in one bound parameter."""
    array = msgspec.json.encode(sorted(set(values))).decode()
    return select(func.json_each(array).table_valued("value", name="wanted").c.value)


def _encode_cursor(sort: str, value: object, name: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((sort, value, name))).decode()


def _decode_cursor(cursor: str, sort: str) -> tuple[str | int | float | bool, str]:
    try:
        data = base64.urlsafe_b64decode(cursor.encode())
        made_for, value, name = msgspec.json.decode(
            data, type=tuple[str, str | int | float | bool, str]
        )
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise _invalid("cursor", "not a cursor of this list") from error
    if made_for != sort:
        raise _invalid("cursor", f"the cursor belongs to sort={made_for}")
    return value, name


def _invalid(param: str, message: str) -> LoradError:
    return LoradError("invalid_value", message, param=param)

"""Every question to the registry, as a function of an open connection.

Goes in: a connection (one snapshot) and plain values.  Comes out: the frozen records.  Pages of
names are made in `paging.py`, records out of rows in `rows.py`.
"""

from collections.abc import Collection, Iterable

from sqlalchemy import Connection, func, select

from engine.adapters.states import State
from lorad.registry.models import adapters, audit, events, facts, history, packed, revisions
from lorad.registry.models import tombstones as tombstones_table
from lorad.registry.records import (
    AdapterRecord,
    AuditRecord,
    EventRecord,
    PackedRecord,
    PackedUse,
    RevisionRecord,
    Serving,
    Tombstone,
)
from lorad.registry.rows import adapter_of, revision_of, select_adapters
from lorad.registry.sqlite import any_of
from lorad.registry.store import Store


# ----------------------------------------------------------------- adapters
def adapter(connection: Connection, name: str) -> AdapterRecord | None:
    row = connection.execute(select_adapters().where(adapters.c.name == name)).first()
    return None if row is None else adapter_of(row)


def names_of(connection: Connection, rev: str) -> tuple[str, ...]:
    """Names that serve `rev` or have it as their candidate."""
    points = (adapters.c.serving_rev == rev) | (adapters.c.candidate_rev == rev)
    return tuple(connection.execute(select(adapters.c.name).where(points)).scalars())


def pointing(connection: Connection) -> tuple[AdapterRecord, ...]:
    """Every name that points to a revision, by name."""
    points = adapters.c.serving_rev.is_not(None) | adapters.c.candidate_rev.is_not(None)
    rows = connection.execute(select_adapters().where(points).order_by(adapters.c.name))
    return tuple(adapter_of(row) for row in rows)


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
    rows = connection.execute(select_adapters().where(points).order_by(adapters.c.name)).all()
    known = _revisions(connection, store, None)
    return tuple(
        Serving(
            adapter=adapter_of(row),
            revision=known.get(row.serving_rev),
            candidate=known.get(row.candidate_rev),
        )
        for row in rows
    )


def changed_since(connection: Connection, since: int) -> list[tuple[AdapterRecord, int]]:
    """Names that a transaction after `since` changed, each with the number of the last one."""
    rows = connection.execute(select_adapters().where(adapters.c.generation > since)).all()
    return [(adapter_of(row), row.generation) for row in rows]


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


def own_tokenizers(connection: Connection) -> tuple[str, ...]:
    """What registered names mean, where it has a tokenizer of its own: the pinned first, then by
    the last use; one that was never used by when it was added."""
    rev = func.coalesce(adapters.c.serving_rev, adapters.c.candidate_rev)
    used = func.max(func.max(adapters.c.last_used_at, adapters.c.created_at))
    own = (
        select(revisions.c.rev)
        .join(adapters, rev == revisions.c.rev)
        .where(revisions.c.own_tokenizer, adapters.c.state == State.REGISTERED)
        .group_by(revisions.c.rev)
        .order_by(func.max(adapters.c.pinned).desc(), used.desc(), revisions.c.rev)
    )
    return tuple(connection.execute(own).scalars())


def unlike(connection: Connection, base_text: str, model: str | None) -> tuple[str, ...]:
    """What names of `model` (None: of any) mean and was not looked at beside a base of `base_text`:
    the pinned first, then by the last use."""
    rev = func.coalesce(adapters.c.serving_rev, adapters.c.candidate_rev)
    found = (
        select(revisions.c.rev)
        .join(adapters, rev == revisions.c.rev)
        .where(revisions.c.base_text != base_text, adapters.c.state == State.REGISTERED)
        .group_by(revisions.c.rev)
        .order_by(
            func.max(adapters.c.pinned).desc(),
            func.max(adapters.c.last_used_at).desc(),
            revisions.c.rev,
        )
    )
    if model is not None:
        found = found.where(adapters.c.model == model)
    return tuple(connection.execute(found).scalars())


def vocabularies(connection: Connection) -> dict[str, tuple[int, int]]:
    """By model, of registered names: the most ids that one has, and how many have a tokenizer of
    their own."""
    found = (
        select(
            adapters.c.model,
            func.max(revisions.c.num_tokens).label("most"),
            func.count().filter(revisions.c.own_tokenizer).label("own"),
        )
        .join(revisions, revisions.c.rev == adapters.c.serving_rev)
        .where(adapters.c.state == State.REGISTERED)
        .group_by(adapters.c.model)
    )
    return {row.model: (row.most, row.own) for row in connection.execute(found)}


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


def _revisions(
    connection: Connection, store: Store, revs: list[str] | None
) -> dict[str, RevisionRecord]:
    """`revs` None: all of them."""
    rows, files = select(revisions), select(packed)
    if revs is not None:
        rows = rows.where(revisions.c.rev.in_(any_of(revs)))
        files = files.where(packed.c.rev.in_(any_of(revs)))
    by_rev: dict[str, dict[str, PackedRecord]] = {}
    for row in connection.execute(files):
        by_rev.setdefault(row.rev, {})[row.layout] = PackedRecord(
            layout=row.layout,
            path=str(store.packed(row.rev, row.layout)),
            num_blocks=row.num_blocks,
            true_bytes=row.true_bytes,
        )
    return {row.rev: revision_of(row, by_rev.get(row.rev, {})) for row in connection.execute(rows)}

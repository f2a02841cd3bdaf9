"""Tenants in the registry: who they are, what they may, and the digests of their keys.

Goes in: plain values.  Comes out: records, and futures of changes on the one writing thread, each
with its audit row in the same transaction.  There are few of them, so that reads take them all.
No key is ever seen here, only digests.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeVar

import msgspec
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from lorad.errors import LoradError
from lorad.registry.journal import Stamp, note
from lorad.registry.models import facts, tenant_keys, tenants
from lorad.registry.records import KeyRecord, TenantRecord

T = TypeVar("T")

MAX_TENANTS = 4096
_FACT = "tenants"


class Change(Protocol):
    """Of Registry: one transaction, and what follows it."""

    def __call__(self, work: Callable[[Connection, Stamp], T], actor: str, /) -> "Future[T]": ...


class Tenants:
    """The rows; made by Registry, whose reader and writer it shares."""

    def __init__(
        self, read: Callable[[], AbstractContextManager[Connection]], change: Change
    ) -> None:
        self._read, self._change = read, change

    def all(self) -> tuple[TenantRecord, ...]:
        """By name."""
        with self._read() as connection:
            return every(connection)

    # ------------------------------------------------------------- changes
    def add(
        self, record: TenantRecord, key: KeyRecord | None, *, actor: str = "daemon"
    ) -> "Future[TenantRecord]":
        """name_taken if there is one of that name, conflict if a uid is another's."""

        def work(connection: Connection, at: Stamp) -> TenantRecord:
            known = every(connection)
            if any(other.name == record.name for other in known):
                hint = f"loractl tenant set {record.name}"
                raise LoradError("name_taken", f"there is a tenant {record.name!r}", hint=hint)
            if len(known) >= MAX_TENANTS:
                raise LoradError("conflict", f"there are {MAX_TENANTS} tenants, which is the most")
            _check_uids(known, record)
            _insert(connection, replace(record, created_at=at.now, keys=()))
            _note(connection, at, "added", record.name)
            if key is not None:
                _add_key(connection, record.name, replace(key, created_at=at.now))
            return _need(connection, record.name)

        return self._change(work, actor)

    def set(
        self, name: str, values: Mapping[str, Any], *, actor: str = "daemon"
    ) -> "Future[TenantRecord]":
        """Fields of TenantRecord.  not_found; conflict if a uid is another's."""

        def work(connection: Connection, at: Stamp) -> TenantRecord:
            before = _need(connection, name)
            after = replace(before, **values)
            _check_uids(every(connection), after)
            changed = after != before
            if changed:
                connection.execute(
                    update(tenants).where(tenants.c.name == name).values(_row(after))
                )
            words = ", ".join(f for f in sorted(values) if getattr(before, f) != values[f])
            _note(connection, at, "set", name, message=words, changed=changed)
            return after

        return self._change(work, actor)

    def remove(self, name: str, *, actor: str = "daemon") -> "Future[int]":
        """It and its keys; how many tenants are left.  not_found."""

        def work(connection: Connection, at: Stamp) -> int:
            _need(connection, name)
            connection.execute(delete(tenants).where(tenants.c.name == name))
            _note(connection, at, "removed", name)
            return len(every(connection))

        return self._change(work, actor)

    def set_key(
        self, name: str, key: KeyRecord, *, grace_seconds: float = 0.0, actor: str = "daemon"
    ) -> "Future[TenantRecord]":
        """The new key, beside which older ones are good for `grace_seconds` more.  not_found."""

        def work(connection: Connection, at: Stamp) -> TenantRecord:
            before, end = _need(connection, name), at.now + grace_seconds
            for old in before.keys:
                expires = min(old.expires_at or end, end)
                same = tenant_keys.c.id == old.id
                if expires <= at.now:
                    connection.execute(delete(tenant_keys).where(same))
                else:
                    connection.execute(update(tenant_keys).where(same).values(expires_at=expires))
            _add_key(connection, name, replace(key, created_at=at.now))
            _note(connection, at, "key_rotated", name, message=f"key {key.id}")
            return _need(connection, name)

        return self._change(work, actor)


# ----------------------------------------------------------------- in a transaction
def every(connection: Connection) -> tuple[TenantRecord, ...]:
    """All of them, by name."""
    keys: dict[str, list[KeyRecord]] = {}
    newest = select(tenant_keys).order_by(tenant_keys.c.created_at.desc(), tenant_keys.c.id)
    for row in connection.execute(newest):
        values = dict(row._mapping)
        keys.setdefault(values.pop("tenant"), []).append(KeyRecord(**values))
    records = []
    for row in connection.execute(select(tenants).order_by(tenants.c.name)):
        values = dict(row._mapping) | {
            "adapters": msgspec.json.decode(row.adapters, type=tuple[str, ...]),
            "uids": msgspec.json.decode(row.uids, type=tuple[int, ...]),
        }
        records.append(TenantRecord(**values, keys=tuple(keys.get(row.name, ()))))
    return tuple(records)


def changed_at(connection: Connection) -> int:
    """The write transaction that changed a tenant last; 0 if none did."""
    value = select(facts.c.value).where(facts.c.key == _FACT)
    return connection.execute(value).scalar() or 0


def restore(connection: Connection, records: Iterable[TenantRecord], generation: int) -> None:
    """Make the rows what a card says."""
    connection.execute(delete(tenants))
    for record in records:
        _insert(connection, record)
        for key in record.keys:
            _add_key(connection, record.name, key)
    _mark(connection, generation)


def touch_used(
    connection: Connection, names: Mapping[str, float], keys: Mapping[str, float]
) -> None:
    """Times of last use, never backwards; what is gone meanwhile is passed over."""
    for table, column, used in (
        (tenants, tenants.c.name, names),
        (tenant_keys, tenant_keys.c.id, keys),
    ):
        for word, at in used.items():
            later = (column == word) & (table.c.last_used_at < at)
            connection.execute(update(table).where(later).values(last_used_at=at))


def _need(connection: Connection, name: str) -> TenantRecord:
    for record in every(connection):
        if record.name == name:
            return record
    raise LoradError("not_found", f"no tenant {name[:80]!r}", hint="loractl tenant ls")


def _check_uids(known: Iterable[TenantRecord], record: TenantRecord) -> None:
    """A uid means one tenant."""
    for other in known:
        shared = set(other.uids) & set(record.uids) if other.name != record.name else set()
        if shared:
            hint = f"loractl tenant set {other.name} --uid ..."
            message = f"uid {min(shared)} is tenant {other.name!r} already"
            raise LoradError("conflict", message, hint=hint)


def _insert(connection: Connection, record: TenantRecord) -> None:
    connection.execute(insert(tenants).values(_row(record)))


def _row(record: TenantRecord) -> dict[str, Any]:
    row = asdict(record)
    del row["keys"]
    for column in ("adapters", "uids"):
        row[column] = msgspec.json.encode(row[column]).decode()
    return row


def _add_key(connection: Connection, tenant: str, key: KeyRecord) -> None:
    connection.execute(insert(tenant_keys).values(asdict(key) | {"tenant": tenant}))


def _note(
    connection: Connection,
    at: Stamp,
    what: str,
    name: str,
    *,
    message: str = "",
    changed: bool = True,
) -> None:
    """The audit row, the event, and that the tenants' card is behind."""
    action = f"tenant.{what}"
    note(
        connection,
        at,
        action,
        f"tenant:{name}",
        "",
        action=action,
        message=message,
        changed=changed,
    )
    if changed:
        _mark(connection, at.generation)


def _mark(connection: Connection, generation: int) -> None:
    row = {"key": _FACT, "value": generation}
    statement = upsert(facts).values(row)
    connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_=row))

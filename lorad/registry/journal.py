"""Events and audit: what a change leaves behind for people, in the same transaction.

Goes in: a `Stamp` and words.  Comes out: one audit row for every change that was asked for, and
one event if something became different.  Both tables are bounded by rows and by age; knows nothing
of adapters.

Whose word it is: `acting` says so for all that is done in its context, the tasks and threads that
are begun there included; nobody has to hand it on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from lorad.registry import queries
from lorad.registry.models import audit, events, facts
from lorad.registry.records import AuditRecord

#: Rows kept; older ones go as new ones come.
KEEP_EVENTS = 20_000
KEEP_AUDIT = 100_000
#: And for how long at most.
KEEP_EVENTS_SECONDS = 90 * 86400.0
KEEP_AUDIT_SECONDS = 400 * 86400.0
#: Rows that one new row looks at for their age: more than come, so that none is left for long, and
#: few, so that a clock that jumps ahead does not take them all at once.
_LOOKED_AT = 32

#: Who does what is not said to be anybody else's word.
DAEMON = "daemon"
_ACTOR: ContextVar[str] = ContextVar("actor", default=DAEMON)


def act_as(actor: str) -> None:
    """From now on, in this context."""
    _ACTOR.set(actor)


@contextmanager
def acting(actor: str) -> Iterator[None]:
    """What is done inside is on the word of `actor`."""
    token = _ACTOR.set(actor)
    try:
        yield
    finally:
        _ACTOR.reset(token)


def actor_now() -> str:
    return _ACTOR.get()


@dataclass(frozen=True, slots=True)
class Stamp:
    """When, in which transaction, and on whose word.  `written` are its audit rows, for whoever
    tells them on once they are committed; `keep`: they go into the table too."""

    now: float
    generation: int
    actor: str
    keep: bool = True
    written: list[AuditRecord] = field(default_factory=list, compare=False)


def stamp(connection: Connection, now: float, actor: str, *, keep_audit: bool = True) -> Stamp:
    """Open a change: count the transaction."""
    counter = facts.c.key == "generation"
    connection.execute(update(facts).where(counter).values(value=facts.c.value + 1))
    return Stamp(now, queries.generation(connection), actor, keep_audit)


def note(
    connection: Connection,
    at: Stamp,
    type: str,
    name: str,
    rev: str,
    *,
    action: str,
    level: str = "info",
    cause: str = "",
    message: str = "",
    changed: bool = True,
) -> None:
    result = "ok" if changed else "unchanged"
    write_audit(connection, at, action, name, rev, result, message)
    if not changed:
        return
    row = {
        "time": at.now,
        "level": level,
        "type": type,
        "name": name,
        "rev": rev,
        "cause": cause or at.actor,
        "message": message,
    }
    done = connection.execute(insert(events).values(row))
    _forget(connection, events, done.inserted_primary_key, KEEP_EVENTS)
    _forget_old(connection, events, at.now - KEEP_EVENTS_SECONDS, _LOOKED_AT)


def _forget(connection: Connection, table: Any, key: Any, keep: int) -> None:
    """Ids rise by one, so all but the newest `keep` are those at or below `id - keep`."""
    connection.execute(delete(table).where(table.c.id <= key[0] - keep))


def _forget_old(connection: Connection, table: Any, before: float, most: int) -> None:
    """Of the oldest `most`: no time has an index, and ids rise with it."""
    oldest = select(table.c.id).order_by(table.c.id).limit(most)
    connection.execute(delete(table).where(table.c.id.in_(oldest), table.c.time < before))


def write_audit(
    connection: Connection, at: Stamp, action: str, name: str, rev: str, result: str, message: str
) -> None:
    """One audit row by itself: what was refused, or done outside the registry."""
    write_audit_of(connection, at, at.actor, action, name, rev, result, message)


def write_audit_of(
    connection: Connection,
    at: Stamp,
    actor: str,
    action: str,
    name: str,
    rev: str,
    result: str,
    message: str,
) -> None:
    """The same on the word of another than the stamp's."""
    row: dict[str, Any] = {
        "time": at.now,
        "actor": actor,
        "action": action,
        "name": name,
        "rev": rev,
        "result": result,
        "message": message,
    }
    id = 0
    if at.keep:
        done = connection.execute(insert(audit).values(row))
        key: Any = done.inserted_primary_key
        _forget(connection, audit, key, KEEP_AUDIT)
        _forget_old(connection, audit, at.now - KEEP_AUDIT_SECONDS, _LOOKED_AT)
        id = key[0]
    at.written.append(AuditRecord(id=id, **row))

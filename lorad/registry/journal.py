"""Events and audit: what a change leaves behind for people, in the same transaction.

Goes in: a `Stamp` and words.  Comes out: one audit row for every change that was asked for, and
one event if something became different.  Both tables are bounded; knows nothing of adapters.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, update

from lorad.registry import queries
from lorad.registry.models import audit, events, facts

#: Rows kept; older ones go as new ones come.
KEEP_EVENTS = 20_000
KEEP_AUDIT = 100_000


@dataclass(frozen=True, slots=True)
class Stamp:
    """When, in which transaction, and on whose word."""

    now: float
    generation: int
    actor: str


def stamp(connection: Connection, now: float, actor: str) -> Stamp:
    """Open a change: count the transaction."""
    counter = facts.c.key == "generation"
    connection.execute(update(facts).where(counter).values(value=facts.c.value + 1))
    return Stamp(now, queries.generation(connection), actor)


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
    _forget_before(connection, events, done.inserted_primary_key, KEEP_EVENTS)


def _forget_before(connection: Connection, table: Any, key: Any, keep: int) -> None:
    """Ids rise by one, so all but the newest `keep` are those at or below `id - keep`."""
    connection.execute(delete(table).where(table.c.id <= key[0] - keep))


def write_audit(
    connection: Connection, at: Stamp, action: str, name: str, rev: str, result: str, message: str
) -> None:
    """One audit row by itself: what was refused, or done outside the registry."""
    row = {
        "time": at.now,
        "actor": at.actor,
        "action": action,
        "name": name,
        "rev": rev,
        "result": result,
        "message": message,
    }
    done = connection.execute(insert(audit).values(row))
    _forget_before(connection, audit, done.inserted_primary_key, KEEP_AUDIT)

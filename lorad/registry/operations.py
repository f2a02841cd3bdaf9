"""Operations in the registry: rows that survive a restart, and their ids.

Goes in: what was begun and what became of it.  Comes out: records, newest first, and futures of
changes on the one writing thread.  A row is no truth about adapters: no card, no generation, no
audit follows it.  Ended ones are kept for some days and up to a number.

An id is eight letters and digits without look-alikes: a number of 40 bits, the seconds since 2025
times 1024, or one more than the highest id that there is.  So ids rise, also within a second and
when the clock goes back, and sort as text.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from lorad.registry.models import operations
from lorad.registry.records import LIVE, OperationRecord
from lorad.registry.writer import Writer

#: Ended operations that are kept.
KEEP_ROWS = 1000
KEEP_SECONDS = 14 * 86400.0
#: A failed one keeps its half of a download for this long: the next try goes on from there.
KEEP_STAGING_SECONDS = 86400.0

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_EPOCH = 1_735_689_600  # 2025-01-01
_LIKE = str.maketrans({"o": "0", "i": "1", "l": "1"})


def spell(number: int) -> str:
    """A number of 40 bits as an id."""
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(35, -1, -5))


def read_id(text: str) -> str:
    """An id as somebody typed it: case and look-alikes do not matter."""
    return text.strip().lower().translate(_LIKE)


class Operations:
    """The rows; made by Registry, whose reader and writer it shares."""

    def __init__(
        self,
        read: Callable[[], AbstractContextManager[Connection]],
        writer: Writer,
        clock: Callable[[], float],
    ) -> None:
        self._read, self._writer, self._clock = read, writer, clock

    # ------------------------------------------------------------- reads
    def get(self, id: str) -> OperationRecord | None:
        with self._read() as connection:
            return one(connection, read_id(id))

    def list(
        self, *, states: tuple[str, ...] = (), kind: str = "", limit: int = KEEP_ROWS
    ) -> tuple[OperationRecord, ...]:
        """The newest `limit`, newest first; `states` () is all of them."""
        wanted = select(operations).order_by(operations.c.id.desc()).limit(limit)
        if states:
            wanted = wanted.where(operations.c.state.in_(states))
        if kind:
            wanted = wanted.where(operations.c.kind == kind)
        with self._read() as connection:
            return tuple(OperationRecord(**r._mapping) for r in connection.execute(wanted))

    # ------------------------------------------------------------- changes
    def begin(
        self, kind: str, target: str, *, wish: str, name: str, actor: str, state: str = "queued"
    ) -> "Future[OperationRecord]":
        """A new row, with an id above all others."""

        def work(connection: Connection) -> OperationRecord:
            now = self._clock()
            newest = connection.execute(select(func.max(operations.c.id))).scalar()
            number = max(int(now - _EPOCH) << 10, _number(newest) + 1 if newest else 0)
            record = OperationRecord(
                id=spell(number),
                kind=kind,
                target=target,
                state=state,
                wish=wish,
                name=name,
                actor=actor,
                created_at=now,
                updated_at=now,
            )
            connection.execute(insert(operations).values(asdict(record)))
            _forget(connection, now)
            return record

        return self._writer.submit(work)

    def change(self, id: str, **values: Any) -> "Future[OperationRecord]":
        """Set columns of one row.  KeyError if it is gone."""

        def work(connection: Connection) -> OperationRecord:
            before = one(connection, id)
            if before is None:
                raise KeyError(id)
            after = replace(before, **values, updated_at=self._clock())
            where = operations.c.id == id
            connection.execute(update(operations).where(where).values(asdict(after)))
            return after

        return self._writer.submit(work)

    def note_progress(self, done: dict[str, tuple[int, int]]) -> "Future[None]":
        """(bytes done, bytes in all) of several at once; losing a batch is fine."""

        def work(connection: Connection) -> None:
            now = self._clock()
            for id, (done_bytes, total_bytes) in done.items():
                values = {"done_bytes": done_bytes, "total_bytes": total_bytes, "updated_at": now}
                where = operations.c.id == id
                connection.execute(update(operations).where(where).values(values))

        return self._writer.submit(work)


# ----------------------------------------------------------------- in a transaction
def one(connection: Connection, id: str) -> OperationRecord | None:
    row = connection.execute(select(operations).where(operations.c.id == id)).first()
    return OperationRecord(**row._mapping) if row is not None else None


def stagings_in_use(connection: Connection, now: float) -> set[str]:
    """Staging folders that some operation will go on filling: those of live ones, and of failed
    ones for a day."""
    recent = (operations.c.state == "failed") & (
        operations.c.updated_at > now - KEEP_STAGING_SECONDS
    )
    used = select(operations.c.staging).where(
        operations.c.staging != "", operations.c.state.in_(LIVE) | recent
    )
    return set(connection.execute(used).scalars())


def _number(id: str) -> int:
    number = 0
    for letter in id:
        number = number << 5 | _ALPHABET.index(letter)
    return number


def _forget(connection: Connection, now: float) -> None:
    ended = operations.c.state.not_in(LIVE)
    connection.execute(
        delete(operations).where(ended, operations.c.updated_at < now - KEEP_SECONDS)
    )
    kept = select(operations.c.id).where(ended).order_by(operations.c.id.desc())
    oldest = connection.execute(kept.offset(KEEP_ROWS).limit(1)).scalar()
    if oldest is not None:
        connection.execute(delete(operations).where(ended, operations.c.id <= oldest))

"""Connections to registry.db with the settings that the promises rest on, and its errors in words.

Goes in: a path.  Comes out: SQLAlchemy engines for the one writer and for many readers, and
`translate`, which turns what SQLite says into lorad's errors.  Knows no table.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, Select, create_engine, event, func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from lorad import disk
from lorad.errors import LoradError, RegistryUnusable

BUSY_TIMEOUT_SECONDS = 5.0
#: What the database should always find on its disk: its log may grow to 1,000 pages of 4 KiB, and
#: is then copied into the database.
ROOM_BYTES = 8 << 20

#: Errors that say that the file itself is broken, not the world around it.
CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def writer_engine(path: Path, *, busy_timeout: float = BUSY_TIMEOUT_SECONDS) -> Engine:
    """For the writing thread: every transaction takes the write lock at its start."""
    return _engine(path, "BEGIN IMMEDIATE", busy_timeout, foreign_keys=True)


def reader_engine(path: Path) -> Engine:
    """For any thread: each transaction is one snapshot; writing is refused by SQLite."""
    return _engine(path, "BEGIN", BUSY_TIMEOUT_SECONDS, foreign_keys=True, query_only=True)


def migration_engine(path: Path) -> Engine:
    """Foreign keys are off, because rebuilding a table would cascade; the migrator checks them."""
    return _engine(path, "BEGIN IMMEDIATE", BUSY_TIMEOUT_SECONDS, foreign_keys=False)


def _engine(
    path: Path, begin: str, busy_timeout: float, *, foreign_keys: bool, query_only: bool = False
) -> Engine:
    pool: dict[str, Any] = {"poolclass": NullPool}
    if query_only:
        pool = {"poolclass": QueuePool, "pool_size": 4, "max_overflow": 60}
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": busy_timeout, "check_same_thread": False},
        **pool,
    )

    def connected(raw: sqlite3.Connection, _record: object) -> None:
        raw.isolation_level = None  # transactions begin where we say, not where the driver guesses
        raw.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        # NORMAL may lose the last commits with the power; this database writes too little to care
        raw.execute("PRAGMA synchronous = FULL")
        if query_only:
            raw.execute("PRAGMA query_only = ON")

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


def translate(error: BaseException, path: Path) -> BaseException:
    """SQLite's error of the database at `path` as the one that a caller is told; anything else
    comes back as it is."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, OSError) and cause.errno in disk.FULL:  # of a file beside the database
        return disk.refused("change the registry", path, cause)
    if not isinstance(cause, sqlite3.Error):
        return error
    code = getattr(cause, "sqlite_errorcode", 0)
    primary = code & 0xFF
    if primary in _BUSY:
        return LoradError(
            "registry_busy",
            "another process holds the registry's write lock",
            hint="try again; no tool but lorad should write registry.db",
        )
    if primary == sqlite3.SQLITE_FULL:
        return disk.full("the registry cannot grow: the disk is full", path, ROOM_BYTES)
    if code == sqlite3.SQLITE_IOERR_WRITE:  # a quota or a file size limit ends up here, not in FULL
        what = "the registry cannot be written: disk full, over quota or failing"
        return disk.full(what, path, ROOM_BYTES)
    if primary in CORRUPT:
        return RegistryUnusable(f"the registry is damaged: {cause}", hint="restart lorad")
    if primary in (
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    ):
        return RegistryUnusable(
            f"the registry cannot be used: {cause}", hint="check the state directory and its disk"
        )
    return error


@contextmanager
def translating(path: Path) -> Iterator[None]:
    """What SQLite says of the database at `path` is raised as lorad's own error."""
    try:
        yield
    except Exception as error:
        translated = translate(error, path)
        if translated is error:
            raise
        raise translated from error


def companions(database: Path) -> tuple[Path, Path]:
    """The WAL and the shared-memory file; a WAL must never meet another database than its own."""
    return Path(f"{database}-wal"), Path(f"{database}-shm")


def backup(source: Path, target: Path, copied: Callable[[], None]) -> None:
    """Copy one consistent state of `source` into the new file `target`, while others write."""
    reader = sqlite3.connect(
        f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_SECONDS
    )
    try:
        writer = sqlite3.connect(target)
        try:
            reader.backup(writer)
            copied()
            # a copy is one file: without WAL it needs no companion, and opens read-only anywhere
            writer.execute("PRAGMA journal_mode = DELETE")
        finally:
            writer.close()
    finally:
        reader.close()


def any_of(values: Iterable[str]) -> Select[Any]:
    """Any number of values in one bound parameter."""
    array = msgspec.json.encode(sorted(set(values))).decode()
    return select(func.json_each(array).table_valued("value", name="wanted").c.value)

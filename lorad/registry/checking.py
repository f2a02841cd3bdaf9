"""Is a registry sound?  Every page, every reference, and what it says of the store, read only.

Goes in: a database, live or not, the revisions in the store, its cards, its backups.  Comes out: a
`RegistryCheck` with a sentence for each problem.  Changes no byte, takes no lock.
"""

import os
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.states import State
from lorad.errors import RegistryUnusable
from lorad.registry import backups as copies
from lorad.registry import migrate, sqlite
from lorad.registry.backups import Backups
from lorad.registry.cards import Cards
from lorad.registry.models import SCHEMA_VERSION
from lorad.wire_registry import RegistryBackup, RegistryCheck

#: A broken database has as many problems as pages.
MOST_PROBLEMS = 20
_REV = re.compile(r"[0-9a-f]{64}")


def check(path: Path, store: Path, *, follows: bool) -> RegistryCheck:
    """`store` is its directory.  `follows`: cards keep up with the database now, so that lagging
    behind is no problem that the next start mends.

    RegistryUnusable for another program's file, a newer schema, or one that cannot be read.
    """
    found = migrate.inspect(path)
    folder = Backups(path.parent / "backups")
    backups = tuple(
        RegistryBackup(file=str(p), num_bytes=p.stat().st_size, good=copies.good(p))
        for p in folder.newest_first()
    )
    problems = [f"the backup {Path(b.file).name} is damaged" for b in backups if not b.good]
    counts = _Counts()
    if found.kind is migrate.Kind.ABSENT:
        problems.insert(0, f"there is no registry at {path}")
    else:
        try:
            with _opened(path) as connection:
                problems[:0] = _broken(connection)
                if found.kind is migrate.Kind.REGISTRY and found.version == SCHEMA_VERSION:
                    counts = _counts(connection)
                    problems += _against_store(connection, store)
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            what = "it is damaged" if code in sqlite.CORRUPT else "it cannot be read"
            problems.insert(0, f"{what}: {error}")
        cards = Cards(store / ".cards").generation()
        if found.version == SCHEMA_VERSION and not follows:
            problems += _against_cards(counts.generation, cards)
        if found.version not in (0, SCHEMA_VERSION):
            said = f"its schema is {found.version}; the next start brings it to {SCHEMA_VERSION}"
            problems.append(said)
    return RegistryCheck(
        ok=not problems,
        path=str(path),
        version=found.version,
        generation=counts.generation,
        adapters=counts.adapters,
        revisions=counts.revisions,
        num_bytes=path.stat().st_size if path.exists() else 0,
        backups=backups,
        problems=tuple(problems[:MOST_PROBLEMS]),
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    generation: int = 0
    adapters: int = 0
    revisions: int = 0


class _opened:
    """A read-only connection that ends with the block; of a file without changes in a WAL it
    leaves not even a lock behind."""

    def __init__(self, path: Path) -> None:
        wal = sqlite.companions(path)[0]
        alone = not wal.exists() or wal.stat().st_size == 0
        self._uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"

    def __enter__(self) -> sqlite3.Connection:
        patience = sqlite.BUSY_TIMEOUT_SECONDS
        self._connection = sqlite3.connect(self._uri, uri=True, timeout=patience)
        return self._connection

    def __exit__(self, *exc: object) -> None:
        self._connection.close()


def _broken(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(f"PRAGMA integrity_check({MOST_PROBLEMS})").fetchall()
    problems = [str(text) for (text,) in rows if text != "ok"]
    problems += [
        f"row {row} of {table} points to nothing in {parent}"
        for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchall()
    ]
    return problems


def _counts(connection: sqlite3.Connection) -> _Counts:
    def number(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    return _Counts(
        generation=number("SELECT value FROM facts WHERE key = 'generation'"),
        adapters=number("SELECT count(*) FROM adapters"),
        revisions=number("SELECT count(*) FROM revisions"),
    )


def _against_store(connection: sqlite3.Connection, store: Path) -> Iterator[str]:
    """Names that serve what is not there.  What is known to be missing is no news."""
    try:
        here = {name for name in os.listdir(store) if _REV.fullmatch(name)}
    except OSError as error:
        yield f"the store {store} cannot be read: {error.strerror}"
        return
    query = "SELECT name, serving_rev FROM adapters WHERE state = ? AND serving_rev IS NOT NULL"
    for name, rev in connection.execute(query, (State.REGISTERED.value,)):
        if rev not in here:
            yield f"{name}: the files of {rev[:12]} are not in the store"


def _against_cards(generation: int, cards: int) -> Iterator[str]:
    if cards > generation:
        text = f"it went back in time: its last change is {generation}, its cards know {cards}"
        yield f"{text}; the next start mends it"


def need_backup(file: Path) -> None:
    """RegistryUnusable unless `file` is a sound registry of a schema that is known."""
    if not file.is_file():
        raise RegistryUnusable(
            f"{file} is not there", hint="backups/ in the state directory has what there is"
        )
    if migrate.inspect(file).kind is not migrate.Kind.REGISTRY or not copies.good(file):
        raise RegistryUnusable(f"{file} is no sound backup of a registry", hint="try an older one")

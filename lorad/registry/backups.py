"""Rolling copies of registry.db: the newest few, each one file that is synced before it counts.

Goes in: the path of a live database.  Comes out: `backups/registry-<generation>-<time>.db`.  The
generation orders them, because a clock may jump.  Knows no table but the one with the generation.
"""

import os
import sqlite3
import time
from pathlib import Path

from lorad.registry import failpoints, sqlite
from lorad.registry.models import APPLICATION_ID, SCHEMA_VERSION

KEEP = 5


class Backups:
    """The folder of backups beside registry.db."""

    def __init__(self, directory: Path, *, keep: int = KEEP) -> None:
        self.directory = directory
        self._keep = keep

    def newest_first(self) -> tuple[Path, ...]:
        return tuple(sorted(self.directory.glob("registry-*.db"), reverse=True))

    def newest_generation(self) -> int:
        """-1 without a backup."""
        newest = self.newest_first()
        return int(newest[0].name.split("-")[1]) if newest else -1

    def oldest_time(self) -> float:
        """When the oldest backup was made; 0 without one."""
        newest = self.newest_first()
        return newest[-1].stat().st_mtime if newest else 0.0

    def newest_time(self) -> float:
        """When the newest backup was made; 0 without one."""
        newest = self.newest_first()
        return newest[0].stat().st_mtime if newest else 0.0

    def take(self, database: Path, generation: int, now: float) -> Path:
        """Copy `database` as it is, with everything committed; the oldest copies go."""
        self.directory.mkdir(mode=0o750, exist_ok=True)
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        target = self.directory / f"registry-{generation:012d}-{when}.db"
        temporary = self.directory / "copying.tmp"
        remove_database(temporary)
        sqlite.backup(database, temporary, lambda: failpoints.hit("backup.copied"))
        sync(temporary)
        os.replace(temporary, target)
        sync(self.directory)
        for old in self.newest_first()[self._keep :]:
            old.unlink(missing_ok=True)
        return target


def good(path: Path) -> bool:
    """A registry of this or an earlier schema that passes quick_check."""
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            check = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            connection.close()
    except sqlite3.Error:
        return False
    known = application == APPLICATION_ID and 1 <= version <= SCHEMA_VERSION
    return known and bool(check == "ok")


def remove_database(path: Path) -> None:
    for file in (path, *sqlite.companions(path)):
        file.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, survive the loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Brings registry.db to this program's schema, or refuses it untouched.

Goes in: the path, and where migrations lie.  Comes out: what kind of file it is (`inspect`), and
a file of the newest schema (`upgrade`).  Each migration is one transaction that also raises
`user_version`, so that a kill leaves one schema or the next.  Knows no data.
"""

import importlib.util
import sqlite3
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from lorad.errors import RegistryUnusable
from lorad.registry import failpoints, sqlite
from lorad.registry.models import APPLICATION_ID, SCHEMA_VERSION

#: WAL needs shared memory between processes; on these it corrupts, slowly.
NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs"}
    | {"beegfs", "ocfs2", "gfs2", "orangefs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"}
    | {"fuse.rclone", "fuse.ceph", "fuse.juicefs"}
)


class Kind(Enum):
    """What lies at the path of the registry."""

    ABSENT = auto()  # no file, or one without any table
    CORRUPT = auto()
    REGISTRY = auto()


@dataclass(frozen=True, slots=True)
class Found:
    kind: Kind
    version: int = 0


def inspect(path: Path) -> Found:
    """Look without changing a byte.

    RegistryUnusable for somebody else's database, a newer schema, or a file that cannot be read.
    """
    if not path.exists():
        return Found(Kind.ABSENT)
    wal = sqlite.companions(path)[0]
    # without changes in a WAL the one file is all there is, and not even a lock is left behind
    alone = not wal.exists() or wal.stat().st_size == 0
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}",
            uri=True,
            timeout=sqlite.BUSY_TIMEOUT_SECONDS,
        )
        try:
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables == 0 and application == 0:
                return Found(Kind.ABSENT)
            _refuse(path, application, version)
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                return Found(Kind.CORRUPT)
        finally:
            connection.close()
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF in sqlite.CORRUPT:
            return Found(Kind.CORRUPT)
        raise RegistryUnusable(
            f"cannot read {path}: {error}", hint="check its owner, its mode and its disk"
        ) from error
    return Found(Kind.REGISTRY, version)


def _refuse(path: Path, application: int, version: int) -> None:
    if application != APPLICATION_ID:
        raise RegistryUnusable(
            f"{path} is another program's database", hint="move it away, or change the state dir"
        )
    if version > SCHEMA_VERSION:
        raise RegistryUnusable(
            f"{path} has schema {version}, this lorad knows {SCHEMA_VERSION}; nothing was changed",
            hint="run the newer lorad, or put back a backup from before its upgrade",
        )


def upgrade(
    path: Path, version: int, *, scripts: Path | None = None, target: int = SCHEMA_VERSION
) -> None:
    """Run the migrations from `version` to `target`; 0 makes a new database in WAL mode."""
    # loaded here, because a start without an upgrade has no use for it
    from alembic import command
    from alembic.config import Config

    engine = sqlite.migration_engine(path)
    try:
        with engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            assert raw is not None
            mode = raw.cursor().execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise RegistryUnusable(
                    f"{path}: its file system cannot do WAL (got {mode})",
                    hint="set registry.dir to a local disk",
                )
            config = Config()
            config.set_main_option("script_location", str(scripts or migrations_dir()))
            config.attributes["connection"] = connection
            for number in range(version + 1, target + 1):
                with connection.begin():
                    command.upgrade(config, f"{number:04d}")
                    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
                    assert broken is None, f"migration {number} leaves {broken} dangling"
                    connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
                    connection.exec_driver_sql(f"PRAGMA user_version = {number}")
                    failpoints.hit("migrate.executed")
    except Exception as error:
        translated = sqlite.translate(error, path)
        if translated is error:
            raise
        raise translated from error
    finally:
        engine.dispose()


def migrations_dir() -> Path:
    """Inside an installed lorad, else beside it in a checkout."""
    spec = importlib.util.find_spec("lorad._migrations")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / "migrations"


def refuse_network_filesystem(
    directory: Path, *, mounts: Path = Path("/proc/self/mountinfo")
) -> None:
    """RegistryUnusable if `directory` lies where WAL is not safe; silent without a mount table."""
    kind = _filesystem(directory.resolve(), mounts)
    if kind in NETWORK_FILESYSTEMS:
        raise RegistryUnusable(
            f"{directory} is on {kind}: SQLite's WAL is not safe on a network file system",
            hint="put the state directory on a local disk (--config, STATE_DIRECTORY)",
        )


def _filesystem(directory: Path, mounts: Path) -> str:
    """Type of the mount with the longest path that holds `directory`."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")  # a blank is written \040
        if directory.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind

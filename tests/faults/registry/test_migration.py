"""Migrations that are killed roll back or are complete; a newer schema is not touched."""

import hashlib
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorad.errors import RegistryUnusable
from lorad.registry import migrate, models
from lorad.registry.registry import Registry

Fill = Callable[..., list[str]]

NEXT = models.SCHEMA_VERSION + 1
LATER = f'''
"""A later schema, for the test."""
import sqlalchemy as sa
from alembic import op

revision = "{NEXT:04d}"
down_revision = "{models.SCHEMA_VERSION:04d}"


def upgrade() -> None:
    op.add_column("adapters", sa.Column("colour", sa.String, nullable=False, server_default="red"))
    op.execute("UPDATE adapters SET priority = 100 - priority")
'''


def _bytes(state: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in state.glob("registry.db*")
        if not path.name.endswith("-shm")  # shared memory of readers, not data
    }


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """The migrations with one more."""
    folder = tmp_path / "scripts"
    shutil.copytree(migrate.migrations_dir(), folder)
    (folder / "versions" / f"{NEXT:04d}_colour.py").write_text(LATER)
    return folder


@pytest.fixture
def state(tmp_path: Path, fill: Fill) -> Path:
    registry = Registry.open(tmp_path / "state")
    fill(registry, 3)
    registry.close()
    return tmp_path / "state"


def _ask(state: Path, question: str) -> Any:
    connection = sqlite3.connect(state / "registry.db")
    try:
        return connection.execute(question).fetchone()[0]
    finally:
        connection.close()


@pytest.mark.parametrize("place", ["migrate.backed_up", "migrate.executed"])
def test_a_killed_migration_leaves_the_old_schema_whole_and_the_next_start_completes_it(
    state: Path, scripts: Path, forker: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    order = {"dir": str(state), "task": "upgrade_here", "scripts": str(scripts)}
    assert os.WTERMSIG(forker.run(order | {"failpoint": place})) == signal.SIGKILL
    assert _ask(state, "PRAGMA user_version") == models.SCHEMA_VERSION
    assert _ask(state, "SELECT sum(priority) FROM adapters") == 3
    assert _ask(state, "PRAGMA integrity_check") == "ok"
    assert os.waitstatus_to_exitcode(forker.run(order)) == 0
    assert _ask(state, "PRAGMA user_version") == NEXT
    assert _ask(state, "SELECT sum(priority) FROM adapters") == 297
    assert _ask(state, "SELECT min(colour) FROM adapters") == "red"


def test_an_upgrade_makes_a_backup_of_the_old_schema_first(
    state: Path, scripts: Path, forker: Any
) -> None:
    for old in (state / "backups").glob("*"):
        old.unlink()
    forker.run({"dir": str(state), "task": "upgrade_here", "scripts": str(scripts)})
    (backup,) = (state / "backups").glob("*.db")
    connection = sqlite3.connect(backup)
    assert connection.execute("PRAGMA user_version").fetchone() == (models.SCHEMA_VERSION,)
    assert connection.execute("SELECT sum(priority) FROM adapters").fetchone() == (3,)
    connection.close()


@pytest.mark.parametrize("in_wal", [False, True])
def test_a_newer_schema_is_refused_and_stays_byte_identical(state: Path, in_wal: bool) -> None:
    connection = sqlite3.connect(state / "registry.db", isolation_level=None)
    connection.execute(f"PRAGMA user_version = {models.SCHEMA_VERSION + 1}")
    if not in_wal:
        connection.close()
    before = _bytes(state)
    with pytest.raises(RegistryUnusable) as refused:
        Registry.open(state)
    assert f"schema {NEXT}" in refused.value.message and refused.value.exit == 4
    assert _bytes(state) == before
    connection.close()


def test_another_programs_database_is_refused_untouched(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "registry.db")
    connection.execute("CREATE TABLE songs (title)")
    connection.close()
    before = _bytes(tmp_path)
    with pytest.raises(RegistryUnusable, match="another program"):
        Registry.open(tmp_path)
    assert _bytes(tmp_path) == before


def test_a_killed_first_start_starts_afresh(tmp_path: Path, forker: Any) -> None:
    order = {"dir": str(tmp_path), "task": "open_here", "failpoint": "migrate.executed"}
    assert os.WTERMSIG(forker.run(order)) == signal.SIGKILL
    registry = Registry.open(tmp_path)
    assert registry.report.created and registry.list().total == 0
    registry.close()


def test_wal_on_a_network_file_system_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    folder = tmp_path / "srv my"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/root rw\n"
        f"36 21 0:52 / {escaped} rw,relatime shared:1 - nfs4 server:/export rw\n"
    )
    migrate.refuse_network_filesystem(tmp_path, mounts=mounts)
    with pytest.raises(RegistryUnusable, match="nfs4"):
        migrate.refuse_network_filesystem(folder / "deeper", mounts=mounts)

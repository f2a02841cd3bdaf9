"""A registry that is damaged, gone or older than its cards comes back, and says so."""

import os
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.adapters.states import State
from lorad.registry.registry import Registry

Fill = Callable[..., list[str]]


@pytest.fixture
def closed(tmp_path: Path, fill: Fill) -> Path:
    """A state directory with n0 to n5 (n0 pinned, priorities 0 to 5), closed in good order."""
    registry = Registry.open(tmp_path)
    fill(registry, 6)
    registry.close()
    return tmp_path


def _seen(state: Path) -> tuple[Any, dict[str, Any]]:
    registry = Registry.open(state)
    try:
        return registry.report, {
            a.name: (a.serving_rev, a.pinned, a.priority) for a in registry.list().items
        }
    finally:
        registry.close()


def _remove_backups(state: Path) -> None:
    for backup in (state / "backups").glob("*"):
        backup.unlink()


def test_a_registry_of_noise_is_kept_and_rebuilt_from_the_store(closed: Path) -> None:
    before = _seen(closed)[1]
    _remove_backups(closed)
    noise = random.Random(1).randbytes(50_000)
    (closed / "registry.db").write_bytes(noise)
    report, after = _seen(closed)
    assert report.rebuilt and report.kept_aside is not None
    assert report.kept_aside.read_bytes() == noise
    assert report.kept_aside.name.startswith("registry.db.corrupt-")
    assert after == before
    assert any("rebuilt" in text for _, text in report.messages())


@pytest.mark.parametrize("seed", range(12))
def test_scrambled_bytes_are_noticed_or_do_no_harm(closed: Path, seed: int) -> None:
    before = _seen(closed)[1]
    path = closed / "registry.db"
    rng = random.Random(seed)
    size = path.stat().st_size
    with path.open("r+b") as file:
        # a page at a time, as a disk fails: the first one, then any
        file.seek(4096 * (0 if seed == 0 else rng.randrange(size // 4096)))
        file.write(rng.randbytes(4096))
    report, after = _seen(closed)
    assert after == before
    if report.recovered:
        assert report.kept_aside is not None and report.kept_aside.exists()
    assert seed != 0 or report.recovered


def test_a_missing_database_comes_back_from_the_newest_backup_and_the_cards(
    closed: Path, fill: Fill
) -> None:
    registry = Registry.open(closed)
    registry.set_priority("n3", 77).result()
    registry.remove("n5").result()
    registry.close()
    before = _seen(closed)[1]
    assert list((closed / "backups").glob("*.db"))
    (closed / "registry.db").unlink()
    report, after = _seen(closed)
    assert report.restored_from is not None and not report.rebuilt
    assert after == before and after["n3"][2] == 77 and "n5" not in after
    assert report.messages()[0][0] == "error"


def test_a_missing_database_without_backups_is_rebuilt_from_the_store_alone(closed: Path) -> None:
    before = _seen(closed)[1]
    _remove_backups(closed)
    (closed / "registry.db").unlink()
    report, after = _seen(closed)
    assert report.rebuilt and sorted(report.names_restored) == sorted(before)
    assert after == before and after["n0"][1] is True


def test_a_store_without_cards_is_never_an_empty_start_in_silence(closed: Path) -> None:
    for path in sorted((closed / "store" / ".cards").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    _remove_backups(closed)
    (closed / "registry.db").unlink()
    registry = Registry.open(closed)
    try:
        assert registry.report.recovered and len(registry.report.unnamed_revs) == 6
        # what nobody names is left for an operator: reconciling must not remove it
        registry.reconcile().result()
        assert len(registry.store.revs()) == 6
    finally:
        registry.close()


def test_a_deleted_wal_loses_nothing_that_was_acknowledged(
    tmp_path: Path, child: ModuleType, forker: Any
) -> None:
    """Killed, so that the WAL holds the last changes; then somebody deletes it."""
    order = {"dir": str(tmp_path), "task": "fill_and_die"}
    assert os.WTERMSIG(forker.run(order)) == signal.SIGKILL
    wal = tmp_path / "state" / "registry.db-wal"
    assert wal.stat().st_size > 0
    wal.unlink()
    report, after = _seen(tmp_path / "state")
    assert report.recovered and len(report.names_restored) == 8
    assert sorted(after) == sorted(child.NAMES)


def test_a_wal_left_beside_a_missing_database_is_not_played_into_the_new_one(
    tmp_path: Path, child: ModuleType, forker: Any
) -> None:
    forker.run({"dir": str(tmp_path), "task": "fill_and_die"})
    state = tmp_path / "state"
    (state / "registry.db").unlink()
    report, after = _seen(state)
    assert report.recovered and sorted(after) == sorted(child.NAMES)
    assert list(state.glob("registry.db.corrupt-*-wal"))


def test_an_old_copy_put_in_place_catches_up_with_the_cards(closed: Path) -> None:
    old = (closed / "registry.db").read_bytes()
    registry = Registry.open(closed)
    registry.set_pin("n1", True).result()
    registry.remove("n2").result()
    registry.close()
    (closed / "registry.db").write_bytes(old)
    report, after = _seen(closed)
    assert report.names_restored == ["n1"] and report.names_removed == ["n2"]
    assert after["n1"][1] is True and "n2" not in after


def test_a_name_whose_files_are_gone_comes_back_as_missing(closed: Path, child: ModuleType) -> None:
    rev = child.digest(child.content(2))
    store = Registry.open(closed)
    store.store.remove([rev])
    store.close()
    _remove_backups(closed)
    (closed / "registry.db").unlink()
    registry = Registry.open(closed)
    try:
        record = registry.get("n2")
        assert record is not None and record.stored_state is State.MISSING
    finally:
        registry.close()


@pytest.mark.parametrize("place", ["recover.moved_aside", "recover.built"])
def test_a_kill_during_recovery_leaves_it_to_the_next_start(
    closed: Path, forker: Any, place: str, tmp_path: Path
) -> None:
    before = _seen(closed)[1]
    (closed / "registry.db").write_bytes(b"noise" * 2000)
    order = {"dir": str(closed), "task": "open_here", "failpoint": place}
    assert os.WTERMSIG(forker.run(order)) == signal.SIGKILL
    report, after = _seen(closed)
    assert after == before and report.recovered
    assert len(list(closed.glob("registry.db.corrupt-*"))) == 1


def test_a_damaged_backup_is_passed_over_for_an_older_one(closed: Path) -> None:
    registry = Registry.open(closed)
    registry.set_priority("n1", 9).result()
    registry.close()
    before = _seen(closed)[1]
    newest = sorted((closed / "backups").glob("*.db"), reverse=True)
    assert len(newest) >= 2
    newest[0].write_bytes(b"noise")
    (closed / "registry.db").unlink()
    report, after = _seen(closed)
    assert report.restored_from == newest[1] and after == before


def test_backups_are_whole_databases_and_only_five_are_kept(closed: Path) -> None:
    for number in range(8):
        registry = Registry.open(closed)
        registry.set_priority("n1", number).result()
        registry.close()
    _seen(closed)
    backups = sorted((closed / "backups").iterdir())
    assert len(backups) == 5
    for backup in backups:
        connection = sqlite3.connect(f"file:{backup}?mode=ro", uri=True)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM adapters").fetchone() == (6,)
        connection.close()

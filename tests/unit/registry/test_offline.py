"""Restore, rebuild, export and import of a registry that no daemon has open."""

import shutil
import sqlite3

import pytest

from engine.adapters.states import State
from lorad.errors import LockHeld, RegistryUnusable
from lorad.registry import checking, offline
from lorad.registry.lock import state_lock
from lorad.registry.records import TenantRecord
from lorad.registry.registry import Registry
from lorad.registry.store import Store
from lorad.wire_registry import RegistryEntry


@pytest.fixture
def place(tmp_path):
    return offline.Place(tmp_path, tmp_path / "store")


@pytest.fixture
def filled(registry, add, place):
    """Two names, one of them pinned, in a registry that is closed."""
    add("acme/a", b"one", pin=True, priority=70, labels={"team": "x"})
    add("b", b"two")
    registry.close()
    return place


def names(place):
    return [item.name for item in offline.export(place)]


def reopened(place):
    registry = Registry.open(place.state)
    registry.close()
    return registry


def test_export_says_what_an_import_needs(filled):
    first, second = offline.export(filled)
    assert (first.name, first.pinned, first.priority) == ("acme/a", True, 70)
    assert first.labels == {"team": "x"} and len(first.rev or "") == 64
    assert (second.name, second.pinned, second.priority) == ("b", False, 50)


def test_a_restore_brings_back_what_the_copy_had_and_keeps_what_was_there(filled, add, tmp_path):
    copy = tmp_path / "copy.db"
    offline.write_backup(filled.database, copy)
    registry = Registry.open(filled.state)
    registry.remove("acme/a").result()
    registry.set_priority("b", 9).result()
    registry.close()
    done = offline.restore(filled, copy, actor="uid:7")
    assert done.names == 2 and done.lost == () and done.restored_from == str(copy)
    assert names(filled) == ["acme/a", "b"]
    assert offline.entries(copy)[0].pinned and offline.export(filled)[1].priority == 50
    assert [e.name for e in offline.entries(filled.state / done.kept_aside)] == ["b"]
    again = Registry.open(filled.state)
    [row, *_] = again.audit_log(1)
    assert (row.action, row.actor) == ("registry.restore", "uid:7")
    assert again.report.messages() == (), "the next start has nothing to mend"
    again.close()


def test_names_that_came_after_the_copy_do_not_come_back_over_it(filled, put, revision):
    copy = filled.state / "copy.db"
    offline.write_backup(filled.database, copy)
    registry = Registry.open(filled.state)
    rev = put(registry.store, b"later")
    registry.register("c", model="base", source="x", revision=revision(rev)).result()
    registry.close()
    done = offline.restore(filled, copy, actor="")
    assert names(filled) == ["acme/a", "b"]
    assert done.notes == ("1 revisions in the store belong to no name; a start removes them",)
    filled.database.unlink()  # and then the database is lost, too
    for companion in filled.state.glob("registry.db-*"):
        companion.unlink()
    reopened(filled)
    assert names(filled) == ["acme/a", "b"]


def test_tenants_are_those_of_the_copy_and_whoever_it_does_not_know_is_named(filled):
    bare = filled.state / "bare.db"
    offline.write_backup(filled.database, bare)
    registry = Registry.open(filled.state)
    for name in ("acme", "rival"):
        registry.tenants.add(TenantRecord(name=name, adapters=("*",)), None).result()
    registry.close()
    full = filled.state / "full.db"
    offline.write_backup(filled.database, full)
    registry = Registry.open(filled.state)
    registry.tenants.remove("rival").result()
    registry.close()
    assert offline.restore(filled, full, actor="").lost == ()
    registry = Registry.open(filled.state)
    assert [t.name for t in registry.tenants.all()] == ["acme", "rival"]
    registry.close()

    first, second = offline.restore(filled, bare, actor="").lost
    assert first == "tenants that the backup does not know: acme, rival"
    assert "may use every adapter" in second
    filled.database.unlink()  # nor do they come back from their card
    reopened(filled)
    registry = Registry.open(filled.state)
    assert registry.tenants.all() == ()
    registry.close()


def test_a_restore_says_whose_files_are_not_there(filled):
    copy = filled.state / "copy.db"
    offline.write_backup(filled.database, copy)
    rev = offline.export(filled)[1].rev
    (filled.store / rev).chmod(0o755)
    shutil.rmtree(filled.store / rev)
    [lost] = offline.restore(filled, copy, actor="").lost
    assert lost == f"b: the files of {rev[:12]} are not in the store"


def test_a_copy_is_restored_on_another_host_that_has_the_store(filled, tmp_path):
    copy = tmp_path / "copy.db"
    offline.write_backup(filled.database, copy)
    there = offline.Place(tmp_path / "there", tmp_path / "elsewhere" / "store")
    shutil.copytree(filled.store, there.store, ignore=shutil.ignore_patterns(".cards"))
    assert offline.restore(there, copy, actor="").lost == ()
    registry = Registry.open(there.state, store=Store(there.store))
    assert registry.reconcile().result().missing == ()
    first = registry.get("acme/a")
    assert first.pinned and registry.store.has(first.serving_rev)
    registry.close()


def test_what_is_no_backup_is_refused_and_nothing_is_touched(filled, tmp_path):
    before = filled.database.read_bytes()
    bad = tmp_path / "bad.db"
    for data in (b"no database", before[: len(before) // 2]):
        bad.write_bytes(data)
        with pytest.raises(RegistryUnusable):
            offline.restore(filled, bad, actor="")
    with pytest.raises(RegistryUnusable, match="is not there"):
        offline.restore(filled, tmp_path / "absent.db", actor="")
    assert filled.database.read_bytes() == before


def test_a_state_directory_in_use_is_left_alone(filled):
    copy = filled.state / "copy.db"
    offline.write_backup(filled.database, copy)
    with state_lock(filled.state):
        with pytest.raises(LockHeld):
            offline.restore(filled, copy, actor="")
        with pytest.raises(LockHeld):
            offline.rebuild(filled, cards_only=True, actor="")
        with pytest.raises(LockHeld):
            offline.take_in(filled, (), actor="")


def test_a_rebuild_from_the_store_alone_has_names_and_settings_and_says_what_is_lost(filled):
    filled.database.write_bytes(b"broken")
    done = offline.rebuild(filled, cards_only=True, actor="")
    first, second = offline.export(filled)
    assert (first.name, first.pinned, first.labels) == ("acme/a", True, {"team": "x"})
    assert second.name == "b"
    assert done.lost[0].startswith("history, events, audit") and done.restored_from is None
    assert (filled.state / done.kept_aside).read_bytes() == b"broken"


def test_a_rebuild_takes_the_newest_good_backup_and_newer_cards(filled):
    registry = Registry.open(filled.state)
    registry.set_priority("b", 33).result()
    registry.close()
    done = offline.rebuild(filled, cards_only=False, actor="")
    assert "registry-" in done.restored_from and done.names == 2
    assert offline.export(filled)[1].priority == 33
    assert done.lost[0] == "events and audit since that backup"


def test_with_neither_backup_nor_card_there_is_nothing_to_rebuild_from(place):
    with pytest.raises(RegistryUnusable, match="nothing to rebuild from"):
        offline.rebuild(place, cards_only=False, actor="")


def test_an_import_sets_what_differs_and_makes_names_whose_files_are_here(filled):
    first, second = offline.export(filled)
    registry = Registry.open(filled.state)
    registry.set_pin("acme/a", False).result()
    registry.remove("b").result()
    registry.close()
    odd = RegistryEntry(name="b2", rev="f" * 64)
    told = offline.take_in(filled, (first, second, odd), actor="")
    assert [(i.name, i.action, i.ok) for i in told] == [
        ("acme/a", "changed", True),
        ("b", "created", True),
        ("b2", "lacking", False),
    ]
    assert [(e.name, e.pinned) for e in offline.export(filled)] == [("acme/a", True), ("b", False)]
    told = offline.take_in(filled, (first, second), actor="")
    assert [i.action for i in told] == ["unchanged", "unchanged"]


def test_an_import_leaves_the_content_of_a_name_alone(filled):
    first, second = offline.export(filled)
    swapped = RegistryEntry(name="b", rev=first.rev, priority=5)
    [told] = offline.take_in(filled, (swapped,), actor="")
    assert told.action == "other_rev" and "only settings are taken" in told.message
    after = offline.export(filled)[1]
    assert (after.rev, after.priority) == (second.rev, 5)


def test_a_dry_run_changes_nothing(filled):
    first, _ = offline.export(filled)
    changed = RegistryEntry(name=first.name, rev=first.rev, priority=1)
    [told] = offline.take_in(filled, (changed,), actor="", dry_run=True)
    assert told.action == "changed" and offline.export(filled)[0].priority == 70


def test_a_setting_that_is_refused_is_one_names_failure(filled):
    first, second = offline.export(filled)
    bad = RegistryEntry(name="acme/a", rev=first.rev, priority=999)
    worse, fine = offline.take_in(filled, (bad, second), actor="")
    assert (worse.action, worse.code) == ("failed", "invalid_value") and fine.ok


# ----------------------------------------------------------------- check
def check(place, **options):
    return checking.check(place.database, place.store, follows=False, **options)


def test_a_sound_registry_has_no_problem(filled):
    found = check(filled)
    assert found.ok and found.problems == () and (found.adapters, found.revisions) == (2, 2)
    assert all(b.good for b in found.backups) and found.generation > 0


def test_a_check_changes_no_byte_and_leaves_no_file(filled):
    before = {p.name: p.read_bytes() for p in filled.state.iterdir() if p.is_file()}
    check(filled)
    assert {p.name: p.read_bytes() for p in filled.state.iterdir() if p.is_file()} == before


def test_torn_pages_dangling_rows_lost_files_and_bad_backups_are_named(filled):
    rev = offline.export(filled)[1].rev
    (filled.store / rev).chmod(0o755)
    shutil.rmtree(filled.store / rev)
    assert check(filled).problems == (f"b: the files of {rev[:12]} are not in the store",)

    raw = sqlite3.connect(filled.database)
    raw.execute("PRAGMA foreign_keys = OFF")
    raw.execute("DELETE FROM revisions WHERE rev = ?", (rev,))
    raw.commit()
    raw.close()
    assert any("points to nothing in revisions" in p for p in check(filled).problems)

    backups = filled.state / "backups"
    backups.mkdir(exist_ok=True)
    (backups / "registry-000000000009-20250101T000000Z.db").write_bytes(b"x" * 5000)
    assert any("is damaged" in p for p in check(filled).problems)

    data = bytearray(filled.database.read_bytes())
    data[4096 + 8 : 4096 * 2] = b"\xff" * (4096 - 8)
    filled.database.write_bytes(data)
    found = check(filled)
    assert not found.ok and found.problems


def test_a_database_that_went_back_in_time_is_told(filled):
    old = filled.state / "old.db"
    offline.write_backup(filled.database, old)
    registry = Registry.open(filled.state)
    registry.set_priority("b", 1).result()
    registry.close()
    shutil.copyfile(old, filled.database)
    [problem] = check(filled).problems
    assert problem.startswith("it went back in time") and "the next start mends it" in problem


def test_one_that_is_written_to_meanwhile_is_not_called_damaged(filled, monkeypatch):
    monkeypatch.setattr(checking.sqlite, "BUSY_TIMEOUT_SECONDS", 0.0)
    other = sqlite3.connect(filled.database, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    other.execute("UPDATE facts SET value = value + 1 WHERE key = 'generation'")
    other.execute("COMMIT")
    try:
        with pytest.raises(RegistryUnusable, match="locked"):
            check(filled)
    finally:
        other.close()


def test_no_registry_is_a_problem_too(place):
    place.store.mkdir()
    assert check(place).problems == (f"there is no registry at {place.database}",)


def test_names_that_are_known_to_be_missing_are_no_news(filled):
    registry = Registry.open(filled.state)
    rev = registry.get("b").serving_rev
    (filled.store / rev).chmod(0o755)
    shutil.rmtree(filled.store / rev)
    registry.mark_missing("b").result()
    assert registry.get("b").stored_state is State.MISSING
    registry.close()
    assert check(filled).ok

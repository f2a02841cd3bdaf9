"""A full disk and a foreign lock: told as such, nothing half done, and over when they are over."""

import asyncio
import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lorad.errors import LoradError
from lorad.registry import failpoints
from lorad.registry.cards import Cards
from lorad.registry.registry import Registry

Fill = Callable[..., list[str]]


@pytest.fixture
def registry(tmp_path: Path, fill: Fill) -> Iterator[Registry]:
    registry = Registry.open(tmp_path, busy_timeout=0.2)
    fill(registry, 3)
    yield registry
    failpoints.set_hook(None)
    registry.close()


def _full_at(place: str) -> None:
    def hook(name: str) -> None:
        if name == place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failpoints.set_hook(hook)


def _code(call: Callable[[], Any]) -> str:
    with pytest.raises(LoradError) as raised:
        call()
    return raised.value.code


def _picture(registry: Registry) -> Any:
    return registry.list().items, registry.events(), registry.store.revs()


def _limit_pages(registry: Registry, extra: int | None) -> None:
    """Let the database grow by so many pages at most: SQLite says FULL, as with a full disk."""

    def limit(connection: Any) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        most = 1 << 30 if extra is None else pages + extra
        connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")

    registry.changes.writer.submit(limit).result()


def test_a_full_disk_under_the_database_changes_nothing_and_recovers(registry: Registry) -> None:
    before = _picture(registry)
    _limit_pages(registry, 0)
    labels = {"long": "x" * 50_000}
    assert _code(lambda: registry.set_labels("n1", labels).result()) == "insufficient_storage"
    assert _picture(registry) == before
    assert registry.get("n1") is not None  # reading goes on
    _limit_pages(registry, None)
    assert registry.set_labels("n1", labels).result() is True


def test_a_file_size_limit_reads_as_full_too(tmp_path: Path, forker: Any) -> None:
    """A quota fails the write with another errno than a full disk; the child checks and exits."""
    status = forker.run({"dir": str(tmp_path), "task": "outgrow_a_file_limit"})
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("place", ["store.file_synced", "store.before_rename"])
def test_a_full_disk_under_the_store_shows_nothing_partial_and_the_same_call_works_later(
    registry: Registry, child: ModuleType, place: str
) -> None:
    before = _picture(registry)
    data = child.content(99)
    staging = registry.store.stage()
    (staging.path / "adapter_model.safetensors").write_bytes(data)
    _full_at(place)
    assert (
        _code(lambda: registry.store.commit(staging, child.digest(data))) == "insufficient_storage"
    )
    assert _picture(registry) == before
    failpoints.set_hook(None)
    assert registry.store.commit(staging, child.digest(data)).is_dir()


def test_a_full_disk_under_the_cards_does_not_fail_the_change_and_they_catch_up(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _full_at("cards.written")
    assert registry.set_priority("n1", 91).result() is True
    assert "the write itself stands" in caplog.text
    failpoints.set_hook(None)
    registry.set_priority("n2", 92).result()
    registry.close()
    for lost in (tmp_path / "registry.db", *(tmp_path / "backups").glob("*")):
        lost.unlink()
    rebuilt = Registry.open(tmp_path)
    priorities = {a.name: a.priority for a in rebuilt.list().items}
    rebuilt.close()
    assert priorities == {"n0": 0, "n1": 91, "n2": 92}


def test_files_of_what_was_removed_go_though_its_card_cannot_be_written(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """They are what the disk is full of; and an operator reads a line of it, no traceback."""
    _full_at("cards.written")
    there = registry.get("n0")
    assert there is not None and there.serving_rev is not None
    registry.remove("n0", None).result()
    assert registry.collect(set()).result() == (there.serving_rev,)
    registry.set_priority("n1", 91).result()  # what follows a write is done before the next
    assert not registry.store.has(there.serving_rev)
    assert "No space left" in caplog.text and "Traceback" not in caplog.text


def test_the_card_of_a_revision_that_met_a_full_disk_is_written_later(
    registry: Registry, tmp_path: Path, child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(cards: Any, revision: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    op = {"op": "register", "name": "late", "content": 39, "candidate": False, "pin": None}
    rev = child.digest(child.content(39))
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Cards, "write_revision", full)
        child.submit(registry, op | {"rev": rev, "priority": 1}).result()
    registry.set_priority("n2", 92).result()
    registry.close()
    for lost in (tmp_path / "registry.db", *(tmp_path / "backups").glob("*")):
        lost.unlink()
    rebuilt = Registry.open(tmp_path)
    found = rebuilt.get("late")
    rebuilt.close()
    assert found is not None and found.serving_rev == rev


def test_a_foreign_lock_is_waited_for_and_then_told_as_busy(
    registry: Registry, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert _code(lambda: registry.set_pin("n1", True).result()) == "registry_busy"
        assert registry.get("n1") is not None  # readers never wait
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert registry.set_pin("n1", True).result() is True


def test_a_lock_that_ends_in_time_is_only_a_delay(tmp_path: Path, fill: Fill) -> None:
    registry = Registry.open(tmp_path)
    fill(registry, 1)
    other = sqlite3.connect(tmp_path / "registry.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    future = registry.set_priority("n0", 33)
    release = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    release.start()
    assert future.result(timeout=5) is True
    release.join()
    other.close()
    registry.close()


def test_an_event_loop_is_never_blocked_by_a_locked_registry(
    registry: Registry, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def serve() -> int:
        """Turn the loop over, a read a turn, while changes wait for the lock; how many turns."""
        futures = [asyncio.wrap_future(registry.set_priority("n1", i)) for i in range(4)]
        turns = 0
        while not all(f.done() for f in futures):
            registry.get("n1")
            turns += 1
            await asyncio.sleep(0)
        codes = [getattr(f.exception(), "code", None) for f in futures]
        assert codes == ["registry_busy"] * 4
        return turns

    try:
        # 0.8 s of waiting is hundreds of turns; a loop that waited too would make four
        assert asyncio.run(serve()) > 20
    finally:
        other.execute("ROLLBACK")
        other.close()

"""An inbox that goes, comes back, or is another one: told apart from folders that were deleted."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorad.watch import watcher as watcher_module

Fill = Callable[..., Path]


def told(rig: Any) -> list[tuple[str, bool]]:
    return [(gone.name, gone.with_inbox) for gone in rig.gone]


def test_folders_that_went_with_their_inbox_are_told_as_such_and_come_back(
    rig: Any, tmp_path: Path, fill_folder: Fill
) -> None:
    fill_folder(rig.inbox / "a")
    fill_folder(rig.inbox / "acme" / "b")
    rig.run(10)
    rig.inbox.rename(tmp_path / "unmounted")
    rig.run(10)
    assert sorted(told(rig)) == [("a", True), ("acme/b", True)]
    (tmp_path / "unmounted").rename(rig.inbox)
    rig.run(10)
    assert sorted(rig.names) == ["a", "a", "acme/b", "acme/b"]
    shutil.rmtree(rig.inbox / "a")
    rig.run(10)
    assert told(rig)[2:] == [("a", False)]


def test_an_empty_directory_in_the_inboxes_place_is_no_deletion(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill
) -> None:
    """As an unmount leaves it."""
    rig = make_rig("inotify")
    fill_folder(rig.inbox / "a")
    rig.run(10)
    rig.inbox.rename(tmp_path / "unmounted")
    rig.inbox.mkdir()
    rig.run(10)
    assert told(rig) == [("a", True)]


def test_what_is_in_the_new_inbox_too_can_be_deleted_there(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill
) -> None:
    rig = make_rig("inotify")
    fill_folder(rig.inbox / "a")
    fill_folder(rig.inbox / "b")
    rig.run(10)
    shutil.copytree(rig.inbox, tmp_path / "copy")
    rig.inbox.rename(tmp_path / "old")
    shutil.rmtree(tmp_path / "copy" / "b")
    (tmp_path / "copy").rename(rig.inbox)
    rig.run(10)
    assert told(rig) == [("b", True)]
    shutil.rmtree(rig.inbox / "a")
    rig.run(10)
    assert told(rig) == [("b", True), ("a", False)]


@pytest.mark.parametrize(("left", "with_inbox"), [(0, True), (1, False)])
def test_a_start_that_finds_nothing_at_all_takes_the_inbox_for_gone(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill, left: int, with_inbox: bool
) -> None:
    for number in range(left):
        fill_folder(tmp_path / "inbox" / f"left{number}")
    known = {tmp_path / "inbox" / "a": "signature"}
    rig = make_rig("inotify", known=known)
    rig.run(10)
    assert told(rig) == [("a", with_inbox)]


def test_a_folder_that_has_no_room_is_tried_again_once_a_rescan_however_often_it_scans(
    make_rig: Callable[..., Any], fill_folder: Fill
) -> None:
    """Each attempt copies it; polling scans every settle time."""
    rig = make_rig("polling", rescan=30.0)
    folder = fill_folder(rig.inbox / "a")
    rig.run(10)
    for _ in range(6):
        rig.watcher.retry(folder)
        rig.run(10)
    assert 3 <= len(rig.found) <= 4


def test_between_rescans_nothing_is_looked_at(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("inotify", rescan=60.0)
    for number in range(20):
        fill_folder(rig.inbox / f"a{number}")
    rig.run(10)
    looks: list[str] = []
    real_scan, real_look = watcher_module.scan, watcher_module.look

    def scan(*args: Any) -> Any:
        looks.append("scan")
        return real_scan(*args)

    def look(*args: Any) -> Any:
        looks.append("look")
        return real_look(*args)

    monkeypatch.setattr(watcher_module, "scan", scan)
    monkeypatch.setattr(watcher_module, "look", look)
    rig.run(120)
    assert looks == ["scan", "scan"]
    (rig.inbox / "a3" / "adapter_config.json").write_text('{"r": 5}')
    rig.run(5)
    assert looks == ["scan", "scan", "look"]


def test_polling_takes_a_bounded_share_of_the_time(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("polling", rescan=1000.0)
    fill_folder(rig.inbox / "a")
    scans, real_scan = 0, watcher_module.scan

    def slow(*args: Any) -> Any:
        """As if it took two seconds."""
        nonlocal scans
        scans += 1
        rig.slept += 2.0
        return real_scan(*args)

    rig.slept = 0.0
    monkeypatch.setattr(watcher_module, "scan", slow)
    monkeypatch.setattr(watcher_module.time, "perf_counter", lambda: rig.slept)
    rig.run(100)
    assert 2 <= scans <= 100 * (1 / watcher_module._SCAN_SHARE) / 2 + 1

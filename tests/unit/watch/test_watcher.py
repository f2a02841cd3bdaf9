"""The watcher over a real directory: every way in which people put files there, once each."""

import ctypes
import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watchdog.observers import inotify_c
from watchdog.observers.inotify_c import InotifyConstants, InotifyEvent, InotifyFD
from watchdog.utils import BaseThread

from lorad.watch import hints as hints_module
from lorad.watch import watcher as watcher_module
from lorad.watch.inbox import InboxFolder
from lorad.watch.mounts import silent_file_system
from lorad.watch.watcher import InboxWatcher

Fill = Callable[..., Path]


def _mute(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if watchdog told nothing."""
    monkeypatch.setattr(hints_module._Marker, "on_any_event", lambda *_: None)


def _until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def _fail_with(number: int) -> int:
    """What a call of the C library does that fails."""
    ctypes.set_errno(number)
    return -1


# ----------------------------------------------------------------- ways to put a folder there
def _cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def _tar(source: Path, target: Path) -> None:
    archive = source.parent / "a.tar"
    subprocess.run(["tar", "cf", archive, "-C", source.parent, source.name], check=True)
    subprocess.run(["tar", "xf", archive, "-C", target.parent], check=True)
    (target.parent / source.name).rename(target)


def _mv(source: Path, target: Path) -> None:
    source.rename(target)


def _rsync(source: Path, target: Path) -> None:
    """As rsync does: a hidden file beside its place, then a rename."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        hidden = target / f".{file.name}.Ab12Cd"
        hidden.write_bytes(file.read_bytes())
        hidden.rename(target / file.name)


WAYS = {"cp": _cp, "tar": _tar, "mv": _mv, "rsync": _rsync}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_folder_is_reported_once_however_it_came(
    rig: Any, tmp_path: Path, fill_folder: Fill, way: Callable[[Path, Path], None]
) -> None:
    way(fill_folder(tmp_path / "made"), rig.inbox / "bible")
    rig.run(0.5)
    assert rig.names == []
    rig.run(10)
    assert rig.names == ["bible"]
    assert rig.found[0].path == rig.inbox / "bible"


def test_a_tenant_that_is_moved_in_brings_all_its_adapters(
    rig: Any, tmp_path: Path, fill_folder: Fill
) -> None:
    for name in ("one", "two"):
        fill_folder(tmp_path / "made" / name)
    (tmp_path / "made").rename(rig.inbox / "acme")
    rig.run(10)
    assert sorted(rig.names) == ["acme/one", "acme/two"]
    (rig.inbox / "acme").rename(tmp_path / "made")
    rig.run(10)
    assert sorted(folder.name for folder in rig.gone) == ["acme/one", "acme/two"]


def test_a_slow_write_is_reported_when_it_is_whole(
    rig: Any, weight_bytes: Callable[..., bytes]
) -> None:
    folder = rig.inbox / "slow"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    data = weight_bytes(4096)
    with (folder / "adapter_model.safetensors").open("wb", buffering=0) as file:
        for at in range(0, len(data), 1024):
            file.write(data[at : at + 1024])
            rig.run(0.8)
            assert rig.names == []
    rig.run(10)
    assert rig.names == ["slow"]


def test_a_writer_that_stalls_is_given_some_patience(
    rig: Any, weight_bytes: Callable[..., bytes]
) -> None:
    folder = rig.inbox / "stalls"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    data = weight_bytes()
    with (folder / "adapter_model.safetensors").open("wb", buffering=0) as file:
        for part in (data[:100], data[100:200], data[200:]):
            file.write(part)
            rig.run(1.9)
    rig.run(10)
    assert rig.names == ["stalls"]
    assert [len(file.read_bytes()) for file in folder.glob("*.safetensors")] == [len(data)]


def test_a_truncated_file_that_stays_so_is_reported_once(
    rig: Any, fill_folder: Fill, weight_bytes: Callable[..., bytes]
) -> None:
    folder = fill_folder(rig.inbox / "cut")
    (folder / "adapter_model.safetensors").write_bytes(weight_bytes()[:-1])
    rig.run(1.5)
    assert rig.names == []
    rig.run(20)
    assert rig.names == ["cut"]
    (folder / "adapter_model.safetensors").write_bytes(weight_bytes())
    rig.run(10)
    assert rig.names == ["cut", "cut"]


def test_vims_way_of_saving_is_one_change(rig: Any, fill_folder: Fill) -> None:
    folder = fill_folder(rig.inbox / "edited")
    rig.run(10)
    config = folder / "adapter_config.json"
    (folder / "4913").touch()
    (folder / "4913").unlink()
    (folder / ".adapter_config.json.swp").write_text("swap")
    config.rename(folder / "adapter_config.json~")
    config.write_text('{"r": 4}')
    (folder / "adapter_config.json~").unlink()
    (folder / ".adapter_config.json.swp").unlink()
    rig.run(10)
    assert rig.names == ["edited", "edited"]
    assert rig.gone == []


def test_changed_content_is_reported_again_and_unchanged_content_is_not(
    make_rig: Callable[..., Any], fill_folder: Fill, weight_bytes: Callable[..., bytes]
) -> None:
    rig = make_rig("inotify", rescan=3.0)
    folder = fill_folder(rig.inbox / "a")
    rig.run(10)
    (folder / "README.md").write_text("notes")
    (folder / "copy.tmp").write_text("x")
    os.utime(folder)
    with (folder / "adapter_config.json").open("r+"):
        pass  # opened for writing, and closed without
    rig.run(10)
    assert rig.names == ["a"]
    (folder / "adapter_model.safetensors").write_bytes(weight_bytes(8))
    rig.run(10)
    assert rig.names == ["a", "a"]
    assert rig.found[0].signature != rig.found[1].signature


def test_swapping_two_folders_by_rename_is_a_change_and_no_loss(
    rig: Any, tmp_path: Path, fill_folder: Fill
) -> None:
    folder = fill_folder(rig.inbox / "a")
    rig.run(10)
    folder.rename(tmp_path / "old")
    rig.run(0.3)
    fill_folder(tmp_path / "new", 8).rename(folder)
    rig.run(10)
    assert rig.names == ["a", "a"]
    assert rig.gone == []


def test_a_deleted_folder_is_gone_and_back_when_it_is_put_back(rig: Any, fill_folder: Fill) -> None:
    folder = fill_folder(rig.inbox / "acme" / "a")
    rig.run(10)
    shutil.rmtree(folder)
    rig.run(10)
    assert [gone.name for gone in rig.gone] == ["acme/a"]
    fill_folder(folder)
    rig.run(10)
    assert rig.names == ["acme/a", "acme/a"]
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_model.safetensors").unlink()
    rig.run(10)
    assert [gone.name for gone in rig.gone] == ["acme/a", "acme/a"]


def test_a_renamed_folder_is_gone_under_the_old_name_and_found_under_the_new(
    rig: Any, fill_folder: Fill, weight_bytes: Callable[..., bytes]
) -> None:
    fill_folder(rig.inbox / "a").rename(rig.inbox / "b")
    rig.run(10)
    assert rig.names == ["b"]
    (rig.inbox / "b").rename(rig.inbox / "c")
    rig.run(10)
    assert (rig.names, [gone.name for gone in rig.gone]) == (["b", "c"], ["b"])
    (rig.inbox / "c" / "adapter_model.safetensors").write_bytes(weight_bytes(8))
    rig.run(10)
    assert rig.names == ["b", "c", "c"]


def test_a_change_of_lorad_toml_is_a_change(rig: Any, fill_folder: Fill) -> None:
    folder = fill_folder(rig.inbox / "a")
    rig.run(10)
    (folder / "lorad.toml").write_text("pin = true\npriority = 7")
    rig.run(10)
    (folder / "lorad.toml").write_text("pinn = true")
    rig.run(10)
    assert [(f.options.pin, f.options.priority) for f in rig.found] == [
        (None, None),
        (True, 7),
        (None, None),
    ]
    assert "unknown key 'pinn'" in rig.found[-1].problem


def test_a_file_that_becomes_readable_is_a_change(rig: Any, fill_folder: Fill) -> None:
    folder = fill_folder(rig.inbox / "a")
    (folder / "adapter_config.json").chmod(0o000)
    rig.run(10)
    (folder / "adapter_config.json").chmod(0o644)
    rig.run(10)
    assert rig.names == ["a", "a"]


def test_reading_is_no_hint(make_rig: Callable[..., Any], fill_folder: Fill) -> None:
    """Or each look at a folder would lead to the next."""
    rig = make_rig("inotify")
    folder = fill_folder(rig.inbox / "a")
    rig.run(4)
    (folder / "adapter_config.json").read_text()
    assert list(folder.iterdir())
    rig.wait_for_hints()
    hints = rig.watcher._observation.take()
    assert not hints.moved
    assert hints.touched <= {rig.inbox}  # where the awaited file is


def test_hostile_names_arrive_inert(rig: Any, tmp_path: Path, fill_folder: Fill) -> None:
    for name in (b"\x1b]0;title\x07", b"[/bold]", b"\xff\xfe", b"x" * 255, b"UPPER", b"..x"):
        fill_folder(rig.inbox / os.fsdecode(name))
    rig.run(10)
    assert len(rig.found) == 5  # "..x" is hidden
    assert all(f.name.startswith("inbox:") and not f.legal for f in rig.found)
    assert all(f.display_name.isascii() and f.display_name.isprintable() for f in rig.found)


def test_a_link_is_told_once_and_not_followed(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill
) -> None:
    rig = make_rig("inotify", rescan=2.0)
    (rig.inbox / "link").symlink_to(fill_folder(tmp_path / "outside"))
    rig.run(20)
    assert rig.names == []
    assert rig.warnings == ["link is a symlink: copy the folder instead"]


# ----------------------------------------------------------------- the inbox itself
def test_an_inbox_that_is_deleted_and_made_again_is_followed(rig: Any, fill_folder: Fill) -> None:
    fill_folder(rig.inbox / "a")
    rig.run(10)
    shutil.rmtree(rig.inbox)
    rig.run(10)
    assert [gone.name for gone in rig.gone] == ["a"]
    assert len(rig.warnings) == 1 and "cannot be read" in rig.warnings[0]
    fill_folder(rig.inbox / "b")
    rig.run(10)
    assert rig.names == ["a", "b"]
    fill_folder(rig.inbox / "c")
    rig.run(10)
    assert rig.names == ["a", "b", "c"]


def test_an_inbox_that_is_replaced_is_noticed_without_a_hint(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill
) -> None:
    rig = make_rig("inotify")
    fill_folder(rig.inbox / "a")
    rig.run(10)
    rig.inbox.rename(tmp_path / "old")
    fill_folder(rig.inbox / "b")
    rig.run(10)
    assert (rig.names, [gone.name for gone in rig.gone]) == (["a", "b"], ["a"])
    fill_folder(rig.inbox / "c")
    rig.run(10)
    assert rig.names == ["a", "b", "c"]


def test_an_inbox_without_permission_loses_nothing_and_resumes(
    rig: Any, fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_folder(rig.inbox / "a")
    rig.run(10)
    real_open = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if path == rig.inbox:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        fill_folder(rig.inbox / "b")
        rig.run(20)
        assert (rig.names, rig.gone, len(rig.warnings)) == (["a"], [], 1)
    rig.run(10)
    assert (rig.names, rig.gone) == (["a", "b"], [])


def test_a_folder_without_permission_keeps_its_adapter_and_is_told_once(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("inotify", rescan=2.0)
    folder = fill_folder(rig.inbox / "acme" / "a")
    rig.run(10)
    real_open = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if path == "acme":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        (folder / "adapter_config.json").write_text('{"r": 1}')
        rig.run(20)
        assert (rig.names, rig.gone) == (["acme/a"], [])
        assert len(rig.warnings) == len(set(rig.warnings)) <= 2
    rig.run(10)
    assert (rig.names, rig.gone) == (["acme/a", "acme/a"], [])


# ----------------------------------------------------------------- when hints fail
def test_without_inotify_the_inbox_is_polled_and_it_is_said_once(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify_c, "inotify_init", lambda: _fail_with(errno.EMFILE))
    rig = make_rig("auto")
    assert rig.watcher.mode == "polling"
    fill_folder(rig.inbox / "a")
    rig.run(10)
    assert rig.names == ["a"]
    assert len(rig.warnings) == 1 and "fs.inotify.max_user_instances" in rig.warnings[0]


def test_out_of_watches_half_way_the_inbox_is_polled_and_it_is_said_once(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_watch, left = inotify_c.inotify_add_watch, iter(range(64))

    def limited(*arguments: Any) -> Any:
        return _fail_with(errno.ENOSPC) if next(left, None) is None else add_watch(*arguments)

    monkeypatch.setattr(inotify_c, "inotify_add_watch", limited)
    rig = make_rig("auto")
    for n in range(100):
        fill_folder(rig.inbox / "acme" / f"a{n}")
    rig.run(10)
    assert rig.watcher.mode == "polling"
    assert len(rig.names) == len(set(rig.names)) == 100
    assert len(rig.warnings) == 1 and "fs.inotify.max_user_watches" in rig.warnings[0]
    fill_folder(rig.inbox / "late")
    rig.run(10)
    assert rig.names[-1] == "late"


def test_on_a_network_file_system_the_inbox_is_polled(
    make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "silent_file_system", lambda folder: "nfs4")
    rig = make_rig("auto")
    assert rig.watcher.mode == "polling"
    assert rig.warnings == ["the inbox is on nfs4, where inotify misses changes: polling it"]
    assert make_rig("inotify").watcher.mode == "inotify"  # asked for by name


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = "\n".join(
        [
            "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
            f"23 22 0:5 / {tmp_path} rw - nfs4 server:/x rw",
            f"24 23 0:6 / {tmp_path}/local rw - tmpfs tmpfs rw",
            f"25 23 0:7 / {tmp_path}/with\\040space rw - fuse.sshfs x rw",
        ]
    )
    assert silent_file_system(tmp_path / "inbox", mounts) == "nfs4"
    assert silent_file_system(tmp_path / "local" / "inbox", mounts) == ""
    assert silent_file_system(tmp_path / "with space", mounts) == "fuse.sshfs"
    assert silent_file_system(Path("/srv"), mounts) == ""


def test_what_no_hint_told_is_found_by_the_rescan(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("inotify", rescan=5.0)
    _mute(monkeypatch)
    fill_folder(rig.inbox / "a")
    rig.run(4)
    assert rig.names == []
    rig.run(4)
    assert rig.names == ["a"]
    shutil.rmtree(rig.inbox / "a")
    rig.run(8)
    assert [gone.name for gone in rig.gone] == ["a"]


def test_what_arrives_before_its_directory_is_watched_is_found_without_a_rescan(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("inotify")
    add_watch = inotify_c.inotify_add_watch

    def late(fd: int, path: bytes, mask: Any) -> Any:
        if path.endswith(b"/acme") and not os.path.exists(path + b"/one"):
            fill_folder(Path(os.fsdecode(path)) / "one")
        return add_watch(fd, path, mask)

    monkeypatch.setattr(inotify_c, "inotify_add_watch", late)
    (rig.inbox / "acme").mkdir()
    rig.run(5)
    assert rig.names == ["acme/one"]


def test_lost_hints_are_made_good_by_a_scan_at_once(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("inotify")
    _mute(monkeypatch)
    fill_folder(rig.inbox / "a")
    rig.run(2)
    assert rig.names == []
    (reader,) = (thread for thread in threading.enumerate() if isinstance(thread, InotifyFD))
    reader.handle_event(InotifyEvent(-1, InotifyConstants.IN_Q_OVERFLOW, 0, b""))
    rig.run(2)
    assert rig.names == ["a"]
    assert rig.watcher.num_overflows == 1


def test_a_flood_of_hints_is_bounded_and_ends_in_a_scan(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "MAX_MARKS", 20)
    rig = make_rig("inotify")
    for n in range(50):
        fill_folder(rig.inbox / f"a{n}")
    rig.run(4)
    assert len(rig.names) == len(set(rig.names)) == 50
    assert rig.watcher.num_overflows >= 1


def test_a_hint_wakes_whoever_waits_for_it_and_overflow_too(tmp_path: Path) -> None:
    woken = threading.Event()
    observation = hints_module.Observation(tmp_path, woken.set)
    try:
        (tmp_path / "a").mkdir()
        assert woken.wait(20)
        _until(lambda: tmp_path / "a" in observation.take().moved)
        woken.clear()
        logging.getLogger("watchdog.observers.inotify_c").warning("events were lost")
        assert woken.is_set()
        assert observation.take().overflow
        assert not observation.take().overflow
    finally:
        observation.close()


def test_what_happens_in_a_folder_that_moved_away_is_no_news(
    make_rig: Callable[..., Any],
    tmp_path: Path,
    fill_folder: Fill,
    recwarn: pytest.WarningsRecorder,
) -> None:
    rig = make_rig("inotify", rescan=2.0)
    fill_folder(rig.inbox / "acme" / "a")
    rig.run(4)
    (rig.inbox / "acme").rename(tmp_path / "away")
    rig.run(4)
    fill_folder(tmp_path / "away" / "a", 8)
    fill_folder(tmp_path / "away" / "b")
    rig.run(10)
    assert (rig.names, [gone.name for gone in rig.gone]) == (["acme/a"], ["acme/a"])
    (tmp_path / "away").rename(rig.inbox / "acme")
    rig.run(4)
    assert sorted(rig.names) == ["acme/a", "acme/a", "acme/b"]
    fill_folder(rig.inbox / "acme" / "b", 8)
    rig.run(4)
    assert sorted(rig.names) == ["acme/a", "acme/a", "acme/b", "acme/b"]
    assert not recwarn.list  # watchdog's, one for each folder that came back


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_watching_goes_on_where_watchdogs_reader_is_known_to_fail(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill
) -> None:
    """watchdog 7.1.0: two folders that had one path in turn, the later one removed first."""
    rig = make_rig("inotify")
    fill_folder(rig.inbox / "a").rename(tmp_path / "old")
    fill_folder(tmp_path / "new", 8).rename(rig.inbox / "a")
    rig.run(4)
    shutil.rmtree(rig.inbox / "a")
    rig.run(4)
    shutil.rmtree(tmp_path / "old")
    rig.run(4)
    fill_folder(rig.inbox / "b")
    rig.run(4)
    assert (rig.names, [gone.name for gone in rig.gone]) == (["a", "b"], ["a"])
    assert rig.watcher.mode == "inotify"


def test_an_observation_that_has_ended_is_begun_anew(
    make_rig: Callable[..., Any], fill_folder: Fill
) -> None:
    rig = make_rig("inotify")
    for thread in threading.enumerate():
        if isinstance(thread, InotifyFD):
            thread.stop()
            thread.join()
    fill_folder(rig.inbox / "a")
    rig.run(4)
    fill_folder(rig.inbox / "b")
    rig.run(4)
    assert rig.names == ["a", "b"]


def test_without_a_thread_for_watchdog_the_inbox_is_polled(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: BaseThread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(BaseThread, "start", start)
    rig = make_rig("auto")
    assert rig.watcher.mode == "polling"
    assert rig.warnings == ["inotify failed: can't start new thread; the inbox is polled instead"]
    fill_folder(rig.inbox / "a")
    rig.run(4)
    assert rig.names == ["a"]


def test_an_inbox_that_is_a_link_is_observed_where_it_leads(
    tmp_path: Path, make_rig: Callable[..., Any], fill_folder: Fill
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "inbox").symlink_to(tmp_path / "real")
    rig = make_rig("inotify")
    folder = fill_folder(rig.inbox / "a")
    rig.run(4)
    fill_folder(tmp_path / "real" / "a", 8)
    rig.run(4)
    assert [found.path for found in rig.found] == [folder, folder]


# ----------------------------------------------------------------- what the daemon asks
def test_a_report_that_failed_is_repeated_at_the_next_rescan(
    make_rig: Callable[..., Any], fill_folder: Fill
) -> None:
    rig = make_rig("inotify", rescan=5.0)
    folder = fill_folder(rig.inbox / "a")
    fill_folder(rig.inbox / "b")
    rig.run(4)
    assert sorted(rig.names) == ["a", "b"]
    rig.watcher.retry(folder)
    rig.run(10)
    assert sorted(rig.names) == ["a", "a", "b"]


def test_a_callback_that_raises_costs_nobody_else_and_is_tried_again(
    make_rig: Callable[..., Any], fill_folder: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig("inotify", rescan=5.0)
    failures = iter([True])

    def on_folder(folder: InboxFolder) -> None:
        if folder.name == "a" and next(failures, False):
            raise RuntimeError("full")
        rig.found.append(folder)

    rig.watcher._on_folder = on_folder
    fill_folder(rig.inbox / "a")
    fill_folder(rig.inbox / "b")
    rig.run(4)
    assert rig.names == ["b"]
    rig.run(10)
    assert rig.names == ["b", "a"]
    assert "the report of a failed" in caplog.text


def test_what_an_earlier_run_reported_is_reported_only_if_it_differs(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill
) -> None:
    first = make_rig("inotify")
    for name in ("same", "changed", "deleted", "unknown"):
        fill_folder(first.inbox / name)
    first.run(10)
    first.watcher.stop()
    known = {folder.path: folder.signature for folder in first.found}
    known[first.inbox / "unknown"] = ""
    (first.inbox / "changed" / "adapter_config.json").write_text('{"r": 1}')
    shutil.rmtree(first.inbox / "deleted")
    second = make_rig("inotify", known=known)
    second.run(10)
    assert sorted(second.names) == ["changed", "unknown"]
    assert [gone.name for gone in second.gone] == ["deleted"]


def test_what_an_earlier_run_reported_of_another_inbox_hinders_nobody(
    make_rig: Callable[..., Any], tmp_path: Path, fill_folder: Fill
) -> None:
    """`watch.dir` was changed between two starts; what is there no more comes up first."""
    elsewhere = tmp_path / "former"
    rig = make_rig("inotify", known={elsewhere / "gone": "", elsewhere / "bible": "0" * 32})
    fill_folder(rig.inbox / "bible")
    rig.run(10)
    assert rig.names == ["bible"]
    assert not rig.gone


def test_a_wished_rescan_happens_at_once(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("inotify")
    _mute(monkeypatch)
    fill_folder(rig.inbox / "a")
    rig.watcher.rescan_now()
    rig.run(2)
    assert rig.names == ["a"]


# ----------------------------------------------------------------- with its thread
@pytest.mark.parametrize("mode", ["auto", "polling"])
def test_the_thread_reports_and_ends(tmp_path: Path, fill_folder: Fill, mode: Any) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    fill_folder(inbox / "first")
    found: list[InboxFolder] = []
    gone: list[InboxFolder] = []
    threads: set[str] = set()

    def on_folder(folder: InboxFolder) -> None:
        threads.add(threading.current_thread().name)
        found.append(folder)

    watcher = InboxWatcher(
        inbox, settle=0.05, rescan=60, mode=mode, on_folder=on_folder, on_gone=gone.append
    )
    watcher.start()
    try:
        assert watcher.scanned.wait(20)
        _until(lambda: [f.name for f in found] == ["first"])
        fill_folder(inbox / "acme" / "second")
        _until(lambda: [f.name for f in found] == ["first", "acme/second"])
        shutil.rmtree(inbox / "first")
        _until(lambda: [f.name for f in gone] == ["first"])
    finally:
        watcher.stop()
    assert threads == {"lorad-watch"}
    watcher.stop()
    watcher.rescan_now()  # too late, and harmless
    fill_folder(inbox / "after")
    assert [f.name for f in found] == ["first", "acme/second"]
    assert not any(
        thread.name == "lorad-watch" or isinstance(thread, BaseThread)
        for thread in threading.enumerate()
    )


def test_the_thread_survives_its_own_failure(
    tmp_path: Path,
    fill_folder: Fill,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = iter([True])
    scan = watcher_module.scan

    def fail_once(*args: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("unforeseen")
        return scan(*args)

    monkeypatch.setattr(watcher_module, "scan", fail_once)
    fill_folder(tmp_path / "inbox" / "a")
    found: list[InboxFolder] = []
    watcher = InboxWatcher(
        tmp_path / "inbox", settle=0.05, rescan=60, on_folder=found.append, on_gone=found.append
    )
    watcher.start()
    try:
        _until(lambda: [f.name for f in found] == ["a"])
    finally:
        watcher.stop()
    assert "the inbox watcher failed and goes on" in caplog.text


def test_hundreds_of_folders_are_scanned_in_little_time(tmp_path: Path, fill_folder: Fill) -> None:
    """400 take about 70 ms; the bound is for a loaded machine, and far below a quadratic walk."""
    one = fill_folder(tmp_path / "one")
    inbox = tmp_path / "inbox"
    for n in range(400):
        folder = inbox / f"t{n % 4}" / f"a{n}"
        folder.mkdir(parents=True)
        for file in one.iterdir():
            (folder / file.name).hardlink_to(file)
    found: list[InboxFolder] = []
    now = [0.0]
    watcher = InboxWatcher(
        inbox,
        settle=1.0,
        rescan=60,
        on_folder=found.append,
        on_gone=found.append,
        clock=lambda: now[0],
    )
    began = time.process_time()
    for now[0] in (0.0, 1.0, 2.0):
        watcher.tick()
    watcher.stop()
    assert len({folder.name for folder in found}) == len(found) == 400
    assert time.process_time() - began < 1


@pytest.mark.late
@pytest.mark.parametrize("watches", [None, 64])
def test_ten_thousand_folders_are_told_once_each_and_a_change_of_one_alone(
    make_rig: Callable[..., Any], fill_folder: Fill, monkeypatch: pytest.MonkeyPatch, watches: Any
) -> None:
    """With as many watches as it takes, and on a system that grants 64 of them."""
    add_watch, left = inotify_c.inotify_add_watch, iter(range(watches or 0))

    def limited(*arguments: Any) -> Any:
        return _fail_with(errno.ENOSPC) if next(left, None) is None else add_watch(*arguments)

    if watches is not None:
        monkeypatch.setattr(inotify_c, "inotify_add_watch", limited)
    rig = make_rig("auto", rescan=60.0)
    one = fill_folder(rig.inbox.parent / "one")
    for n in range(10_000):
        folder = rig.inbox / f"t{n % 40}" / f"a{n}"
        folder.mkdir(parents=True)
        for file in one.iterdir():
            (folder / file.name).hardlink_to(file)

    def until(count: int) -> None:
        """Some looks more than it takes, to see that nothing comes twice."""
        rig.wait_for_hints()
        last = rig.now + 300.0
        while len(rig.found) < count and rig.now < last:
            rig.now += 0.5
            rig.watcher.tick()
        for _ in range(4):
            rig.now += 1.0
            rig.watcher.tick()

    until(10_000)
    assert len(rig.names) == len(set(rig.names)) == 10_000
    assert len(rig.warnings) == (watches is not None)
    changed = rig.inbox / "t7" / "a4007"
    shutil.rmtree(changed)  # its files are those of all the others
    fill_folder(changed, num_values=65)
    until(10_001)
    assert rig.names[10_000:] == ["t7/a4007"] and rig.gone == []
    assert rig.watcher.mode == ("inotify" if watches is None else "polling")


def test_what_is_seen_and_reported_is_counted(rig: Any, tmp_path: Path, fill_folder: Fill) -> None:
    fill_folder(rig.inbox / "bible")
    rig.run(10)
    counts = rig.watcher.num_events
    assert counts["whole"] == 1 and counts["gone"] == 0
    assert rig.watcher.mode == "polling" or counts["touched"] + counts["moved"] >= 1
    (rig.inbox / "bible").rename(tmp_path / "away")
    rig.run(10)
    assert counts["gone"] == 1
    assert sum(rig.watcher.scans.counts) >= 1


# ----------------------------------------------------------------- one adapter in another's folder
def test_a_folder_that_mv_put_into_an_adapters_is_told_of_and_no_adapter(
    rig: Any, tmp_path: Path, fill_folder: Fill
) -> None:
    rig.watcher._rescan = 30.0
    served = fill_folder(rig.inbox / "acme" / "sql")
    rig.run(10)
    assert rig.names == ["acme/sql"] and not rig.found[0].nested
    subprocess.run(["mv", fill_folder(tmp_path / "sql.new"), served], check=True)
    rig.run(10)
    assert rig.names == ["acme/sql", "acme/sql"] and rig.found[1].nested == ("sql.new",)
    rig.run(100)
    assert len(rig.found) == 2, "once"
    shutil.rmtree(served / "sql.new")
    rig.run(50)
    assert [folder.nested for folder in rig.found] == [(), ("sql.new",), ()]


def test_the_commands_of_the_howto_replace_a_folder_and_lose_no_name(
    rig: Any, tmp_path: Path, fill_folder: Fill
) -> None:
    served = fill_folder(rig.inbox / "sql")
    rig.run(10)
    fill_folder(served / "sql.new", 128)
    words = "mv -T sql/sql.new .new && mv -T sql .old && mv -T .new sql"
    subprocess.run(words, shell=True, cwd=rig.inbox, check=True)
    rig.run(10)
    assert rig.names == ["sql", "sql"] and not rig.found[1].nested and not rig.gone
    again = fill_folder(tmp_path / "again")
    refused = subprocess.run(["mv", "-T", again, served], capture_output=True)
    assert refused.returncode and again.is_dir(), "-T puts no folder into another"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_two_folders_that_change_places_are_a_replacement(rig: Any, fill_folder: Fill) -> None:
    rig.watcher._rescan = 30.0
    served, new = fill_folder(rig.inbox / "sql"), fill_folder(rig.inbox / ".new", 128)
    rig.run(40)
    libc = ctypes.CDLL(None, use_errno=True)  # as mv --exchange, of coreutils 9.5, does it
    here, exchange = -100, 2
    assert libc.renameat2(here, bytes(new), here, bytes(served), exchange) == 0
    rig.run(10)
    assert rig.names == ["sql", "sql"] and not rig.gone
    shutil.rmtree(new)
    rig.run(5)
    fill_folder(rig.inbox / "other")
    rig.run(10)
    assert rig.names[2:] == ["other"] and not rig.gone

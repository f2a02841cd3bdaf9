"""The demo's folder: it stays while anybody lives in it, and goes when its owner was killed."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.demo_folder import LOCK, PREFIX, Folder, clear

#: Moves in; with a word, has a child live there too, whose pid it prints.
OWNER = """
import subprocess, sys, time
from lorad.demo_folder import Folder
folder = Folder(sys.argv[1])
(folder.path / "store").mkdir()
(folder.path / "store" / "weights").write_bytes(b"x" * 100)
if len(sys.argv) > 2:
    child = subprocess.Popen(["cat"], stdin=sys.stdin, stdout=subprocess.DEVNULL,
                             pass_fds=(folder.lock,))
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def move_in(tmp_path):
    started = []

    def start(*words):
        command = [sys.executable, "-c", OWNER, str(tmp_path), *words]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def test_what_a_killed_demo_left_goes_at_the_next_start_and_a_live_one_stays(tmp_path, move_in):
    dead, left = move_in()
    _, live = move_in()
    assert clear(str(tmp_path)) == []
    dead.kill()
    dead.wait(timeout=30)
    assert [str(path) for path in clear(str(tmp_path))] == [left]
    assert [str(path) for path in tmp_path.iterdir()] == [live]
    assert (tmp_path / live / "store" / "weights").read_bytes() == b"x" * 100


def test_a_folder_that_is_kept_while_another_demo_looks_at_it_stays(tmp_path, monkeypatch):
    folder, flock = Folder(str(tmp_path)), fcntl.flock

    def late(lock, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        folder.keep()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert clear(str(tmp_path)) == []
    assert folder.path.is_dir()


def test_a_daemon_that_outlives_its_killed_demo_has_its_folder_until_it_ends(tmp_path, move_in):
    demo, left = move_in("with a daemon")
    demo.kill()
    demo.wait(timeout=30)
    assert clear(str(tmp_path)) == []
    with (Path(left) / LOCK).open("rb") as lock:
        demo.communicate(timeout=30)  # closes what the daemon reads from, which ends it
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits until it has let go
    assert [str(path) for path in clear(str(tmp_path))] == [left]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_kept_stays_whoever_has_ended(tmp_path):
    folder = Folder(str(tmp_path))
    folder.keep()
    assert clear(str(tmp_path)) == []
    assert folder.path.is_dir()


def test_a_folder_is_locked_before_anybody_can_take_it_for_an_abandoned_one(tmp_path, monkeypatch):
    cleared = []
    monkeypatch.setattr(
        "lorad.demo_folder.fcntl.flock", lambda *_: cleared.append(clear(str(tmp_path)))
    )
    monkeypatch.setattr("lorad.demo_folder._abandoned", _opened)
    Folder(str(tmp_path)).remove()
    assert cleared == [[]]


def _opened(path):
    """Whoever finds the lock may have it, as if nobody had locked it yet."""
    return os.open(path / LOCK, os.O_RDWR) if (path / LOCK).exists() else None


def test_what_only_looks_like_a_demos_folder_is_left_alone(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(mine)
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}empty").mkdir()
    aside = tmp_path / f"{PREFIX}aside"
    aside.mkdir()
    (aside / LOCK).symlink_to(mine / LOCK)
    assert clear(str(tmp_path)) == []
    others = tmp_path / f"{PREFIX}others"
    others.mkdir()
    (others / LOCK).touch()
    monkeypatch.setattr("lorad.demo_folder.os.geteuid", lambda: 12345)
    assert clear(str(tmp_path)) == []
    monkeypatch.undo()
    assert clear(str(tmp_path)) == [others]

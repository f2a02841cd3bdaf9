"""How a Unix socket comes to be, and what is never done to somebody else's file."""

import grp
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lorad.api import server
from lorad.api.server import MAX_PATH_BYTES, bind_unix, unlink_unix
from lorad.errors import CannotBind, LockHeld

#: Knocks as nobody until it is told to; then once more, and says what it met.
KNOCK = """
import errno, os, select, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
met = set()
def knock():
    with socket.socket(socket.AF_UNIX) as door:
        met.add(errno.errorcode.get(door.connect_ex(sys.argv[1]), "IN"))
print("knocking", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    knock()
knock()
print(*met)
"""


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_mode_is_right_from_the_first_instant(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "chmod", None)  # nothing may have to be put right afterwards
    path = tmp_path / "a.sock"
    before = os.umask(0)
    try:
        listener = bind_unix(path, 0o660)
        assert mode_of(path) == 0o660
        assert os.umask(0) == 0
    finally:
        os.umask(before)
        listener.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_somebody_outside_the_group_never_gets_in_not_even_while_it_is_made(request):
    """Another user knocks without a pause while the socket is made again and again."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # every user may enter it, unlike tmp_path
    request.addfinalizer(lambda: shutil.rmtree(folder))
    folder.chmod(0o755)
    path = folder / "a.sock"
    stranger = subprocess.Popen(
        [sys.executable, "-c", KNOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    before = os.umask(0)
    try:
        assert stranger.stdout.readline() == b"knocking\n"
        for _ in range(200):
            with bind_unix(path, 0o660):
                pass
            path.unlink()
        with bind_unix(path, 0o660):
            stranger.stdin.write(b"once more\n")
            heard, _ = stranger.communicate(timeout=60)
    finally:
        os.umask(before)
        stranger.kill()
    assert "EACCES" in heard.decode().split()
    assert set(heard.decode().split()) <= {"EACCES", "ENOENT"}


def test_a_group_gets_in_only_once_the_socket_is_its_own(tmp_path, monkeypatch):
    seen = []
    chown = os.chown
    monkeypatch.setattr(os, "chown", lambda p, *a: (seen.append(mode_of(p)), chown(p, *a)))
    path = tmp_path / "a.sock"
    own = grp.getgrgid(os.getgid()).gr_name
    bind_unix(path, 0o660, own).close()
    assert seen == [0o600]
    assert mode_of(path) == 0o660
    assert path.stat().st_gid == os.getgid()


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path):
    path = tmp_path / "a.sock"
    bind_unix(path, 0o600).close()
    with bind_unix(path, 0o600), socket.socket(socket.AF_UNIX) as client:
        assert client.connect_ex(str(path)) == 0


def test_a_socket_that_somebody_answers_on_is_left_alone(tmp_path):
    path = tmp_path / "a.sock"
    with bind_unix(path, 0o600), socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(LockHeld, match="another process answers"):
            bind_unix(path, 0o600)
        unlink_unix(path)
        assert client.connect_ex(str(path)) == 0


def test_a_file_that_is_no_socket_is_kept(tmp_path):
    path = tmp_path / "a.sock"
    path.write_text("precious")
    with pytest.raises(CannotBind, match="is not a socket"):
        bind_unix(path, 0o600)
    unlink_unix(path)
    assert path.read_text() == "precious"


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("precious")
    path = tmp_path / "a.sock"
    path.symlink_to(target)
    with pytest.raises(CannotBind, match="is not a socket"):
        bind_unix(path, 0o600)
    assert target.read_text() == "precious"


def test_the_longest_path_works_and_one_more_is_explained():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        longest = Path(folder, "s" * (MAX_PATH_BYTES - len(folder) - 1))
        bind_unix(longest, 0o600).close()
        with pytest.raises(CannotBind, match="108 bytes, 107 are possible"):
            bind_unix(Path(f"{longest}s"), 0o600)


def test_a_directory_that_is_missing_and_a_group_that_is_not_are_explained(tmp_path):
    with pytest.raises(CannotBind, match="No such file or directory"):
        bind_unix(tmp_path / "missing" / "a.sock", 0o600)
    with pytest.raises(CannotBind, match="no group no-such-group") as caught:
        bind_unix(tmp_path / "a.sock", 0o660, "no-such-group")
    assert "groupadd" in caught.value.hint


def test_a_group_that_cannot_be_given_leaves_no_socket_behind(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(server.os, "chown", refuse)
    path = tmp_path / "a.sock"
    with pytest.raises(CannotBind, match="cannot give"):
        bind_unix(path, 0o660, grp.getgrgid(os.getgid()).gr_name)
    assert not path.exists()


def test_a_stopped_server_takes_its_file_with_it(tmp_path):
    path = tmp_path / "a.sock"
    bind_unix(path, 0o600).close()
    unlink_unix(path)
    assert not path.exists()

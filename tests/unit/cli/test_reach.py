"""Where the daemon is, and why it cannot be reached."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from lorad import wire
from lorad.caller import ApiError, Caller, Unreachable
from lorad.cli import reach
from lorad.cli.options import Options
from lorad.cli.reach import advise, checked_host, default_host
from lorad.cli.session import Session
from lorad.cli.unanswered import unanswered


def test_the_users_own_daemon_comes_before_the_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(reach.paths.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(reach, "SYSTEM_SOCKET", tmp_path / "system.sock")
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/home/u"}
    own, system = tmp_path / "lorad" / "admin.sock", tmp_path / "system.sock"
    assert default_host(env) == f"unix://{own}"
    system.touch()
    assert default_host(env) == f"unix://{system}"
    own.parent.mkdir()
    own.touch()
    assert default_host(env) == f"unix://{own}"
    assert default_host({"HOME": "/home/u"}) == f"unix://{system}"


def test_a_uid_without_a_home_asks_the_machines_daemon(monkeypatch):
    monkeypatch.setattr(reach.paths.os, "geteuid", lambda: 54321)

    def nobody(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(reach.paths.Path, "expanduser", nobody)
    assert default_host({}) == "unix:///run/lorad/admin.sock"


@pytest.mark.parametrize(
    "host", ["unix:///run/x.sock", "/run/x.sock", "x.sock", "http://localhost:8411", "https://h"]
)
def test_hosts(host):
    assert checked_host(host) == host


@pytest.mark.parametrize(
    "host",
    ["unix://", "tcp://h:1", "http://", "http://h:port", "http://[h", "http://h:99999", "a\0b"],
)
def test_what_is_no_host_says_what_to_write(host):
    with pytest.raises(ValueError, match=r"write unix:///path/admin\.sock or http://host:port"):
        checked_host(host)


def test_a_password_in_a_host_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="LORAD_API_KEY") as caught:
        checked_host("http://me:sesame@127.0.0.1:8412")
    assert "sesame" not in str(caught.value)


def test_a_path_that_no_socket_can_have_is_refused_with_the_limit():
    checked_host("unix:///" + "x" * 106)
    with pytest.raises(ValueError, match="has 108 bytes: a socket's path has at most 107"):
        checked_host("unix:///" + "x" * 107)


def failure(path):
    """What a call to `path` fails with."""
    caller = Caller(path, 1.0)
    with pytest.raises(Unreachable) as caught, caller.open("GET", "/livez"):
        raise AssertionError("somebody answered")
    caller.close()
    return caught.value


def test_an_address_that_does_not_answer_is_no_socket_that_somebody_holds():
    told = advise(Unreachable("http://gpu:8412", "loading"))
    assert told.exit == 3 and "socket" not in told.cause + told.why and "admin_bind" in told.hint


def test_a_missing_socket_is_absent(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file" / "below"):
        advice = advise(failure(path))
        assert (advice.exit, advice.why) == (3, f"{path} does not exist")
        assert advice.hint.startswith("lorad serve")


def test_a_socket_that_nobody_listens_on_is_stale(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    advice = advise(failure(path))
    assert advice.exit == 3
    assert "left from a daemon" in advice.why


def test_a_file_that_is_no_socket_is_called_so(tmp_path):
    path = tmp_path / "file"
    path.touch()
    error = failure(path)
    assert advise(error).cause == "that is not a socket"


def test_a_connection_that_breaks_is_lost_and_not_slow(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        caller = Caller(path, 5.0)
        caller._answered = True  # as after a first call

        def hang_up():
            connection, _ = listener.accept()
            connection.recv(100)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Unreachable) as caught, caller.open("GET", "/livez"):
            raise AssertionError("somebody answered")
        thread.join(5)
        caller.close()
    assert caught.value.kind == "lost"
    assert advise(caught.value).exit == 3


def test_a_denied_socket_says_whose_it_is_and_how_to_get_in(tmp_path, monkeypatch):
    path = tmp_path / "s"
    path.touch()
    os.chmod(path, 0o660)
    denied = Unreachable(f"unix://{path}", "denied")
    real = os.stat(path)
    as_group = os.stat_result((*real[:5], 54321, *real[6:]))
    monkeypatch.setattr(reach.Path, "stat", lambda self: as_group)
    advice = advise(denied)
    assert advice.exit == 5
    assert ":54321 (0660); you are uid" in advice.why
    assert advice.hint == "sudo usermod -aG 54321 $USER, then log in again"
    monkeypatch.setattr(reach.Path, "stat", lambda self: os.stat_result((*real[:5], 0, *real[6:])))
    assert "usermod" not in advise(denied).hint


def test_a_folder_that_may_not_be_entered_is_named(monkeypatch):
    def stat(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reach.Path, "stat", stat)
    advice = advise(Unreachable("unix:///run/lorad/admin.sock", "denied"))
    assert advice.exit == 5
    assert advice.why.startswith("a folder above /run/lorad/admin.sock may not be entered")


def test_a_gateway_without_sockets_answers_both_planes_where_it_was_reached():
    for socket_path, host in (("", "http://10.0.0.1:8000"), ("/run/x.sock", "unix:///run/x.sock")):
        status = SimpleNamespace(inference_socket=socket_path)
        admin = SimpleNamespace(host="http://10.0.0.1:8000", status=lambda status=status: status)
        with Session(Options(), _client=admin).inference() as client:
            assert client.host == host


def test_an_operators_key_that_applications_routes_refuse_is_told_apart_from_theirs():
    body = wire.ErrorBody(message="no", type="authentication_error", code="invalid_api_key")
    for host, told in (("http://h:8000", True), ("unix:///run/x.sock", False)):
        session = SimpleNamespace(client=SimpleNamespace(host=host))
        error = unanswered(session, "poet", ApiError(401, body))
        assert ("an operator's is another one" in error.hint) == told

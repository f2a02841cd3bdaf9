"""Notifications and passed sockets, against a real datagram socket."""

import contextlib
import os
import socket
import time

import pytest

from lorad import systemd
from lorad.errors import CannotBind
from lorad.pulse import Pulse
from lorad.systemd import Notifier, activated_sockets


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


@pytest.fixture
def notifier(manager):
    return Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "30000000"})


def silent(manager):
    manager.setblocking(False)
    try:
        manager.recv(1000)
    except BlockingIOError:
        return True
    return False


def test_ready_and_status_arrive_in_one_datagram(manager, notifier):
    notifier.ready("serving tiny")
    assert manager.recv(1000) == b"READY=1\nSTATUS=serving tiny"


def test_a_status_cannot_smuggle_in_another_state(manager, notifier):
    notifier.status("tiny\nREADY=1")
    assert manager.recv(1000) == b"STATUS=tiny READY=1"


def test_a_long_start_and_a_long_stop_ask_for_more_time(manager, notifier):
    notifier.status("loading 40%", extend_seconds=30)
    assert manager.recv(1000) == b"STATUS=loading 40%\nEXTEND_TIMEOUT_USEC=30000000"
    notifier.stopping("draining", extend_seconds=2.5)
    assert manager.recv(1000) == b"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=2500000"


def test_a_reload_begins_with_the_time_and_ends_with_ready(manager, notifier):
    notifier.ready("serving")
    manager.recv(1000)
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    first, second = manager.recv(1000).decode().split("\n")
    assert first == "RELOADING=1"
    assert 0 <= int(second.removeprefix("MONOTONIC_USEC=")) - before < 5_000_000
    notifier.reloaded("engine_restarting: it died")
    assert manager.recv(1000) == b"READY=1\nSTATUS=engine_restarting: it died"


def test_what_has_not_started_or_is_stopping_never_says_that_it_is_ready(manager, notifier):
    notifier.reloading()
    notifier.reloaded("loading_base")
    assert silent(manager)
    notifier.ready("serving")
    notifier.stopping("draining")
    manager.recv(1000), manager.recv(1000)
    notifier.reloading()
    notifier.reloaded("draining")
    assert silent(manager)


def test_the_watchdog_is_fed_twice_as_often_as_asked():
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_seconds == 15
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog_seconds == 0


def test_the_watchdog_starves_only_when_nobody_looks_after_the_engine(manager, notifier, caplog):
    tended = True
    pulse = Pulse(notifier, lambda: tended)
    pulse.beat()
    assert manager.recv(1000) == b"WATCHDOG=1"
    tended = False
    pulse.beat()
    pulse.beat()
    assert b"watchdog is not fed" in manager.recv(1000)
    assert [record.levelname for record in caplog.records] == ["CRITICAL"], "said once"
    tended = True
    pulse.beat()
    assert manager.recv(1000) == b"WATCHDOG=1"


def test_a_manager_that_does_not_read_holds_the_loop_up_for_a_moment_only(manager, notifier):
    begun = time.monotonic()
    for _ in range(1000):
        notifier.status("x")
        if time.monotonic() - begun > systemd.SEND_SECONDS / 2:
            break
    assert time.monotonic() - begun < 4 * systemd.SEND_SECONDS
    while manager.recv(1000) and not silent(manager):
        pass
    notifier.ready("still spoken to")


def test_without_systemd_nothing_happens(tmp_path):
    Notifier({}).watchdog()
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).stopping("bye")
    assert activated_sockets({"LISTEN_FDS": "2", "LISTEN_PID": "1"}, ("admin",)) == {}


@pytest.fixture
def passed(monkeypatch):
    """passed(socket, names) -> the environment in which it was passed in as the first one."""

    def pass_in(sock, names):
        monkeypatch.setattr(systemd, "FIRST_FD", os.dup(sock.fileno()))
        return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": names}

    yield pass_in
    with contextlib.suppress(OSError):
        os.close(systemd.FIRST_FD)


def test_sockets_of_this_process_come_by_name(passed, tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "a"))
        sock.listen()
        found = activated_sockets(passed(sock, "admin"), ("admin", "inference"))
        assert set(found) == {"admin"}
        assert not found["admin"].get_inheritable()
        found["admin"].close()


@pytest.mark.parametrize(
    ("kind", "names", "why"),
    [
        (socket.SOCK_STREAM, "amdin", "'amdin'"),
        (socket.SOCK_STREAM, "", "''"),
        (socket.SOCK_STREAM, "admin", "does not listen"),
        (socket.SOCK_DGRAM, "admin", "does not listen"),
    ],
)
def test_a_socket_that_nobody_would_serve_is_refused(passed, kind, names, why):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        env = passed(sock, names)
        with pytest.raises(CannotBind, match=why):
            activated_sockets(env, ("admin", "inference"))


def test_a_descriptor_that_is_no_socket_is_refused(monkeypatch, tmp_path):
    file = os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)
    monkeypatch.setattr(systemd, "FIRST_FD", file)
    env = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "admin"}
    with pytest.raises(CannotBind, match="is no socket"):
        activated_sockets(env, ("admin",))
    os.close(file)

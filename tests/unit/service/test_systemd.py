"""Notifications and passed sockets, against a real datagram socket."""

import os
import socket

import pytest

from lorad.systemd import Notifier, activated_sockets


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def test_ready_and_status_arrive_in_one_datagram(manager):
    Notifier({"NOTIFY_SOCKET": manager.getsockname()}).ready("serving tiny")
    assert manager.recv(1000) == b"READY=1\nSTATUS=serving tiny"


def test_a_long_start_asks_for_more_time(manager):
    Notifier({"NOTIFY_SOCKET": manager.getsockname()}).status("loading 40%", extend_seconds=30)
    assert manager.recv(1000) == b"STATUS=loading 40%\nEXTEND_TIMEOUT_USEC=30000000"


def test_the_watchdog_is_fed_twice_as_often_as_asked():
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_seconds == 15
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog_seconds == 0


def test_without_systemd_nothing_happens(tmp_path):
    Notifier({}).watchdog()
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).stopping("bye")
    assert activated_sockets({"LISTEN_FDS": "2", "LISTEN_PID": "1"}) == {}


def test_sockets_of_this_process_come_by_name(monkeypatch):
    with socket.socket(socket.AF_UNIX) as passed:
        monkeypatch.setattr("lorad.systemd.FIRST_FD", os.dup(passed.fileno()))
        env = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "admin"}
        found = activated_sockets(env)
        assert set(found) == {"admin"}
        found["admin"].close()

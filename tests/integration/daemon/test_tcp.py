"""A daemon on TCP: keys that change under it, loractl from afar, and starts that are refused."""

import os
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

OLD, NEW, BOSS = "old-" * 10, "new-" * 10, "boss" * 10


@pytest.fixture(scope="module")
def free():
    """Two ports that nobody has."""
    with socket.socket() as one, socket.socket() as two:
        for sock in (one, two):
            sock.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture(scope="module")
def daemon(make_daemon, free):
    daemon = make_daemon()
    for name, key in (("api", OLD), ("admin", BOSS)):
        path = daemon.root / name
        path.write_text(f"{key}\n")
        path.chmod(0o600)
    daemon.tcp = f"""
[tcp]
enabled = true
bind = "127.0.0.1:{free[0]}"
api_keys_file = "{daemon.root}/api"
admin_bind = "127.0.0.1:{free[1]}"
admin_keys_file = "{daemon.root}/admin"
"""
    daemon.configure(daemon.tcp)
    return daemon


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def models(port, key):
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, trust_env=False)


def loractl(daemon, port, *words, key=BOSS):
    return subprocess.run(
        [daemon.command()[0], "-m", "lorad.cli.app", "-H", f"http://127.0.0.1:{port}", *words],
        capture_output=True,
        text=True,
        env={**daemon.env, "LORAD_API_KEY": key},
        timeout=30,
    )


def test_starts_that_would_let_strangers_in_are_refused(daemon):
    for text, why in (
        ('[tcp]\nenabled = true\nbind = "0.0.0.0:0"\n', "there are no keys"),
        ('[tcp]\nenabled = true\nadmin_bind = "127.0.0.1:0"\n', "everybody would be an operator"),
    ):
        daemon.configure(text)
        for arguments in ((), ("--check",)):
            status, words = daemon.refused(*arguments)
            assert (status, why in words) == (2, True), words
    os.chmod(daemon.root / "api", 0o644)
    daemon.configure(daemon.tcp)
    for arguments in ((), ("--check",)):
        status, words = daemon.refused(*arguments)
        assert (status, "others may read" in words) == (2, True), words
        assert OLD not in words
    os.chmod(daemon.root / "api", 0o600)


@pytest.mark.late
def test_keys_are_asked_for_and_change_under_a_running_daemon(daemon, free):
    daemon.start()
    assert [models(free[0], key).status_code for key in (OLD, NEW, BOSS)] == [200, 401, 401]
    shown = loractl(daemon, free[1], "status", "--json")
    assert shown.returncode == 0 and '"state": "ready"' in shown.stdout, shown.stderr
    denied = loractl(daemon, free[1], "status", key=OLD)
    assert denied.returncode == 5 and OLD not in denied.stderr
    (daemon.root / "api").write_text(f"{NEW}\n")
    assert loractl(daemon, free[1], "reload").returncode == 0
    assert [models(free[0], key).status_code for key in (OLD, NEW)] == [401, 200]
    (daemon.root / "api").write_text("short\n")
    refused = loractl(daemon, free[1], "reload")
    assert refused.returncode == 2 and "tcp.api_keys_file: line 1" in refused.stderr
    assert models(free[0], NEW).status_code == 200, "the keys from before go on"
    text = daemon.log.read_text() + loractl(daemon, free[1], "config", "show", "--json").stdout
    assert "api_keys_file" in text, "the file's name is no secret"
    for pid in (daemon.process.pid, *children(daemon.process.pid)):
        text += Path(f"/proc/{pid}/cmdline").read_text()
    assert "engine.process" in text
    assert not any(key in text for key in (OLD, NEW, BOSS))
    assert daemon.stop() == 0

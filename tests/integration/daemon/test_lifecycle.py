"""Starts and ends: what survives them, and how a start that cannot be is refused."""

import contextlib
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lorad import wire
from lorad.client import ApiError, Unreachable


@pytest.fixture(scope="module")
def only(make_daemon):
    return make_daemon()


@pytest.fixture
def running(only):
    """One that is ready, by this test's start or by the one's before."""
    if only.process is None or only.process.poll() is not None:
        only.start()
    return only


@pytest.fixture
def daemon(only):
    """One that is not running."""
    only.stop()
    return only


def test_a_restart_brings_back_adapters_pins_priorities_and_labels(daemon):
    daemon.start()
    daemon.upload("bible", 1, pin=True, priority=80, labels={"voice": "old"})
    daemon.upload("acme/jargon", 2)
    with daemon.client() as client:
        client.patch("acme/jargon", wire.AdapterPatch(priority=10))
    before = daemon.text("acme/jargon")
    assert daemon.stop() == 0
    assert not daemon.admin.exists()
    assert not daemon.inference.exists()
    daemon.start()
    bible = daemon.adapter("bible")
    assert (bible.state, bible.pinned, bible.priority) == ("idle", True, 80)
    assert bible.labels == {"voice": "old"}
    jargon = daemon.adapter("acme/jargon")
    assert (jargon.state, jargon.priority) == ("registered", 10)
    assert daemon.text("acme/jargon") == before


# httpcore leaves a socket open when the daemon dies between its listening and its accepting.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_kill_9_loses_nothing_that_was_acknowledged(daemon):
    """Three times at a random moment of registering; the stale sockets are cleared each time."""
    acknowledged = {}
    moment = random.Random(5)
    for number in range(3):
        daemon.start()
        if number == 0:
            daemon.upload("kept", 99, pin=True)
        for name, rev in acknowledged.items():
            assert daemon.adapter(name).rev == rev
        busy = threading.Event()

        def register(number=number, busy=busy):
            try:
                for n in range(100):
                    name = f"k{number}-{n}"
                    acknowledged[name] = daemon.upload(name, 1000 * number + n + 100).rev
                    busy.set()
            except (Unreachable, ApiError, httpx.HTTPError):
                return

        thread = threading.Thread(target=register)
        thread.start()
        assert busy.wait(30)
        busy.clear()
        threading.Event().wait(moment.uniform(0.0, 1.0))
        daemon.kill()
        thread.join(30)
        assert daemon.admin.exists()
    daemon.start()
    assert len(acknowledged) >= 3
    for name, rev in acknowledged.items():
        row = daemon.adapter(name)
        assert (row.rev, row.state) == (rev, "registered")
    assert daemon.text(next(iter(acknowledged)))
    assert daemon.adapter("kept").pinned


@pytest.mark.slow
def test_a_damaged_registry_comes_back_and_is_not_silent_about_it(daemon):
    daemon.start()
    daemon.upload("stays", 77, pin=True)
    assert daemon.stop() == 0
    (database,) = daemon.root.rglob("registry.db")
    database.write_bytes(b"noise" * 10_000)
    daemon.start()
    assert daemon.adapter("stays").pinned
    told = [e for e in daemon.events() if e.type == "registry.recovered"]
    assert any(e.level == "error" and ".corrupt-" in e.message for e in told)


def test_the_first_signal_drains_and_the_second_aborts_with_an_error_event(running, poll):
    daemon = running
    daemon.upload("drained", 7)
    begun = threading.Event()
    lines, told = [], []

    def stream():
        body = daemon.body("drained", 3900, stream=True)
        with daemon.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    def follow():
        with daemon.client() as client:
            told.extend(event.type for _, event in client.follow_events())

    thread, follower = threading.Thread(target=stream), threading.Thread(target=follow)
    thread.start()
    follower.start()
    assert begun.wait(30)
    daemon.process.send_signal(signal.SIGTERM)

    def draining():
        with daemon.http() as http:
            return http.get("/readyz").json().get("error", {}).get("code") == "draining"

    poll(draining, "readyz to say draining")
    refused = daemon.ask("drained")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    with daemon.client() as client:
        assert client.status().state == "draining"
    assert thread.is_alive()
    assert daemon.stop() == 0
    thread.join(30)
    last = [line for line in lines if line.startswith("data:")][-1]
    assert '"code":"draining"' in last
    assert "data: [DONE]" not in lines
    follower.join(30)
    assert told[-1] == "drain.forced", "it followed to the end, which was no error"
    assert "Traceback" not in daemon.tail()


def test_a_bad_configuration_is_exit_2_with_the_nearest_name(daemon):
    daemon.configure("[lorra]\n")
    status, words = daemon.refused()
    assert status == 2
    assert "did you mean lora?" in words
    daemon.configure()
    assert daemon.refused("--check")[0] == 0
    assert daemon.refused("--print-config")[0] == 0


def test_a_file_where_the_socket_should_be_is_refused_and_kept(daemon):
    daemon.admin.write_text("precious")
    status, words = daemon.refused()
    assert status == 3
    assert "not a socket" in words
    assert daemon.admin.read_text() == "precious"
    daemon.admin.unlink()


def test_a_socket_path_that_is_too_long_is_refused(daemon):
    daemon.configure(f'[inference]\nsocket = "/tmp/{"x" * 120}/s"\n')
    status, words = daemon.refused()
    assert status == 3
    assert "107" in words
    daemon.configure()


def test_a_socket_on_which_another_process_listens_is_left_alone(daemon):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.inference))
        other.listen()
        assert daemon.refused()[0] == 6
    os.unlink(daemon.inference)


def test_a_registry_of_a_newer_lorad_is_exit_4_and_stays_as_it_is(daemon):
    path = daemon.root / "state" / "registry.db"
    if not path.exists():
        daemon.start().stop()
    with contextlib.closing(sqlite3.connect(path)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        database.execute("PRAGMA user_version = 9999")
    there = path.read_bytes()
    status, words = daemon.refused()
    assert status == 4
    assert "9999" in words
    assert path.read_bytes() == there
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {version}")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a card")
def test_cuda_without_a_card_is_exit_5(daemon):
    whole = daemon.config.read_text()
    daemon.config.write_text(whole.replace('device = "cpu"', 'device = "cuda"'))
    status, words = daemon.refused()
    daemon.config.write_text(whole)
    assert status == 5
    assert "cuda" in words.lower()


def test_signals_from_the_first_moment_on_and_while_the_base_loads(daemon, poll):
    daemon.start(ready=False)
    facts = Path(f"/proc/{daemon.process.pid}/status")

    def hangups_wait():
        blocked = re.search(r"^SigBlk:\s+(\w+)$", facts.read_text(), re.MULTILINE)
        return int(blocked[1], 16) & 1

    poll(hangups_wait, "the configuration to be read")
    daemon.process.send_signal(signal.SIGHUP)  # nobody listens yet: it would end a process

    def listening():
        with daemon.client() as client:
            try:
                return client.status()
            except Unreachable:
                return None

    status = poll(listening, "the admin socket")
    assert status.state == "loading_base"
    poll(lambda: "config.reloaded" in daemon.tail(), "the signal to be heard")
    assert daemon.stop(signal.SIGINT) == 0
    assert "Traceback" not in daemon.tail()


@pytest.mark.late
def test_a_stop_before_anybody_listens_is_a_clean_end_and_nothing_is_begun(daemon, poll):
    daemon.log.write_text("")
    daemon.start(ready=False)
    facts = Path(f"/proc/{daemon.process.pid}/status")

    def stops_wait():
        blocked = re.search(r"^SigBlk:\s+(\w+)$", facts.read_text(), re.MULTILINE)
        return int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1

    poll(stops_wait, "the configuration to be read")
    assert daemon.stop() == 0
    told = daemon.tail()
    assert "stopped" in told and "Traceback" not in told
    assert "daemon.start" not in told, "it was heard before anything began"


def test_systemd_hears_of_it_and_keeps_the_sockets_that_it_passed(daemon):
    address = str(daemon.root / "notify")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        socket.socket(socket.AF_UNIX) as inference,
        socket.socket(socket.AF_UNIX) as admin,
    ):
        notify.bind(address)
        notify.settimeout(60)
        for listener, path in ((inference, daemon.inference), (admin, daemon.admin)):
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            listener.listen()
        daemon.start_under_systemd(address, inference, admin)
        heard = []
        while not any(words.startswith("READY=1") for words in heard):
            heard.append(notify.recv(4096).decode())
        assert any("EXTEND_TIMEOUT_USEC=" in words for words in heard)
        assert any(words == "WATCHDOG=1" for words in heard)
        assert daemon.text("tiny")
        daemon.process.send_signal(signal.SIGHUP)
        while not heard[-1].startswith("RELOADING=1\nMONOTONIC_USEC="):
            heard.append(notify.recv(4096).decode())
        while not heard[-1].startswith("READY=1"):
            heard.append(notify.recv(4096).decode())
        assert daemon.stop() == 0
        while not heard[-1].startswith("STOPPING=1"):
            heard.append(notify.recv(4096).decode())
        assert "EXTEND_TIMEOUT_USEC=" in heard[-1]
        # Nobody serves now; who connects waits in the backlog, and is answered after the restart.
        with daemon.http() as http, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(http.get, "/livez")
            daemon.start_under_systemd(address, inference, admin)
            assert waiting.result(60).status_code == 200
        assert daemon.stop() == 0
    assert daemon.inference.exists()
    assert daemon.admin.exists()


def test_connections_never_take_the_last_descriptor(daemon, poll):
    few = ["bash", "-c", 'ulimit -n 128; exec "$@"', "lorad", *daemon.command()]
    with daemon.log.open("ab") as log:
        before = log.tell()
        daemon.process = subprocess.Popen(few, stdout=log, stderr=log, env=daemon.env)
    daemon.wait_ready()
    clients = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    try:
        for client in clients:
            client.connect(str(daemon.inference))
        assert daemon.is_ready()
        assert daemon.ask("tiny", 4).status_code == 200
        daemon.upload("late", 19)
        with daemon.http() as http:
            poll(lambda: http.get("/readyz").status_code == 200, "an answer among the idle")
    finally:
        for client in clients:
            client.close()
    text = daemon.log.read_text()[before:]
    assert "128 open files are allowed" in text
    assert "Traceback" not in text
    assert daemon.stop() == 0

"""The engine process dies or hangs: in mid-stream, in mid-load, and too often.

Every stream gets an error event and a proper end, what was resident and pinned is so again, and
/readyz, asked all the time, says 503 with its reason and Retry-After for as long as it is true.
The tests share one daemon and its count of crashes: the last one brings it to five.
"""

import json
import os
import signal
import threading
import time

import httpx
import pytest

from lorad.client import ApiError, Unreachable

LONG = 3900  # tokens: nobody ends by itself
NAMES = ("deaths/pinned", "deaths/resident", "tiny")


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    config = daemon.config.read_text()
    quick = 'deterministic = true\nstall_after = "1500ms"\nreplace_after = "1500ms"'
    daemon.config.write_text(config.replace("deterministic = true", quick))
    daemon.start()
    daemon.upload(NAMES[0], 1, pin=True, priority=70)
    daemon.upload(NAMES[1], 2, load=True)
    daemon.upload("deaths/cold", 3)
    daemon.said = {name: daemon.text(name) for name in NAMES}
    yield daemon
    if daemon.process.poll() is None:
        daemon.kill()


class Readiness:
    """Asks /readyz all the time; `seen` is each answer that differs from the one before."""

    def __init__(self, daemon):
        self.daemon, self.seen, self.slowest = daemon, [], 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.ask)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(60)

    def ask(self):
        with self.daemon.http() as http:
            while not self.over.wait(0.02):
                began = time.monotonic()
                answer = http.get("/readyz")
                assert http.get("/livez").status_code == 200
                self.slowest = max(self.slowest, time.monotonic() - began)
                code = ""
                if answer.status_code != 200:
                    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
                    code = answer.json()["error"]["code"]
                if not self.seen or self.seen[-1] != code:
                    self.seen.append(code)


class Stream(threading.Thread):
    """One endless stream: `begun` after its first text, then its last line or what broke it."""

    def __init__(self, daemon, name, length=LONG):
        super().__init__()
        self.daemon, self.model, self.length = daemon, name, length
        self.begun, self.lines, self.broke = threading.Event(), [], None
        self.start()

    def run(self):
        body = self.daemon.body(self.model, self.length, stream=True)
        try:
            with self.daemon.http() as http, http.stream("POST", "/v1/completions", json=body) as a:
                for line in a.iter_lines():
                    if line.startswith("data: "):
                        self.lines.append(line[6:])
                        self.begun.set()
        except httpx.HTTPError as error:
            self.broke = error

    def check_error_event(self, code):
        self.join(60)
        assert not self.is_alive() and self.broke is None, f"a bare disconnect: {self.broke!r}"
        assert json.loads(self.lines[-1])["error"]["code"] == code, self.lines[-1]
        assert "[DONE]" not in self.lines
        text = "".join(json.loads(line)["choices"][0]["text"] for line in self.lines[:-1])
        said = self.daemon.said[self.model].rstrip("\ufffd")  # the last character may be cut
        assert text.startswith(said) or said.startswith(text.rstrip("\ufffd"))


def start_streams(daemon, count):
    streams = [Stream(daemon, NAMES[n % len(NAMES)]) for n in range(count)]
    assert all(stream.begun.wait(60) for stream in streams)
    return streams


def slots(daemon):
    with daemon.client() as client:
        return {item.name for item in client.slots().items}


def status(daemon):
    with daemon.client() as client:
        return client.status()


def assert_all_is_back(daemon, residents, restarts, poll):
    daemon.wait_ready()
    poll(lambda: slots(daemon) == residents, "the residents")
    assert status(daemon).engine_restarts == restarts
    assert daemon.adapter(NAMES[0]).pinned
    assert {name: daemon.text(name) for name in NAMES} == daemon.said
    with daemon.client() as client:
        assert client.evict(NAMES[0]).items[0].code == "pinned"


def test_killed_in_mid_stream(daemon, poll):
    residents = slots(daemon)
    assert residents == set(NAMES[:2])
    streams = start_streams(daemon, 9)
    whole = {}

    def ask():
        whole["answer"] = daemon.ask(NAMES[1], LONG)

    waiting = threading.Thread(target=ask)
    waiting.start()
    poll(lambda: status(daemon).running == 10, "the tenth request to run")
    with Readiness(daemon) as readiness:
        poll(lambda: readiness.seen, "a first answer")
        os.kill(status(daemon).engine_pid, signal.SIGKILL)
        for stream in streams:
            stream.check_error_event("engine_restarting")
        waiting.join(60)
        assert_all_is_back(daemon, residents, 1, poll)
    answer = whole["answer"]
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    assert "retry-after" in answer.headers
    assert readiness.seen == ["", "engine_restarting", ""]


@pytest.mark.late
def test_killed_in_mid_load(daemon, poll):
    """A load that is under way ends with the reason; what was resident before is back."""
    residents, ended = slots(daemon), {}
    before = status(daemon).engine_restarts

    def load():
        with daemon.client() as client:
            ended["load"] = client.load("deaths/cold").items[0]

    engine = status(daemon).engine_pid
    os.kill(engine, signal.SIGSTOP)  # so that it is under way for as long as it takes
    thread, request = threading.Thread(target=load), Stream(daemon, NAMES[1])
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    os.kill(engine, signal.SIGKILL)
    thread.join(60)
    assert ended["load"].code == "engine_restarting"
    request.join(60)
    assert request.broke is None and not request.begun.is_set()
    assert_all_is_back(daemon, residents, before + 1, poll)
    with daemon.client() as client:
        assert client.load("deaths/cold").items[0].state == "idle"
        assert client.evict("deaths/cold").items[0].ok


@pytest.mark.late
def test_an_engine_that_hangs_is_announced_and_replaced(daemon, poll):
    residents, before = slots(daemon), status(daemon).engine_restarts
    streams = start_streams(daemon, 3)
    with Readiness(daemon) as readiness:
        os.kill(status(daemon).engine_pid, signal.SIGSTOP)
        poll(lambda: "engine_stalled" in readiness.seen, "the announcement")
        refused = daemon.ask(NAMES[0])
        assert refused.json()["error"]["code"] in ("engine_stalled", "engine_restarting")
        assert int(refused.headers["retry-after"]) >= 1
        for stream in streams:
            stream.check_error_event("engine_restarting")
        assert_all_is_back(daemon, residents, before + 1, poll)
    assert readiness.seen == ["", "engine_stalled", "engine_restarting", ""]
    assert readiness.slowest < 5.0, "HTTP did not answer meanwhile"
    types = [event.type for event in daemon.events()]
    assert "engine.stalled" in types and types.count("engine.died") == before + 1


@pytest.mark.slow
def test_an_engine_that_hangs_for_a_moment_goes_on(daemon, poll):
    stream = Stream(daemon, NAMES[0], 500)
    assert stream.begun.wait(60)
    engine = status(daemon).engine_pid
    with Readiness(daemon) as readiness:
        os.kill(engine, signal.SIGSTOP)
        poll(lambda: "engine_stalled" in readiness.seen, "the announcement")
        os.kill(engine, signal.SIGCONT)
        poll(lambda: readiness.seen[-1] == "", "readiness")
    assert readiness.seen == ["", "engine_stalled", ""]
    assert status(daemon).engine_pid == engine
    stream.join(60)
    assert stream.lines[-1] == "[DONE]"


@pytest.mark.late
def test_the_fifth_crash_in_ten_minutes_ends_the_daemon(daemon, poll):
    dead, before = set(), status(daemon).engine_restarts
    while daemon.process.poll() is None:
        try:
            engine = status(daemon).engine_pid
        except (ApiError, Unreachable, httpx.HTTPError):
            continue
        if engine is not None and engine not in dead:
            dead.add(engine)
            os.kill(engine, signal.SIGKILL)
        time.sleep(0.02)
    assert daemon.process.wait(60) == 1
    assert before + len(dead) == 5
    last = daemon.tail()
    assert (
        "crashed 5 times in 10 minutes" in last and "hint" in last.lower()
    ) or "log above" in last
    assert "Traceback" not in last

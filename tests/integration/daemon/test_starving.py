"""One slot, and an adapter that never stops by itself: nobody else waits for its end (fault 15)."""

import json
import threading
import time

import pytest

from lorad import wire

STARVE_AFTER = 0.3
LONG = 900  # tokens: many times STARVE_AFTER, on a machine of these days


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    one = f'slots = 1\nstarve_after = "{STARVE_AFTER}s"'
    daemon.config.write_text(daemon.config.read_text().replace("slots = 8", one))
    daemon.inbox.mkdir(parents=True)
    daemon.drop("busy", 1)
    daemon.drop("acme/cold", 2)
    daemon.start()
    for name in ("busy", "acme/cold"):
        daemon.wait_state(name, "registered")
        daemon.text(name, 1)  # packed, and in host memory from now on
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


class Stream(threading.Thread):
    """A long answer, token by token, with the time of each event."""

    def __init__(self, daemon, model, max_tokens):
        super().__init__(daemon=True)
        self.server, self.asked = daemon, daemon.body(model, max_tokens, stream=True)
        self.text, self.times, self.over, self.error = "", [], False, None
        self.start()

    def run(self):
        with (
            self.server.http() as http,
            http.stream("POST", "/v1/completions", json=self.asked) as answer,
        ):
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.over = True
                elif line.startswith("data: "):
                    event = json.loads(data)
                    self.error = event.get("error")
                    self.text += event["choices"][0]["text"] if not self.error else ""
                    self.times.append(time.monotonic())


def test_a_cold_adapter_is_served_in_the_middle_of_anothers_answer(daemon, poll):
    alone = daemon.text("acme/cold", 8)
    stream = Stream(daemon, "busy", LONG)
    poll(lambda: len(stream.times) > 20, "the stream to run")
    began = time.monotonic()
    assert daemon.text("acme/cold", 8) == alone
    ended = time.monotonic()
    assert stream.is_alive() and not stream.over, "it only waited for the other's end"
    assert ended - began < 20
    drains = [e for e in daemon.events() if e.cause == "starvation"]
    assert any("busy" in (e.name or "") for e in drains)
    stream.join(90)
    assert stream.over and stream.error is None, "nobody's request is aborted"
    assert max(stream.times) > ended, "it goes on after the other"
    prefix = daemon.text("busy", 400)
    assert stream.text.startswith(prefix), "and says what it would have said"


def test_with_all_slots_pinned_a_request_for_another_adapter_is_no_room_at_once(daemon):
    """Fault 16: nothing that happens by itself would ever make room."""
    with daemon.client() as client:
        client.patch("busy", wire.AdapterPatch(pinned=True))
        began = time.monotonic()
        answer = daemon.ask("acme/cold", 2)
        assert time.monotonic() - began < 5
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "no_room")
        assert "pinned" in error["message"]
        assert answer.headers["x-should-retry"] == "false" and "retry-after" in answer.headers
        assert daemon.ask("busy", 2).status_code == 200, "the pinned one is served"
        client.patch("busy", wire.AdapterPatch(pinned=False))
    assert daemon.ask("acme/cold", 2).status_code == 200


def test_a_request_in_the_queue_ends_at_the_time_that_its_client_allows(daemon, poll):
    stream = Stream(daemon, "busy", 400)
    poll(lambda: len(stream.times) > 5, "the stream to run")
    with daemon.http() as http:
        answer = http.post(
            "/v1/completions",
            json=daemon.body("acme/cold", 4),
            headers={"x-request-timeout": "0.1"},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "queued" in answer.json()["error"]["message"]
    stream.join(60)
    assert stream.over and stream.error is None

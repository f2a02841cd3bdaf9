"""A real daemon explains itself, is reloaded, drained and resumed, by signal and by command."""

import json
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lorad.client import ApiError, Unreachable
from lorad.wire_operate import DrainAsk


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon().start()
    daemon.upload("bible", 1)
    daemon.upload("acme/sql", 2)
    return daemon


class Stream(threading.Thread):
    """A long answer; `begun` with its first line."""

    def __init__(self, daemon, model):
        super().__init__()
        self.daemon_, self.model = daemon, model
        self.begun, self.lines = threading.Event(), []
        self.start()
        assert self.begun.wait(30)

    def run(self):
        body = self.daemon_.body(self.model, 3900, stream=True)
        with (
            self.daemon_.http() as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()


def reload(daemon):
    with daemon.client() as client:
        return client.reload()


def test_an_adapter_is_explained_cold_and_warm_and_by_what_it_would_cost(daemon):
    daemon.upload("explained/cold", 1)
    daemon.upload("explained/warm", 2)
    before = daemon.text("explained/warm")
    with daemon.client() as client:
        cold = client.explain("explained/cold")
        assert (cold.state, cold.tier, cold.served) == ("registered", "disk", False)
        warm = client.explain("explained/warm")
        assert (warm.state, warm.tier, warm.served) == ("idle", "gpu", True)
        assert (warm.cost.loads, warm.cost.place, warm.cost.victims) == (1, 1, 1)
        assert 0.5 < warm.cost.uses <= 1.0 and warm.cost.return_seconds > 0
        assert warm.room.total_bytes > warm.room.free_bytes > 0
        client.pin("explained/warm")
        assert "pinned" in client.explain("explained/warm").next
        client.unpin("explained/warm")
        client.evict("explained/warm")
        gone = client.explain("explained/warm")
        assert (gone.state, gone.tier, gone.served) == ("ram", "ram", False)
        assert gone.next == "a request brings it up" and gone.next_seconds > 0
        assert gone.cost.evictions == 1 and gone.cost.uses == pytest.approx(warm.cost.uses, rel=0.1)
        with pytest.raises(ApiError) as caught:
            client.explain("nobody")
        assert caught.value.status == 404 and caught.value.code == "model_not_found"
    assert daemon.text("explained/warm") == before


def test_limits_and_the_log_level_change_under_a_running_daemon(daemon):
    daemon.configure('[limits]\nbody = "4KiB"\nmax_tokens = 8\n[log]\nlevel = "debug"\n')
    done = reload(daemon)
    assert done.changed == ("limits.body", "limits.max_tokens", "log.level")
    assert daemon.ask("bible", 9).status_code == 400
    long = daemon.ask("bible", 4, user="x" * 6000)
    assert (long.status_code, long.json()["error"]["code"]) == (413, "payload_too_large")
    with daemon.client() as client:
        told = client.config()
    assert told.settings["limits"]["max_tokens"] == 8
    assert told.settings["inference"]["socket"] == str(daemon.inference)
    assert told.origins["limits.max_tokens"].startswith(f"{daemon.config}:")
    daemon.configure()
    assert reload(daemon).needs_restart == ()
    assert daemon.ask("bible", 9).status_code == 200


def test_a_broken_file_is_refused_by_command_and_by_signal_and_serving_goes_on(daemon, poll):
    daemon.configure("[limits]\nmax_tokns = 4\n")
    with pytest.raises(ApiError) as caught:
        reload(daemon)
    assert (caught.value.code, caught.value.hint) == ("invalid_config", "did you mean max_tokens?")
    assert "limits.max_tokns" in caught.value.message
    command = [daemon.command()[0], "-m", "lorad.cli.app", "-H", f"unix://{daemon.admin}", "reload"]
    shown = subprocess.run(command, capture_output=True, text=True, env=daemon.env, timeout=30)
    assert shown.returncode == 2 and "limits.max_tokns" in shown.stderr
    daemon.process.send_signal(signal.SIGHUP)

    def told():
        return [e for e in daemon.events() if e.type == "config.rejected"][2:]

    (event,) = poll(told, "the rejection by signal")
    assert "limits.max_tokns" in event.message and "max_tokens?" in event.message
    daemon.configure()
    for _ in range(100):
        daemon.process.send_signal(signal.SIGHUP)
    assert daemon.ask("bible", 9).status_code == 200
    assert "Traceback" not in daemon.tail()


def test_one_adapter_is_drained_while_others_serve(daemon, poll):
    stream = Stream(daemon, "bible")
    with daemon.client() as client:
        with pytest.raises(ApiError) as caught:
            client.drain(DrainAsk(name="bible", timeout_s=0.05))
        assert caught.value.code == "deadline_exceeded"
        refused = daemon.ask("bible", 4)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        assert daemon.ask("acme/sql", 4).status_code == 200
        assert daemon.ask("tiny", 4).status_code == 200
        told = client.explain("bible")
        assert (told.served, told.running, told.hint) == (False, 1, "loractl resume bible")
        assert "operator drains it" in told.why and "1 requests of it end" in told.next
        assert client.ready() == "" and client.status().drained == ("bible",)
        done = client.drain(DrainAsk(name="bible", timeout_s=0.05, cancel=True))
        assert (done.cancelled, done.running) == (1, 0)
        stream.join(30)
        last = [line for line in stream.lines if line.startswith("data:")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        client.resume("bible")
        assert daemon.ask("bible", 4).status_code == 200


def test_the_daemon_is_drained_without_ending_and_resumes(daemon):
    with daemon.client() as client:
        assert client.drain(DrainAsk()).running == 0
        assert client.ready() == "draining"
        status = client.status()
        assert status.state == "draining" and "operator" in status.reason
        assert daemon.ask("tiny", 4).status_code == 503
        client.pin("acme/sql")
        assert client.resume().changed
        assert client.ready() == ""
    assert daemon.ask("acme/sql", 4).status_code == 200


def test_usr1_dumps_state_and_stacks_and_a_second_term_ends_streams(daemon, poll):
    stream = Stream(daemon, "bible")
    daemon.process.send_signal(signal.SIGUSR1)
    poll(lambda: "Current thread" in daemon.log.read_text(), "the stacks")
    log = daemon.log.read_text()
    assert 'state {"schema":"lorad/status' in log and "lorad/daemon.py" in log
    with ThreadPoolExecutor(1) as pool:  # an operator drains one meanwhile, and waits for it
        waiting = pool.submit(drain, daemon, "bible")
        poll(lambda: drained(daemon) == ("bible",), "the drain of one")
        daemon.process.send_signal(signal.SIGTERM)
        poll(lambda: not daemon_ready(daemon), "the drain")
        assert daemon.stop() == 0
        assert waiting.result(30) is not None, "it was answered, or told that nobody will"
    stream.join(30)
    assert '"code":"draining"' in [line for line in stream.lines if line.startswith("data:")][-1]


def drain(daemon, name):
    try:
        with daemon.client() as client:
            return client.drain(DrainAsk(name=name, timeout_s=600))
    except (ApiError, Unreachable) as error:
        return error


def drained(daemon):
    with daemon.client() as client:
        return client.status().drained


def daemon_ready(daemon):
    with daemon.client() as client:
        return client.ready() == ""

"""A stop with very many streams under way, and a log that nothing can be written to."""

import signal
import subprocess
import threading

import pytest


class Stream(threading.Thread):
    """`begun` with its first line; `lines` are what there was."""

    def __init__(self, daemon, model, tokens):
        super().__init__()
        self.daemon_, self.model, self.tokens = daemon, model, tokens
        self.begun, self.lines = threading.Event(), []
        self.start()

    def run(self):
        body = self.daemon_.body(self.model, self.tokens, stream=True)
        with (
            self.daemon_.http(600) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for line in filter(None, answer.iter_lines()):
                self.lines.append(line)
                self.begun.set()


@pytest.mark.slow
def test_of_fifty_streams_the_short_ones_end_and_the_late_ones_get_an_error_event(
    make_daemon, poll
):
    daemon = make_daemon()
    daemon.config.write_text(daemon.config.read_text().replace('"20s"', '"10m"'))
    daemon.start()
    daemon.upload("bible", 1)
    models = ["bible", "tiny"]
    long = [Stream(daemon, models[n % 2], 4000) for n in range(25)]
    short = [Stream(daemon, models[n % 2], 40) for n in range(25)]
    assert all(stream.begun.wait(120) for stream in (*long, *short))
    daemon.process.send_signal(signal.SIGTERM)

    def refused():
        answer = daemon.ask("bible", 4)
        return answer.status_code == 503 and answer.json()["error"]["code"] == "draining"

    poll(refused, "the drain")
    with daemon.client() as client:
        assert client.ready() == "draining"
    for stream in short:
        stream.join(300)
        assert stream.lines[-1] == "data: [DONE]"
    assert daemon.process.poll() is None, "it waits for the long ones"
    assert daemon.stop() == 0
    for stream in long:
        stream.join(60)
        assert '"code":"draining"' in stream.lines[-1], "no end without a word"
    assert "Traceback" not in daemon.tail()
    daemon.start()
    assert daemon.adapter("bible").state in ("registered", "ram", "idle")
    assert not [e for e in daemon.events() if e.type == "registry.recovered"]
    assert daemon.stop() == 0


@pytest.mark.late
def test_a_log_that_nothing_can_be_written_to_ends_nothing(make_daemon):
    daemon = make_daemon()
    with open("/dev/full", "w") as full:
        daemon.process = subprocess.Popen(
            daemon.command(), stdout=full, stderr=full, stdin=subprocess.DEVNULL, env=daemon.env
        )
    daemon.log.touch()
    daemon.wait_ready()
    daemon.upload("bible", 1)
    assert daemon.ask("bible", 4).status_code == 200
    daemon.process.send_signal(signal.SIGUSR1)  # which writes much of it
    assert daemon.ask("bible", 4).status_code == 200
    assert daemon.stop() == 0

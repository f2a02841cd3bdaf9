"""Two whole daemons behind a gateway that is a process of its own, over one catalog in a folder."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lorad import wire
from lorad.client import ApiError, LoradClient, Unreachable
from tests.integration.daemon.conftest import PATIENCE, until

pytestmark = pytest.mark.late

LONG = 3900  # tokens: nobody ends by itself


class Gateway:
    """`lorad gateway` in a folder of its own, before `daemons` by name."""

    def __init__(self, root, daemons):
        self.root, self.daemons = root, daemons
        self.folder, self.log = root / "gateway", root / "gateway.log"
        self.folder.mkdir()
        self.process = None

    def start(self, until):
        members = [f"--member={name}={d.root}/run" for name, d in self.daemons.items()]
        command = [sys.executable, "-m", "lorad.cli.serve", "gateway", *members]
        command += ["--catalog", str(self.root / "catalog"), "--folder", str(self.folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=next(iter(self.daemons.values())).env
            )
        until(self.is_ready, lambda: f"the gateway to be ready:\n{self.tail()}")
        return self

    def is_ready(self):
        assert self.process.poll() is None, self.tail()
        try:
            with self.client() as client:
                replicas = client.status().models[0].replicas
                return client.ready() == "" and all(one.state == "ready" for one in replicas)
        except (Unreachable, ApiError, IndexError):
            return False

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def tail(self):
        return self.log.read_text(errors="replace")[-4000:]

    def client(self):
        return LoradClient(f"unix://{self.folder}/admin.sock")

    def http(self):
        transport = httpx.HTTPTransport(uds=f"{self.folder}/inference.sock", verify=False)
        return httpx.Client(transport=transport, base_url="http://lorad", timeout=PATIENCE)

    def ask(self, model, max_tokens=16):
        body = {"model": model, "prompt": "Once upon", "max_tokens": max_tokens, "temperature": 0}
        with self.http() as http:
            return http.post("/v1/completions", json={**body, "ignore_eos": True})

    @contextlib.contextmanager
    def stream(self, body):
        body = body | {"ignore_eos": True}
        with self.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            yield answer

    def text(self, model):
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.headers["x-lorad-rev"]

    def loractl(self, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", "lorad.cli.app", "-H", f"{self.folder}/admin.sock", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "COLUMNS": "200"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def gateway(make_daemon, make_adapter):
    daemons = {"east": make_daemon(), "west": make_daemon()}
    for daemon in daemons.values():
        daemon.start(ready=False)
    for daemon in daemons.values():
        daemon.wait_ready()
    gateway = Gateway(daemons["east"].root, daemons).start(until)
    gateway.folders = {n: make_adapter(gateway.root / f"in-{n}", n) for n in (1, 2, 3)}
    yield gateway
    assert gateway.stop() == 0, gateway.tail()
    for daemon in daemons.values():
        assert daemon.stop() == 0, daemon.tail()


def test_a_cluster_is_operated_and_asked_like_one_daemon(gateway, poll):
    gateway.loractl("add", str(gateway.folders[1]), "--name", "poet")
    first, rev = gateway.text("poet")
    assert gateway.text("poet") == (first, rev)
    assert gateway.text("tiny")[0] != first
    assert gateway.ask("nobody").status_code == 404
    listed = gateway.loractl("ls")
    assert "poet" in listed
    status = gateway.loractl("status")
    assert "replica east" in status and "replica west" in status
    with gateway.client() as client:
        whole = client.status()
        assert whole.reason == "" and len(whole.models[0].fingerprint) == 12, "one base for both"
    assert "poet" in gateway.loractl("ps") and rev[:12] in gateway.loractl("show", "poet")
    assert "poet" in gateway.loractl("explain", "poet")
    assert "poet" in gateway.loractl("top", "--once")
    assert 'member="west"' in gateway.loractl("metrics")
    with gateway.http() as http:
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "poet"]
        assert http.get("/v1/models/poet").json()["root"] == rev
    gateway.loractl("load", "poet")
    with gateway.client() as client:
        assert len(client.adapter("poet").adapter.replicas) == 1

        def told():
            return {(event.type, event.name) for event in client.recent_events().items}

        poll(lambda: {("adapter.added", "poet"), ("slot.load", "poet")} <= told(), told)


def test_after_a_rollout_both_have_the_new_revision_and_a_stream_ends_on_the_old(gateway, poll):
    gateway.loractl("add", str(gateway.folders[2]), "--name", "clerk", "--pin")
    old, old_rev = gateway.text("clerk")
    body = {"model": "clerk", "prompt": "x", "max_tokens": 300, "stream": True, "temperature": 0}
    with gateway.stream(body) as answer:
        lines = answer.iter_lines()
        next(lines)
        added = gateway.loractl(
            "add", str(gateway.folders[3]), "--name", "clerk", "--replace", "-o", "json"
        )
        new_rev = json.loads(added)["rev"]
        assert new_rev != old_rev
        rest = list(lines)
    assert rest[-2] == "data: [DONE]" and answer.headers["x-lorad-rev"] == old_rev
    new, seen = gateway.text("clerk")
    assert (new != old, seen) == (True, new_rev)
    for daemon in gateway.daemons.values():
        assert daemon.adapter("clerk").rev == new_rev
        refused = daemon.ask(f"clerk@{old_rev}")
        assert refused.status_code == 404, "nobody answers with what was before"
        assert daemon.text("clerk") == daemon.text(f"clerk@{new_rev}")
    assert old_rev[:8] in gateway.loractl("rollback", "clerk")
    assert gateway.text("clerk") == (old, old_rev)
    gateway.loractl("rm", "clerk", "--yes")
    assert gateway.ask("clerk").status_code == 404
    assert all(daemon.adapter("clerk") is None for daemon in gateway.daemons.values())


def running(daemon):
    with daemon.client() as client:
        return client.board().requests


def test_a_member_that_is_killed_costs_its_streams_alone(gateway, poll):
    with gateway.client() as client:
        client.upload(gateway.folders[1], wire.UploadStart(name="bard", load=True))
        (home,) = client.adapter("bard").adapter.replicas
    daemon = gateway.daemons[home]
    told, begun = [], threading.Event()

    def read():
        body = {"model": "bard", "prompt": "x", "max_tokens": LONG, "stream": True}
        with gateway.stream(body) as answer:
            for line in answer.iter_lines():
                told.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE)
    before = gateway.text("bard")
    with ThreadPoolExecutor(6) as crowd:
        asked = [crowd.submit(gateway.ask, "bard", 200) for _ in range(6)]
        poll(lambda: len(running(daemon)) >= 7, "all of them to run there")
        daemon.kill()
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} == {200}, "nothing of them had been seen"
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    reader.join(PATIENCE)
    last = json.loads([line for line in told if line][-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_restarting"
    assert gateway.text("bard") == before, "the other one took it in"
    with gateway.client() as client:
        states = {one.name: one.state for one in client.status().models[0].replicas}
    assert states[home] in ("lost", "away") and len(states) == 2
    daemon.start()
    poll(gateway.is_ready, "both to be there again")
    poll(lambda: gateway.text("bard") == before, "the same answer of either")


def test_who_waits_at_a_full_member_goes_to_one_that_joins(gateway, poll):
    full, late = gateway.daemons["east"], gateway.daemons["west"]
    plain = full.config.read_text()
    full.config.write_text(plain.replace("threads = 1", "threads = 1\nmax_num_seqs = 1"))
    for daemon in (full, late):
        assert daemon.stop() == 0, daemon.tail()
    full.start()
    poll(lambda: states(gateway) == {"east": "ready", "west": "lost"}, "one of both to be there")
    with ThreadPoolExecutor(6) as crowd:
        # Of so many tokens that most still wait when the other is up.  On cores that six work on
        # the last was answered after 47 s, and had once none after 60.
        asked = [crowd.submit(gateway.ask, "tiny", 2000) for _ in range(6)]
        poll(lambda: len(running(full)) >= 6, "all of them to wait there")
        late.start()
        poll(lambda: running(late), "some of them to go there")
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert "requests on: a member joined" in gateway.tail()
    full.config.write_text(plain)


def states(gateway):
    with gateway.client() as client:
        return {one.name: one.state for one in client.status().models[0].replicas}

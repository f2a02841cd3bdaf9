"""One model on two engines: requests find their adapter, a killed engine costs its streams alone.

Both are on the CPU.  Each takes two sequences at a time, so that a third one waits.
"""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lorad.routing.affinity import ranking

pytestmark = pytest.mark.late

#: Both engines are some adapter's home.
SEEDS = {"a": 1, "b": 6, "c": 2}
NAMES = tuple(SEEDS)
LONG = 3900  # tokens: nobody ends by itself
REPLICAS = ("0", "1")


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    config = daemon.config.read_text()
    more = "deterministic = true\nreplicas = 2\nmax_num_seqs = 2"
    config = config.replace("deterministic = true", more)
    allowed = f'[lora]\nallowed_roots = ["{daemon.root}/shared"]'
    daemon.config.write_text(config.replace("[lora]", allowed))
    daemon.start()
    daemon.wait_engines()
    for name, seed in SEEDS.items():
        daemon.upload(name, seed)
    daemon.said = {name: daemon.text(name) for name in (*NAMES, "tiny")}
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


def replicas(daemon):
    with daemon.client() as client:
        (model,) = client.status().models
    return {one.name: one for one in model.replicas}


def home_of(daemon, name):
    return ranking(daemon.adapter(name).rev, REPLICAS)[0]


class Stream(threading.Thread):
    """One endless stream: `begun` after its first text, then every line of it."""

    def __init__(self, daemon, name):
        super().__init__()
        self.daemon, self.model = daemon, name
        self.begun, self.lines, self.broke = threading.Event(), [], None
        self.start()

    def run(self):
        body = self.daemon.body(self.model, LONG, stream=True)
        try:
            with self.daemon.http() as http, http.stream("POST", "/v1/completions", json=body) as a:
                for line in a.iter_lines():
                    if line.startswith("data: "):
                        self.lines.append(line[6:])
                        self.begun.set()
        except httpx.HTTPError as error:
            self.broke = error


def test_every_adapter_is_on_its_home_and_operators_see_which(daemon):
    for name in NAMES:
        assert daemon.adapter(name).replicas == (home_of(daemon, name),)
    with daemon.client() as client:
        assert {row.name: row.replicas for row in client.slots().items} == {
            name: (home_of(daemon, name),) for name in NAMES
        }
        told = client.explain(NAMES[0])
        assert told.replica == home_of(daemon, NAMES[0]) and told.served
        metrics = client.metrics()
    for replica in REPLICAS:
        used = sum(home_of(daemon, name) == replica for name in NAMES)
        assert replicas(daemon)[replica].slots_used == used
        assert f'lorad_slots_used{{replica="{replica}"}} {used}.0' in metrics
    assert metrics.count("\nvllm:lora_requests_info{") == 1
    assert f'running_lora_adapters="{",".join(NAMES)}"' in metrics


def test_a_killed_engine_ends_its_streams_and_loses_nobody_who_waits(daemon, poll):
    name = NAMES[0]
    home = home_of(daemon, name)
    before = replicas(daemon)[home]
    streams = [Stream(daemon, name)]
    with ThreadPoolExecutor(4) as pool:
        whole = pool.submit(daemon.ask, name, 600)  # begun, and nobody has seen anything of it
        poll(lambda: replicas(daemon)[home].running == 2, "two to run")
        assert streams[0].begun.wait(60)
        waiting = [pool.submit(daemon.ask, name) for _ in range(3)]
        poll(lambda: replicas(daemon)[home].waiting == 3, "three to wait behind the streams")
        os.kill(before.engine_pid, signal.SIGKILL)
        for answer in waiting:
            assert answer.result().status_code == 200, answer.result().text
            assert answer.result().json()["choices"][0]["text"] == daemon.said[name]
        assert whole.result().status_code == 200
        assert whole.result().json()["choices"][0]["text"].startswith(daemon.said[name])
        assert whole.result().json()["usage"]["completion_tokens"] == 600
    for stream in streams:
        stream.join(60)
        assert stream.broke is None and not stream.is_alive()
        assert json.loads(stream.lines[-1])["error"]["code"] == "engine_restarting"
    with daemon.http() as http:
        assert http.get("/readyz").status_code == 200  # the other one takes requests
    held = {name for name in NAMES if home_of(daemon, name) == home}
    poll(lambda: replicas(daemon)[home].state == "ready", "the engine to be there again")
    poll(
        lambda: all(home in daemon.adapter(name).replicas for name in held),
        "what it held to be there again",
    )
    counted = routed(daemon, home)
    assert {name: daemon.text(name) for name in held} == {name: daemon.said[name] for name in held}
    assert routed(daemon, home) == counted + len(held)
    after = replicas(daemon)[home]
    assert after.engine_restarts == before.engine_restarts + 1
    assert after.engine_pid != before.engine_pid


def routed(daemon, replica):
    """How many sequences that engine was sent, for whatever reason."""
    with daemon.client() as client:
        lines = client.metrics().splitlines()
    wanted = [li for li in lines if li.startswith("lorad_routed_requests_total{")]
    return sum(float(li.rsplit(" ", 1)[1]) for li in wanted if f'replica="{replica}"' in li)


def test_no_request_gets_an_old_revision_after_a_rollout_was_told(daemon, poll):
    """Asked all the while; what streams keeps the old one where it is."""
    name = NAMES[1]
    old = daemon.said[name]
    streams = [Stream(daemon, name)]
    assert all(stream.begun.wait(60) for stream in streams)
    over, done, wrong, seen = threading.Event(), threading.Event(), [], set()

    def ask():
        while not over.is_set():
            told = done.is_set()
            text = daemon.text(name)
            seen.add(text)
            if told and text == old:
                wrong.append(text)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    poll(lambda: old in seen, "an answer of the old one")
    added = daemon.upload(name, 77, replace=True)
    done.set()
    assert added.state in ("idle", "active")
    poll(lambda: len(seen) == 2, "an answer of the new one")
    over.set()
    for thread in asking:
        thread.join(60)
    assert not wrong
    daemon.said[name] = daemon.text(name)
    assert daemon.said[name] != old
    with daemon.client() as client:
        rows = client.board().requests
        assert {row.replica for row in rows.values()} <= set(REPLICAS)
        for id in rows:
            client.cancel_request(id)
    for stream in streams:
        stream.join(60)
    poll(lambda: not leftovers(daemon, name), "the old revision to leave both engines")


def leftovers(daemon, name):
    with daemon.client() as client:
        return [row.name for row in client.slots().items if row.name.startswith(f"{name}@")]


def test_a_pin_is_held_by_one_engine_and_evicting_is_for_all(daemon, poll):
    name = NAMES[2]
    with daemon.client() as client:
        client.pin(name)
        assert daemon.adapter(name).replicas == (home_of(daemon, name),)
        assert client.evict(name).items[0].code == "pinned"
        client.unpin(name)
        (item,) = client.evict(name).items
        assert item.ok
    poll(lambda: daemon.adapter(name).replicas == (), "it to be nowhere")
    with daemon.client() as client:
        assert client.load(name).items[0].ok
    assert daemon.adapter(name).replicas == (home_of(daemon, name),)
    assert daemon.text(name) == daemon.said[name]


def test_vllms_routes_for_adapters_are_those_of_all_engines(daemon, make_adapter, poll):
    path = make_adapter(daemon.root / "shared" / "d", 4)
    transport = httpx.HTTPTransport(uds=str(daemon.admin), verify=False)
    with httpx.Client(transport=transport, base_url="http://lorad", timeout=60) as http:
        told = {"lora_name": "acme/d", "lora_path": str(path)}
        assert http.post("/v1/load_lora_adapter", json=told).status_code == 200
        assert daemon.adapter("acme/d").replicas == (home_of(daemon, "acme/d"),)
        assert 'running_lora_adapters="a,acme/d,b,c"' in http.get("/metrics").text
        told = {"lora_name": "acme/d"}
        assert http.post("/v1/unload_lora_adapter", json=told).status_code == 200
        poll(
            lambda: 'running_lora_adapters="a,b,c"' in http.get("/metrics").text,
            "it to leave both engines",
        )


def test_more_engines_than_there_can_be_are_refused_at_the_start(make_daemon):
    daemon = make_daemon()
    config = daemon.config.read_text()
    daemon.config.write_text(config.replace("deterministic", "replicas = 0\ndeterministic"))
    status, told = daemon.refused()
    assert status == 2 and "models.replicas: 1 to 64: engines of this model" in told, told

"""Engines of one model are killed in turn, under load, while an adapter is replaced all the while.

Nobody whose stream had not begun is lost, streams end with an error event or whole, every answer is
of the revision that its name meant, and at the end everything is where it belongs.
"""

import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lorad.routing.affinity import ranking

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c", "d")
CLIENTS, KILLS = 6, 4  # a replica may crash five times in ten minutes


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    config = daemon.config.read_text()
    more = "deterministic = true\nreplicas = 2\nmax_num_seqs = 4"
    more += '\nstall_after = "5s"\nreplace_after = "5s"'
    daemon.config.write_text(config.replace("deterministic = true", more))
    daemon.start()
    daemon.wait_engines()
    daemon.texts = {}
    for n, name in enumerate(NAMES):
        daemon.upload(name, n + 1)
        daemon.texts[name] = [daemon.text(name)]
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


class Client(threading.Thread):
    """Asks and streams in turn until `over`; what was wrong is in `wrong`."""

    def __init__(self, daemon, seed, over):
        super().__init__()
        self.daemon, self.over = daemon, over
        self.rng = random.Random(seed)
        self.wrong, self.whole, self.cut = [], 0, 0
        self.start()

    def run(self):
        try:
            with self.daemon.http() as http:
                while not self.over.is_set():
                    name = self.rng.choice(NAMES)
                    (self.stream if self.rng.random() < 0.5 else self.ask)(http, name)
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))

    def ask(self, http, name):
        answer = http.post("/v1/completions", json=self.daemon.body(name, 16))
        if answer.status_code != 200:
            self.wrong.append(answer.text)
        else:
            self.check(name, answer.json()["choices"][0]["text"])

    def stream(self, http, name):
        body = self.daemon.body(name, 16, stream=True)
        text, error, done = "", "", False
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                told = json.loads(line[6:])
                error = error or told.get("error", {}).get("code", "")
                text += "".join(choice["text"] for choice in told.get("choices", ()))
        if done:
            self.check(name, text)
        elif text and error == "engine_restarting":
            self.cut += 1
        else:
            self.wrong.append(f"a stream of {name} ended with {error!r} after {text!r}")

    def check(self, name, text):
        self.whole += 1
        if text not in self.daemon.texts[name]:
            self.wrong.append(f"{name} said {text!r}")


def replicas(daemon):
    with daemon.client() as client:
        (model,) = client.status().models
    return model.replicas


def test_kills_in_turn_lose_nobody_whose_stream_had_not_begun(daemon, poll):
    over = threading.Event()
    clients = [Client(daemon, seed, over) for seed in range(CLIENTS)]
    for kill in range(KILLS):
        poll(lambda: all(one.state == "ready" for one in replicas(daemon)), "both engines")
        so_far = sum(client.whole for client in clients)
        poll(lambda so_far=so_far: sum(c.whole for c in clients) > so_far + 20, "some answers")
        os.kill(replicas(daemon)[kill % 2].engine_pid, signal.SIGKILL)
        # Meanwhile one is replaced: whatever it says before it is told done may be of either.
        daemon.texts["d"].append(NEXT[kill % 2](daemon))
        added = daemon.upload("d", SEEDS[kill % 2], replace=True)
        assert added.state != "quarantined"
    poll(lambda: all(one.state == "ready" for one in replicas(daemon)), "both engines")
    over.set()
    for client in clients:
        client.join(120)
        assert not client.is_alive()
    assert [wrong for client in clients for wrong in client.wrong] == []
    assert sum(one.engine_restarts for one in replicas(daemon)) == KILLS
    assert daemon.text("d") == daemon.texts["d"][-1]
    for name in NAMES[:3]:
        assert daemon.text(name) == daemon.texts[name][0]
    poll(lambda: all(len(daemon.adapter(name).replicas) >= 1 for name in NAMES), "all to be up")
    with daemon.client() as client:
        assert not [row.name for row in client.slots().items if "@" in row.name]


def test_what_a_hanging_engine_has_not_begun_is_answered_by_the_other(daemon, poll):
    home = ranking(daemon.adapter("a").rev, ("0", "1"))[0]
    daemon.wait_engines()
    poll(lambda: home in daemon.adapter("a").replicas, "it to be at home")
    engine = next(one for one in replicas(daemon) if one.name == home)
    os.kill(engine.engine_pid, signal.SIGSTOP)
    with ThreadPoolExecutor(6) as pool:  # nobody knows yet that it hangs
        answers = list(pool.map(lambda _: daemon.ask("a"), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {daemon.texts["a"][0]}
    most = engine.engine_restarts
    poll(lambda: replicas(daemon)[int(home)].engine_restarts > most, "a new one")
    daemon.wait_engines()
    poll(lambda: home in daemon.adapter("a").replicas, "it to be where it was")


#: The two contents that `d` is replaced by in turn.
SEEDS = (11, 12)


def _said_by(seed):
    def said(daemon):
        """What that content says, asked under a name of its own, which goes again."""
        name = f"as-{seed}"
        daemon.upload(name, seed)
        text = daemon.text(name)
        with daemon.client() as client:
            client.remove(name)
        return text

    return said


NEXT = tuple(_said_by(seed) for seed in SEEDS)

"""Two replicas on Ray Serve, as applications and operators see them.

One Ray for all of it; starting that, and a replica anew, is most of the time: a minute on two cores
that others wanted too, and twice that where they wanted them badly.
"""

import json
import threading

import pytest

from lorad.client import ApiError

pytestmark = pytest.mark.late

NAMES = ("a", "b", "c", "d")
CLIENTS = 3
SHORT, LONG = 16, 100  # tokens


def test_each_adapter_is_on_one_replica_and_stays_there(cluster) -> None:
    for name in NAMES:
        for _ in range(3):
            assert cluster.text(name) == cluster.texts[name][SHORT]
    homes = {name: cluster.holders(name) for name in NAMES}
    assert all(len(held) == 1 for held in homes.values()), homes


def test_operators_need_their_key_and_see_every_replica(cluster) -> None:
    with cluster.http() as http:
        assert http.get("/admin/v1/status").status_code == 401
    assert len(cluster.replicas()) == 2
    with cluster.client() as client:
        assert {row.name for row in client.slots().items} == set(NAMES)
        board = client.board()
    assert board.status.state == "ready"


def test_loractl_and_top_speak_to_the_cluster_as_to_one_daemon(cluster) -> None:
    status = cluster.loractl("status")
    assert cluster.url in status and "unix" not in status
    assert all(one in status for one in cluster.replicas())
    listed = json.loads(cluster.loractl("ls", "-o", "json"))
    assert {row["name"] for row in listed["items"]} == set(NAMES)
    shown = cluster.loractl("top", "--once")
    assert cluster.url.removeprefix("http://") in shown
    assert all(f" {name} " in shown for name in NAMES)


def test_a_name_that_nobody_knows_is_refused_as_a_daemon_would(cluster) -> None:
    answer = cluster.ask("nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_an_adapter_is_replaced_under_load_and_no_old_answer_comes_after_that(cluster) -> None:
    """Whatever was asked before the rollout was done may be of either; nothing after it."""
    before = cluster.texts["d"][SHORT]
    over, answers, wrong = threading.Event(), [], []

    def ask_on():
        while not over.is_set():
            answer = cluster.ask("d")
            if answer.status_code == 200:
                answers.append(answer.json()["choices"][0]["text"])
            else:
                wrong.append(answer.text)

    threads = [threading.Thread(target=ask_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    added = cluster.add("d", 11)
    after = [cluster.text("d") for _ in range(4)]
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(after) == {after[0]} and after[0] != before
    assert set(answers) <= {before, after[0]}
    cluster.texts["d"] = cluster.texts_of("d")
    for daemon in cluster.daemons():  # each by itself, not only the one that has the load
        assert daemon.adapter("d").adapter.rev == added.rev


class Client(threading.Thread):
    """Asks and streams in turn; `wrong` is what no client should see."""

    def __init__(self, cluster, number, over):
        super().__init__()
        self.cluster, self.number, self.over = cluster, number, over
        self.whole = self.cut = 0
        self.wrong = []
        self.start()

    def run(self):
        turn = self.number
        with self.cluster.http() as http:
            while not self.over.is_set():
                name = NAMES[turn % len(NAMES)]
                (self.stream if turn % 3 else self.ask)(http, name)
                turn += 1

    def ask(self, http, name):
        answer = http.post("/v1/completions", json=self.cluster.body(name, SHORT))
        if answer.status_code != 200:
            self.wrong.append(answer.text)
        else:
            self.check(name, SHORT, answer.json()["choices"][0]["text"])

    def stream(self, http, name):
        body = self.cluster.body(name, LONG, stream=True)
        text, error, done = "", "", False
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    told = json.loads(line[6:])
                    error = error or told.get("error", {}).get("code", "")
                    text += "".join(choice["text"] for choice in told.get("choices", ()))
        if done:
            self.check(name, LONG, text)
        elif answer.status_code == 200 and error == "engine_restarting":
            self.cut += 1
        else:
            self.wrong.append(f"a stream of {name} ended with {error!r} after {len(text)}")

    def check(self, name, length, text):
        self.whole += 1
        if text != self.cluster.texts[name][length]:
            self.wrong.append(f"{name} said {text!r}")


def test_a_replica_that_is_killed_loses_nothing_that_had_not_begun(cluster, poll) -> None:
    homes = {name: cluster.holders(name)[0] for name in NAMES}
    homes |= {other: other for other in set(cluster.replicas()) - set(homes.values())}
    victim = homes["a"]
    over = threading.Event()
    clients = [Client(cluster, number, over) for number in range(CLIENTS)]
    try:
        poll(lambda: sum(client.whole for client in clients) > 12, "some answers")
        daemon = cluster.daemon(victim)
        assert a_stream_during(cluster, "a", daemon.parent().kill) == "engine_restarting"
        so_far = sum(client.whole for client in clients)
        poll(lambda: sum(client.whole for client in clients) > so_far + 12, "answers after that")
        poll(lambda: not daemon.is_running(), "its daemon to end with it")
        poll(lambda: len(cluster.replicas()) == 2, "another in its place")
        # While there is more to do where they went, adapters come home: to who has the place now.
        # Not "d", which was replaced: it may be where its old revision was.
        (new,) = set(cluster.replicas()) - set(homes.values())
        for name in NAMES[:3]:
            home = homes[name]
            wanted = new if home == victim else home
            poll(lambda name=name, at=wanted: at in cluster.holders(name), f"{name} to be at home")
    finally:
        over.set()
    for client in clients:
        client.join(60)
        assert not client.is_alive()
    assert [wrong for client in clients for wrong in client.wrong] == []
    assert sum(client.cut for client in clients) <= CLIENTS


def a_stream_during(cluster, name, act):
    """The code of the error that it ends with."""
    body = cluster.body(name, 4000, stream=True)
    with cluster.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        act()
        *_, last = lines
    return json.loads(last.removeprefix("data: "))["error"]["code"]


def test_a_daemon_that_is_killed_takes_its_replica_with_it_and_no_request(cluster, poll) -> None:
    before = cluster.replicas()
    name = next(iter(before))
    cluster.daemon(name).kill()
    for adapter in NAMES:
        assert cluster.text(adapter) == cluster.texts[adapter][SHORT]
    poll(lambda: name not in cluster.replicas(), "its actor to end, too")


def test_an_answer_that_its_client_gave_up_is_ended_at_the_replica(cluster, poll) -> None:
    with (
        cluster.http() as http,
        http.stream("POST", "/v1/completions", json=cluster.body("a", 4000, stream=True)) as answer,
    ):
        lines = answer.iter_lines()  # to forget it is to give up
        assert next(lines).startswith("data: ")
        poll(lambda: running(cluster) == 1, "it to run")
    poll(lambda: running(cluster) == 0, "it to end")


def running(cluster):
    with cluster.client() as client:
        return client.status().running


def test_what_is_refused_is_told_as_a_daemon_tells_it(cluster) -> None:
    with cluster.client() as client, pytest.raises(ApiError) as refused:
        client.adapter("nobody")
    assert refused.value.code == "model_not_found"


def test_what_a_hanging_daemon_has_not_begun_is_answered_by_the_other(cluster, poll) -> None:
    poll(lambda: len(cluster.replicas()) == 2, "both replicas")
    before = set(cluster.replicas())
    cluster.daemon(cluster.holders("b")[0]).suspend()
    assert cluster.text("b") == cluster.texts["b"][SHORT]
    poll(lambda: len(set(cluster.replicas()) & before) == 1, "it to be passed by")

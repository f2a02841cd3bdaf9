"""A daemon whose model is an encoder: operators see what they see of any other, and requests to
generate are told what the model does."""

import os
import signal
import threading
from collections import Counter

import pytest

from lorad import wire
from tests.fakes.tiny_bert import HIDDEN, LAYERS, LENGTH, write_bert, write_bert_adapter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon(make_daemon, tmp_path_factory):
    daemon = make_daemon()
    base = write_bert(tmp_path_factory.mktemp("bert"), pooling="cls")
    daemon.config.write_text(
        f'[[models]]\nbase = "{base}"\nname = "vectors"\ndevice = "cpu"\nthreads = 1\n'
        '[lora]\nslots = 8\nram_cache = "16MiB"\nadapter_pool = "2MiB"\n'
        '[watch]\nsettle = "100ms"\n'
    )
    daemon.start()
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module")
def add(daemon):
    """add(name, seed): its row; with `labels`, a classifier of its own."""

    def add(name, seed, *, labels=0, again=0, **start):
        folder = daemon.root / f".up-{seed}-{again}"
        write_bert_adapter(folder, seed, labels=labels)
        with daemon.client() as client:
            client.upload(folder, wire.UploadStart(name=name, **start))
        return daemon.wait_state(name, "registered", "ram", "idle")

    return add


def post(daemon, path, **body):
    with daemon.http() as http:
        answer = http.post(path, json=body)
    return answer.status_code, answer.json()


def test_adapters_come_load_leave_and_are_pinned(daemon, add):
    add("one", 1, load=True)
    daemon.wait_state("one", "idle")
    add("two", 2, pin=True)
    daemon.wait_state("two", "idle")
    with daemon.client() as client:
        assert [row.name for row in client.slots().items] == ["one", "two"]
        assert client.evict("two").items[0].code == "pinned"
        assert client.evict("one").items[0].ok
        explained = client.explain("one")
    assert (explained.tier, explained.room.kv_floor_bytes) == ("ram", 0)
    with daemon.client() as client:
        detail = client.adapter("one")
    assert detail.pooling.kinds == ("cls",) and not detail.serving.keeps_kv
    row = daemon.adapter("one")
    assert (row.rank, row.running, row.prefix_query_tokens) == (4, 0, 0)


def test_an_adapter_may_bring_a_classifier(daemon, add):
    add("classes", 4, labels=3)
    with daemon.client() as client:
        serving = client.adapter("classes").serving
    assert serving.kinds == ("classifier",)
    assert {"score.weight.rows", "score.bias.rows"} <= set(serving.targets)


def test_an_adapter_of_another_architecture_is_quarantined(daemon):
    daemon.drop("llama", 7)
    assert daemon.wait_state("llama", "quarantined").reason.startswith("E_")


def test_the_status_says_how_it_pools_and_has_no_keys_and_values(daemon):
    with daemon.client() as client:
        status = client.status()
    assert (status.state, status.model, status.tasks) == ("ready", "vectors", ("embed",))
    assert status.max_model_len == LENGTH
    pooling = status.pooling
    assert (pooling.kinds, pooling.width, pooling.normalizes) == (("cls",), HIDDEN, True)
    assert pooling.origin == "1_Pooling/config.json"
    pool = status.pool
    assert (pool.block_size, pool.kv_active, pool.kv_cached) == (0, 0, 0)
    assert pool.free + pool.adapter_idle + pool.adapter_active == pool.total > 0


def test_metrics_and_the_live_picture_have_zeros_for_what_it_lacks(daemon):
    with daemon.client() as client:
        metrics = client.metrics()
        board = client.board()
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    assert lines["lorad_kv_cache_blocks"] == "0.0"
    assert float(lines['lorad_pool_blocks{use="free"}']) > 0
    assert board.status.pooling.width == HIDDEN
    assert (board.load.query_tokens, board.load.hit_tokens) == (0, 0)


def test_models_are_listed_with_what_they_are_for(daemon, add):
    add("listed", 3)
    with daemon.http() as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    for name in ("vectors", "listed"):
        facts = cards[name]["lorad"]
        assert (facts["tasks"], facts["dimensions"]) == (["embed"], HIDDEN)
    assert cards["listed"]["parent"] == "vectors"


@pytest.mark.parametrize("stream", [False, True])
def test_to_generate_is_a_400_that_says_what_the_model_does(daemon, stream):
    said = [{"role": "user", "content": "hello"}]
    for path, more in (
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        status, body = post(daemon, path, model="vectors", stream=stream, **more)
        assert status == 400 and body["error"]["param"] == "model"
        assert body["error"]["message"] == "vectors makes vectors and scores, and generates nothing"
        assert post(daemon, path, model="nobody", **more)[0] == 404


def test_text_becomes_the_tokens_of_its_own_tokenizer(daemon):
    status, body = post(daemon, "/tokenize", model="vectors", prompt="ab", return_token_strs=True)
    assert status == 200
    assert body["token_strs"] == ["[CLS]", "a", "b", "[SEP]"]


def test_what_an_adapter_does_is_verified(daemon):
    with daemon.client() as client:
        (told,) = client.verify("two", full=True).items
    assert told.ok and not told.findings, told
    assert told.modules == 2 * LAYERS and told.worst_error < told.tolerance
    assert told.bytes_checked > 0 and told.bytes_different == 0


def embed(http, name):
    """(status, revision that answered, vector or error code) of one text."""
    answer = http.post("/v1/embeddings", json={"model": name, "input": "some words"})
    body = answer.json()
    if answer.status_code != 200:
        return answer.status_code, "", body["error"]["code"]
    return 200, answer.headers["x-lorad-rev"], tuple(body["data"][0]["embedding"])


class Askers:
    """Threads that ask for vectors of `name` without a pause; `heard` is what they were told."""

    def __init__(self, daemon, name, count):
        self.over, self.heard = threading.Event(), []
        self.threads = [
            threading.Thread(target=self.ask, args=(daemon, name)) for _ in range(count)
        ]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a request without an end"

    def ask(self, daemon, name):
        with daemon.http() as http:
            while not self.over.is_set():
                self.heard.append(embed(http, name))


def test_replaced_evicted_and_loaded_under_load_each_answer_is_of_one_revision(daemon, add, poll):
    add("swap", 11)
    with Askers(daemon, "swap", 4) as askers, daemon.client() as client:
        for turn, seed in enumerate((12, 11, 12, 11)):
            told = len(askers.heard)
            poll(lambda told=told: len(askers.heard) > told + 8, "some answers")
            add("swap", seed, again=turn, replace=True)
            assert client.evict("swap").items[0].ok
            assert client.load("swap").items[0].ok
        told = len(askers.heard)
        poll(lambda: len(askers.heard) > told + 8, "some answers")
    assert {status for status, *_ in askers.heard} == {200}, Counter(askers.heard)
    said = {}
    for _, rev, vector in askers.heard:
        assert vector == pytest.approx(said.setdefault(rev, vector), abs=1e-6)
    assert len(said) == 2
    one, other = said.values()
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-2


def test_killed_under_load_each_waiting_request_ends_with_an_error(daemon, add, poll):
    add("killed", 21)
    with daemon.client() as client:
        before = client.status()
    with Askers(daemon, "killed", 6) as askers:
        poll(lambda: len(askers.heard) > 12, "some answers")
        os.kill(before.engine_pid, signal.SIGSTOP)
        poll(lambda: client_running(daemon) == 6, "all of them to wait")
        os.kill(before.engine_pid, signal.SIGKILL)
        poll(lambda: any(status == 503 for status, *_ in askers.heard), "their errors")
        daemon.wait_ready()
        told = len(askers.heard)
        poll(lambda: any(s == 200 for s, *_ in askers.heard[told:]), "answers again")
    answered = {(status, value) for status, _, value in askers.heard if status != 200}
    codes = {"engine_restarting", "loading_base"}
    assert all(status == 503 and code in codes for status, code in answered), answered
    with daemon.client() as client:
        assert client.status().engine_restarts == before.engine_restarts + 1
    assert len({vector for status, _, vector in askers.heard if status == 200}) == 1


def client_running(daemon):
    """Requests that have not ended, as the daemon counts them."""
    with daemon.client() as client:
        return client.board().num_requests


def test_after_the_engines_death_it_is_ready_again_with_what_was_pinned(daemon, poll):
    with daemon.client() as client:
        deaths = client.status().engine_restarts + 1
        os.kill(client.status().engine_pid, signal.SIGKILL)
        poll(lambda: client.status().engine_restarts == deaths, "the death to be noticed")
    daemon.wait_ready()
    assert daemon.wait_state("two", "idle").pinned


def test_check_refuses_what_a_start_would(daemon):
    text = daemon.config.read_text()
    try:
        daemon.config.write_text(text.replace("threads = 1", "num_blocks = 9"))
        status, said = daemon.refused("--check")
        assert status == 2 and "models.num_blocks: only a model that generates has it" in said
    finally:
        daemon.config.write_text(text)

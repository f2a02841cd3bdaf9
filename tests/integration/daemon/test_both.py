"""One model that generates and makes vectors and scores, with the same adapters for both."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from lorad import wire
from lorad.text.pair_prompt import qwen3_reranker
from lorad.text.tokenizer import Tokenizer
from tests.fakes.tiny_qwen3 import LENGTH, NO, YES, write_qwen3, write_qwen3_adapter

pytestmark = pytest.mark.slow

TEXTS = ["a", "some words", "wörds", "x" * 300, "some other words"]
QUERY, DOCUMENTS = "which of these is it? " * 4, [f"number {n} " * (n % 5 + 1) for n in range(12)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("both")


@pytest.fixture(scope="module")
def daemon(make_daemon, root):
    base, daemon = write_qwen3(root / "base"), make_daemon()
    daemon.config.write_text(
        f'[[models]]\nbase = "{base}"\nname = "base"\ndevice = "cpu"\nthreads = 1\n'
        'tasks = ["generate", "embed", "rerank", "classify"]\ncpu_pool = "16MiB"\n'
        '[lora]\nslots = 8\nram_cache = "16MiB"\n[watch]\nsettle = "100ms"\n'
    )
    daemon.start()
    for name, (seed, labels) in {"one": (1, 0), "two": (2, 0), "head": (3, 3)}.items():
        folder = write_qwen3_adapter(daemon.root / f".up-{name}", seed, labels=labels)
        with daemon.client() as client:
            client.upload(folder, wire.UploadStart(name=name))
        daemon.wait_state(name, "registered", "ram", "idle")
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module")
def library(root, daemon):
    """An engine that pools alone, in this process; revisions by name; and the tokenizer."""
    config = PoolingConfig(
        model=str(root / "base"),
        device="cpu",
        threads=1,
        adapter_pool=2 << 20,
        score_tokens=(YES, NO),
    )
    engine = PoolingEngine(config)
    revs = {
        name: engine.add_folder(daemon.root / f".up-{name}", root / "packed")
        for name in ("one", "two", "head")
    }
    yield engine, {"base": None, **revs}, Tokenizer.load(root / "base")
    engine.close()


def post(daemon, path, status=200, **body):
    with daemon.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def vectors(daemon, model, texts=TEXTS):
    answer = post(daemon, "/v1/embeddings", model=model, input=texts)
    return np.array([item["embedding"] for item in answer["data"]])


def generated(daemon, model, prompt="Once upon"):
    answer = post(
        daemon, "/v1/completions", model=model, prompt=prompt, max_tokens=24, temperature=0
    )
    return answer["choices"][0]["text"]


def wanted_vectors(library, name):
    engine, revs, tokenizer = library
    ids = [tokenizer.encode(text, True) for text in TEXTS]
    return np.array(engine.embed(ids, revs=[revs[name]] * len(ids)))


def wanted_scores(library, name):
    engine, revs, tokenizer = library
    ids = []
    for document in DOCUMENTS:
        asked = qwen3_reranker().ask(QUERY, document, "")
        parts = asked.text[: asked.end], asked.text[asked.end :]
        ids.append([token for part in parts for token in tokenizer.encode(part, False)])
    assert max(map(len, ids)) < LENGTH
    return [float(r.values[0]) for r in engine.classify(ids, revs=[revs[name]] * len(ids))]


def scores(daemon, model):
    told = post(daemon, "/v1/score", model=model, text_1=QUERY, text_2=DOCUMENTS)
    return [one["score"] for one in told["data"]]


def test_all_endpoints_at_the_same_moment_give_what_each_gives_alone(daemon, library):
    names = ("base", "one", "two")
    quiet = {name: generated(daemon, name) for name in names}
    wanted = {name: (wanted_vectors(library, name), wanted_scores(library, name)) for name in names}
    begin = threading.Barrier(9)

    def ask(what, name):
        begin.wait()
        return what, name, [what(daemon, name) for _ in range(3)]

    jobs = [(what, name) for name in names for what in (generated, vectors, scores)]
    with ThreadPoolExecutor(len(jobs)) as threads:
        for what, name, answers in threads.map(lambda job: ask(*job), jobs):
            for answer in answers:
                if what is generated:
                    assert answer == quiet[name]
                elif what is vectors:
                    assert (
                        np.abs(answer - wanted[name][0]).max()
                        < 1e-5 * np.abs(wanted[name][0]).max()
                    )
                else:
                    assert answer == pytest.approx(wanted[name][1], abs=1e-5)


def test_a_query_ahead_of_its_documents_is_computed_once(daemon, library):
    def prefix():
        daemon.is_ready()
        with daemon.client() as client:
            return client.status().prefix

    before = prefix()
    query = "a query that nobody has asked before"
    told = post(daemon, "/v1/rerank", model="two", query=query, documents=DOCUMENTS)
    assert len(told["results"]) == len(DOCUMENTS)
    after = prefix()
    asked = qwen3_reranker().ask(query, "", "")
    _, _, tokenizer = library
    ahead = len(tokenizer.encode(asked.text[: asked.end], False)) // 16 * 16
    assert ahead > 64
    assert after.hit_tokens - before.hit_tokens >= (len(DOCUMENTS) - 1) * ahead


def test_a_head_of_an_adapters_own_classifies_and_its_adapter_generates(daemon, library):
    engine, revs, tokenizer = library
    told = post(daemon, "/classify", model="head", input=TEXTS[:2])
    ids = [tokenizer.encode(text, True) for text in TEXTS[:2]]
    wanted = engine.classify(ids, revs=[revs["head"]] * 2)
    for one, result in zip(told["data"], wanted, strict=True):
        assert one["num_classes"] == 3
        assert one["probs"] == pytest.approx(result.values.tolist(), abs=1e-5)
    assert generated(daemon, "head") != generated(daemon, "base")


def test_what_is_shown_is_of_both(daemon, capsys):
    with daemon.client() as client:
        status, detail = client.status(), client.adapter("head")
    assert status.tasks == ("generate", "embed", "rerank", "classify")
    assert status.pooling == detail.pooling
    assert (status.pooling.kinds, status.pooling.score_tokens) == (("last",), (YES, NO))
    assert detail.serving.keeps_kv and status.pool.block_size == 16
    with daemon.http() as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert (
        set(cards["base"]["lorad"]["tasks"])
        == set(status.tasks)
        == set(cards["one"]["lorad"]["tasks"])
    )
    assert cards["base"]["lorad"]["dimensions"] == status.pooling.width


def test_an_adapter_is_verified_on_the_engine_that_does_both(daemon):
    with daemon.client() as client:
        client.load("head")
        (told,) = client.verify("head", full=True).items
    assert told.ok and not told.findings, told


def test_a_client_that_leaves_takes_its_inputs_back(daemon, poll):
    texts = [f"{n} " + "y" * (LENGTH - 40) for n in range(200)]
    body = json.dumps({"model": "one", "input": texts}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"

    def status():
        with daemon.client() as client:
            return client.status()

    before = status().prompt_tokens
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.inference))
        client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        poll(lambda: status().running, "it runs")

    def over():
        now = status()
        return now.running == now.waiting == 0 and now.pool.kv_active == 0

    poll(over, "nothing runs")
    assert status().prompt_tokens - before < 200 * (LENGTH - 40) / 2
    assert generated(daemon, "one")

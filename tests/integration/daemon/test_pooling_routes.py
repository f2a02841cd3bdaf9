"""Vectors and scores over HTTP from a daemon whose engine is a process of its own."""

import os
import signal
import socket

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from lorad import wire
from lorad.client import openai
from lorad.text.tokenizer import Tokenizer
from tests.fakes.tiny_bert import HIDDEN, LENGTH, write_bert, write_bert_adapter

pytestmark = pytest.mark.slow

TEXTS = ["a", "some words", "wörds", "x" * (LENGTH - 2), "some other words"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A cross-encoder whose files also say how it pools."""
    return write_bert(tmp_path_factory.mktemp("bert"), labels=1, pooling="mean")


@pytest.fixture(scope="module")
def port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def daemon(make_daemon, base, port):
    daemon = make_daemon()
    daemon.config.write_text(
        f'[[models]]\nbase = "{base}"\nname = "vectors"\ndevice = "cpu"\nthreads = 1\n'
        'tasks = ["embed", "rerank", "classify"]\n'
        '[lora]\nslots = 8\nram_cache = "16MiB"\nadapter_pool = "2MiB"\n'
        '[watch]\nsettle = "100ms"\n'
        f'[tcp]\nenabled = true\nbind = "127.0.0.1:{port}"\n'
    )
    daemon.start()
    for seed in (1, 2):
        folder = write_bert_adapter(daemon.root / f".up-{seed}", seed)
        with daemon.client() as client:
            client.upload(folder, wire.UploadStart(name=f"acme/{seed}"))
        daemon.wait_state(f"acme/{seed}", "registered", "ram", "idle")
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module")
def library(base, daemon):
    """text, adapter's number (0: the base) -> the vector that the library gives."""
    tokenizer = Tokenizer.load(base)
    config = PoolingConfig(model=str(base), device="cpu", threads=1, adapter_pool=2 << 20)
    with PoolingEngine(config) as engine:
        revs = {
            n: engine.add_folder(daemon.root / f".up-{n}", daemon.root / "packed") for n in (1, 2)
        }

        def vector(text, number=0):
            [found] = engine.embed([tokenizer.encode(text, True)], revs=[revs.get(number)])
            return found

        yield vector


def post(daemon, path, **body):
    with daemon.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_of_the_base_and_of_adapters_are_those_of_the_library(daemon, library):
    client = openai(daemon.inference)
    for number, name in enumerate(("vectors", "acme/1", "acme/2")):
        answer = client.embeddings.create(model=name, input=TEXTS)
        for text, item in zip(TEXTS, answer.data, strict=True):
            assert np.abs(np.array(item.embedding) - library(text, number)).max() < 1e-5
            assert len(item.embedding) == HIDDEN
        assert answer.usage.total_tokens == sum(len(t.encode()) + 2 for t in TEXTS)
    client.close()


def test_documents_are_ranked_by_the_head_and_by_vectors(daemon):
    documents = ["some words", "zzz", "some other words", "y" * 200]
    ranked = post(daemon, "/v1/rerank", query="some words", documents=documents)["results"]
    scores = {r["index"]: r["relevance_score"] for r in ranked}
    tei = post(daemon, "/rerank", query="some words", texts=documents, truncate=True)
    # Which inputs share a step is chance, and the last bit hangs on it.
    assert {item["index"]: item["score"] for item in tei} == pytest.approx(scores, rel=1e-5)
    each = [
        post(daemon, "/v1/score", model="vectors", text_1="some words", text_2=d)["data"][0][
            "score"
        ]
        for d in documents[:3]
    ]
    assert each == pytest.approx([scores[i] for i in range(3)], rel=1e-5)
    by_cosine = post(
        daemon, "/v2/rerank", query="some words", documents=documents, scoring="cosine", top_n=1
    )
    [best] = by_cosine["results"]
    assert best["index"] == 0 and best["relevance_score"] == pytest.approx(1, abs=1e-5)


def test_huggingface_hub_embeds_and_compares_over_tcp_as_with_tei(daemon, library, port):
    for number, name in ((0, "vectors"), (1, "acme/1")):
        asked = InferenceClient(model=f"http://127.0.0.1:{port}/embed?model={name}")
        told = asked.feature_extraction(TEXTS)
        wanted = np.array([library(text, number) for text in TEXTS])
        assert told.shape == wanted.shape and np.abs(told - wanted).max() < 1e-5
    asked = InferenceClient(model=f"http://127.0.0.1:{port}")
    assert np.abs(asked.feature_extraction(TEXTS[0]) - library(TEXTS[0])).max() < 1e-5
    alike = asked.sentence_similarity(TEXTS[1], other_sentences=TEXTS)
    wanted = [float(library(TEXTS[1]) @ library(text)) for text in TEXTS]
    assert alike == pytest.approx(wanted, abs=1e-5)


def test_classes_tokens_and_metrics(daemon):
    [item] = post(daemon, "/classify", model="acme/1", input=["x"])["data"]
    assert (item["label"], item["num_classes"]) == ("class 0", 1)
    [item] = post(daemon, "/pooling", model="vectors", input="abc")["data"]
    assert item["shape"] == [5, HIDDEN]
    with daemon.client() as client:
        lines = client.metrics().splitlines()
    counted = [line for line in lines if 'endpoint="classify"' in line and "_count" in line]
    assert [line.rsplit(" ", 1)[1] for line in counted if 'kind="lora"' in line] == ["1.0"]


def test_after_the_engines_death_the_next_one_gives_the_same_vectors(daemon, poll):
    before = post(daemon, "/v1/embeddings", model="acme/2", input="x")["data"]
    with daemon.client() as client:
        os.kill(client.status().engine_pid, signal.SIGKILL)
        poll(lambda: client.status().engine_restarts == 1, "the engine's death to be noticed")
    daemon.wait_ready()
    assert post(daemon, "/v1/embeddings", model="acme/2", input="x")["data"] == before

"""A ColBERT over HTTP from a daemon, in both dialects, with adapters: vectors of tokens, MaxSim."""

import numpy as np
import pytest

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from lorad import wire
from lorad.cli.revision import pooling_words
from lorad.text.tokenizer import Tokenizer
from tests.fakes.tiny_bert import write_bert_adapter
from tests.fakes.tiny_colbert import (
    CLS,
    DOCUMENT,
    MASK,
    QUERY,
    QUERY_LENGTH,
    SEP,
    WIDTH,
    write_colbert,
)

pytestmark = pytest.mark.late

TEXTS = ["some words", "no. words!", "wörds"]
NAMES = ("pylate", "colbert", "acme/one")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("colbert")
    return {name: write_colbert(root / name, name) for name in ("pylate", "colbert")}


@pytest.fixture(scope="module")
def daemon(make_daemon, bases):
    daemon = make_daemon()
    entries = (
        f'[[models]]\nbase = "{base}"\nname = "{name}"\ndevice = "cpu"\nthreads = 1\n'
        for name, base in bases.items()
    )
    daemon.config.write_text(
        "".join(entries) + '[lora]\nslots = 8\nram_cache = "16MiB"\nadapter_pool = "2MiB"\n'
    )
    daemon.start()
    folder = write_bert_adapter(daemon.root / ".one", 1)
    with daemon.client() as client:
        client.upload(folder, wire.UploadStart(name="acme/one", model="pylate"))
    daemon.wait_state("acme/one", "registered", "ram", "idle")
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module")
def vectors(bases, daemon):
    """name, role, text -> what the library gives, of what is read by hand."""
    tokenizer = Tokenizer.load(bases["pylate"])
    engines = {
        name: PoolingEngine(PoolingConfig(model=str(base), device="cpu", threads=1))
        for name, base in bases.items()
    }
    rev = engines["pylate"].add_folder(daemon.root / ".one", daemon.root / "packed")

    def made(name, role, text):
        model, on = ("pylate", rev) if name == "acme/one" else (name, None)
        ids = tokenizer.encode(text, add_special=False)
        tokens = [CLS, QUERY if role == "query" else DOCUMENT, *ids, SEP]
        unseen = QUERY_LENGTH - len(tokens) if role == "query" else 0
        filled = [*tokens, *[MASK] * unseen]
        [rows] = engines[model].embed_tokens([filled], revs=[on], unseen=unseen)
        skipped = {tokenizer.token_id(mark) for mark in ".!"}
        kept = [i for i, t in enumerate(filled) if role == "query" or t not in skipped]
        return rows[kept]

    yield made
    for engine in engines.values():
        engine.close()


def post(daemon, path, status=200, **body):
    with daemon.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def maxsim(one, two):
    return float((one @ two.T).max(1).sum())


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_tokens_are_those_of_the_library(daemon, vectors, name):
    for role, texts in (("query", ["words?"]), ("document", TEXTS)):
        told = post(daemon, "/pooling", model=name, input=texts, input_type=role)
        for text, item in zip(texts, told["data"], strict=True):
            wanted = vectors(name, role, text)
            assert item["shape"] == [len(wanted), WIDTH] == list(wanted.shape)
            assert np.abs(np.array(item["data"]) - wanted).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_every_route_that_ranks_does_so_by_maxsim(daemon, vectors, name):
    query = vectors(name, "query", "words?")
    wanted = [maxsim(query, vectors(name, "document", text)) for text in TEXTS]
    order = np.argsort(-np.array(wanted)).tolist()
    for path in ("/v1/rerank", "/v2/rerank"):
        told = post(daemon, path, model=name, query="words?", documents=TEXTS)["results"]
        assert [one["index"] for one in told] == order
        assert np.allclose([one["relevance_score"] for one in told], sorted(wanted)[::-1])
    told = post(daemon, f"/rerank?model={name}", query="words?", texts=TEXTS)
    assert [one["index"] for one in told] == order
    told = post(daemon, "/v1/score", model=name, text_1="words?", text_2=TEXTS)["data"]
    assert np.allclose([one["score"] for one in told], wanted)


def test_what_has_no_meaning_is_a_400_that_says_where_to_go(daemon):
    told = post(daemon, "/v1/embeddings", 400, model="colbert", input="x")["error"]
    assert (told["code"], told["param"]) == ("unsupported_parameter", "model")
    assert "/pooling" in told["details"]["hint"]
    told = post(daemon, "/pooling", 400, model="colbert", input="x")["error"]
    assert (told["code"], told["param"]) == ("invalid_value", "input_type")


def test_how_it_pools_is_shown(daemon):
    with daemon.client() as client:
        told = [pooling_words(one.pooling) for one in client.status().models]
    assert told == [
        "each token (config_sentence_transformers.json), 8 numbers, of length 1",
        "each token (artifact.metadata), 8 numbers, of length 1",
    ]

"""Daemons whose model is a decoder that makes vectors, or scores how well two texts fit."""

import numpy as np
import pytest

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from lorad import wire
from lorad.text.pair_prompt import qwen3_reranker
from lorad.text.tokenizer import Tokenizer
from tests.fakes.tiny_qwen3 import HIDDEN, LENGTH, NO, YES, write_qwen3, write_qwen3_adapter

pytestmark = pytest.mark.slow

TEXTS = ["a", "some words", "wörds", "x" * (LENGTH - 1), "some other words"]
DOCUMENTS = ["that", "yes and no", "", "y" * 2000, "something else"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("pooled")


def begin(make_daemon, base, models, adapters):
    """A daemon with these adapters: name -> (seed, classes of its own)."""
    daemon = make_daemon()
    daemon.config.write_text(
        f'[[models]]\nbase = "{base}"\nname = "base"\ndevice = "cpu"\nthreads = 1\n{models}\n'
        '[lora]\nslots = 8\nram_cache = "16MiB"\nadapter_pool = "2MiB"\n'
        '[watch]\nsettle = "100ms"\n'
    )
    daemon.start()
    for name, (seed, labels) in adapters.items():
        folder = write_qwen3_adapter(daemon.root / f".up-{name}", seed, labels=labels)
        with daemon.client() as client:
            client.upload(folder, wire.UploadStart(name=name))
        daemon.wait_state(name, "registered", "ram", "idle")
    return daemon


@pytest.fixture(scope="module")
def embedder(make_daemon, root):
    base = write_qwen3(root / "embedder", embeds=True)
    daemon = begin(make_daemon, base, "", {"one": (1, 0), "two": (2, 0)})
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module")
def reranker(make_daemon, root):
    base = write_qwen3(root / "reranker")
    adapters = {"one": (1, 0), "head": (3, 1), "classes": (4, 3)}
    models = 'tasks = ["rerank", "classify"]\nprefix_cache = "off"'
    daemon = begin(make_daemon, base, models, adapters)
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module")
def library(root):
    """library(folder, words): an engine in this process, and the folder's tokenizer."""
    made = []

    def library(folder, **told):
        config = PoolingConfig(
            model=str(folder), device="cpu", threads=1, adapter_pool=2 << 20, **told
        )
        made.append(PoolingEngine(config))
        return made[-1], Tokenizer.load(folder)

    yield library
    for engine in made:
        engine.close()


def post(daemon, path, status=200, **body):
    with daemon.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def vectors(daemon, model, texts, **more):
    answer = post(daemon, "/v1/embeddings", model=model, input=texts, **more)
    return np.array([item["embedding"] for item in answer["data"]])


def test_vectors_are_those_of_the_last_token_which_is_the_end_mark(embedder, root, library):
    engine, tokenizer = library(root / "embedder")
    ids = [tokenizer.encode(text, True) for text in TEXTS]
    for name in ("base", "one", "two"):
        rev = None
        if name != "base":
            rev = engine.add_folder(embedder.root / f".up-{name}", embedder.root / "packed")
        wanted = np.array(engine.embed(ids, revs=[rev] * len(ids)))
        assert np.abs(vectors(embedder, name, TEXTS) - wanted).max() < 1e-5
    assert np.allclose(np.linalg.norm(wanted, axis=1), 1.0)
    queries = [tokenizer.encode(f"Instruct: Find it\nQuery:{text}", True) for text in TEXTS[:2]]
    asked = vectors(embedder, "base", TEXTS[:2], input_type="query")
    assert np.abs(asked - np.array(engine.embed(queries))).max() < 1e-5
    short = vectors(embedder, "base", TEXTS[:2], dimensions=8)
    assert short.shape == (2, 8) and np.allclose(np.linalg.norm(short, axis=1), 1.0)
    post(embedder, "/v1/embeddings", 400, model="base", input="x" * LENGTH)
    post(embedder, "/v1/embeddings", 400, model="base", input="")
    cut = vectors(embedder, "base", ["x" * 2 * LENGTH], truncate=True)
    assert np.abs(cut - vectors(embedder, "base", ["x" * (LENGTH - 1)])).max() < 1e-6


def test_the_status_says_how_it_pools_and_what_memory_it_takes(embedder):
    with embedder.client() as client:
        status, detail = client.status(), client.adapter("one")
    assert (status.tasks, status.max_model_len) == (("embed",), LENGTH)
    assert status.pooling == detail.pooling
    told = status.pooling
    assert (told.kinds, told.width, told.normalizes) == (("last",), HIDDEN, True)
    assert told.origin == "1_Pooling/config.json"
    assert status.pool.block_size == 16 and "tokens or" in embedder.tail()


def test_one_whose_inputs_begin_with_nothing_cached_keeps_nothing(reranker):
    with reranker.client() as client:
        assert client.status().pool.block_size == 0
    assert "of one layer and one step" in reranker.tail()


def test_an_instruction_that_queries_share_is_computed_once(embedder):
    def hits():
        with embedder.client() as client:
            return client.status().prefix.hit_tokens

    before = hits()
    texts = [f"{n} or so" for n in range(20)]
    task = "given what somebody asks, find what answers it, as short as it can be said"
    vectors(embedder, "two", texts, input_type="query", instruction=task)
    embedder.is_ready()
    shared = len(f"Instruct: {task}\nQuery:") // 16 * 16
    assert hits() - before == 19 * shared


def test_to_generate_is_a_400(embedder):
    said = post(embedder, "/v1/completions", 400, model="base", prompt="x")
    assert "makes vectors and scores" in said["error"]["message"]


def test_what_an_adapter_does_is_verified(embedder):
    with embedder.client() as client:
        (told,) = client.verify("two", full=True).items
    assert told.ok and not told.findings, told
    assert told.modules == 4 and told.worst_error < told.tolerance


def scores(engine, tokenizer, query, documents, rev=None, task=""):
    ids = []
    for document in documents:
        asked = qwen3_reranker().ask(query, document, task)
        parts = asked.text[: asked.end], asked.text[asked.end :]
        ahead, behind = (tokenizer.encode(part, False) for part in parts)
        ids.append([*ahead[: LENGTH - len(behind)], *behind])
    return engine.classify(ids, revs=[rev] * len(ids))


def test_reranked_by_yes_over_no_and_by_adapters(reranker, root, library):
    engine, tokenizer = library(root / "reranker", score_tokens=(YES, NO))
    for name in ("base", "one", "head"):
        rev = None
        if name != "base":
            rev = engine.add_folder(reranker.root / f".up-{name}", reranker.root / "packed")
        wanted = scores(engine, tokenizer, "which?", DOCUMENTS, rev)
        told = post(reranker, "/v1/rerank", model=name, query="which?", documents=DOCUMENTS)[
            "results"
        ]
        order = sorted(range(len(wanted)), key=lambda i: -wanted[i].logits[0])
        assert [one["index"] for one in told] == order
        for one in told:
            got, score = one["relevance_score"], wanted[one["index"]].values[0]
            assert abs(got - score) < 1e-5 and 0 < got < 1
        pairs = post(reranker, "/v1/score", model=name, text_1="which?", text_2=DOCUMENTS[:3])
        assert [one["score"] for one in pairs["data"]] == pytest.approx(
            [float(one.values[0]) for one in wanted[:3]], abs=1e-5
        )
    task = scores(engine, tokenizer, "which?", DOCUMENTS[:1], None, "Find it")[0].values[0]
    [told] = post(
        reranker,
        "/v1/rerank",
        model="base",
        query="which?",
        documents=DOCUMENTS[:1],
        instruction="Find it",
    )["results"]
    assert abs(told["relevance_score"] - task) < 1e-5
    raw = post(reranker, "/rerank", query="which?", texts=DOCUMENTS[:2], raw_scores=True)
    wanted = scores(engine, tokenizer, "which?", DOCUMENTS[:2])
    assert {one["index"]: one["score"] for one in raw} == pytest.approx(
        {i: float(one.logits[0]) for i, one in enumerate(wanted)}, abs=1e-4
    )


def test_what_does_not_fit_and_what_is_not_served(reranker):
    told = {"model": "base", "documents": ["a"]}
    long = post(reranker, "/v1/rerank", 400, query="q" * LENGTH, **told)
    assert "without its document" in long["error"]["message"]
    alone = post(reranker, "/classify", 400, model="base", input="a text alone")
    assert "how well two texts fit" in alone["error"]["message"]
    post(reranker, "/v1/embeddings", 400, model="base", input="a")
    classes = post(reranker, "/classify", model="classes", input="a text alone")
    assert classes["data"][0]["num_classes"] == 3


def test_the_words_are_shown(reranker):
    with reranker.client() as client:
        told = client.status().pooling
        serving = client.adapter("classes").serving
    assert told.score_tokens == (YES, NO) and told.labels == ()
    assert told.asks == "the form of Qwen3-Reranker"
    assert serving.kinds == ("classifier",) and "score.weight.rows" in serving.targets


def test_an_adapter_with_a_head_is_verified_too(reranker):
    with reranker.client() as client:
        assert client.load("classes").items[0].ok
        reranker.wait_state("classes", "idle")
        (told,) = client.verify("classes", full=True).items
    assert told.ok and not told.findings, told


def test_check_refuses_what_a_start_would(reranker):
    text = reranker.config.read_text()
    try:
        for models, told in (
            ('prefix_cache = "on"\npooling = "mean"', "pooling by mean reads rows"),
            ('chunked_prefill = "on"\npooling = "cls"', "pooling by cls reads rows"),
            ('score_words = ["maybe"]', "is 5 tokens of this model"),
            ('pair_template = "/nowhere.jinja"', "cannot be read"),
        ):
            usual = text.replace('prefix_cache = "off"', "")
            reranker.config.write_text(usual.replace("threads = 1", models))
            status, said = reranker.refused("--check")
            assert status == 2 and told in said, said
    finally:
        reranker.config.write_text(text)

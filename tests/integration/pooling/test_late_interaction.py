"""Late interaction from the files of a model to scores: what is read of a query and of a document,
which tokens see which, and which have a vector."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError, ModelUnsupported
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.files import read_pooling
from engine.pooling.requests import PoolRequest
from lorad.errors import LoradError
from lorad.service.pool_ask import Cut, Input, PoolAsk, ScoreAsk, Wish
from lorad.text.late import LateText
from lorad.text.tokenizer import TextError, Tokenizer
from tests.fakes.tiny_bert import LENGTH, write_bert
from tests.fakes.tiny_colbert import (
    CLS,
    DOCUMENT,
    DOCUMENT_LENGTH,
    MASK,
    QUERY,
    QUERY_LENGTH,
    SEP,
    WIDTH,
    Dialect,
    write_colbert,
)
from tests.integration.pooling.test_pooling_service import CoreLink, service_of

DIALECTS: tuple[Dialect, ...] = ("pylate", "colbert")


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def folder(dialect: Dialect, tmp_path: Path) -> Path:
    return write_colbert(tmp_path / "model", dialect)


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Any]]:
    links: list[CoreLink] = []

    def start(folder: Path) -> Any:
        links.append(CoreLink(folder))
        service = service_of(folder, links[-1])
        service._links = links[-1]
        return service

    yield start
    for link in links:
        link.close()


def hidden(folder: Path, tokens: list[int], seen: int) -> Any:
    """Hidden states (tokens, hidden) of transformers' own BERT, to which what is not seen is
    padding."""
    import transformers

    tensors = load_file(folder / "model.safetensors")
    model = transformers.BertModel(
        transformers.BertConfig(**transformers.BertConfig.get_config_dict(folder)[0]),
        add_pooling_layer=False,
    ).eval()
    own = {k.removeprefix("bert."): v for k, v in tensors.items()}
    model.load_state_dict({k: own[k] for k in model.state_dict()})
    mask = torch.tensor([[1] * seen + [0] * (len(tokens) - seen)])
    with torch.no_grad():
        return model(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0]


def vectors(folder: Path, tokens: list[int], seen: int, skipped: set[int] | None = None) -> Any:
    """What a token of each place ought to have."""
    path = folder / "1_Dense" / "model.safetensors"
    tensors = load_file(path if path.exists() else folder / "model.safetensors")
    rows = hidden(folder, tokens, seen) @ tensors["linear.weight"].T
    rows = rows / rows.norm(dim=1, keepdim=True)
    return rows[[i for i, token in enumerate(tokens) if token not in (skipped or set())]].numpy()


def query(text: str) -> list[int]:
    return [CLS, QUERY, *text.encode(), SEP]


def document(text: str) -> list[int]:
    return [CLS, DOCUMENT, *text.encode(), SEP]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


def ask(service: Any, text: str, role: Any, **more: Any) -> Any:
    wish = Wish(model="m", endpoint="pooling", cut=more.pop("cut", Cut()))
    told = PoolAsk(wish=wish, task="tokens", inputs=(Input(text, None, "input", role),), **more)
    [result] = asyncio.run(service.run(told)).results
    return result


def test_a_query_is_filled_up_with_what_sees_the_others_and_is_not_seen(
    folder: Path, serve: Callable[[Path], Any]
) -> None:
    service, tokenizer = serve(folder), Tokenizer.load(folder)
    tokens = [CLS, QUERY, *ids(tokenizer, "cats?"), SEP]
    filled = [*tokens, *[MASK] * (QUERY_LENGTH - len(tokens))]
    got = ask(service, "cats?", "query")
    assert got.values.shape == (QUERY_LENGTH, WIDTH) and got.num_tokens == QUERY_LENGTH
    assert np.abs(got.values - vectors(folder, filled, len(tokens))).max() < 1e-5
    # And would be others, were they seen.
    assert np.abs(got.values - vectors(folder, filled, len(filled))).max() > 1e-2


def test_a_document_has_a_vector_for_each_token_but_those_of_its_punctuation(
    folder: Path, serve: Callable[[Path], Any]
) -> None:
    service, tokenizer = serve(folder), Tokenizer.load(folder)
    tokens = [CLS, DOCUMENT, *ids(tokenizer, "a cat. yes!"), SEP]
    skipped = {*ids(tokenizer, "."), *ids(tokenizer, "!")}
    got = ask(service, "a cat. yes!", "document")
    assert got.values.shape == (len(tokens) - 2, WIDTH) and got.num_tokens == len(tokens)
    assert np.abs(got.values - vectors(folder, tokens, len(tokens), skipped)).max() < 1e-5


def test_a_rerank_and_a_score_are_sums_of_the_best_products(
    folder: Path, serve: Callable[[Path], Any]
) -> None:
    service, tokenizer = serve(folder), Tokenizer.load(folder)
    texts = ["dogs. and cats", "a cat", "nothing of it!"]
    asked = [CLS, QUERY, *ids(tokenizer, "a cat"), SEP]
    one = vectors(folder, [*asked, *[MASK] * (QUERY_LENGTH - len(asked))], len(asked))
    skipped = {*ids(tokenizer, "."), *ids(tokenizer, "!")}
    wanted = []
    for text in texts:
        tokens = [CLS, DOCUMENT, *ids(tokenizer, text), SEP]
        two = vectors(folder, tokens, len(tokens), skipped)
        wanted.append((one @ two.T).max(1).sum())
    for ranks, endpoint in ((True, "rerank"), (False, "score")):
        scored = asyncio.run(
            service.score(
                ScoreAsk(
                    wish=Wish(model="m", endpoint=endpoint),  # type: ignore[arg-type]
                    firsts=("a cat",),
                    seconds=tuple(texts),
                    params=("query", "documents"),
                    ranks=ranks,
                )
            )
        )
        assert scored.how == "maxsim"
        assert np.abs(np.array(scored.scores) - wanted).max() < 1e-4
        assert list(scored.order) == np.argsort(-np.array(wanted)).tolist()


def test_what_is_too_long_is_cut_to_the_length_of_its_kind_or_refused(
    folder: Path, serve: Callable[[Path], Any]
) -> None:
    service, cut = serve(folder), Cut(truncate=True)
    for role, most in (("query", QUERY_LENGTH), ("document", DOCUMENT_LENGTH)):
        with pytest.raises(LoradError) as told:
            ask(service, "x" * 30, role)
        assert told.value.code == "context_length_exceeded" and str(most) in told.value.message
        got = ask(service, "x" * 30, role, cut=cut)
        assert got.values.shape == (most, WIDTH)
        mark = QUERY if role == "query" else DOCUMENT
        x = ids(Tokenizer.load(folder), "x")
        wanted = vectors(folder, [CLS, mark, *x * (most - 3), SEP], most)
        assert np.abs(got.values - wanted).max() < 1e-5


def test_a_rerank_bounds_documents_by_themselves(
    folder: Path, serve: Callable[[Path], Any]
) -> None:
    service, x = serve(folder), ids(Tokenizer.load(folder), "x")
    cut = Cut(truncate=True, pair="only_second", second=3)
    got = ask(service, "x" * 9, "document", cut=cut)
    assert np.abs(got.values - vectors(folder, [CLS, DOCUMENT, *x * 3, SEP], 6)).max() < 1e-5
    assert ask(service, "x" * 8, "query", cut=cut).num_tokens == QUERY_LENGTH


def test_what_it_cannot_do_is_refused_by_name(folder: Path, serve: Callable[[Path], Any]) -> None:
    service = serve(folder)
    with pytest.raises(LoradError) as told:
        ask(service, "which of them?", None)
    assert (told.value.code, told.value.param) == ("invalid_value", "input_type")
    wish = Wish(model="m", endpoint="embeddings")
    with pytest.raises(LoradError) as told:
        asyncio.run(service.run(PoolAsk(wish=wish, task="embed", inputs=(Input("x"),))))
    assert (told.value.code, told.value.param) == ("unsupported_parameter", "model")
    assert "/pooling" in told.value.hint
    compare = ScoreAsk(
        wish=wish, firsts=("a",), seconds=("b",), params=("q", "d"), scoring="vectors"
    )
    with pytest.raises(LoradError) as told:
        asyncio.run(service.score(compare))
    assert (told.value.code, told.value.param) == ("unsupported_parameter", "scoring")


def test_token_ids_are_taken_as_they_are(folder: Path, serve: Callable[[Path], Any]) -> None:
    service, tokens = serve(folder), [CLS, 7, 9, SEP]
    wish = Wish(model="m", endpoint="pooling")
    told = PoolAsk(wish=wish, task="tokens", inputs=(Input(tuple(tokens)),))
    [got] = asyncio.run(service.run(told)).results
    assert np.abs(got.values - vectors(folder, tokens, 4)).max() < 1e-5


def test_vectors_are_cut_normed_anew_and_bare_when_asked(folder: Path) -> None:
    with PoolingEngine(PoolingConfig(model=str(folder), device="cpu")) as engine:
        [whole] = engine.embed_tokens([[CLS, 5, SEP]])
        [cut] = engine.embed_tokens([[CLS, 5, SEP]], dimensions=3)
        [bare] = engine.embed_tokens([[CLS, 5, SEP]], normalize=False)
    assert np.abs(np.linalg.norm(cut, axis=1) - 1).max() < 1e-6 and cut.shape == (3, 3)
    lengths = np.linalg.norm(bare, axis=1, keepdims=True)
    assert np.abs(lengths - 1).max() > 0.1 and np.abs(bare / lengths - whole).max() < 1e-6
    assert np.abs(cut - whole[:, :3] / np.linalg.norm(whole[:, :3], axis=1)[:, None]).max() < 1e-6


def test_queries_of_unlike_lengths_and_documents_do_not_change_each_other(folder: Path) -> None:
    queries = [([CLS, QUERY, *range(n), SEP], QUERY_LENGTH - 3 - n) for n in (1, 4, 4, 9)]
    with PoolingEngine(PoolingConfig(model=str(folder), device="cpu")) as engine:
        alone = []
        for tokens, unseen in queries:
            filled = [*tokens, *[MASK] * unseen]
            alone += engine.embed_tokens([filled], unseen=unseen)
        core = engine.core
        for n, (tokens, unseen) in enumerate(queries):
            told = {"tokens": [*tokens, *[MASK] * unseen], "unseen": unseen, "task": "tokens"}
            core.take(PoolRequest(request_id=f"q{n}", **told))
            core.take(PoolRequest(request_id=f"d{n}", tokens=list(range(12)), task="tokens"))
        found = {r.request_id: r.values for r in core.step().results}
    for n, wanted in enumerate(alone):
        got = found[f"q{n}"]
        assert got is not None and np.abs(got - wanted).max() < 1e-5


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"query_prefix": "[Nobody] "}, "lacks the mark '[Nobody] '"),
        ({"document_prefix": None}, ""),  # [D] is meant
        ({"query_prefix": ""}, ""),  # none is put there
    ],
)
def test_marks_have_to_be_in_the_vocabulary(given: Any, told: str, tmp_path: Path) -> None:
    folder = write_colbert(tmp_path / "model", "pylate", **given)
    late = read_pooling(folder).late
    assert late is not None
    if told:
        with pytest.raises(TextError, match="lacks the mark"):
            LateText(Tokenizer.load(folder), late)
        return
    text = LateText(Tokenizer.load(folder), late)
    assert text.marked([1, 2], "document") == [1, DOCUMENT, 2]
    wanted = [1, 2] if given.get("query_prefix") == "" else [1, QUERY, 2]
    assert text.marked([1, 2], "query") == wanted


def test_queries_that_are_not_filled_up_or_whose_filling_is_seen(tmp_path: Path) -> None:
    tokens = [CLS, QUERY, 5, SEP]
    for told, wanted in (
        ({"do_query_expansion": False}, (tokens, 0)),
        ({"do_query_expansion": False, "attend_to_expansion_tokens": True}, (tokens, 0)),
        ({"attend_to_expansion_tokens": True}, ([*tokens, *[MASK] * 8], 0)),
        ({}, ([*tokens, *[MASK] * 8], 8)),
    ):
        folder = write_colbert(tmp_path / str(len(list(tmp_path.iterdir()))), "pylate", **told)
        late = read_pooling(folder).late
        assert late is not None
        assert LateText(Tokenizer.load(folder), late).filled(tokens, LENGTH) == wanted


@pytest.mark.parametrize(
    ("dialect", "told", "why"),
    [
        ("pylate", {"similarity_fn_name": "XTR"}, "similarity_fn_name"),
        ("pylate", {"query_length": 0}, "query_length"),
        ("pylate", {"skiplist_words": "."}, "skiplist_words"),
        ("pylate", {"do_query_expansion": "yes"}, "do_query_expansion"),
        ("colbert", {"interaction": "flipr"}, "interaction"),
        ("colbert", {"similarity": "l2"}, "similarity"),
        ("colbert", {"query_token_id": 1}, "query_token_id"),
        ("colbert", {"dim": WIDTH + 1}, "linear.weight"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    dialect: Dialect, told: Any, why: str, tmp_path: Path
) -> None:
    folder = write_colbert(tmp_path / "model", dialect, **told)
    with pytest.raises(ModelUnsupported, match=why) as refused:
        PoolingEngine(PoolingConfig(model=str(folder), device="cpu")).close()
    assert "\n" not in refused.value.message


def test_a_length_or_a_pooling_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    long = write_colbert(tmp_path / "long", "pylate", query_length=LENGTH + 1)
    with pytest.raises(ConfigError, match="queries have 65 tokens"):
        PoolingEngine(PoolingConfig(model=str(long), device="cpu"))
    model = write_colbert(tmp_path / "model", "colbert")
    with pytest.raises(ConfigError, match="a vector for each token"):
        PoolingEngine(PoolingConfig(model=str(model), device="cpu", pooling="mean"))


def test_marks_without_a_projection_behind_the_model_are_refused(tmp_path: Path) -> None:
    folder = write_colbert(tmp_path / "model", "pylate")
    pooled = write_bert(tmp_path / "pooled", pooling="mean")
    for name in ("modules.json", "1_Pooling"):
        (pooled / name).rename(folder / name)
    with pytest.raises(ModelUnsupported, match="query_prefix"):
        read_pooling(folder)


def test_a_projection_is_left_over_in_a_model_that_is_no_colbert(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_bert(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"linear.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"linear\.weight"):
        PoolingEngine(PoolingConfig(model=str(folder), device="cpu"))


def test_what_nobody_sees_is_refused_of_all_of_an_input(folder: Path) -> None:
    with PoolingEngine(PoolingConfig(model=str(folder), device="cpu")) as engine:
        for unseen in (-1, 3):
            engine.core.take(
                PoolRequest(request_id=str(unseen), tokens=[1] * 3, task="tokens", unseen=unseen)
            )
        told = {r.request_id: r.code for r in engine.core.step().results}
    assert told == {"-1": "invalid_value", "3": "invalid_value"}

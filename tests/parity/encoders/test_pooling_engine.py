"""The pooling engine against transformers: what stands beside an input changes no answer."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, ModelUnsupported, RequestInvalid, UnknownRevision
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine

SMALL = {"adapter_pool": 4 << 20, "ram_cache": 4 << 20, "device": "cpu"}


@pytest.fixture
def engines() -> Iterator[Callable[..., PoolingEngine]]:
    made: list[PoolingEngine] = []

    def make(folder: Path, **options: Any) -> PoolingEngine:
        made.append(PoolingEngine(PoolingConfig(model=str(folder), **SMALL | options)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def mean_of(case: Any, tokens: list[int]) -> Any:
    return case.theirs(tokens).mean(0).numpy()


def close(got: Any, expected: Any) -> None:
    assert np.abs(got - expected).max() < 1e-5
    assert got @ expected / np.linalg.norm(got) / np.linalg.norm(expected) > 0.9999


def test_vectors_equal_transformers_in_any_order_and_cut_of_batches(
    case: Any, engines: Callable[..., PoolingEngine]
) -> None:
    batch = case.batch
    expected = [mean_of(case, tokens) for tokens in batch]
    wide = engines(case.folder)
    for got, wanted in zip(wide.embed(batch), expected, strict=True):
        close(got, wanted)
    assert wide.core.num_steps == 1
    for got, wanted in zip(wide.embed(batch[::-1]), expected[::-1], strict=True):
        close(got, wanted)
    narrow = engines(case.folder, max_batch_tokens=40)
    for got, wanted in zip(narrow.embed(batch), expected, strict=True):
        close(got, wanted)
    assert narrow.core.num_steps == 4  # the long one alone


def test_deterministic_vectors_have_the_same_bits_whatever_is_beside_them(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine]
) -> None:
    for name in ("roberta", "modernbert"):
        case = make(name)
        engine = engines(case.folder, deterministic=True)
        together = engine.embed(case.batch)
        for tokens, got in zip(case.batch, together, strict=True):
            assert np.array_equal(engine.embed([tokens])[0], got)


def test_lengths_one_exactly_the_longest_and_more(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine]
) -> None:
    case = make("roberta")
    engine = engines(case.folder)
    longest = engine.info.max_length
    assert longest == 298
    tokens = (case.batch[2] * 2)[: longest + 1]
    close(engine.embed([[7]])[0], mean_of(case, [7]))
    close(engine.embed([tokens[:longest]])[0], mean_of(case, tokens[:longest]))
    with pytest.raises(RequestInvalid, match="299 tokens, the model takes 298"):
        engine.embed([tokens])
    cut = [*tokens[: longest - 1], tokens[-1]]
    [result] = engine.pool("embed", [tokens], truncate=True)
    assert (result.num_tokens, result.num_cut) == (298, 1)
    close(result.values, mean_of(case, cut))
    short = engines(case.folder, max_length=5, truncate=True)
    close(short.embed([tokens])[0], mean_of(case, [*tokens[:4], tokens[-1]]))
    with pytest.raises(RequestInvalid):
        short.embed([tokens], truncate=False)


def test_what_cannot_be_computed_is_refused_and_the_others_are_answered(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine]
) -> None:
    case = make("bert")
    engine = engines(case.folder)
    for wrong, options in (
        ([], {}),
        ([97], {}),
        ([-1], {}),
        ([5], {"dimensions": 49}),
        ([5], {"dimensions": 0}),
        ([5], {"prompt_tokens": 1}),
    ):
        with pytest.raises(RequestInvalid):
            engine.embed([[5, 6, 7], wrong] if not options else [wrong], **options)
    with pytest.raises(RequestInvalid, match="token types"):
        engine.pool("embed", [[5, 6]], types=[[0]])
    with pytest.raises(RequestInvalid, match=r"outside 0\.\.1"):
        engine.pool("embed", [[5, 6]], types=[[0, 2]])
    with pytest.raises(UnknownRevision):
        engine.embed([[5]], ["0" * 64])
    with pytest.raises(RequestInvalid, match=r"no classifier: there is no score\.weight"):
        engine.classify([[5]])
    close(engine.embed([[5, 6, 7]])[0], mean_of(case, [5, 6, 7]))


def test_token_vectors_types_and_dimensions(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine]
) -> None:
    case = make("bert")
    engine, tokens = engines(case.folder), case.batch[4]
    [rows] = engine.embed_tokens([tokens])
    assert np.abs(rows - case.theirs(tokens).numpy()).max() < 1e-5
    [unit] = engine.embed_tokens([tokens], normalize=True, dimensions=20)
    assert unit.shape == (33, 20) and np.allclose(np.linalg.norm(unit, axis=1), 1.0)
    types = [int(i > 10) for i in range(33)]
    [result, plain] = engine.pool("embed", [tokens, tokens], types=[types, [0] * 33])
    close(result.values, case.theirs(tokens, types).mean(0).numpy())
    close(plain.values, mean_of(case, tokens))
    [cut] = engine.embed([tokens], dimensions=20, normalize=True)
    head = mean_of(case, tokens)[:20]
    close(cut, head / np.linalg.norm(head))


def test_the_files_of_sentence_transformers_are_obeyed(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine], tmp_path: Path
) -> None:
    case = make("bert")
    folder = tmp_path / "model"
    shutil.copytree(case.folder, folder / "0_Transformer")
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"x.{kind}"} for i, kind in enumerate(kinds)
    ]
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "lasttoken"], "include_prompt": False}),
        ("0_Transformer/sentence_bert_config.json", {"max_seq_length": 40}),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    engine, tokens = engines(folder), case.batch[4]
    assert engine.info.width == 96 and engine.info.max_length == 40 and engine.info.normalizes
    theirs = case.theirs(tokens)
    expected = torch.cat((theirs[3], theirs[-1])).numpy()
    close(engine.embed([tokens], prompt_tokens=3)[0], expected / np.linalg.norm(expected))
    close(engine.embed([tokens], prompt_tokens=3, normalize=False)[0], expected)
    other = engines(folder, pooling="max", max_length=300)
    assert other.info.pooling_origin == "the configuration"
    got = other.embed([tokens], prompt_tokens=0, normalize=False)[0]
    close(got, theirs.amax(0).numpy())
    with pytest.raises(ConfigError, match="max_length = 301"):
        engines(folder, max_length=301)
    config = json.loads((folder / "0_Transformer/config.json").read_text())
    (folder / "0_Transformer/config.json").write_text(
        json.dumps(config | {"matryoshka_dimensions": [16, 500]})
    )
    with pytest.raises(ModelUnsupported, match="500"):
        engines(folder)


@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_squashed_and_logits_are_told(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine], labels: int
) -> None:
    case = make("roberta", "ForSequenceClassification", num_labels=labels)
    engine = engines(case.folder)
    assert engine.info.num_labels == labels
    with torch.no_grad():
        theirs = [case.model(input_ids=torch.tensor([t])).logits[0] for t in case.batch]
    for got, logits in zip(engine.classify(case.batch), theirs, strict=True):
        squash = torch.sigmoid if labels == 1 else torch.nn.Softmax(-1)
        assert np.abs(got.logits - logits.numpy()).max() < 1e-5
        assert np.abs(got.values - squash(logits).numpy()).max() < 1e-5


def test_there_is_no_kv_in_the_plan(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine]
) -> None:
    info = engines(make("nomic").folder).info
    assert info.kv_bytes == 0 and info.adapter_bytes == 4 << 20

"""Scores that are the share of one word beside another, such as yes and no, against transformers
and PEFT."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError, ModelUnsupported
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from engine.pooling.fit import scores_by_words, usual_tasks

YES, NO = 9, 21
#: Another vocabulary than 97, so that rows of a pair there are folded.
WIDE = {"vocab_size": 17_000}


def against(logits: Any) -> Any:
    """yes - no at the last row of (tokens, vocab)."""
    return logits[-1, YES] - logits[-1, NO]


def check(result: Any, logit: float) -> None:
    assert result.logits.shape == (1,) and abs(result.logits[0] - logit) < 1e-5
    assert abs(result.values[0] - 1 / (1 + np.exp(-logit))) < 1e-6


@pytest.mark.parametrize("name", ["qwen3", "qwen2", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_the_score_is_the_first_words_share(
    make: Callable[..., Any], engines: Callable[..., Any], name: str
) -> None:
    """Tied, untied, and with capped logits."""
    case = make(name)
    engine = engines(case.folder, score_tokens=(YES, NO))
    info = engine.info
    assert (info.num_labels, info.score_tokens) == (1, (YES, NO))
    for got, tokens in zip(engine.classify(case.batch), case.batch, strict=True):
        check(got, against(case.logits(tokens)))
    [alone] = engine.classify([case.batch[2]])
    check(alone, against(case.logits(case.batch[2])))
    [one] = engines(case.folder, score_tokens=(YES,)).classify([case.batch[2]])
    check(one, case.logits(case.batch[2])[-1, YES])


@pytest.mark.parametrize("name", ["qwen2", "llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_adapters_on_the_head_change_the_words_they_score_by(
    make: Callable[..., Any],
    train: Callable[..., Any],
    engines: Callable[..., Any],
    tmp_path: Path,
    name: str,
) -> None:
    base, task = make(name, **WIDE), "CAUSAL_LM"
    told: list[dict[str, Any]] = [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "lora_bias": True},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    ]
    if name == "qwen2":  # on a tied base PEFT wants both ends alike
        told += [
            {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
            {"target_modules": ["v_proj"], "trainable_token_indices": {"lm_head": [4, YES, 50]}},
        ]
    adapters = [train(base, n, task, **one) for n, one in enumerate(told)]
    engine = engines(base.folder, score_tokens=(YES, NO), adapter_pool=64 << 20, ram_cache=64 << 20)
    revs = [engine.add_folder(one.folder, tmp_path) for one in adapters]
    tokens = base.batch[1]
    got = engine.classify([tokens] * (len(revs) + 1), [*revs, None])
    scores = [against(one.logits(tokens)) for one in (*adapters, base)]
    for result, logit in zip(got, scores, strict=True):
        check(result, logit)
    assert len({round(float(s), 4) for s in scores}) == len(scores)  # each changes something


def test_an_adapter_with_a_classifier_scores_by_that(
    make: Callable[..., Any],
    train: Callable[..., Any],
    engines: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = make("qwen3")
    engine, adapter = engines(base.folder, score_tokens=(YES, NO)), train(base, 4, labels=3)
    rev = engine.add_folder(adapter.folder, tmp_path)
    tokens = base.batch[2]
    plain, own = engine.classify([tokens, tokens], [None, rev])
    check(plain, against(base.logits(tokens)))
    assert np.abs(own.logits - adapter.logits(tokens)).max() < 1e-5


def test_the_files_of_sentence_transformers_name_the_words(
    make: Callable[..., Any], engines: Callable[..., Any], tmp_path: Path
) -> None:
    case = make("qwen3")
    shutil.copytree(case.folder, tmp_path / "model")
    for name, value in (
        (
            "modules.json",
            [{"path": "", "type": "x.Transformer"}, {"path": "1", "type": "x.LogitScore"}],
        ),
        ("1/config.json", {"true_token_id": YES, "false_token_id": NO}),
    ):
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(json.dumps(value))
    assert usual_tasks(tmp_path / "model") == ("rerank",)
    assert not scores_by_words(PoolingConfig(model=str(tmp_path / "model")))
    assert scores_by_words(PoolingConfig(model=str(case.folder)))
    [got] = engines(tmp_path / "model").classify([case.batch[2]])
    check(got, against(case.logits(case.batch[2])))


def test_deterministic_scores_have_the_same_bits_whatever_is_beside_them(
    make: Callable[..., Any], train: Callable[..., Any], engines: Callable[..., Any], tmp_path: Path
) -> None:
    base = make("llama")
    engine = engines(base.folder, deterministic=True, score_tokens=(YES, NO))
    rev = engine.add_folder(
        train(base, 1, "CAUSAL_LM", target_modules=["lm_head", "q_proj"]).folder, tmp_path
    )
    wanted = [rev, None, rev, rev, None, None]
    together = engine.classify(base.batch, wanted)
    for tokens, owner, got in zip(base.batch, wanted, together, strict=True):
        [alone] = engine.classify([tokens], [owner])
        assert np.array_equal(alone.logits, got.logits)


def test_words_that_cannot_score_are_refused(
    make: Callable[..., Any], engines: Callable[..., PoolingEngine]
) -> None:
    for tokens in ((1, 2, 3), (-1,)):
        with pytest.raises(ConfigError, match="score_tokens"):
            engines(make("qwen3").folder, score_tokens=tokens)
    with pytest.raises(ConfigError, match="the base has 97 token ids"):
        engines(make("qwen3").folder, score_tokens=(97,))
    classifier = make("qwen3", "ForSequenceClassification", num_labels=3)
    with pytest.raises(ConfigError, match="the base is a classifier"):
        engines(classifier.folder, score_tokens=(YES, NO))
    with pytest.raises(ModelUnsupported, match=r"no lm_head\.weight") as caught:
        engines(make("qwen2", "Model").folder, score_tokens=(YES, NO))
    assert "embed" in caught.value.hint

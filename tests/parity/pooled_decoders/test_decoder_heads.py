"""Decoders that classify, and adapters with heads of their own on them, against transformers and
PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.adapters.pack import pack_into
from engine.errors import AdapterInvalid, RequestInvalid

PADDING = 3
CLASSIFIER = "ForSequenceClassification"
RARE = ("gemma2", "gemma3", "mistral", "phi3", "smollm3")
NAMES = ("llama", "qwen2", "qwen3", *(pytest.param(n, marks=pytest.mark.slow) for n in RARE))


def same(got: Any, wanted: Any) -> None:
    assert got.shape == wanted.shape and np.abs(got - wanted).max() < 1e-5


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_scores_equal_transformers(
    make: Callable[..., Any], engines: Callable[..., Any], name: str, labels: int
) -> None:
    case = make(name, CLASSIFIER, num_labels=labels)
    engine = engines(case.folder)
    assert engine.info.num_labels == labels == len(engine.info.labels)
    for got, tokens in zip(engine.classify(case.batch), case.batch, strict=True):
        logits = case.logits(tokens)
        same(got.logits, logits)
        powers = np.exp(logits)
        same(got.values, powers / (1 + powers) if labels == 1 else powers / powers.sum())


@pytest.mark.parametrize(
    "tokens",
    [[5, 6, PADDING], [5, PADDING, 6, PADDING, PADDING], [PADDING, PADDING], [PADDING, 5]],
)
def test_the_row_that_is_scored_is_the_last_one_that_is_no_padding(
    make: Callable[..., Any], engines: Callable[..., Any], tokens: list[int]
) -> None:
    """An end mark that is the padding token too is passed by, as transformers does."""
    case = make("qwen3", CLASSIFIER, num_labels=3)
    engine = engines(case.folder)
    [got, alone] = engine.classify([tokens, [9, 8]])
    same(got.logits, case.logits(tokens))
    same(alone.logits, case.logits([9, 8]))
    same(engine.embed([tokens])[0], case.hidden(tokens)[-1])  # pooling knows no padding


@pytest.mark.parametrize("name", NAMES)
def test_adapters_with_heads_of_their_own_are_mixed_in_one_batch(
    name: str,
    make: Callable[..., Any],
    train: Callable[..., Any],
    engines: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = make(name, CLASSIFIER, num_labels=2)
    adapters = [
        train(base, 1, labels=3),
        train(base, 2, labels=1, r=2, use_rslora=True, target_modules=["o_proj", "down_proj"]),
    ]
    engine = engines(base.folder)
    revs = [engine.add_folder(one.folder, tmp_path) for one in adapters]
    owners: list[int | None] = [0, None, 1, 0, 1, None]
    wanted = [None if i is None else revs[i] for i in owners]
    for rev in revs:
        engine.load(rev)
    before = engine.core.num_steps
    got = engine.classify(base.batch, wanted)
    assert engine.core.num_steps == before + 1
    vectors = engine.embed(base.batch, wanted)
    for i, (owner, tokens) in enumerate(zip(owners, base.batch, strict=True)):
        theirs = base if owner is None else adapters[owner]
        same(got[i].logits, theirs.logits(tokens))
        same(vectors[i], theirs.hidden(tokens)[-1])
        [alone] = engine.classify([tokens], [wanted[i]])
        same(alone.logits, got[i].logits)


def test_deterministic_scores_of_an_adapter_keep_their_bits_beside_others(
    make: Callable[..., Any],
    train: Callable[..., Any],
    engines: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = make("qwen3", CLASSIFIER, num_labels=2)
    engine = engines(base.folder, deterministic=True)
    revs = [engine.add_folder(train(base, seed, labels=3).folder, tmp_path) for seed in (1, 2)]
    wanted = [revs[0], None, revs[1], revs[0], None, revs[1]]
    together = engine.classify(base.batch, wanted)
    for tokens, rev, got in zip(base.batch, wanted, together, strict=True):
        [alone] = engine.classify([tokens], [rev])
        assert np.array_equal(alone.logits, got.logits)


def test_a_checkpoint_that_generates_serves_adapters_that_classify(
    make: Callable[..., Any],
    train: Callable[..., Any],
    engines: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = make("llama")
    engine, adapter = engines(base.folder), train(base, 5, labels=3, use_dora=True)
    assert engine.info.num_labels == 0
    with pytest.raises(RequestInvalid, match=r"the model has no classifier: .* score\.weight"):
        engine.classify([[5, 6]])
    rev = engine.add_folder(adapter.folder, tmp_path)
    plain = engine.add_folder(train(base, 6, "CAUSAL_LM").folder, tmp_path)
    tokens = base.batch[2]
    [got] = engine.classify([tokens], [rev])
    same(got.logits, adapter.logits(tokens))
    with pytest.raises(RequestInvalid, match="has no classifier"):
        engine.classify([tokens], [plain])
    same(engine.embed([tokens])[0], base.hidden(tokens)[-1])


def test_an_adapter_on_the_embedding_changes_the_vectors_of_its_own_inputs_alone(
    make: Callable[..., Any],
    train: Callable[..., Any],
    engines: Callable[..., Any],
    tmp_path: Path,
) -> None:
    base = make("qwen2")
    told: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["v_proj"], "trainable_token_indices": [5, 9, 40]},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    ]
    adapters = [train(base, 7 + n, "FEATURE_EXTRACTION", **one) for n, one in enumerate(told)]
    engine = engines(base.folder)
    revs = [engine.add_folder(one.folder, tmp_path) for one in adapters]
    tokens = [5, 9, 30, 40, 9, 11]
    got = engine.embed([tokens] * 4, [*revs, None])
    for vector, theirs in zip(got, [*adapters, base], strict=True):
        same(vector, theirs.hidden(tokens)[-1])


def test_a_head_is_refused_on_a_base_that_generates(
    make: Callable[..., Any], train: Callable[..., Any], tmp_path: Path
) -> None:
    base = make("llama")
    adapter = train(base, 5, labels=3)
    assert "base_model.model.score.weight" in load_file(
        adapter.folder / "adapter_model.safetensors"
    )
    told = {"dtype": "float32", "max_rank": 64}
    with pytest.raises(AdapterInvalid) as caught:
        pack_into(adapter.folder, base.folder, tmp_path, block_size=16, **told)
    assert caught.value.reason == "E_MODULES_TO_SAVE"
    manifest = pack_into(adapter.folder, base.folder, tmp_path, block_size=0, **told)
    assert "score.weight.rows" in {m.module for m in manifest.modules}


def test_an_adapter_that_waits_for_a_turn_is_refused_where_nobody_talks(
    make: Callable[..., Any], train: Callable[..., Any], engines: Callable[..., Any], tmp_path: Path
) -> None:
    base = make("llama")
    adapter = train(base, 6, "CAUSAL_LM")
    path = adapter.folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alora_invocation_tokens": [5]}))
    with pytest.raises(AdapterInvalid, match="acts from its invocation on") as caught:
        engines(base.folder).add_folder(adapter.folder, tmp_path)
    assert caught.value.reason == "E_ALORA"

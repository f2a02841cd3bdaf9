"""Decoders that make vectors, against transformers."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.errors import ConfigError, ModelUnsupported, RequestInvalid
from engine.kernels import backend
from engine.pooling import backbone


def close(got: Any, expected: Any, worst: float = 1e-5) -> None:
    assert np.abs(got - expected).max() < worst
    assert got @ expected / np.linalg.norm(got) / np.linalg.norm(expected) > 0.9999


def test_the_last_row_equals_transformers_in_any_order_and_cut_of_batches(
    case: Any, engines: Callable[..., Any]
) -> None:
    batch = case.batch
    expected = [case.hidden(tokens)[-1] for tokens in batch]
    wide = engines(case.folder)
    assert wide.info.kinds == ("last",) and "last" in wide.info.pooling_origin
    for got, wanted in zip(wide.embed(batch), expected, strict=True):
        close(got, wanted)
    assert wide.core.num_steps == 1
    for got, wanted in zip(wide.embed(batch[::-1]), expected[::-1], strict=True):
        close(got, wanted)
    narrow = engines(case.folder, max_batch_tokens=24, max_num_seqs=3)
    for got, wanted in zip(narrow.embed(batch), expected, strict=True):
        close(got, wanted)
    assert narrow.core.num_steps > 3
    [rows] = wide.embed_tokens([batch[2]])
    assert np.abs(rows - case.hidden(batch[2])).max() < 1e-5


@pytest.mark.parametrize("kind", ["mean", "weighted_mean", "cls", "max"])
def test_other_ways_of_pooling_a_decoder(
    make: Callable[..., Any], engines: Callable[..., Any], kind: str
) -> None:
    case = make("qwen3")
    vectors = engines(case.folder, pooling=kind).embed(case.batch)
    for got, tokens in zip(vectors, case.batch, strict=True):
        rows = case.hidden(tokens)
        places = np.arange(1, len(rows) + 1)[:, None]
        wanted = {
            "mean": rows.mean(0),
            "weighted_mean": (rows * places).sum(0) / places.sum(),
            "cls": rows[0],
            "max": rows.max(0),
        }
        close(got, wanted[kind])


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_deterministic_vectors_have_the_same_bits_whatever_is_beside_them(
    make: Callable[..., Any], engines: Callable[..., Any], name: str
) -> None:
    case = make(name)
    engine = engines(case.folder, deterministic=True)
    together = engine.embed(case.batch)
    for tokens, got in zip(case.batch, together, strict=True):
        assert np.array_equal(engine.embed([tokens])[0], got)
        close(got, case.hidden(tokens)[-1])


def test_a_step_leaves_nothing_behind_for_the_next(
    make: Callable[..., Any], engines: Callable[..., Any]
) -> None:
    """All layers write to one place: what an earlier, longer input left there is not seen."""
    case = make("qwen2")
    engine = engines(case.folder)
    for tokens in (case.batch[2], case.batch[1], case.batch[0], case.batch[4]):
        close(engine.embed([tokens])[0], case.hidden(tokens)[-1])


@pytest.mark.parametrize("deterministic", [False, True])
def test_long_inputs_of_a_decoder_with_windows_are_cut_into_strips(
    make: Callable[..., Any],
    engines: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    deterministic: bool,
) -> None:
    case = make("gemma2")
    whole = engines(case.folder, deterministic=deterministic).embed(case.batch)
    monkeypatch.setattr(backbone, "STRIP_ROWS", 16)
    strips = engines(case.folder, deterministic=deterministic).embed(case.batch)
    for got, uncut, tokens in zip(strips, whole, case.batch, strict=True):
        close(got, case.hidden(tokens)[-1])
        assert not deterministic or np.array_equal(got, uncut)


def test_lengths_one_exactly_the_longest_and_more(
    make: Callable[..., Any], engines: Callable[..., Any]
) -> None:
    case = make("qwen3")
    engine = engines(case.folder, max_batch_tokens=16)
    assert engine.info.max_length == 64
    tokens = (case.batch[2] * 2)[:65]
    close(engine.embed([[7]])[0], case.hidden([7])[-1])
    close(engine.embed([tokens[:64]])[0], case.hidden(tokens[:64])[-1])
    with pytest.raises(RequestInvalid, match="65 tokens, the model takes 64"):
        engine.embed([tokens])
    with pytest.raises(RequestInvalid, match="no tokens"):
        engine.embed([[]])
    with pytest.raises(RequestInvalid, match="outside"):
        engine.embed([[5, 97]])
    with pytest.raises(RequestInvalid, match=r"outside 0\.\.0"):
        engine.pool("embed", [[5, 6]], types=[[0, 1]])
    cut = [*tokens[:63], tokens[-1]]
    [result] = engine.pool("embed", [tokens], truncate=True)
    assert (result.num_tokens, result.num_cut) == (64, 1)
    close(result.values, case.hidden(cut)[-1])


def embedding_model(case: Any, folder: Path) -> Path:
    """As Qwen3-Embedding lies on a disk: no `model.` ahead of names, and no output head."""
    case.model.base_model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    for name, value in (
        ("config.json", config),
        ("modules.json", [{"path": path, "type": f"x.{kind}"} for kind, path in kinds]),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True, "include_prompt": True}),
        ("sentence_bert_config.json", {"max_seq_length": 40}),
        ("config_sentence_transformers.json", {"prompts": {"query": "Instruct: x\nQuery:"}}),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    return folder


def test_the_files_of_an_embedding_model_are_obeyed(
    make: Callable[..., Any], engines: Callable[..., Any], tmp_path: Path
) -> None:
    case = make("qwen3")
    engine = engines(embedding_model(case, tmp_path / "model"))
    info, tokens = engine.info, case.batch[2]
    assert (info.kinds, info.normalizes, info.max_length) == (("last",), True, 40)
    last = case.hidden(tokens)[-1]
    close(engine.embed([tokens])[0], last / np.linalg.norm(last))
    close(engine.embed([tokens], normalize=False)[0], last)
    head = last[:16]
    close(engine.embed([tokens], dimensions=16)[0], head / np.linalg.norm(head))


def test_the_bare_class_is_served_too(
    make: Callable[..., Any], engines: Callable[..., Any]
) -> None:
    case = make("llama", "Model")
    close(engines(case.folder).embed([case.batch[1]])[0], case.hidden(case.batch[1])[-1])


def test_the_plan_has_the_keys_of_one_layer_and_one_step(
    make: Callable[..., Any], engines: Callable[..., Any]
) -> None:
    info = engines(make("qwen3").folder, max_batch_tokens=128, max_num_seqs=4).info
    rows = 128 + 4 * 16
    assert info.kv_bytes == rows * 2 * 2 * 16 * 4  # keys and values, KV heads, head_dim, fp32
    assert info.adapter_bytes == 4 << 20


def test_what_is_forced_and_cannot_be_is_refused_with_the_reason(
    make: Callable[..., Any], engines: Callable[..., Any]
) -> None:
    folder = make("qwen3").folder
    for setting in ("prefix_cache", "chunked_prefill"):
        with pytest.raises(ConfigError, match=f"{setting} = 'on': pooling by mean reads rows"):
            engines(folder, pooling="mean", **{setting: "on"})
        with pytest.raises(ConfigError, match="computes an input whole"):
            engines(folder, **{setting: "on"})
    with pytest.raises(ConfigError, match="max_length = 65 is above the model's 64"):
        engines(folder, max_length=65)


def test_a_decoder_that_sees_both_sides_is_refused(
    make: Callable[..., Any], engines: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copytree(make("qwen3").folder, tmp_path / "both")
    config = json.loads((tmp_path / "both/config.json").read_text())
    (tmp_path / "both/config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(ModelUnsupported, match="is_causal"):
        engines(tmp_path / "both")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off beside a card")
def test_the_way_that_a_card_takes_computes_the_same_vectors(
    make: Callable[..., Any], engines: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make("qwen3")
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    batch = case.batch[:2] + case.batch[4:5]
    for got, tokens in zip(engines(case.folder).embed(batch), batch, strict=True):
        close(got, case.hidden(tokens)[-1], 1e-4)

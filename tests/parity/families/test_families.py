"""Two-layer random models of each family against transformers' own classes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.kernels import backend


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() < 1e-4


def test_logits_equal_transformers(case: Any, rig: Callable[..., Any]) -> None:
    ours = rig(case.folder, max_len=case.max_len)
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        close(ours.logits(prompt), expected)


def test_a_batch_of_mixed_lengths_equals_one_by_one(case: Any, rig: Callable[..., Any]) -> None:
    results = rig(case.folder, max_len=case.max_len).together(
        case.prompts, [-1] * len(case.prompts)
    )
    for got, expected in zip(results, case.expected, strict=True):
        close(got, expected)


@pytest.mark.parametrize("sizes", [[], [7], [16, 16], [20, 1, 25]])
def test_chunks_and_decode_equal_the_whole_prefill_at_every_position(
    case: Any, rig: Callable[..., Any], sizes: list[int]
) -> None:
    close(
        rig(case.folder, max_len=case.max_len).in_chunks(case.prompts[0], sizes), case.expected[0]
    )


def test_deterministic_mode_computes_the_same_model(case: Any, rig: Callable[..., Any]) -> None:
    ours = rig(case.folder, max_len=case.max_len, deterministic=True)
    close(ours.logits(case.prompts[0]), case.expected[0])


def test_deterministic_mode_gives_a_row_its_bits_in_any_batch_and_chunk(
    case: Any, rig: Callable[..., Any]
) -> None:
    ours = rig(case.folder, max_len=case.max_len, deterministic=True)
    together = ours.together(case.prompts, [-1] * len(case.prompts))
    for prompt, got in zip(case.prompts, together, strict=True):
        assert torch.equal(ours.logits(prompt), got)
    assert torch.equal(ours.in_chunks(case.prompts[3], [5, 1, 9]), together[3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off beside a card")
def test_the_way_that_a_card_takes_computes_the_same_model(
    case: Any, rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused norm, rotation, gate and paged attention, on Triton's interpreter: a step with a
    chunk, then decode past the window."""
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    close(rig(case.folder, max_len=case.max_len).in_chunks(case.prompts[2], [8]), case.expected[2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 0.12), (torch.float16, 0.015)],
)
def test_a_mixed_batch_on_a_card_equals_transformers(
    case: Any, rig: Callable[..., Any], dtype: torch.dtype, tolerance: float
) -> None:
    """Relative to the spread of the logits.  On the CPU the families come to 0.07 in bf16, as
    transformers does, and to 0.009 in fp16."""
    card = rig(case.folder, max_len=case.max_len, device="cuda", dtype=dtype)
    whole = card.together(case.prompts, [-1] * len(case.prompts))
    for prompt, got, expected in zip(case.prompts, whole, case.expected, strict=True):
        for result in (got, card.in_chunks(prompt, [20, 1, 9])):
            assert (result.cpu() - expected).abs().max() <= tolerance * expected.std()


def in_the_old_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 4 would have written it."""
    if "text_config" in config:
        return config | {"text_config": in_the_old_dialect(config["text_config"])}
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if config["model_type"] == "phi3":
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        rope.pop("original_max_position_embeddings", None)  # it stands at the top too
        kind = {"longrope": "su"}.get(kind, kind)
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    if config["model_type"] in ("qwen2", "qwen3") and config["sliding_window"] is None:
        config |= {"sliding_window": 64, "use_sliding_window": False}
    if config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = 2
    if "gemma" in config["model_type"] and config["layer_types"][0] == "sliding_attention":
        del config["layer_types"]  # the pattern says the same
    if config.get("max_window_layers") == 1 or config.get("no_rope_layer_interval") == 2:
        config = {k: v for k, v in config.items() if k not in ("layer_types", "no_rope_layers")}
    return config


def test_the_config_in_the_old_dialect_gives_the_same_bits(
    case: Any, rig: Callable[..., Any], tmp_path: Path
) -> None:
    config = json.loads((case.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(in_the_old_dialect(config)))
    (tmp_path / "model.safetensors").symlink_to(case.folder / "model.safetensors")
    prompt = case.prompts[0]
    old, new = (rig(where, max_len=case.max_len) for where in (tmp_path, case.folder))
    assert torch.equal(old.logits(prompt), new.logits(prompt))

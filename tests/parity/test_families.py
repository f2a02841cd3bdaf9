"""Two-layer random models of each family against transformers' own classes."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.kernels import backend

#: head_dim is not hidden / heads (12), three heads share a KV head, sizes are no powers of two.
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biased-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e3}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "mistral-tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-tied-yarn": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16},
        },
    ),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN | {"truncate": False}}),
    "qwen3-biased-tied-window": (
        "Qwen3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
CASES |= {
    "smollm3-biased-tied": (
        "SmolLM3",
        {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3-window": (
        "SmolLM3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3-yarn": ("SmolLM3", {"no_rope_layer_interval": 2, "rope_parameters": YARN}),
}
GEMMA: dict[str, Any] = {"sliding_window": 9, "query_pre_attn_scalar": 7}
CASES |= {
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
    ),
    "gemma2-uncapped-biased-untied": (
        "Gemma2",
        GEMMA
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3-linear-capped-biased-untied": (
        "Gemma3",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
            "final_logit_softcapping": 2.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-within-a-multimodal-model": (
        "Gemma3Multimodal",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}
#: Of the same model as the text; its weights are never looked at.
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
}
LENGTHS = (53, 1, 10, 17)  # longer than original_max_position, than window + 1, than a block


@dataclass
class Case:
    folder: Path
    prompts: list[list[int]]
    expected: list[Tensor]  # logits of each prompt


def build(family: str, options: dict[str, Any]) -> Any:
    """transformers' model with weights that leave no bias, norm or scale at its neutral value."""
    import transformers

    sizes, name, kind = SIZES | options, family, f"{family}ForCausalLM"
    if family == "Gemma3":
        name = "Gemma3Text"
    elif family == "Gemma3Multimodal":
        name, kind = "Gemma3", "Gemma3ForConditionalGeneration"
        sizes = {"text_config": sizes, "vision_config": VISION, "mm_tokens_per_image": 1}
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                centre = 0 if family.startswith("Gemma") else 1  # they add one themselves
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        if not family.startswith("Gemma"):  # they scale it themselves
            model.get_input_embeddings().weight.mul_(8)
    return model


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = build(*CASES[request.param])
    model.save_pretrained(folder)
    torch.manual_seed(6)
    prompts = [torch.randint(0, 131, (n,)).tolist() for n in LENGTHS]
    with torch.no_grad():
        expected = [model(torch.tensor([p])).logits[0] for p in prompts]
    assert expected[0].std() > 0.5  # flat logits would agree with anything
    return Case(folder, prompts, expected)


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() < 1e-4


def test_logits_equal_transformers(case: Case, rig: Callable[..., Any]) -> None:
    ours = rig(case.folder)
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        close(ours.logits(prompt), expected)


def test_a_batch_of_mixed_lengths_equals_one_by_one(case: Case, rig: Callable[..., Any]) -> None:
    results = rig(case.folder).together(case.prompts, [-1] * len(case.prompts))
    for got, expected in zip(results, case.expected, strict=True):
        close(got, expected)


@pytest.mark.parametrize("sizes", [[], [7], [16, 16], [20, 1, 25]])
def test_chunks_and_decode_equal_the_whole_prefill_at_every_position(
    case: Case, rig: Callable[..., Any], sizes: list[int]
) -> None:
    close(rig(case.folder).in_chunks(case.prompts[0], sizes), case.expected[0])


def test_deterministic_mode_computes_the_same_model(case: Case, rig: Callable[..., Any]) -> None:
    ours = rig(case.folder, deterministic=True)
    close(ours.logits(case.prompts[0]), case.expected[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off beside a card")
def test_the_way_that_a_card_takes_computes_the_same_model(
    case: Case, rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused norm, rotation, gate and paged attention, on Triton's interpreter: a step with a
    chunk, then decode past the window."""
    monkeypatch.setattr(backend, "use_kernels", lambda x, deterministic: not deterministic)
    close(rig(case.folder).in_chunks(case.prompts[2], [8]), case.expected[2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 0.12), (torch.float16, 0.015)],
)
def test_a_mixed_batch_on_a_card_equals_transformers(
    case: Case, rig: Callable[..., Any], dtype: torch.dtype, tolerance: float
) -> None:
    """Relative to the spread of the logits.  On the CPU the families come to 0.07 in bf16, as
    transformers does, and to 0.009 in fp16."""
    card = rig(case.folder, device="cuda", dtype=dtype)
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
    case: Case, rig: Callable[..., Any], tmp_path: Path
) -> None:
    config = json.loads((case.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(in_the_old_dialect(config)))
    (tmp_path / "model.safetensors").symlink_to(case.folder / "model.safetensors")
    prompt = case.prompts[0]
    assert torch.equal(rig(tmp_path).logits(prompt), rig(case.folder).logits(prompt))

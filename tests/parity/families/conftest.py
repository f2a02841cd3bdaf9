"""Two-layer random models of each family, made by transformers' own classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
#: The original length is 32: up to it the factors are the short ones, beyond it the long ones.
LONGROPE: dict[str, Any] = {
    "hidden_size": 96,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e3,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.6, 1.8, 2.5],
        "long_factor": [1.0, 1.5, 3.0, 5.0, 9.0, 16.0],
    },
}
CASES |= {
    "phi3-window": ("Phi3", {"sliding_window": 9}),
    "phi3-partial-tied": (
        "Phi3",
        {
            # 9 of 16 elements, rounded up to 10
            "rope_parameters": {"rope_theta": 250.0, "partial_rotary_factor": 0.6},
            "tie_word_embeddings": True,
        },
    ),
    "phi3-longrope-short": ("Phi3", LONGROPE),
    "phi3-longrope-long": ("Phi3", LONGROPE | {"sliding_window": 9}),
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
    model: Any  # transformers' own
    max_len: int  # 0 = the model's own
    prompts: list[list[int]]
    expected: list[Tensor]  # logits of each prompt

    def theirs(self, tokens: list[int]) -> Tensor:
        """transformers' logits (n, vocab).  With a `max_len`, beside a sequence of 53 tokens: there
        it takes longrope's long factors for the short ones too."""
        padded = tokens + [0] * (LENGTHS[0] - len(tokens)) if self.max_len else tokens
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([padded])).logits[0]
        return logits[: len(tokens)]


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


@pytest.fixture(scope="session")
def longrope_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and transformers' model of it: 128 positions, of which 32 are the original ones."""
    folder, model = tmp_path_factory.mktemp("longrope"), build("Phi3", LONGROPE)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = build(*CASES[request.param])
    model.save_pretrained(folder)
    short = request.param == "phi3-longrope-short"
    max_len = 128 if request.param == "phi3-longrope-long" else 0
    torch.manual_seed(6)
    prompts = [torch.randint(0, 131, (32 if short and n > 32 else n,)).tolist() for n in LENGTHS]
    found = Case(folder, model, max_len, prompts, [])
    found.expected += [found.theirs(prompt) for prompt in prompts]
    assert found.expected[0].std() > 0.5  # flat logits would agree with anything
    return found

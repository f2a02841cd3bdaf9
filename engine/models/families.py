"""The dense families: what sets each apart from Llama, as data, and how one is told.  Torch-free.

Goes in: a parsed config.json.  Comes out: the family's name and the fields that describe its text
model, or ModelUnsupported with the list of what works.  Knows nothing of sizes and weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import ModelUnsupported
from engine.models.hf_config import Fields

#: Which layers have a sliding window, where `layer_types` does not say it.
WindowRule = Literal["none", "all", "late", "unrotated", "alternate"]

SUPPORTED = (
    "supported: Llama and SmolLM2 (llama), SmolLM3, Mistral, Qwen2 and Qwen2.5, Qwen3 (dense)"
)


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    `defaults` are the values of fields that its config.json may leave out, as transformers' own
    class has them: a config is often saved without what equals them.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bias_flags: tuple[str, ...] = ()  # of attention_bias and mlp_bias, those that it reads
    qkv_bias: bool = False  # always, without a flag
    qk_norm: bool = False
    window: WindowRule = "none"
    skips_rotation: bool = False  # some layers have no rotary embedding


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        defaults={"num_key_value_heads": None},
        bias_flags=("attention_bias", "mlp_bias"),
    ),
    "mistral": Family("MistralForCausalLM", defaults={"sliding_window": 4096}, window="all"),
    "qwen2": Family(
        "Qwen2ForCausalLM", defaults={"sliding_window": 4096}, qkv_bias=True, window="late"
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={"sliding_window": 4096, "head_dim": 128},
        bias_flags=("attention_bias",),
        qk_norm=True,
        window="late",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "sliding_window": None},
        bias_flags=("attention_bias", "mlp_bias"),
        window="unrotated",
        skips_rotation=True,
    ),
}


def identify(values: Mapping[str, Any]) -> tuple[str, Fields]:
    """The model_type, once it and the architecture are known to be one of ours, and its fields."""
    config = Fields(values, "config.json")
    _refuse_quantized(config)
    if config.take("auto_map", None):
        raise config.refusal("auto_map", "models that bring their own code are not run")
    name, architectures = values.get("model_type"), values.get("architectures")
    if name not in FAMILIES:
        named = (architectures or [name])[0]
        raise ModelUnsupported(f"architecture {named} (model_type {name})", hint=SUPPORTED)
    family = FAMILIES[name]
    if architectures and architectures != [family.architecture]:
        raise ModelUnsupported(f"architecture {architectures[0]} ({name})", hint=SUPPORTED)
    return str(name), Fields({**family.defaults, **values}, "config.json")


def _refuse_quantized(config: Fields) -> None:
    if config.take("quantization_config", None):
        quantization = config.values["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelUnsupported(
            f"the base model is quantized ({method or 'quantization_config is set'})",
            hint="serve the unquantized checkpoint; quantized bases are not supported",
        )

"""The dense families: what sets each apart from Llama, as data, and how one is told.  Torch-free.

Goes in: a parsed config.json.  Comes out: the family's name and the fields that describe its text
model, or ModelUnsupported with the list of what works.  Knows nothing of sizes and weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import ModelUnsupported
from engine.models.head_spec import CLASSIFIER
from engine.models.hf_config import Fields, short

#: Which layers have a sliding window, where `layer_types` does not say it.
WindowRule = Literal["none", "all", "late", "unrotated", "pattern"]

#: What both dialects call the model's dtype.
_DTYPES = ("dtype", "torch_dtype")

SUPPORTED = (
    "supported: Llama and SmolLM2 (llama), SmolLM3, Mistral, Qwen2 and Qwen2.5, Qwen3 (dense),"
    " Gemma 2, Gemma 3 (text), Phi-3, Phi-3.5 and Phi-4 (phi3)"
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
    rope_by_kind: bool = False  # layers with a window have another one than the others
    #: (1 + weight) norms, two more of them a layer, gelu, a scaled embedding, a query scalar.
    gemma: bool = False
    softcaps: tuple[str, ...] = ()  # the fields that are computed
    rotates_in_part: bool = False  # partial_rotary_factor is computed
    longrope_words: tuple[str, ...] = ()  # other spellings of this rope type
    fused_names: bool = False  # the modules of `layout.FUSED_NAMES` are published as one
    #: End of the names of the modules with the code that it was published with, before
    #: transformers had it; that code is not run.
    first_code: str = ""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal `model_type` whose text model is one of ours, and computes the same alone."""

    architecture: str
    text: str  # model_type of the text model
    fields: frozenset[str]  # of its own, which say nothing of the text model
    towers: tuple[str, ...]  # beginnings of the names of the other tensors


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
        defaults={
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "pad_token_id": 128004,
        },
        bias_flags=("attention_bias", "mlp_bias"),
        window="unrotated",
        skips_rotation=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        defaults={
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "pad_token_id": 0,
        },
        bias_flags=("attention_bias",),
        window="pattern",
        gemma=True,
        softcaps=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        # The text_config of the multimodal sizes states hardly more than what differs from these.
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "pad_token_id": 0,
        },
        bias_flags=("attention_bias",),
        qk_norm=True,
        window="pattern",
        rope_by_kind=True,
        gemma=True,
        softcaps=("final_logit_softcapping",),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        defaults={
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32000,
        },
        window="all",
        rotates_in_part=True,
        longrope_words=("su", "yarn"),
        fused_names=True,
        first_code="_phi3",
    ),
}
WRAPPERS = {
    "gemma3": Wrapper(
        "Gemma3ForConditionalGeneration",
        text="gemma3_text",
        fields=frozenset(
            (
                "vision_config",
                "mm_tokens_per_image",
                "boi_token_index",
                "eoi_token_index",
                "image_token_index",
                "image_token_id",
            )
        ),
        towers=("vision_tower.", "multi_modal_projector."),
    ),
}


def identify(
    values: Mapping[str, Any], *, generates: bool = True
) -> tuple[str, Fields, tuple[str, ...]]:
    """The text model's model_type, once it and the architecture are known to be one of ours, its
    fields, and how the names of other towers' tensors begin.  One that does not generate may have
    no head for it, or a classifier in its place."""
    name, towers, where = _word(values, "model_type"), tuple[str, ...](), "config.json"
    _refuse_foreign(Fields(values, where))
    if name in WRAPPERS:
        wrapper = WRAPPERS[name]
        _check_architecture(name, values, wrapper.architecture)
        values, towers, where = _unwrap(values, wrapper), wrapper.towers, "config.json text_config"
        name = _word({"model_type": wrapper.text, **values}, "model_type")
        if name != wrapper.text:
            raise ModelUnsupported(f"a {name} model within {wrapper.architecture}", hint=SUPPORTED)
        _refuse_foreign(Fields(values, where))
    if name not in FAMILIES:
        named = _architecture(values) or name
        raise ModelUnsupported(f"architecture {named} (model_type {name})", hint=SUPPORTED)
    family = FAMILIES[name]
    named = _architecture(values)
    if generates or named not in _without_head(family):
        _check_architecture(name, values, family.architecture)
    fields = Fields({**family.defaults, **values}, where)
    fields.take("auto_map", None)
    return name, fields, towers


def _word(values: Mapping[str, Any], name: str) -> str:
    """A field as text, whatever its type: it is compared and shown, not computed with."""
    return short(str(values.get(name)))


def _architecture(values: Mapping[str, Any]) -> str:
    """The architectures as text, "" if there are none; one that is in a list is itself."""
    named = values.get("architectures")
    if isinstance(named, list) and len(named) == 1:
        return short(str(named[0]))
    return short(str(named)) if named else ""


def _without_head(family: Family) -> set[str]:
    """The family's other classes in transformers that are served for vectors or scores; a text
    model that is a part of a larger one has a word of its own there."""
    word = family.architecture.removesuffix("ForCausalLM")
    return {f"{word}{text}{end}" for text in ("", "Text") for end in ("Model", CLASSIFIER)}


def _is_first_code(own_code: Any, name: str) -> bool:
    """Whether this is the code that became transformers' class of the same name."""
    ends = FAMILIES[name].first_code if name in FAMILIES else ""
    named = own_code if isinstance(own_code, dict) else {"": ""}
    models = [str(path) for kind, path in named.items() if "Tokenizer" not in kind]
    return bool(ends) and all(path.rpartition(".")[0].endswith(ends) for path in models)


def _check_architecture(name: str, values: Mapping[str, Any], ours: str) -> None:
    named = _architecture(values)
    if named and named != ours:
        raise ModelUnsupported(f"architecture {named} ({name})", hint=SUPPORTED)


def _unwrap(values: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    """The text model's own fields, with what holds for it at the top: dtype, tie, end tokens."""
    top = Fields(values, "config.json")
    text = top.take("text_config", None)
    if not isinstance(text, dict):
        raise top.refusal("text_config", "expected the text model's config")
    shared = {key: top.take(key) for key in ("tie_word_embeddings", *_DTYPES) if key in values}
    for name in wrapper.fields:
        top.take(name, None)
    top.refuse_rest()
    tied = shared.get("tie_word_embeddings")
    if tied is not None and text.get("tie_word_embeddings", tied) != tied:
        raise top.refusal("tie_word_embeddings", "text_config says something else")
    ends = [values.get("eos_token_id"), text.get("eos_token_id")]
    listed = [end for one in ends for end in (one if isinstance(one, list) else [one])]
    return {**shared, **text, "eos_token_id": listed}


def _refuse_foreign(config: Fields) -> None:
    own_code = config.take("auto_map", None)
    if own_code and not _is_first_code(own_code, _word(config.values, "model_type")):
        raise config.refusal("auto_map", "models that bring their own code are not run")
    if config.take("quantization_config", None):
        quantization = config.values["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelUnsupported(
            f"the base model is quantized ({short(str(method or 'quantization_config is set'))})",
            hint="serve the unquantized checkpoint; quantized bases are not supported",
        )

"""The encoder families: what sets each apart, as data, and how one is told.  Torch-free.

Goes in: a parsed config.json.  Comes out: the family, the fields that describe the model in its
own transformers dialect, and the engine's name for any of its tensors.  Knows no sizes and reads no
weights.

The engine's names are the same for all of them: `embeddings.word`, `layers.0.q_proj`,
`layers.0.attention_norm`, `head.dense`, `score`.  A family's table leads to them from what it was
published with.  It is the only one: weights, adapters' tensors and heads are all read through it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import ModelUnsupported
from engine.models.head_spec import CLASSIFIER, HeadSpec
from engine.models.hf_config import Fields, short

SUPPORTED = (
    "supported encoders: BERT and MiniLM (bert), RoBERTa, XLM-RoBERTa, ModernBERT, NomicBERT"
)
#: What classes of a family are served, by the end of their names; what else they hold is ignored.
CLASSES = ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER)
#: The class of checkpoints of ColBERT's own code, around a model of any family; and the beginning
#: of what they hold beside it.
COLBERT, PROJECTION = "HF_ColBERT", "linear."


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One `model_type`.  `names` are (pattern, replacement), each tried once, in order."""

    word: str  # what the names of its classes begin with
    names: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]  # beginnings of tensors that are not the encoder's, in its own names
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_eps: str = "layer_norm_eps"  # the fields' names
    activation: str = "hidden_act"
    learned_positions: bool = False
    counts_padding: bool = False  # positions begin behind the padding token's id
    post_norm: bool = True
    gated: bool = False
    always_biased: bool = False  # all projections have a bias, without a flag
    bias_flags: bool = False  # attention_bias, mlp_bias and norm_bias are read
    rope: Literal["", "one", "by_kind"] = ""
    head: HeadSpec = field(default_factory=lambda: HeadSpec("cls", "tanh"))


_BERT_NAMES = (
    (r"\.gamma$", ".weight"),  # the spelling of TensorFlow's checkpoints
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "embeddings.word."),
    (r"^embeddings\.position_embeddings\.", "embeddings.position."),
    (r"^embeddings\.token_type_embeddings\.", "embeddings.type."),
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.(query|key|value)\.", r".\1_proj."),
    (r"\.query_proj\.", ".q_proj."),
    (r"\.key_proj\.", ".k_proj."),
    (r"\.value_proj\.", ".v_proj."),
    (r"\.attention\.output\.dense\.", ".o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".up_proj."),
    (r"(layers\.\d+)\.output\.dense\.", r"\1.down_proj."),
    (r"(layers\.\d+)\.output\.LayerNorm\.", r"\1.ffn_norm."),
)
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_ROBERTA = EncoderFamily(
    "Roberta",
    names=(
        (r"^roberta\.", ""),
        *_BERT_NAMES,
        (r"^classifier\.dense\.", "head.dense."),
        (r"^classifier\.out_proj\.", "score."),
    ),
    ignored=(*_BUFFERS, "pooler.", "lm_head."),
    defaults={"layer_norm_eps": 1e-12, "pad_token_id": 1, "type_vocab_size": 2},
    learned_positions=True,
    counts_padding=True,
    always_biased=True,
)

FAMILIES = {
    "bert": EncoderFamily(
        "Bert",
        names=(
            (r"^bert\.", ""),
            *_BERT_NAMES,
            (r"^pooler\.dense\.", "head.dense."),
            (r"^classifier\.", "score."),
        ),
        ignored=(*_BUFFERS, "cls."),
        defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2},
        learned_positions=True,
        always_biased=True,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": EncoderFamily(
        "XLMRoberta",
        names=_ROBERTA.names,
        ignored=_ROBERTA.ignored,
        defaults=_ROBERTA.defaults,
        learned_positions=True,
        counts_padding=True,
        always_biased=True,
    ),
    "modernbert": EncoderFamily(
        "ModernBert",
        names=(
            (r"^model\.", ""),
            (r"^embeddings\.tok_embeddings\.", "embeddings.word."),
            (r"\.attn_norm\.", ".attention_norm."),
            (r"\.attn\.Wqkv\.", ".qkv_proj."),
            (r"\.attn\.Wo\.", ".o_proj."),
            (r"\.mlp_norm\.", ".ffn_norm."),
            (r"\.mlp\.Wi\.", ".gate_up_proj."),  # what is activated comes first
            (r"\.mlp\.Wo\.", ".down_proj."),
            (r"^classifier\.", "score."),
        ),
        ignored=("decoder.",),
        defaults={
            "norm_eps": 1e-5,
            "norm_bias": False,
            "global_attn_every_n_layers": 3,
            "local_attention": 128,
            "global_rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
            "hidden_activation": "gelu",
            "classifier_pooling": "cls",
            "classifier_bias": False,
            "classifier_activation": "gelu",
        },
        norm_eps="norm_eps",
        activation="hidden_activation",
        post_norm=False,
        gated=True,
        bias_flags=True,
        rope="by_kind",
    ),
    "nomic_bert": EncoderFamily(
        "NomicBert",
        names=(
            (r"^nomic_bert\.", ""),
            (r"^embeddings\.word_embeddings\.", "embeddings.word."),
            (r"^embeddings\.token_type_embeddings\.", "embeddings.type."),
            (r"^(embeddings\.LayerNorm|emb_ln)\.", "embeddings.norm."),
            (r"^encoder\.layers\.", "layers."),
            (r"\.self_attn\.([qkvo]_proj)\.", r".\1."),
            (r"\.attn\.Wqkv\.", ".qkv_proj."),
            (r"\.attn\.out_proj\.", ".o_proj."),
            (r"\.mlp\.fc11\.", ".up_proj."),
            (r"\.mlp\.fc12\.", ".gate_proj."),
            (r"\.mlp\.fc2\.", ".down_proj."),
            (r"\.mlp\.(gate|up|down)_proj\.", r".\1_proj."),
            (r"\.(norm1|post_attention_layernorm)\.", ".attention_norm."),
            (r"\.(norm2|post_mlp_layernorm)\.", ".ffn_norm."),
            (r"^pooler\.dense\.", "head.dense."),
            (r"^classifier\.", "score."),
        ),
        ignored=(*_BUFFERS, "cls.", "rotary_emb."),
        defaults={
            "layer_norm_eps": 1e-12,
            "type_vocab_size": 2,
            "hidden_act": "silu",
            "rope_theta": 1000.0,
        },
        gated=True,
        rope="one",
    ),
}

#: Of NomicBERT's first dialect: its fields in transformers' own.
_NOMIC_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
#: And those that choose another model unless they have this value.
_NOMIC_NEUTRAL: dict[str, Any] = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "use_rms_norm": False,
}
_NOMIC_HARMLESS = frozenset(
    [
        "attn_pdrop",
        "dense_seq_output",
        "fused_bias_fc",
        "fused_dropout_add_ln",
        "pad_vocab_size_multiple",
        "parallel_block_tied_norm",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "use_flash_attn",
        "use_xentropy",
    ]
)


def is_encoder(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an encoder family."""
    return _family_of(values) is not None


def identify(values: Mapping[str, Any]) -> tuple[str, EncoderFamily, Fields, bool]:
    """model_type, family, the config's fields, and whether it is a classifier.  ModelUnsupported
    for another architecture."""
    name, family = values.get("model_type"), _family_of(values)
    if family is None:
        raise ModelUnsupported(f"model_type {short(str(name))}", hint=SUPPORTED)
    named = values.get("architectures") or []
    classes = [str(one) for one in (named if isinstance(named, list) else [named])]
    served = {family.word + end for end in CLASSES} | {COLBERT}
    if len(classes) > 1 or not served.issuperset(classes):
        raise ModelUnsupported(f"architecture {short(', '.join(classes))} ({name})", hint=SUPPORTED)
    if name == "nomic_bert" and "n_embd" in values:
        values = _from_first_nomic(values)
    config = Fields({**family.defaults, **values}, "config.json")
    if config.take("auto_map", None):
        raise config.refusal("auto_map", "models that bring their own code are not run")
    return str(name), family, config, bool(classes) and classes[0].endswith(CLASSIFIER)


def _family_of(values: Mapping[str, Any]) -> EncoderFamily | None:
    name = values.get("model_type")
    return FAMILIES.get(name) if isinstance(name, str) else None


def engine_name(name: str, family: EncoderFamily) -> str:
    """The engine's name of a published tensor."""
    for pattern, replacement in family.names:
        name = re.sub(pattern, replacement, name, count=1)
    return name


def _from_first_nomic(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dialect of the code that NomicBERT was published with, which is not run."""
    config = Fields(values, "config.json")
    for name, neutral in _NOMIC_NEUTRAL.items():
        if config.values.get(name, neutral) != neutral:
            raise config.refusal(name, "the engine computes NomicBERT as it was published alone")
    gone = {"auto_map", "n_positions", "max_trained_positions", *_NOMIC_NEUTRAL, *_NOMIC_HARMLESS}
    told = {_NOMIC_FIELDS.get(key, key): value for key, value in values.items() if key not in gone}
    # Beyond what it was trained with its rotation would have to be stretched by the length.
    trained = config.integer("max_trained_positions", config.integer("n_positions"))
    return {**told, "max_position_embeddings": min(trained, config.integer("n_positions"))}

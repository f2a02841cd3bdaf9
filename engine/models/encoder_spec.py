"""EncoderSpec: what an encoder is, as read from a Hugging Face config.json.  Torch-free.

Goes in: a folder.  Comes out: a frozen EncoderSpec, or ModelUnsupported naming the field that the
engine would have to guess at.  Knows nothing of weights, and of pooling only what the config of a
classifier says.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.errors import OTHER_BASE, ModelUnsupported
from engine.layout import (
    FUSED_NAMES,
    HEAD_DENSE,
    MODULE_ID,
    BlockLayout,
    Shapes,
    adapter_block_bytes,
)
from engine.models.encoder_families import (
    COLBERT,
    FAMILIES,
    PROJECTION,
    EncoderFamily,
    engine_name,
    identify,
)
from engine.models.families import Family
from engine.models.head_spec import HeadSpec, read_labels
from engine.models.hf_config import Fields, read_json
from engine.models.rope import RopeReader, RopeSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
from engine.models.spec import MAX_LAYERS, checkpoint_dtype

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
#: Fields beside `hf_config.HARMLESS` that say nothing about an encoder's forward pass.
_HARMLESS = (
    "classifier_dropout",
    "decoder_bias",
    "deterministic_flash_attn",
    "directionality",
    "embedding_dropout",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "initializer_cutoff_factor",
    "is_matryoshka",
    "matryoshka_dimensions",
    "max_trained_positions",
    "mlp_dropout",
    "model_max_length",
    "output_past",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",
)
_PLACE = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(\w+_proj)\.weight")


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder.  Sizes in elements; `windows` has one a layer: a token sees those at most so far
    away, to both sides; 0 = all."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ffn_size: int
    max_length: int  # tokens of the longest sequence
    norm_eps: float
    dtype: str  # the checkpoint's own
    activation: Activation
    gated: bool
    post_norm: bool
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    num_types: int  # token types; 0 = none
    position_rows: int = 0  # of the table of learned positions; 0 = none
    padding_id: int | None = None  # positions begin behind it, and it has none (RoBERTa)
    windows: tuple[int, ...] = ()
    ropes: tuple[RopeSpec | None, ...] = ()
    head: HeadSpec = field(default_factory=lambda: HeadSpec("cls", "tanh"))
    num_labels: int = 0  # 0 = the base brings no classifier
    labels: tuple[str, ...] = ()  # of the classes, in order
    projected: bool = False  # its files hold ColBERT's projection, which `pooling/` reads
    #: For who reads adapters: an encoder shares no weights between its ends, and where a module is
    #: published as one, adapters have it so.
    tied: bool = False
    fused_names: bool = False
    generates: bool = False

    @property
    def family(self) -> EncoderFamily:
        return FAMILIES[self.model_type]

    @property
    def default_length(self) -> int:
        """The longest sequence."""
        return self.max_length

    @property
    def num_ids(self) -> int:
        """Token ids that there may be: adapters bring none of their own."""
        return self.vocab_size

    @property
    def shapes(self) -> Shapes:
        """(d_in, d_out) of every LoRA target, in the order of `layout.MODULES`.  An MLP without a
        gate has no gate_proj: its first half is the up_proj."""
        hidden, ffn, attention = self.hidden_size, self.ffn_size, self.num_heads * self.head_dim
        gate = ffn if self.gated else 0
        dims = (
            (hidden, attention),
            (hidden, attention),
            (hidden, attention),
            (attention, hidden),
            (hidden, gate),
            (hidden, ffn),
            (ffn, hidden),
        )
        return Shapes(self.num_layers, dims, self.vocab_size)

    def block_layout(self, *, block_size: int = 0, dtype: str, draft_bytes: int = 0) -> BlockLayout:
        """The layout of packed adapters.  There is no KV that shares the blocks, so `block_size`,
        in tokens, and `draft_bytes` say nothing."""
        return BlockLayout(self.shapes, dtype, adapter_block_bytes(self.shapes, dtype))

    def position_ids(self, tokens: Sequence[int]) -> list[int]:
        """Which row of the position table, or which angle, each token of a sequence has."""
        import numpy as np  # which a client does without

        places: list[int] = self.packed_positions(np.array(tokens), [len(tokens)]).tolist()
        return places

    def packed_positions(
        self, ids: "NDArray[np.int64]", lengths: Sequence[int]
    ) -> "NDArray[np.int64]":
        """The same (T,) of sequences of these lengths, which lie one behind the other in ids (T,).
        Each has a token at least."""
        import numpy as np

        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        if self.padding_id is None:
            plain: NDArray[np.int64] = np.arange(len(ids)) - np.repeat(starts, lengths)
            return plain
        real = ids != self.padding_id
        count = np.cumsum(real)
        ahead = np.repeat(count[starts] - real[starts], lengths)
        rows: NDArray[np.int64] = np.where(real, count - ahead, 0) + self.padding_id
        return rows

    def engine_name(self, published: str) -> str:
        """The engine's name of a published tensor."""
        return engine_name(published, self.family)

    def place_of(self, module: str) -> tuple[int, str] | None:
        """Layer and module of a published module's name, such as
        `encoder.layer.0.attention.self.query`; None if LoRA there is not served."""
        name = self.engine_name(f"{module}.weight")
        if name == f"{HEAD_DENSE}.weight":
            return self.num_layers, HEAD_DENSE
        match = _PLACE.fullmatch(name)
        if match is None:
            return None
        absent = not self.gated and match[2] in ("gate_proj", "gate_up_proj")
        known = match[2] in MODULE_ID or match[2] in FUSED_NAMES
        return (int(match[1]), match[2]) if known and not absent else None

    def ignores(self, name: str) -> bool:
        """Whether a tensor, by the engine's name, is beside the encoder and its head: a buffer, or
        of a head for other work."""
        beside = (*self.family.ignored, PROJECTION) if self.projected else self.family.ignored
        return name.startswith(beside) or name.endswith("inv_freq")


def read_encoder_spec(folder: Path) -> EncoderSpec:
    """Read config.json of a Hugging Face folder.

    Raises ConfigError for a folder that cannot be read, ModelUnsupported for a model that the
    engine would not compute exactly: another architecture, a quantized base, a field that it does
    not know and that is not at its neutral value.
    """
    name, family, config, classifies = identify(read_json(folder / "config.json", required=True))
    _refuse_variants(config, family)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    positions = config.integer("max_position_embeddings")
    head_dim = _head_dim(config, hidden, heads)
    padding = config.take("pad_token_id", None) if family.counts_padding else None
    if family.counts_padding and (type(padding) is not int or not 0 <= padding < positions - 1):
        raise config.refusal("pad_token_id", "expected an id that leaves positions behind it")
    labels = read_labels(config) if classifies else ()
    windows = _windows(config, layers) if family.rope == "by_kind" else (0,) * layers
    spec = EncoderSpec(
        model_type=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        ffn_size=config.integer("intermediate_size"),
        max_length=positions if padding is None else positions - padding - 1,
        norm_eps=config.number(family.norm_eps),
        dtype=checkpoint_dtype(config, folder),
        activation=_activation(config, family.activation),
        gated=family.gated,
        post_norm=family.post_norm,
        norm_bias=config.flag("norm_bias") if family.bias_flags else True,
        attention_bias=family.always_biased
        or (family.bias_flags and config.flag("attention_bias")),
        mlp_bias=family.always_biased or (family.bias_flags and config.flag("mlp_bias")),
        num_types=config.integer("type_vocab_size") if "type_vocab_size" in family.defaults else 0,
        position_rows=positions if family.learned_positions else 0,
        padding_id=padding,
        windows=windows,
        ropes=_ropes(config, family, head_dim, positions, windows),
        head=_head(config, family),
        num_labels=len(labels),
        labels=labels,
        projected=COLBERT in (config.values.get("architectures") or ()),
        fused_names=family.rope != "",
    )
    config.refuse_rest()
    return spec


def _refuse_variants(config: Fields, family: EncoderFamily) -> None:
    quantized = config.take("quantization_config", None)
    if quantized:
        raise config.refusal("quantization_config", "serve the unquantized checkpoint")
    if config.take("position_embedding_type", None) not in (None, "absolute"):
        raise config.refusal("position_embedding_type", "only absolute positions are computed")
    if family.norm_eps != "layer_norm_eps":  # ModernBERT's files have both, and it reads its own
        config.take("layer_norm_eps", None)
    for name in _HARMLESS:
        config.take(name, None)


def _head_dim(config: Fields, hidden: int, heads: int) -> int:
    if config.take("head_dim", None) is not None:
        return config.integer("head_dim")
    if hidden % heads:
        raise config.refusal("num_attention_heads", f"hidden_size {hidden} is no multiple of it")
    return hidden // heads


def _activation(config: Fields, name: str) -> Activation:
    value = config.take(name, "gelu")
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise config.refusal(name, f"computed are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _windows(config: Fields, layers: int) -> tuple[int, ...]:
    """ModernBERT: half of local_attention to either side, but for every n-th layer."""
    half = config.integer("local_attention") // 2
    every = config.integer("global_attn_every_n_layers")
    kinds = config.take("layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    known = {"full_attention": 0, "sliding_attention": half}
    fit = isinstance(kinds, list) and len(kinds) == layers
    if not fit or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise config.refusal("layer_types", f"expected {layers} of {', '.join(known)}")
    if half < 1:
        raise config.refusal("local_attention", "expected 2 or more")
    return tuple(known[kind] for kind in kinds)


def _ropes(
    config: Fields, family: EncoderFamily, head_dim: int, positions: int, windows: tuple[int, ...]
) -> tuple[RopeSpec | None, ...]:
    if not family.rope:
        return (None,) * len(windows)
    if head_dim % 2:
        raise config.refusal("num_attention_heads", "rotary halves need an even head_dim")
    values, reader_family = dict(config.values), Family("")
    if family.rope == "one":
        rope = RopeReader(config, reader_family, head_dim, positions).one()
        ropes: tuple[RopeSpec | None, ...] = (rope,) * len(windows)
    else:
        if config.take("rope_scaling", None):
            raise config.refusal("rope_scaling", "the engine does not stretch ModernBERT")
        values["rope_theta"] = config.take("global_rope_theta", None)
        values["rope_local_base_freq"] = config.take("local_rope_theta", None)
        config.take("rope_parameters", None)
        renamed = Fields(values, config.where)
        full, near = RopeReader(renamed, reader_family, head_dim, positions).by_kind()
        ropes = tuple(near if window else full for window in windows)
    if any(rope is not None and rope.one_way_length(positions) < positions for rope in ropes):
        raise ModelUnsupported(
            f"{config.where} rotates long sequences in another way than short", hint=OTHER_BASE
        )
    return ropes


def _head(config: Fields, family: EncoderFamily) -> HeadSpec:
    if not family.bias_flags:
        return family.head
    pools, activation = config.take("classifier_pooling"), config.take("classifier_activation")
    if pools not in ("cls", "mean"):
        raise config.refusal("classifier_pooling", "expected cls or mean")
    if activation != "gelu":
        raise config.refusal("classifier_activation", "only gelu is computed")
    return HeadSpec(
        pools,
        "gelu",
        dense_bias=config.flag("classifier_bias"),
        norm=True,
        norm_bias=config.flag("norm_bias"),
    )

"""ModelSpec: what a dense decoder is, as read from a Hugging Face config.json.  Torch-free.

Goes in: a folder.  Comes out: a frozen ModelSpec, or ModelUnsupported naming the field that the
engine would have to guess at.  Knows nothing of weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.errors import FETCH_AGAIN, ModelUnsupported
from engine.layout import BlockLayout, Shapes, adapter_block_bytes, kv_block_bytes
from engine.models.families import FAMILIES, Family, identify
from engine.models.head_spec import CLASSIFIER, DECODER_HEAD, HeadSpec, read_labels
from engine.models.hf_config import Fields, read_json, short, weights_dtype
from engine.models.layer_kinds import read_rotated, read_windows
from engine.models.rope import RopeReader, RopeSpec

#: A list of so many layers is read in a moment; no dense decoder has a tenth of them.
MAX_LAYERS = 10_000

_DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder.  Sizes in elements; `sliding_window` 0 = full attention on that layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_position: int
    rms_eps: float
    tied: bool
    dtype: str  # the checkpoint's own: float32, bfloat16 or float16
    rope: RopeSpec = field(default_factory=RopeSpec)
    layer_ropes: tuple[RopeSpec | None, ...] = ()  # one a layer, None = no rotation; () = `rope`
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE
    norms_add_one: bool = False  # norms multiply by 1 + weight, before the cast
    post_norms: bool = False  # attention and MLP are normed again before they are added
    activation: Literal["silu", "gelu"] = "silu"  # gelu in its tanh form
    embedding_scale: float = 1.0
    query_scalar: float | None = None  # scores are divided by its root; None = head_dim
    attention_softcap: float = 0.0  # 0 = none
    logit_softcap: float = 0.0
    fused_names: bool = False  # the modules of `layout.FUSED_NAMES` are published as one
    other_towers: tuple[str, ...] = ()  # beginnings of tensor names that are not the text model's
    sliding_windows: tuple[int, ...] = ()  # one a layer, () = none anywhere
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generates: bool = True
    #: Of a decoder that pools: what classifies.
    head: HeadSpec | None = None
    num_labels: int = 0  # 0 = the base brings no classifier
    labels: tuple[str, ...] = ()  # of the classes, in order
    #: A classifier's last row is that of the last token which is not this one.
    pad_token_id: int | None = None
    extra_vocab: int = 0  # token ids behind the base's that adapters may bring rows for
    ranks: int = 1  # above 1: what each of so many ranks has (`models/shard.py`)

    @property
    def num_ids(self) -> int:
        """Token ids of the base and of adapters, which logits have a column for each."""
        return self.vocab_size + self.extra_vocab

    @property
    def num_types(self) -> int:
        """Token types: a decoder has none."""
        return 0

    @property
    def default_length(self) -> int:
        """The longest sequence, unless a longer one is asked for: `max_position`, but with
        longrope the original length, up to which the result is exact whatever its length."""
        ropes = {self.rope, *self.layer_ropes} - {None}
        return min(rope.one_way_length(self.max_position) for rope in ropes if rope is not None)

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def shapes(self) -> Shapes:
        """(d_in, d_out) of every LoRA target, in the order of `layout.MODULES`."""
        hidden, ffn = self.hidden_size, self.ffn_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        dims = (
            (hidden, q),
            (hidden, kv),
            (hidden, kv),
            (q, hidden),
            (hidden, ffn),
            (hidden, ffn),
            (ffn, hidden),
        )
        return Shapes(self.num_layers, dims, self.num_ids)

    def block_layout(self, *, block_size: int, dtype: str, draft_bytes: int = 0) -> BlockLayout:
        """The layout of packed adapters: an arena of `dtype`, blocks of `block_size` tokens, or of
        adapters alone where that is 0.  `draft_bytes` of a block are a draft model's KV."""
        if not block_size:
            return BlockLayout(self.shapes, dtype, adapter_block_bytes(self.shapes, dtype))
        size = self.kv_block_bytes(block_size, dtype)
        return BlockLayout(self.shapes, dtype, size + draft_bytes, self.ranks)

    def kv_block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of K and V of `block_size` tokens in all layers."""
        return kv_block_bytes(
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )


def read_spec(
    folder: Path, *, pools: bool = False, generates: bool | None = None, extra_vocab: int = 0
) -> ModelSpec:
    """Read config.json (and generation_config.json) of a Hugging Face folder; `pools`: of a model
    that is to make vectors or scores.  Unless it `generates` too, which None leaves to that, it may
    have no head to generate with, and no use for `extra_vocab`.

    Raises ConfigError for a folder that cannot be read, ModelUnsupported for a model that the
    engine would not compute exactly: another architecture, a quantized base, a field that it does
    not know and that is not at its neutral value.
    """
    values = read_json(folder / "config.json", required=True)
    generates = not pools if generates is None else generates
    name, config, towers = identify(values, generates=generates)
    generation = read_json(folder / "generation_config.json", required=False)
    family = FAMILIES[name]
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    max_position = config.integer("max_position_embeddings")
    rotated = read_rotated(config, family, layers)
    windows = read_windows(config, family, layers, rotated)
    head_dim = _head_dim(config, hidden, heads)
    reader = RopeReader(config, family, head_dim, max_position)
    rope, layer_ropes = _ropes(reader, windows, rotated)
    reach = rope.reach(max_position)
    windows = tuple(size if size < reach else 0 for size in windows)  # Phi-3.5's hides nothing
    caps = {field: config.optional_number(field) or 0.0 for field in family.softcaps}
    biased = {flag: config.flag(flag) for flag in family.bias_flags}
    if config.take("is_causal", True) is False:
        raise config.refusal("is_causal", "the engine's decoders see no token behind their own")
    labels = read_labels(config) if pools and _classifies(values) else ()
    spec = ModelSpec(
        model_type=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(config, heads),
        head_dim=head_dim,
        ffn_size=config.integer("intermediate_size"),
        max_position=reach,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        tied=config.flag("tie_word_embeddings"),
        dtype=checkpoint_dtype(config, folder),
        rope=rope,
        layer_ropes=layer_ropes,
        qkv_bias=family.qkv_bias or biased.get("attention_bias", False),
        o_bias=biased.get("attention_bias", False),
        mlp_bias=biased.get("mlp_bias", False),
        qk_norm=family.qk_norm,
        norms_add_one=family.gemma,
        post_norms=family.gemma,
        activation=_activation(config, family),
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        query_scalar=config.number("query_pre_attn_scalar") if family.gemma else None,
        attention_softcap=caps.get("attn_logit_softcapping", 0.0),
        logit_softcap=caps.get("final_logit_softcapping", 0.0),
        fused_names=family.fused_names,
        other_towers=towers,
        sliding_windows=windows if any(windows) else (),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), config.values.get("eos_token_id")),
        bos_token_id=_first(
            _token_ids(generation.get("bos_token_id"), config.values.get("bos_token_id"))
        ),
        generates=generates,
        head=DECODER_HEAD if pools else None,
        num_labels=len(labels),
        labels=labels,
        pad_token_id=_first(_token_ids(config.values.get("pad_token_id"))),
        extra_vocab=extra_vocab if generates else 0,
    )
    config.refuse_rest()
    return spec


def _classifies(values: Mapping[str, Any]) -> bool:
    named = values.get("architectures") or [""]
    return str(named[0] if isinstance(named, list) else named).endswith(CLASSIFIER)


def _ropes(
    reader: RopeReader, windows: tuple[int, ...], rotated: tuple[bool, ...]
) -> tuple[RopeSpec, tuple[RopeSpec | None, ...]]:
    """The rotary embedding of full attention, and every layer's, () if it is that of all."""
    if reader.family.rope_by_kind:
        rope, local = reader.by_kind()
        by_layer: list[RopeSpec | None] = [local if window else rope for window in windows]
    else:
        rope = reader.one()
        by_layer = [rope if turned else None for turned in rotated]
    return rope, () if all(one == rope for one in by_layer) else tuple(by_layer)


def _activation(config: Fields, family: Family) -> Literal["silu", "gelu"]:
    if family.gemma:
        config.take("hidden_act", None)  # wrong in early files, and read by nobody
        if config.take("hidden_activation", None) not in (None, "gelu_pytorch_tanh"):
            raise config.refusal("hidden_activation", "only gelu_pytorch_tanh is computed")
        return "gelu"
    if config.take("hidden_act", "silu") != "silu":
        raise config.refusal("hidden_act", "only silu is computed")
    return "silu"


def _kv_heads(config: Fields, heads: int) -> int:
    """null is as many as heads; absent is no number that a checkpoint states, unless its family
    has a default."""
    kv_heads = heads
    if config.take("num_key_value_heads") is not None:
        kv_heads = config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"{heads} heads are not a multiple of it")
    return kv_heads


def _head_dim(config: Fields, hidden: int, heads: int) -> int:
    if config.take("head_dim", None) is not None:
        head_dim = config.integer("head_dim")
    elif hidden % heads:
        raise config.refusal("num_attention_heads", f"hidden_size {hidden} is no multiple of it")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise config.refusal("head_dim", "rotary halves need an even head_dim")
    return head_dim


def checkpoint_dtype(config: Fields, folder: Path) -> str:
    """The checkpoint's own; where the config is silent, the tensors' own."""
    named = config.values.get("dtype") or config.values.get("torch_dtype")
    name = str(named).removeprefix("torch.") if named else weights_dtype(folder)
    if name not in _DTYPES:
        raise ModelUnsupported(
            f"weights of dtype {short(name)}", hint="supported: float32, bfloat16, float16"
        )
    return _DTYPES[name]


def tokenizer_size(folder: Path) -> int:
    """One more than the highest id in tokenizer.json; 0 if there is none to read.

    Embeddings are often padded past it, and a padded id must never be drawn.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return 0
    try:
        tokenizer = json.loads(path.read_bytes())
        vocab = tokenizer["model"]["vocab"]
        ids = [token["id"] for token in tokenizer.get("added_tokens", [])]
        ids += vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
        return max(int(i) for i in ids) + 1
    except (ValueError, KeyError, TypeError) as error:
        raise ModelUnsupported(
            f"{path}: not a tokenizer file ({error})", hint=FETCH_AGAIN
        ) from error


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Union in order of ids given as an int, a list or null."""
    found: dict[int, None] = {}
    for value in values:
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                found[token] = None
    return tuple(found)


def _first(values: tuple[int, ...]) -> int | None:
    return values[0] if values else None

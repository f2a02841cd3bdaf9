"""ModelSpec: what a dense decoder is, as read from a Hugging Face config.json.  Torch-free.

Goes in: a folder.  Comes out: a frozen ModelSpec, or ModelUnsupported naming the field that the
engine would have to guess at.  Knows nothing of weights.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelUnsupported
from engine.layout import BlockLayout, Shapes, kv_block_bytes
from engine.models.hf_config import Fields, read_json, weights_dtype

RopeKind = Literal["default", "linear", "llama3", "yarn"]

#: model_type -> architecture.  What is not here is refused by name.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED = "supported: Llama and SmolLM2 (llama), Mistral, Qwen2 and Qwen2.5, Qwen3 (dense)"
ROPE_KINDS = "supported: default, linear, llama3, yarn"

_DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `theta`, kind, and the kind's own numbers (see `models/layers.py`)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


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
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE (Qwen3)
    sliding_windows: tuple[int, ...] = ()  # one a layer, () = none anywhere
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

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
        return Shapes(self.num_layers, dims)

    def block_layout(self, *, block_size: int, dtype: str) -> BlockLayout:
        """The layout of packed adapters: an arena of `dtype`, blocks of `block_size` tokens."""
        size = kv_block_bytes(
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        return BlockLayout(self.shapes, dtype, size)


def read_spec(folder: Path) -> ModelSpec:
    """Read config.json (and generation_config.json) of a Hugging Face folder.

    Raises ConfigError for a folder that cannot be read, ModelUnsupported for a model that the
    engine would not compute exactly: another architecture, a quantized base, a field that it does
    not know and that is not at its neutral value.
    """
    config = Fields(read_json(folder / "config.json", required=True), "config.json")
    generation = read_json(folder / "generation_config.json", required=False)
    family = _family(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers, head_dim = config.integer("num_hidden_layers"), _head_dim(config, family, hidden, heads)
    if config.take("hidden_act", "silu") != "silu":
        raise config.refusal("hidden_act", "only silu is computed")
    # Llama alone may leave the field out: elsewhere the default is no property of a checkpoint.
    kv_absent = "num_key_value_heads" not in config.values and family != "llama"
    kv_heads = config.integer("num_key_value_heads", None if kv_absent else heads)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"{heads} heads are not a multiple of it")
    max_position = config.integer("max_position_embeddings")
    rope = _rope(config, max_position)
    biased = family in ("llama", "qwen3") and config.flag("attention_bias")
    spec = ModelSpec(
        model_type=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=config.integer("intermediate_size"),
        max_position=_reach(rope, max_position),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        tied=config.flag("tie_word_embeddings"),
        dtype=_dtype(config, folder),
        rope=rope,
        qkv_bias=biased or family == "qwen2",
        o_bias=biased,
        mlp_bias=family == "llama" and config.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_windows=_windows(config, family, layers),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), config.values.get("eos_token_id")),
        bos_token_id=_first(
            _token_ids(generation.get("bos_token_id"), config.values.get("bos_token_id"))
        ),
    )
    config.refuse_rest()
    return spec


def _family(config: Fields) -> str:
    """The model_type, once it and the architecture are known to be one of ours."""
    if config.take("quantization_config", None):
        quantization = config.values["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelUnsupported(
            f"the base model is quantized ({method or 'quantization_config is set'})",
            hint="serve the unquantized checkpoint; quantized bases are not supported",
        )
    if config.take("auto_map", None):
        raise config.refusal("auto_map", "models that bring their own code are not run")
    family, architectures = config.values.get("model_type"), config.values.get("architectures")
    if family not in FAMILIES:
        named = (architectures or [family])[0]
        raise ModelUnsupported(f"architecture {named} (model_type {family})", hint=SUPPORTED)
    if architectures and architectures != [FAMILIES[family]]:
        raise ModelUnsupported(f"architecture {architectures[0]} ({family})", hint=SUPPORTED)
    return str(family)


def _head_dim(config: Fields, family: str, hidden: int, heads: int) -> int:
    if config.take("head_dim", None) is not None:
        head_dim = config.integer("head_dim")
    elif family == "qwen3" and "head_dim" not in config.values:
        head_dim = 128  # Qwen3 defines it apart from hidden_size
    elif hidden % heads:
        raise config.refusal("num_attention_heads", f"hidden_size {hidden} is no multiple of it")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise config.refusal("head_dim", "rotary halves need an even head_dim")
    return head_dim


def _rope(config: Fields, max_position: int) -> RopeSpec:
    """The old `rope_scaling` wins over `rope_parameters`, theta inside wins over the top one."""
    scaling, parameters = config.take("rope_scaling", None), config.take("rope_parameters", None)
    top_theta = config.number("rope_theta", 10000.0)
    partial = config.take("partial_rotary_factor", None)
    chosen = scaling or parameters or {}
    where = "rope_scaling" if scaling else "rope_parameters"
    if not isinstance(chosen, dict):
        raise config.refusal(where, "expected an object")
    if any(isinstance(value, dict) for value in chosen.values()):
        raise config.refusal(where, "a rotary embedding per layer kind is not supported")
    rope = Fields(chosen, where)
    theta = rope.number("rope_theta", top_theta)
    if scaling and parameters and parameters.get("rope_theta", theta) != theta:
        raise config.refusal("rope_parameters", f"contradicts rope_scaling, where theta is {theta}")
    if rope.take("partial_rotary_factor", partial) not in (None, 1, 1.0):
        raise rope.refusal("partial_rotary_factor", "partial rotary embeddings are not supported")
    kind = rope.take("type", None)
    kind = rope.take("rope_type", None) or kind or "default"
    original = rope.integer("original_max_position_embeddings", max_position)
    original = config.integer("original_max_position_embeddings", original)
    rope.take("finetuned", None)  # a remark in older YaRN checkpoints
    if kind == "default":
        spec = RopeSpec(theta=theta)
    elif kind == "linear":
        spec = RopeSpec(theta=theta, kind="linear", factor=rope.number("factor"))
    elif kind == "llama3":
        spec = RopeSpec(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=original,
        )
    elif kind == "yarn":
        spec = RopeSpec(
            theta=theta,
            kind="yarn",
            factor=rope.number("factor", max_position / original),
            original_max_position=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )
    else:
        raise ModelUnsupported(f"{where} has rope type {kind}", hint=ROPE_KINDS)
    rope.refuse_rest()
    return spec


def _reach(rope: RopeSpec, max_position: int) -> int:
    """YaRN is switched on in configs that still state the length before stretching (Qwen2.5)."""
    if rope.kind == "yarn":
        return max(max_position, int(rope.factor * rope.original_max_position))
    return max_position


def _windows(config: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Window of every layer, 0 = full; () if none has one.  Positions include the row itself."""
    window, from_layer = 0, 0
    if family == "mistral":
        window = _window(config)
    elif family in ("qwen2", "qwen3"):
        size = _window(config)
        window = size if config.flag("use_sliding_window") else 0
        from_layer = int(config.take("max_window_layers", 28) or 0)
    plain = tuple(window if layer >= from_layer else 0 for layer in range(layers))
    kinds = config.take("layer_types", None)
    windows = plain if kinds is None else _windows_by_kind(config, kinds, window, layers)
    if family == "mistral" and windows != plain:
        # The published code windows all layers alike here, whatever layer_types says.
        raise config.refusal("layer_types", "contradicts sliding_window, which covers all layers")
    return windows if any(windows) else ()


def _window(config: Fields) -> int:
    """Absent is the families' default of 4096, null is none."""
    return (
        0 if config.take("sliding_window", 4096) is None else config.integer("sliding_window", 4096)
    )


def _windows_by_kind(config: Fields, kinds: Any, window: int, layers: int) -> tuple[int, ...]:
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(known):
        raise config.refusal(
            "layer_types", f"expected {layers} times full_attention or sliding_attention"
        )
    if "sliding_attention" in kinds and not window:
        raise config.refusal("layer_types", "sliding_attention without a sliding_window in use")
    return tuple(known[kind] for kind in kinds)


def _dtype(config: Fields, folder: Path) -> str:
    """The checkpoint's own; where the config is silent, the tensors' own."""
    named = config.values.get("dtype") or config.values.get("torch_dtype")
    name = str(named).removeprefix("torch.") if named else weights_dtype(folder)
    if name not in _DTYPES:
        raise ModelUnsupported(
            f"weights of dtype {name}", hint="supported: float32, bfloat16, float16"
        )
    return _DTYPES[name]


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

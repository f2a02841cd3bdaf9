"""ModelSpec: what a dense decoder is, as read from a Hugging Face config.json.  Torch-free.

Goes in: a folder.  Comes out: a frozen ModelSpec, or ModelUnsupported naming the field that the
engine would have to guess at.  Knows nothing of weights.
"""

from dataclasses import dataclass, field
from typing import Literal

from engine.adapters.layout import BlockLayout, Shapes, kv_block_bytes

RopeKind = Literal["default", "linear", "llama3", "yarn"]


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
        dims = ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden))
        return Shapes(self.num_layers, dims)

    def block_layout(self, *, block_size: int, dtype: str) -> BlockLayout:
        """The layout of packed adapters for an arena of `dtype` with `block_size` tokens a block."""
        size = kv_block_bytes(
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        return BlockLayout(self.shapes, dtype, size)

"""What inspection finds in an adapter folder, as plain data.

`peft.inspect` makes an AdapterManifest, the registry stores it, the packer follows it.  Torch-free;
holds no paths and no adapter names.
"""

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from engine.messages import PackedModule

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MLX_WEIGHTS_FILE = "adapters.safetensors"
#: An adapter has one of these.
WEIGHTS_FILES = (WEIGHTS_FILE, MLX_WEIGHTS_FILE)
#: The text files that lorad reads from an adapter folder, beside the two above.
TEXT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)

#: safetensors dtype -> our word for it; LoRA factors have one of these.
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of what is read; sizes in bytes."""

    max_rank: int = 512  # `[lora] max_rank`
    max_bytes: int = 4 << 30  # `[watch] max_adapter_bytes`: the weights file
    max_tensors: int = 20_000
    max_header: int = 8 << 20
    max_config: int = 64 << 10
    max_text: int = 64 << 20  # any one text file; Gemma 3's tokenizer.json has 33 MB


class TensorRef(Struct, frozen=True):
    """One tensor of the weights file.  `begin`, `end`: bytes from the start of the file.

    With `transposed` the file holds the transpose, and `shape` is what it is read as: rows `first`
    to `first + shape[0]` of that.
    """

    name: str
    dtype: str  # as in the file: F32, BF16, F16
    shape: tuple[int, ...]
    begin: int
    end: int
    transposed: bool = False
    first: int = 0


class PairTensors(Struct, frozen=True):
    """The tensors of one module: A [r, d_in], B [d_out, r], and what else it has, [d_out] each.
    At the ends d_in or d_out are the tokens that the adapter knows.

    Rows that replace the base's have A alone: those of `rows`, or () for all.  What is counted
    there beyond A's last row is a row of `more`.
    """

    a: TensorRef
    b: TensorRef | None
    bias: TensorRef | None = None  # lora_bias
    magnitude: TensorRef | None = None  # DoRA
    more: TensorRef | None = None
    rows: tuple[int, ...] = ()

    @property
    def every(self) -> tuple[TensorRef, ...]:
        """Those that are there."""
        found = (self.a, self.b, self.bias, self.magnitude, self.more)
        return tuple(ref for ref in found if ref is not None)


class AdapterManifest(Struct, frozen=True, kw_only=True):
    """A valid adapter.  `tensors[i]` are those of `modules[i]`; scaling there is final."""

    rank: int  # the largest
    ranks: dict[str, int]  # module -> its largest rank over the layers
    alpha: float  # lora_alpha, MLX's scale; alpha_pattern is already in the modules' scaling
    rslora: bool
    targets: tuple[str, ...]  # modules that carry a pair anywhere, in layout order
    dtype: str  # float32, bfloat16, float16, or "mixed"
    num_layers: int  # layers that carry a pair
    file_bytes: int  # size of the weights file
    modules: tuple[PackedModule, ...]  # in stream order
    tensors: tuple[PairTensors, ...]
    changes_kv: bool  # False: only the last layer's q, o and MLP, so its KV equals the base's
    warnings: tuple[str, ...]
    semantic: dict[str, Any]  # what of the config decides the arithmetic: part of the digest
    text_files: tuple[str, ...]  # those of TEXT_FILES that are there
    weights_file: str = WEIGHTS_FILE  # which of WEIGHTS_FILES
    num_tokens: int = 0  # ids that its requests may hold and draw; 0 = as the base's
    own_tokenizer: bool = False  # its tokenizer files say something else than the base's
    base_text: str = ""  # what these two were told beside: `adapter_text.base_text`
    alora_tokens: tuple[int, ...] = ()  # an activated LoRA: those that it is invoked by

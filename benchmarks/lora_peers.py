"""vLLM's own LoRA kernels, of the package as installed: `lora_kernels.py --peer vllm` runs them.

Nothing of theirs is kept here: what is imported is `vllm.lora.ops.triton_ops`, its `lora_shrink`,
`lora_expand` and `LoRAKernelMeta`, and what surrounds them is set up as vLLM does for a layer: one
tensor a module for all slots, every adapter padded with zeros to `max_lora_rank`, the scaling
multiplied into lora_B, an fp32 buffer between the two kernels, a grid for all slots and "none" or,
as `specialize_active_lora` has it, for the next power of two of adapters in the step.

The arguments have changed from release to release, and a call that fits by chance would time
something else: `load` compares their names, and refuses a package with others.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from lora_cases import LAYOUT, SLOTS
from torch import Tensor

from engine.kernels.lora_meta import GroupShape, group_shapes

#: What `max_lora_rank` may be.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: The release whose arguments these are.
KNOWN = "0.33"
_META = (
    *("token_lora_mapping", "token_indices_sorted_by_lora_ids", "num_tokens_per_lora"),
    *("lora_token_start_loc", "lora_ids", "no_lora_flag_cpu", "num_active_loras"),
)
_ARGUMENTS = {
    "lora_shrink": ("inputs", "lora_a_weights", "output_tensor", *_META, "scaling"),
    "lora_expand": (
        *("inputs", "lora_b_weights", "output_tensor", *_META),
        *("offset_start", "add_inputs"),
    ),
    "LoRAKernelMeta.make": ("max_loras", "max_num_tokens", "device", "captured_lora_counts"),
    "LoRAKernelMeta.prepare_tensors": ("self", "token_lora_mapping"),
    "LoRAKernelMeta.meta_args": ("self", "token_nums", "specialize_active_lora"),
}


class Unusable(Exception):
    """One line: why the peer cannot be run here, and what to try."""


@dataclass(frozen=True)
class Vllm:
    """The three names that are called, and whose they are."""

    version: str
    shrink: Callable[..., None]
    expand: Callable[..., None]
    meta: Any  # LoRAKernelMeta


def load() -> Vllm:
    """The installed package's kernels; raises Unusable."""
    try:
        package = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise _broken(error) from error
        raise Unusable(
            f"vllm is not installed; try: pip install 'vllm=={KNOWN}.*', in a copy of this "
            "environment, for it brings a torch of its own"
        ) from error
    except Exception as error:  # whatever a package does when it is imported
        raise _broken(error) from error
    version = str(getattr(package, "__version__", "of no version"))
    try:
        ops = importlib.import_module("vllm.lora.ops.triton_ops")
    except Exception as error:
        raise _broken(error, version) from error
    for name, wanted in _ARGUMENTS.items():
        found = _arguments(ops, name)
        if found != wanted:
            has = "is not there" if found is None else f"takes ({', '.join(found)})"
            raise Unusable(
                f"vllm {version} has other kernels than {KNOWN}, whose arguments are known here: "
                f"{name} {has}; try: pip install 'vllm=={KNOWN}.*'"
            )
    return Vllm(version, ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta)


def _broken(error: Exception, version: str = "") -> Unusable:
    said = (str(error).splitlines() or [""])[0]
    return Unusable(
        f"vllm {version}".rstrip() + f" cannot be imported ({type(error).__name__}: {said}); "
        "try: python -c 'import vllm.lora.ops.triton_ops'"
    )


def _arguments(ops: ModuleType, name: str) -> tuple[str, ...] | None:
    """The names of its arguments, whether it is a function or registered with torch."""
    found: Any = ops
    for part in name.split("."):
        found = getattr(found, part, None)
    schema = getattr(getattr(found, "default", None), "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    return tuple(inspect.signature(found).parameters) if callable(found) else None


def padded(rank: int) -> int:
    """The least `max_lora_rank` that an adapter of this rank fits in."""
    return next(most for most in RANKS if most >= rank)


class Stacks:
    """vLLM's weights of every layer, and what it sends to the card for a step."""

    def __init__(
        self,
        vllm: Vllm,
        shapes: Mapping[str, GroupShape],
        *,
        layers: int,
        slots: int,
        max_rank: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.vllm = vllm
        self.max_rank = max_rank
        self._slots, self._max_rows, self._device = slots, max_rows, device
        self._specialized = False
        self._metas: dict[bool, Any] = {}

        def zeros(*size: int) -> Tensor:
            return torch.zeros(slots, 1, *size, dtype=dtype, device=device)

        self._a = {  # each (slots, 1, max_rank, d_in)
            (layer, group): [zeros(max_rank, shape.d_in) for _ in shape.widths]
            for layer in range(layers)
            for group, shape in shapes.items()
        }
        self._b = {  # each (slots, 1, d_out, max_rank)
            (layer, group): [zeros(width, max_rank) for width in shape.widths]
            for layer in range(layers)
            for group, shape in shapes.items()
        }

    def put(
        self, slot: int, layer: int, group: str, pairs: Sequence[tuple[Tensor, Tensor, float]]
    ) -> None:
        """lora_A (rank, d_in), lora_B (rank, d_out) and the scaling of each module of a group."""
        for number, (a, b, scaling) in enumerate(pairs):
            rank = len(a)
            self._a[layer, group][number][slot, 0, :rank] = a
            self._b[layer, group][number][slot, 0, :, :rank] = (b * scaling).T

    def begin(self, slots: Tensor, *, specialized: bool) -> None:
        """A step whose rows use these slots, (rows,) int32; -1 where a row uses none."""
        if specialized not in self._metas:
            most = self._slots + 1  # each of the slots, and none
            counts = [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]
            self._metas[specialized] = self.vllm.meta.make(
                self._slots, self._max_rows, self._device, counts if specialized else [most]
            )
        self._metas[specialized].prepare_tensors(slots)
        self._specialized = specialized

    def apply(self, y: Tensor, x: Tensor, layer: int, group: str) -> None:
        """y (rows, all widths) += the correction of x (rows, d_in)."""
        a, b = self._a[layer, group], self._b[layer, group]
        args = self._metas[self._specialized].meta_args(len(x), self._specialized)
        h = torch.empty(len(a), len(x), self.max_rank, dtype=torch.float32, device=x.device)
        self.vllm.shrink(x, a, h, *args, 1.0)
        self.vllm.expand(h, b, y, *args, offset_start=0, add_inputs=True)


def compile_peer(max_rank: int, rows: int, group: str) -> None:
    """Launch its kernels once on one layer: they are then in triton's cache on disk."""
    shape, device = group_shapes(LAYOUT)[group], torch.device("cuda")
    stacks = Stacks(
        load(),
        {group: shape},
        **{"layers": 1, "slots": SLOTS, "max_rank": max_rank, "max_rows": rows},
        **{"dtype": torch.bfloat16, "device": device},
    )
    stacks.begin(torch.zeros(rows, dtype=torch.int32, device=device), specialized=True)
    x = torch.zeros(rows, shape.d_in, dtype=torch.bfloat16, device=device)
    y = torch.zeros(rows, sum(shape.widths), dtype=torch.bfloat16, device=device)
    stacks.apply(y, x, 0, group)
    torch.cuda.synchronize()

"""Building blocks of the models: fused LoRA projections, RMSNorm, rotary embedding.

Goes in: activations (T, width), one row a token.  Comes out: activations.  Weights are allocated
empty in their final dtype and on their device; `models/weights.py` fills them.  Knows no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.kernels import elementwise
from engine.kernels.gemm import linear
from engine.kernels.lora import (
    lora_augment,
    lora_augments,
    lora_expand,
    lora_gated,
    lora_gates,
    lora_joined,
    lora_joins,
    lora_shrink,
)
from engine.kernels.lora_meta import LoraMeta
from engine.layout import FUSED_NAMES, GROUPS, ROOMY_GROUPS, room_of
from engine.models.encoder_spec import EncoderSpec
from engine.models.frequencies import inverse_frequencies
from engine.models.ranks import Ranks
from engine.models.rope import RopeSpec
from engine.models.shard import BY_INPUTS
from engine.models.spec import ModelSpec

#: cos and sin of a step's rows (T, 1, rotated / 2) in fp32.
Angles = tuple[Tensor, Tensor]


class Gate(Protocol):
    """`elementwise.silu_mul` or `elementwise.gelu_mul`."""

    def __call__(
        self, gate_up: Tensor, /, out: Tensor | None = None, *, deterministic: bool
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer of a model has in common besides the spec."""

    device: torch.device
    dtype: torch.dtype
    deterministic: bool
    max_len: int = 0  # of a sequence; 0 = the spec's `default_length`
    ranks: Ranks | None = None  # those that share the model; None = this process has all of it
    room: int = 0  # columns behind weights for each module's guests (`kernels/lora_augment.py`)

    def empty(self, *shape: int) -> nn.Parameter:
        """A weight to be filled: no gradient, no initial values."""
        data = torch.empty(*shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(data, requires_grad=False)


class LoraLinear(nn.Module):
    """Projections of one input, fused side by side into one GEMM, with their LoRA correction.

    `group` is a key of `layout.GROUPS`; `splits` are the widths of its modules.  ROOMY_GROUPS have
    the room that `build` asks for.
    """

    def __init__(
        self,
        group: str,
        layer: int,
        d_in: int,
        splits: Sequence[int],
        build: Build,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.group = group
        self.modules_fused = GROUPS[group]
        self.layer = layer
        self.splits = list(splits)
        self.deterministic = build.deterministic
        self.room = room_of(build.room, len(splits)) if group in ROOMY_GROUPS else 0
        #: (sum of splits, d_in + room): the weight, and room for guests, which is never all read.
        self.roomy = build.empty(sum(splits), d_in + self.room).data
        self.weight = nn.Parameter(self.roomy[:, :d_in], requires_grad=False)
        self.bias = build.empty(sum(splits)) if bias else None
        #: Those whose outputs are parts of a sum, where the inputs are cut.
        self.summed = build.ranks if group in BY_INPUTS else None

    def forward(self, x: Tensor, lora: LoraMeta | None) -> Tensor:
        """x (T, d_in) -> (T, sum of splits)."""
        if lora is not None and self._has_guests(lora):
            return self._with_guests(x, lora)
        fixed = self.deterministic
        joins = lora is not None and lora_joins(x, self.weight, lora, deterministic=fixed)
        if lora is not None and not joins:
            lora_shrink(x, layer=self.layer, modules=self.modules_fused, meta=lora)
        y = linear(x, self.weight, self.bias, deterministic=fixed, closely=joins)
        if lora is not None and joins:
            lora_joined(
                y,
                x,
                layer=self.layer,
                modules=self.modules_fused,
                meta=lora,
                base_bias=self.bias,
            )
        elif lora is not None:
            lora_expand(
                y,
                x,
                layer=self.layer,
                modules=self.modules_fused,
                splits=self.splits,
                meta=lora,
                base_bias=self.bias,
                deterministic=fixed,
            )
        if self.summed is not None:
            self.summed.add_up(y)
        return y

    def place_for(self, x: Tensor, lora: LoraMeta | None) -> Tensor | None:
        """Where the input (T, d_in) is to be written that has as many rows as x: with room behind
        each, if the step's adapters are this product's guests; else None, anywhere."""
        if lora is None or not self._has_guests(lora):
            return None
        d_in = self.weight.shape[1]  # always the whole room: shrink is compiled for one stride
        return x.new_empty(len(x), d_in + self.room)[:, :d_in]

    def _has_guests(self, lora: LoraMeta) -> bool:
        return self.room > 0 and lora_augments(lora)

    def _with_guests(self, x: Tensor, lora: LoraMeta) -> Tensor:
        """One product for the base and its guests; x is in `place_for` them."""
        lora_shrink(x, layer=self.layer, modules=self.modules_fused, meta=lora)
        more = lora_augment(x, self.roomy, layer=self.layer, modules=self.modules_fused, meta=lora)
        inputs = x.shape[1] + more
        rows = x.as_strided((len(x), inputs), (x.stride(0), 1))
        y = linear(rows, self.roomy[:, :inputs], self.bias, deterministic=False)
        if self.summed is not None:
            self.summed.add_up(y)
        return y

    def gated(
        self, x: Tensor, lora: LoraMeta | None, gate: Gate, out: Tensor | None = None
    ) -> Tensor:
        """x (T, d_in) -> what `gate` makes of gate and up, (T, width of either), in `out` if given,
        as it is where there are guests."""
        if lora is None or not lora_gates(lora):
            return gate(self(x, lora), out, deterministic=self.deterministic)
        assert out is None
        lora_shrink(x, layer=self.layer, modules=self.modules_fused, meta=lora)
        y = linear(x, self.weight, self.bias, deterministic=self.deterministic)
        return lora_gated(y, layer=self.layer, meta=lora, gelu=gate is elementwise.gelu_mul)

    def parts(self, *, as_one: bool) -> dict[str, Tensor]:
        """Views of the fused tensors by their published names, such as `q_proj.weight`.

        `as_one`: whole, where `layout.FUSED_NAMES` has a name for the group.
        """
        names, widths = self.modules_fused, self.splits
        if as_one and self.group in FUSED_NAMES.values():
            names = tuple(name for name, group in FUSED_NAMES.items() if group == self.group)
            widths = [sum(self.splits)]
        found: dict[str, Tensor] = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                views = torch.split(fused.data, widths)
                for module, view in zip(names, views, strict=True):
                    found[f"{module}.{kind}"] = view
        return found


class RMSNorm(nn.Module):
    """Root mean square over the last axis, times a weight, or (`add_one`) times 1 + the weight."""

    def __init__(self, width: int, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.eps = spec.rms_eps
        self.add_one = spec.norms_add_one
        self.weight = build.empty(width)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape and dtype."""
        return elementwise.rms_norm(x, self.weight, self.eps, add_one=self.add_one)

    def after_sum(self, x: Tensor, owed: "Owed | None", out: Tensor | None = None) -> Tensor:
        """On a card: x (T, width) += what is owed in place, then the norm of x, in `out` if given;
        one launch."""
        from engine.kernels import fused

        delta, norm = owed or (None, None)
        return fused.rms_norm(
            x,
            self.weight,
            self.eps,
            delta,
            delta_weight=None if norm is None else norm.weight,
            add_one=self.add_one,
            out=out,
        )


class Owed(NamedTuple):
    """What the residual stream has not been given yet: `delta` (T, width), normed if there is a
    norm for it."""

    delta: Tensor
    norm: RMSNorm | None


class Rotary(nn.Module):
    """Angles of one rotary embedding, computed once a step for all layers that have it."""

    inv_freq: Tensor

    def __init__(self, rope: RopeSpec, spec: ModelSpec | EncoderSpec, build: Build) -> None:
        super().__init__()
        length = build.max_len or spec.default_length
        inv_freq, self.magnitude = inverse_frequencies(rope, spec.head_dim, length)
        self.register_buffer("inv_freq", inv_freq.to(build.device), persistent=False)
        self.deterministic = build.deterministic

    def forward(self, positions: Tensor) -> Angles:
        """positions (T,) -> cos and sin (T, 1, rotated / 2) in fp32."""
        return elementwise.angles(
            positions, self.inv_freq, self.magnitude, deterministic=self.deterministic
        )

"""Building blocks of a decoder: fused LoRA projections, RMSNorm, rotary embedding.

Goes in: activations (T, width), one row a token.  Comes out: activations.  Weights are allocated
empty in their final dtype and on their device; `models/weights.py` fills them.  Knows no files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.kernels import elementwise
from engine.kernels.gemm import linear
from engine.kernels.lora import lora_apply
from engine.kernels.lora_meta import LoraMeta
from engine.layout import GROUPS
from engine.models.spec import RopeSpec


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer of a model has in common besides the spec."""

    device: torch.device
    dtype: torch.dtype
    deterministic: bool

    def empty(self, *shape: int) -> nn.Parameter:
        """A weight to be filled: no gradient, no initial values."""
        data = torch.empty(*shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(data, requires_grad=False)


class LoraLinear(nn.Module):
    """Projections of one input, fused side by side into one GEMM, with their LoRA correction.

    `group` is a key of `layout.GROUPS`; `splits` are the widths of its modules.
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
        self.modules_fused = GROUPS[group]
        self.layer = layer
        self.splits = list(splits)
        self.deterministic = build.deterministic
        self.weight = build.empty(sum(splits), d_in)
        self.bias = build.empty(sum(splits)) if bias else None

    def forward(self, x: Tensor, lora: LoraMeta | None) -> Tensor:
        """x (T, d_in) -> (T, sum of splits)."""
        y = linear(x, self.weight, self.bias, deterministic=self.deterministic)
        if lora is not None:
            lora_apply(
                y,
                x,
                layer=self.layer,
                modules=self.modules_fused,
                splits=self.splits,
                meta=lora,
                deterministic=self.deterministic,
            )
        return y

    def parts(self) -> dict[str, Tensor]:
        """Views of the fused tensors by their published names, such as `q_proj.weight`."""
        found: dict[str, Tensor] = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                views = torch.split(fused.data, self.splits)
                for module, view in zip(self.modules_fused, views, strict=True):
                    found[f"{module}.{kind}"] = view
        return found


class RMSNorm(nn.Module):
    """Root mean square over the last axis, times a weight."""

    def __init__(self, width: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight = build.empty(width)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape and dtype."""
        return elementwise.rms_norm(x, self.weight, self.eps)

    def after_sum(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """On a card: x (T, width) += delta in place, then the norm of x; one launch."""
        from engine.kernels import fused

        return fused.rms_norm(x, self.weight, self.eps, delta)


class Rotary(nn.Module):
    """Angles of the rotary embedding, computed once a step for all layers."""

    inv_freq: Tensor

    def __init__(self, rope: RopeSpec, head_dim: int, build: Build) -> None:
        super().__init__()
        inv_freq, self.magnitude = inverse_frequencies(rope, head_dim)
        self.register_buffer("inv_freq", inv_freq.to(build.device), persistent=False)
        self.deterministic = build.deterministic

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (T,) -> cos and sin (T, 1, head_dim / 2) in fp32."""
        return elementwise.angles(
            positions, self.inv_freq, self.magnitude, deterministic=self.deterministic
        )


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position (head_dim / 2,) in fp32, and what cos and sin are multiplied by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim), _yarn_magnitude(rope)
    return inv_freq, 1.0


def _llama3(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    low, high, reach = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    share = (reach / wavelength - low) / (high - low)  # 0 = long, 1 = short
    blended = (1 - share) * inv_freq / rope.factor + share * inv_freq
    stretched = torch.where(wavelength > reach / low, inv_freq / rope.factor, blended)
    return torch.where(wavelength < reach / high, inv_freq, stretched)


def _yarn(rope: RopeSpec, inv_freq: Tensor, head_dim: int) -> Tensor:
    """As llama3, but the blend is a ramp over the dimensions, from beta_fast to beta_slow turns."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the published code's way around a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_magnitude(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)

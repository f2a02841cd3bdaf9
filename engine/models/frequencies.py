"""The frequencies of a rotary embedding, by its kind.

Goes in: a RopeSpec, and the longest sequence that will be rotated.  Comes out: radians per position
of each pair of a head's elements, in fp32, and the factor of cos and sin.  Knows no positions.
"""

import math

import torch
from torch import Tensor

from engine.models.rope import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Radians per position (rotated / 2,) in fp32, and what cos and sin are multiplied by.

    A head of which an odd number of elements would turn has one more that does.  `length` is of
    the longest sequence: longrope has other frequencies beyond the original length, for all its
    positions, so that K which is kept would be wrong if a sequence grew from the one to the other.
    """
    width = int(head_dim * rope.rotated)
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, width), _yarn_magnitude(rope)
    if rope.kind == "longrope":
        long = length > rope.original_max_position
        factors = torch.tensor(rope.long_factors if long else rope.short_factors)
        return 1.0 / (factors * rope.theta**exponents), _longrope_magnitude(rope)
    return inv_freq, 1.0


def _llama3(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    low, high, reach = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    share = (reach / wavelength - low) / (high - low)  # 0 = long, 1 = short
    blended = (1 - share) * inv_freq / rope.factor + share * inv_freq
    stretched = torch.where(wavelength > reach / low, inv_freq / rope.factor, blended)
    return torch.where(wavelength < reach / high, inv_freq, stretched)


def _yarn(rope: RopeSpec, inv_freq: Tensor, width: int) -> Tensor:
    """As llama3, but the blend is a ramp over the dimensions, from beta_fast to beta_slow turns."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # the published code's way around a division by zero
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_magnitude(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_magnitude(rope: RopeSpec) -> float:
    """The same below and beyond the original length."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))

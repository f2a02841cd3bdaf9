"""What is done to each row by itself: norm, rotation, gate.

Goes in and comes out: activations, one row a token.  All arithmetic is in fp32.  Knows nothing of
layers and of other rows.  `fused.py` has the same for a card, several ops a launch.

`deterministic` concerns silu, cos and sin: torch may compute them with vector code in the body of
a tensor (or of a thread's share of it) and with scalar code in the tail, so that a value's bits
depend on where it lies.  (silu in torch 2.13 on AVX-512: 4% of the values differ.)  Applied to one
row at a time they lie alike.  Sums, products, divisions and roots are exactly rounded in both, and
a norm's sum runs within its row.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import backend

#: By name; gelu is the exact one.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, add_one: bool = False) -> Tensor:
    """x (..., width) by its root mean square, cast back to x's dtype *before* the weight (Llama).

    `add_one`: times 1 + weight instead, all of it in fp32 before the cast (Gemma).
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if add_one:
        return (wide * scale * (1.0 + weight.float())).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x (rows, width) less its mean, by its deviation, times a weight, plus a bias if there is one;
    rounded to x's dtype once."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def angles(
    positions: Tensor, inv_freq: Tensor, magnitude: float, *, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions (T,) x inv_freq (half,), times `magnitude`: (T, 1, half) fp32."""
    turns = positions.float().unsqueeze(1) * inv_freq  # (T, half)
    cos, sin = (_map(fn, turns, deterministic) for fn in (torch.cos, torch.sin))
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (T, heads, head_dim): the first half against the second, not pairs.

    cos and sin (T, 1, rotated / 2): where `rotated` is less than head_dim, the rest passes.
    """
    rotated = 2 * cos.shape[-1]
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned.to(x.dtype)
    return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)


def silu_mul(gate_up: Tensor, out: Tensor | None = None, *, deterministic: bool) -> Tensor:
    """silu(gate) * up of gate_up (T, 2 * ffn), where gate comes first -> (T, ffn), in `out` if
    given."""
    if backend.use_kernels(gate_up):
        from engine.kernels import fused

        return fused.silu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(_map(F.silu, gate, deterministic), up, out=out)


def gelu_mul(gate_up: Tensor, out: Tensor | None = None, *, deterministic: bool) -> Tensor:
    """The same with gelu in its tanh form."""
    if backend.use_kernels(gate_up):
        from engine.kernels import fused

        return fused.gelu_mul(gate_up, out)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(_map(partial(F.gelu, approximate="tanh"), gate, deterministic), up, out=out)


def activate(x: Tensor, kind: str, *, deterministic: bool) -> Tensor:
    """One of ACTIVATIONS of every number of x (rows, width)."""
    return _map(ACTIVATIONS[kind], x, deterministic)


def cap_logits(
    logits: Tensor, cap: float, out: Tensor | None = None, *, deterministic: bool
) -> Tensor:
    """cap * tanh(logits / cap) of logits (N, vocab) in fp32, in `out` if given."""
    if backend.use_kernels(logits):
        from engine.kernels import fused

        return fused.cap_logits(logits, cap, out)
    capped = _map(torch.tanh, logits.float() / cap, deterministic) * cap
    return capped if out is None else out.copy_(capped)


def _map(fn: Callable[[Tensor], Tensor], x: Tensor, by_row: bool) -> Tensor:
    if not by_row or x.is_cuda:  # on a card every value is computed by itself
        return fn(x)
    return torch.stack([fn(row) for row in x.unbind(0)])

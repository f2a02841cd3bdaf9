"""A residual sum and the norm of it by mean and deviation, in one launch on a card.

Goes in: the stream, what is added to it, weights.  Comes out: the norm, and where it is wanted the
sum.  `elementwise.layer_norm` behind a sum is the specification: the sum is rounded to the rows'
dtype, all else is in fp32 and rounded once.  A row's bits depend on that row alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor, empty

from engine.kernels import backend
from engine.kernels.dependent import follow
from engine.kernels.launch import launch


@triton.jit
def _sum_norm(
    x,
    delta,
    weight,
    bias,
    out,
    stride_x,
    stride_delta,
    eps,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row.  With KEEP the sum stays in x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    live = column < COLUMNS
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)  # written by nobody
    if BIAS:
        shift = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    follow(PDL)
    value = tl.load(x + row * stride_x + column, mask=live, other=0.0)
    more = tl.load(delta + row * stride_delta + column, mask=live, other=0.0)
    value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
    if KEEP:
        tl.store(x + row * stride_x + column, value, mask=live)
    wide = value.to(tl.float32)
    apart = tl.where(live, wide - tl.sum(wide, 0) / COLUMNS, 0.0)
    normed = apart * tl.rsqrt(tl.sum(apart * apart, 0) / COLUMNS + eps) * factor
    if BIAS:
        normed += shift
    tl.store(out + row * COLUMNS + column, normed.to(value.dtype), mask=live)


def sum_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, keep: bool
) -> Tensor:
    """The norm of x + delta, both (T, width) -> (T, width).  `keep`: x becomes the sum in place.

    Last axes are contiguous.
    """
    rows, columns = x.shape
    out = empty(x.shape, dtype=x.dtype, device=x.device)
    assert x.stride(1) == delta.stride(1) == 1
    width, pdl = triton.next_power_of_2(columns), backend.dependent_launch(x.device)
    launch(
        _sum_norm,
        (rows,),
        x,
        delta,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        delta.stride(0),
        eps,
        COLUMNS=columns,
        WIDTH=width,
        KEEP=keep,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=min(16, max(1, width // 512)),
        launch_pdl=pdl,
    )
    return out

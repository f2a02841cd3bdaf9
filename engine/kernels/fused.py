"""What is done to each row by itself on a card, one launch each: norm, gate, cap.

Goes in and comes out: activations, one row a token, as in `elementwise.py`, which is the
specification: all arithmetic in fp32, rounded to the activations' dtype where that module rounds.
Beside it the norm makes the residual sum, which would be another pass.  The rotation of heads is in
`fused_heads.py`.  Knows nothing of other rows; may be captured in a graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import follow
from engine.kernels.hyperbolic import tanh
from engine.kernels.launch import launch

#: Columns of a program of the gate and of the cap.
GATE_COLUMNS = 1024


@triton.jit
def _scaled(value, factor, eps, COLUMNS: tl.constexpr, ADD_ONE: tl.constexpr):
    """A row by its root mean square, times `factor`, or with ADD_ONE times 1 + `factor`.

    The weight product comes after the cast to the row's dtype, with ADD_ONE before it.
    """
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
    if ADD_ONE:
        return (normed * (1.0 + factor)).to(value.dtype)
    else:
        return (normed.to(value.dtype).to(tl.float32) * factor).to(value.dtype)


@triton.jit
def _norm(
    x,
    delta,
    weight,
    delta_weight,
    out,
    stride_x,
    stride_delta,
    stride_out,
    eps,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    NORM_DELTA: tl.constexpr,
    ADD_ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row.  x += delta where ADD; the sum is rounded before it is normed, as torch's is."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    live = column < COLUMNS
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)  # written by nobody
    if NORM_DELTA:
        before = tl.load(delta_weight + column, mask=live, other=0.0).to(tl.float32)
    follow(PDL)
    value = tl.load(x + row * stride_x + column, mask=live, other=0.0)
    if ADD:
        more = tl.load(delta + row * stride_delta + column, mask=live, other=0.0)
        if NORM_DELTA:
            more = _scaled(more, before, eps, COLUMNS, ADD_ONE)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + row * stride_x + column, value, mask=live)
    normed = _scaled(value, factor, eps, COLUMNS, ADD_ONE)
    tl.store(out + row * stride_out + column, normed, mask=live)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    *,
    delta_weight: Tensor | None = None,
    add_one: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The norm of x (T, width) over its last axis, times weight -> (T, width), in `out` if given.

    With `delta` (T, width), x becomes x + delta in place first, or with `delta_weight` too x + the
    norm of delta.  `add_one` as in `elementwise.rms_norm`, for both.  Last axes are contiguous.
    """
    rows, columns = x.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other = x if delta is None else delta
    assert x.stride(1) == other.stride(1) == out.stride(1) == 1
    width, pdl = triton.next_power_of_2(columns), backend.dependent_launch(x.device)
    launch(
        _norm,
        (rows,),
        x,
        other,
        weight,
        weight if delta_weight is None else delta_weight,
        out,
        x.stride(0),
        other.stride(0),
        out.stride(0),
        eps,
        COLUMNS=columns,
        WIDTH=width,
        ADD=delta is not None,
        NORM_DELTA=delta_weight is not None,
        ADD_ONE=add_one,
        PDL=pdl,
        num_warps=min(16, max(1, width // 512)),
        launch_pdl=pdl,
    )
    return out


@triton.jit
def opened(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):
    """silu(gate) * up of two tiles in fp32, or with GELU gelu's tanh form of it, in `dtype`."""
    steep = gate
    if GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u, with u = sqrt(2 / pi) (x + 0.044715 x^3)
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(steep))  # never beyond 1, whatever the gate
    sigmoid = tl.where(steep >= 0, 1.0, small) / (1.0 + small)
    return ((gate * sigmoid).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _gate(
    gate_up,
    out,
    stride_row,
    stride_out,
    COLUMNS: tl.constexpr,
    TAKE: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE columns (axis 1) of one row (axis 0)."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    live = column < COLUMNS
    at = gate_up + row * stride_row + column
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + COLUMNS, mask=live, other=0.0).to(tl.float32)
    value = opened(gate, up, out.dtype.element_ty, GELU)
    tl.store(out + row * stride_out + column, value, mask=live)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up of gate_up (T, 2 * ffn), where gate comes first -> (T, ffn), in `out` if
    given."""
    return _gated(gate_up, out, gelu=False)


def gelu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """The same with gelu in its tanh form."""
    return _gated(gate_up, out, gelu=True)


def _gated(gate_up: Tensor, out: Tensor | None, *, gelu: bool) -> Tensor:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == out.stride(1) == 1 and out.shape == (rows, columns)
    pdl = backend.dependent_launch(gate_up.device)
    launch(
        _gate,
        (rows, triton.cdiv(columns, GATE_COLUMNS)),
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        COLUMNS=columns,
        TAKE=GATE_COLUMNS,
        GELU=gelu,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _cap(
    logits,
    out,
    stride_row,
    stride_out,
    cap,
    COLUMNS: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE columns (axis 1) of one row (axis 0)."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    live = column < COLUMNS
    value = tl.load(logits + row * stride_row + column, mask=live, other=0.0).to(tl.float32) / cap
    tl.store(out + row * stride_out + column, cap * tanh(value), mask=live)


def cap_logits(logits: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """cap * tanh(logits / cap) of logits (N, vocab) in fp32, in `out` if given."""
    rows, columns = logits.shape
    if out is None:
        out = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    assert logits.stride(1) == out.stride(1) == 1
    pdl = backend.dependent_launch(logits.device)
    launch(
        _cap,
        (rows, triton.cdiv(columns, GATE_COLUMNS)),
        logits,
        out,
        logits.stride(0),
        out.stride(0),
        cap,
        COLUMNS=columns,
        TAKE=GATE_COLUMNS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out

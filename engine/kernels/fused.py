"""What is done to each row by itself on a card, one launch each: norm, rotation, gate.

Goes in and comes out: activations, one row a token, as in `elementwise.py`, which is the
specification: all arithmetic in fp32, rounded to the activations' dtype where that module rounds.
Beside it each kernel does what would be another pass: the residual sum, the write of K and V.
Knows nothing of other rows; may be captured in a graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import follow

#: Columns of a program of the gate, and heads of one of the rotation.
GATE_COLUMNS, ROTATE_HEADS = 1024, 8


@triton.jit
def _norm(
    x,
    delta,
    weight,
    out,
    stride_x,
    stride_delta,
    eps,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row.  x += delta where ADD; the sum is rounded before it is normed, as torch's is."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    live = column < COLUMNS
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)  # written by nobody
    follow(PDL)
    value = tl.load(x + row * stride_x + column, mask=live, other=0.0)
    if ADD:
        more = tl.load(delta + row * stride_delta + column, mask=live, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + row * stride_x + column, value, mask=live)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32) * factor
    tl.store(out + row * COLUMNS + column, normed.to(out.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """The norm of x (T, width) over its last axis, times weight -> (T, width).

    With `delta` (T, width), x becomes x + delta in place first.  Last axes are contiguous.
    """
    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other = x if delta is None else delta
    assert x.stride(1) == other.stride(1) == 1
    width, pdl = triton.next_power_of_2(columns), backend.dependent_launch(x.device)
    _norm[(rows,)](
        x,
        other,
        weight,
        out,
        x.stride(0),
        other.stride(0),
        eps,
        COLUMNS=columns,
        WIDTH=width,
        ADD=delta is not None,
        PDL=pdl,
        num_warps=min(16, max(1, width // 512)),
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _head_norm(
    first, second, weight, column, live, DIM: tl.constexpr, eps, is_query, is_key, other
):
    """Both halves of each head by the head's root mean square, times q's or k's weight."""
    HALF: tl.constexpr = DIM // 2
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(square / DIM + eps)[:, None]
    q_first = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    q_second = tl.load(weight + HALF + column, mask=live, other=0.0).to(tl.float32)
    k_first = tl.load(other + column, mask=live, other=0.0).to(tl.float32)
    k_second = tl.load(other + HALF + column, mask=live, other=0.0).to(tl.float32)
    by_first = tl.where(is_query[:, None], q_first[None, :], k_first[None, :])
    by_second = tl.where(is_query[:, None], q_second[None, :], k_second[None, :])
    normed = is_query | is_key
    return (
        tl.where(normed[:, None], first * scale, first),
        tl.where(normed[:, None], second * scale, second),
        tl.where(normed[:, None], by_first, 1.0),
        tl.where(normed[:, None], by_second, 1.0),
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate(
    qkv,
    kv,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    stride_row,
    stride_block,
    stride_side,
    stride_key,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE heads (axis 1) of one row (axis 0) of q, k and v side by side."""
    follow(PDL)
    HALF: tl.constexpr = DIM // 2
    dtype = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    column = tl.arange(0, WIDTH)
    live = column < HALF
    here = (head < HEADS + 2 * KV_HEADS)[:, None] & live[None, :]
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = head >= HEADS + KV_HEADS
    turns = is_query | is_key

    at = qkv + row * stride_row + (head * DIM)[:, None] + column[None, :]
    first = tl.load(at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    if NORMED:
        first, second, by_first, by_second = _head_norm(
            first, second, q_weight, column, live, DIM, eps, is_query, is_key, k_weight
        )
        first = (first.to(dtype).to(tl.float32) * by_first).to(dtype).to(tl.float32)
        second = (second.to(dtype).to(tl.float32) * by_second).to(dtype).to(tl.float32)
    c = tl.load(cos + row * HALF + column, mask=live, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + column, mask=live, other=0.0)[None, :]
    turned = tl.where(turns[:, None], first * c - second * s, first).to(dtype)
    turned_second = tl.where(turns[:, None], second * c + first * s, second).to(dtype)
    tl.store(at, turned, mask=here & turns[:, None])
    tl.store(at + HALF, turned_second, mask=here & turns[:, None])

    slot = tl.load(slots + row)
    kept = here & ((slot >= 0) & (is_key | is_value))[:, None]
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    side = is_value.to(tl.int64) * stride_side
    place = (slot // BLOCK) * stride_block + (slot % BLOCK) * stride_key
    to = kv + place + (side + kv_head * DIM)[:, None] + column[None, :]
    tl.store(to, turned, mask=kept)
    tl.store(to + HALF, turned_second, mask=kept)


def rotate_and_write(
    qkv: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    angles: tuple[Tensor, Tensor],
    *,
    heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k of qkv (T, (heads + 2 kv_heads) * head_dim) in place; put K and V into kv.

    kv (num_blocks, 2, block_size, kv_heads, head_dim) is one layer's view; slot_mapping (T,) int64
    as in AttentionMeta, -1 = the row writes nothing.  `angles` are cos and sin (T, 1, head_dim / 2)
    fp32.  With the weights (head_dim,), q and k are normed by head first.  Returns views of qkv:
    q (T, heads, head_dim), k and v (T, kv_heads, head_dim).
    """
    rows = qkv.shape[0]
    block_size, kv_heads, head_dim = kv.shape[2:]
    assert qkv.stride(1) == 1 and kv.stride()[3:] == (head_dim, 1)
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim
    cos, sin = angles
    assert cos.is_contiguous() and sin.is_contiguous()
    normed, pdl = q_weight is not None, backend.dependent_launch(qkv.device)
    _rotate[(rows, triton.cdiv(heads + 2 * kv_heads, ROTATE_HEADS))](
        qkv,
        kv,
        slot_mapping,
        cos,
        sin,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        qkv.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim // 2),
        BLOCK=block_size,
        NORMED=normed,
        TAKE=ROTATE_HEADS,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    parts = torch.split(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in parts)
    return q, k, v


@triton.jit
def _gate(gate_up, out, stride_row, COLUMNS: tl.constexpr, TAKE: tl.constexpr, PDL: tl.constexpr):
    """TAKE columns (axis 1) of one row (axis 0)."""
    follow(PDL)
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    live = column < COLUMNS
    at = gate_up + row * stride_row + column
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + COLUMNS, mask=live, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never beyond 1, whatever the gate
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    silu = (gate * sigmoid).to(dtype).to(tl.float32)
    tl.store(out + row * COLUMNS + column, (silu * up).to(dtype), mask=live)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up (T, 2 * ffn), where gate comes first -> (T, ffn)."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    pdl = backend.dependent_launch(gate_up.device)
    _gate[(rows, triton.cdiv(columns, GATE_COLUMNS))](
        gate_up,
        out,
        gate_up.stride(0),
        COLUMNS=columns,
        TAKE=GATE_COLUMNS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out

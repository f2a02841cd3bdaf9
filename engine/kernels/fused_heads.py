"""What is done to each head of q and k on a card, in one launch: norm, rotation, K and V's write.

Goes in: a step's rows of q, k and v side by side, and the angles.  Comes out: views of the same
rows, and K and V in the arena.  `elementwise.py` is the specification, as for `fused.py`.  Knows
nothing of other rows; may be captured in a graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import follow
from engine.kernels.launch import launch

#: Heads of a program.
ROTATE_HEADS = 8


@triton.jit
def _head_norm(
    part, scale, q_weight, k_weight, column, live, is_query, is_key, ADD_ONE: tl.constexpr, dtype
):
    """Some columns of each head by their head's scale, times q's or k's weight; V as it is."""
    of_q = tl.load(q_weight + column, mask=live, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + column, mask=live, other=0.0).to(tl.float32)
    factor = tl.where(is_query[:, None], of_q[None, :], of_k[None, :])
    if ADD_ONE:
        normed = part * scale * (1.0 + factor)
    else:
        normed = (part * scale).to(dtype).to(tl.float32) * factor
    return tl.where((is_query | is_key)[:, None], normed.to(dtype).to(tl.float32), part)


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
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    ADD_ONE: tl.constexpr,
    TURNED: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TAKE heads (axis 1) of one row (axis 0) of q, k and v side by side.

    The first HALF columns of a head turn against the next HALF; what is left is the rest.
    """
    follow(PDL)
    REST: tl.constexpr = DIM - 2 * HALF
    dtype = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    column = tl.arange(0, WIDTH)
    live = column < HALF
    exists = head < HEADS + 2 * KV_HEADS
    here = exists[:, None] & live[None, :]
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = head >= HEADS + KV_HEADS
    turns = (is_query | is_key)[:, None]

    slot = tl.load(slots + row)
    kept = (exists & (slot >= 0) & (is_key | is_value))[:, None]
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    side = is_value.to(tl.int64) * stride_side
    place = (slot // BLOCK) * stride_block + (slot % BLOCK) * stride_key
    to = kv + place + (side + kv_head * DIM)[:, None]

    at = qkv + row * stride_row + (head * DIM)[:, None]
    first = tl.load(at + column[None, :], mask=here, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + column[None, :], mask=here, other=0.0).to(tl.float32)
    if REST:
        behind = 2 * HALF + tl.arange(0, REST_WIDTH)
        there = exists[:, None] & (behind < DIM)[None, :]
        rest = tl.load(at + behind[None, :], mask=there, other=0.0).to(tl.float32)
    if NORMED:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST:
            square += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(square / DIM + eps)[:, None]
        first = _head_norm(
            first, scale, q_weight, k_weight, column, live, is_query, is_key, ADD_ONE, dtype
        )
        second = _head_norm(
            second,
            scale,
            q_weight + HALF,
            k_weight + HALF,
            column,
            live,
            is_query,
            is_key,
            ADD_ONE,
            dtype,
        )
        if REST:
            rest = _head_norm(
                rest,
                scale,
                q_weight,
                k_weight,
                behind,
                behind < DIM,
                is_query,
                is_key,
                ADD_ONE,
                dtype,
            )
    if TURNED:
        c = tl.load(cos + row * HALF + column, mask=live, other=0.0)[None, :]
        s = tl.load(sin + row * HALF + column, mask=live, other=0.0)[None, :]
        turned = tl.where(turns, first * c - second * s, first)
        second = tl.where(turns, second * c + first * s, second)
        first = turned
    if TURNED or NORMED:
        tl.store(at + column[None, :], first.to(dtype), mask=here & turns)
        tl.store(at + HALF + column[None, :], second.to(dtype), mask=here & turns)
    tl.store(to + column[None, :], first.to(dtype), mask=here & kept)
    tl.store(to + HALF + column[None, :], second.to(dtype), mask=here & kept)
    if REST:
        if NORMED:
            tl.store(at + behind[None, :], rest.to(dtype), mask=there & turns)
        tl.store(to + behind[None, :], rest.to(dtype), mask=there & kept)


def rotate_and_write(
    qkv: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    *,
    heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    add_one: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k of qkv (T, (heads + 2 kv_heads) * head_dim) in place; put K and V into kv.

    kv (num_blocks, 2, block_size, kv_heads, head_dim) is one layer's view; slot_mapping (T,) int64
    as in AttentionMeta, -1 = the row writes nothing.  `angles` are cos and sin (T, 1, rotated / 2)
    fp32, None = nothing turns.  With the weights (head_dim,), q and k are normed by head first,
    `add_one` as in `elementwise.rms_norm`.  Returns views of qkv: q (T, heads, head_dim), k and v
    (T, kv_heads, head_dim).
    """
    rows = qkv.shape[0]
    block_size, kv_heads, head_dim = kv.shape[2:]
    assert qkv.stride(1) == 1 and kv.stride()[3:] == (head_dim, 1)
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim
    half = head_dim // 2 if angles is None else angles[0].shape[-1]
    cos, sin = (qkv, qkv) if angles is None else angles
    assert angles is None or (cos.is_contiguous() and sin.is_contiguous())
    normed, pdl = q_weight is not None, backend.dependent_launch(qkv.device)
    launch(
        _rotate,
        (rows, triton.cdiv(heads + 2 * kv_heads, ROTATE_HEADS)),
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
        HALF=half,
        WIDTH=triton.next_power_of_2(half),
        REST_WIDTH=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK=block_size,
        NORMED=normed,
        ADD_ONE=add_one,
        TURNED=angles is not None,
        TAKE=ROTATE_HEADS,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    parts = torch.split(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in parts)
    return q, k, v

"""Attention of rows that stand alone in their sequence: split-KV over the block-major arena.

Goes in: q, one layer's view of the arena, block tables, a plan of the step (`decode_plan.py`).
Comes out: attention per row.  A program takes one share of the step's keys for one KV head; the
heads that share it are one padded product.  A sequence that lies in several shares is put together
by the program that ends last: which one that is differs from run to run, what it adds and in which
order does not, so the same input gives the same bits.  The only atomics count who has arrived.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_tiles import MERGED, decode_rows, width_of
from engine.kernels.decode_plan import DecodePlan, first_key, plan_word
from engine.kernels.dependent import fetch_ahead, follow_closely
from engine.kernels.paged_merge import merge_heads
from engine.kernels.paged_tile import (
    accumulate,
    block_ids,
    load_rows,
    places,
    score,
    score_factors,
)


@triton.jit
def _fetch_first_tiles(
    kv,
    tables,
    segments,
    segment,
    begin,
    end,
    kv_head,
    stride_block,
    stride_side,
    stride_key,
    stride_table,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Start the way of a share's first AHEAD tiles from memory, while the kernel ahead still runs.

    What that one writes is at most the newest key, and L2 takes writes.
    """
    LINES: tl.constexpr = (DIM * kv.dtype.element_ty.primitive_bitwidth // 8 + 127) // 128
    STEP: tl.constexpr = 128 // (kv.dtype.element_ty.primitive_bitwidth // 8)
    at = segments + segment * 4
    seq = plan_word(at)
    length = plan_word(at + 2)
    start = plan_word(at + 3)
    stop = tl.minimum(end, plan_word(at + 7)) - start
    table = tables + seq.to(tl.int64) * stride_table
    first = first_key(length, WINDOW, TILE)
    column = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1) * STEP
    lane = tl.arange(0, TILE)
    for ahead in tl.static_range(AHEAD):
        key = first + (begin - start + ahead) * TILE
        if begin - start + ahead < stop:
            ids = tl.load(
                table + key // BLOCK + lane // BLOCK,
                mask=key + lane < length,
                other=0,
                cache_modifier=".cg",
            )
            place = places(ids, key, stride_block, stride_key, BLOCK, TILE) + kv_head * DIM
            keys = kv + place[:, None] + column[None, :]
            fetch_ahead(keys)
            fetch_ahead(keys + stride_side)


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tables", "head", "segments", "shares", "empty", "arrived"],
)
def _decode(
    q,
    kv,
    tables,
    head,
    segments,
    shares,
    empty,
    arrived,
    out,
    partial,
    weight,
    stride_q,
    stride_block,
    stride_side,
    stride_key,
    stride_table,
    scale,
    cap,
    factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MIXED: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One share (axis 1) of one KV head (axis 0), for the GROUP heads that share it.

    AHEAD: the plan was there before the kernel ahead began, and may be read before that one ends.
    """
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    if AHEAD == 0:
        follow_closely(PDL)
    size = plan_word(head + 1)
    begin = share * size
    end = tl.minimum(begin + size, plan_word(head))
    segment = 0
    past = 0
    if begin < end:
        segment = plan_word(shares + 2 * share)
        past = plan_word(shares + 2 * share + 1) + 1
        if AHEAD:
            _fetch_first_tiles(
                kv, tables, segments, segment, begin, end, kv_head, stride_block, stride_side,
                stride_key, stride_table, DIM, BLOCK, TILE, WINDOW, AHEAD,
            )  # fmt: skip
    if AHEAD:
        follow_closely(PDL)

    member = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    heads = kv_head * GROUP + member
    here = (member < GROUP)[:, None] & (column < DIM)[None, :]
    keys_at = kv + kv_head * DIM
    values_at = keys_at + stride_side
    lane = tl.arange(0, TILE)
    for j in range(segment, past):
        at = segments + j * 4
        seq = plan_word(at)
        row = plan_word(at + 1).to(tl.int64)
        length = plan_word(at + 2)
        start = plan_word(at + 3)
        tiles = plan_word(at + 7) - start  # of the sequence; the share's are those from low to high
        low = tl.maximum(begin - start, 0)
        high = tl.minimum(end - start, tiles)
        first = first_key(length, WINDOW, TILE)
        from_key = first + low * TILE
        stop = tl.minimum(first + high * TILE, length)
        table = tables + seq.to(tl.int64) * stride_table
        ids = block_ids(table, from_key, stop, BLOCK, TILE)
        at = row * stride_q + heads[:, None] * DIM + column[None, :]
        queries = tl.load(q + at, mask=here, other=0.0)

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for key in range(from_key, stop, TILE):
            live = key + lane < stop
            where = places(ids, key, stride_block, stride_key, BLOCK, TILE)
            ids = block_ids(table, key + TILE, stop, BLOCK, TILE)
            keys = load_rows(keys_at, where, live, DIM, WIDTH, True)
            scores = score(queries, keys, scale, cap, CAPPED)
            seen = live
            if WINDOW:
                seen = live & (key + lane >= length - WINDOW)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            values = load_rows(values_at, where, live, DIM, WIDTH, True)
            acc, best, total = accumulate(acc, best, total, scores, values, factor)

        acc = acc / total[:, None]
        if (low == 0) & (high == tiles):
            at = (row * HEADS + heads)[:, None] * DIM + column[None, :]
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)
        else:
            place = (2 * share + (low == 0).to(tl.int32)).to(tl.int64) * HEADS + heads
            tl.store(partial + place[:, None] * WIDTH + column[None, :], acc, mask=here)
            tl.store(weight + place, best + tl.log2(total), mask=member < GROUP)
            merge_heads(
                segments, j, size, arrived, row, kv_head, out, partial, weight,
                HEADS, HEADS // GROUP, GROUP, MEMBERS, DIM, WIDTH, MERGE,
            )  # fmt: skip
    if not MIXED:
        for i in range(share, plan_word(head + 2), tl.num_programs(1)):
            row = plan_word(empty + i).to(tl.int64)
            at = (row * HEADS + heads)[:, None] * DIM + column[None, :]
            tl.store(out + at, tl.zeros([ROWS, WIDTH], out.dtype.element_ty), mask=here)


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    out: Tensor,
    *,
    mixed: bool,
    settled: bool = False,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Attention of the rows of `plan` over all their keys, into out (T, heads, head_dim).

    q (T, heads, head_dim), its rows at any stride; kv (num_blocks, 2, block_size, kv_heads,
    head_dim), one layer's view; block_tables (S, blocks) int32.  `mixed`: the plan was made with
    query_starts, and rows that are not its own are left; otherwise the rows of sequences of length
    0 become zero.  `settled`: this is not the plan's first use.
    Scores are `softcap` * tanh(scale * q·k / softcap) if `softcap` is set.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = kv.shape[2:4]
    tiles, group = plan.tiles, heads // kv_heads
    assert q.stride()[1:] == (head_dim, 1) and kv.stride()[3:] == (head_dim, 1)
    assert out.is_contiguous()
    pdl = backend.dependent_launch(q.device)
    scale, cap, factor = score_factors(scale, softcap)
    width, members = width_of(head_dim), triton.next_power_of_2(group)
    _decode[(kv_heads, plan.num_shares)](
        q,
        kv,
        block_tables,
        plan.head,
        plan.segments,
        plan.shares,
        plan.empty,
        plan.arrived,
        out,
        plan.partial,
        plan.weight,
        q.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        block_tables.stride(0),
        scale,
        cap,
        factor,
        HEADS=heads,
        GROUP=group,
        DIM=head_dim,
        WIDTH=width,
        BLOCK=block_size,
        TILE=tiles.keys,
        ROWS=decode_rows(group),
        MEMBERS=members,
        MERGE=min(16, max(1, MERGED // (members * width))),
        WINDOW=plan.window,
        CAPPED=softcap != 0.0,
        MIXED=mixed,
        AHEAD=tiles.ahead if pdl and settled else 0,
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers or None,
        launch_pdl=pdl,
    )

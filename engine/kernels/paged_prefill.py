"""Causal attention of several rows a sequence, over cached keys and over their own.

Goes in: q of a step, one layer's view of the arena, block tables, a plan (`prefill_plan.py`).
Comes out: attention per row.  A tile is a few rows of one sequence with all heads that share a KV
head, so a tile of K and V is read once for the group.

Tiles of keys begin at multiples of their size, and a row's keys are added up tile after tile from
its first one.  With FIXED tiles of rows do so too, and every tile of keys is treated alike; one of
which a row sees nothing leaves its sums as they are, bit for bit.  What a row becomes then depends
on its own keys alone, not on the rows beside it, on the chunk it came in or on the batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_tiles import width_of
from engine.kernels.decode_plan import plan_word
from engine.kernels.dependent import follow, follow_closely, let_next_come, wait_for_earlier
from engine.kernels.launch import launch
from engine.kernels.paged_merge import is_last, merge_rows
from engine.kernels.paged_tile import (
    accumulate,
    block_ids,
    load_rows,
    places,
    score,
    score_factors,
)
from engine.kernels.prefill_plan import PrefillPlan


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "query_starts", "items", "arrived"],
)
def _prefill(
    q,
    kv,
    tables,
    seq_lens,
    query_starts,
    items,
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
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FIXED: tl.constexpr,
    FOLLOWED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPAN rows (axis 1) x GROUP heads of one KV head (axis 0).  Late, heavy tiles come first.

    FOLLOWED: what comes behind may read ahead of its own wait what this kernel reads.  EARLY: the
    plan was there before the kernel ahead began.
    """
    kv_head = tl.program_id(0)
    own = tl.program_id(1)
    if not FOLLOWED:
        follow(PDL)
    elif not EARLY:
        follow_closely(PDL)
    count = plan_word(items)
    most = plan_word(items + 1)  # pieces of a tile
    if FOLLOWED and EARLY:
        # Whoever has no tile makes room for the kernel behind, which comes when the others have
        # waited: the first always does.
        if (own < count * most) | (kv_head + own == 0):
            wait_for_earlier(PDL)
        let_next_come(PDL)
    m = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    lane = tl.arange(0, TILE)
    head = kv_head * GROUP + m % GROUP
    keys_at = kv + kv_head * DIM
    values_at = keys_at + stride_side
    for turn in range(own, count * most, tl.num_programs(1)):
        tile = count - 1 - turn // most
        item = items + (tile + 1) * 2
        seq = tl.load(item)
        first = tl.load(item + 1)
        start = tl.load(query_starts + seq)
        num_rows = tl.load(query_starts + seq + 1) - start
        base = tl.load(seq_lens + seq) - num_rows  # position of the sequence's first row
        table = tables + seq.to(tl.int64) * stride_table
        local = first + m // GROUP
        mine = (m < SPAN * GROUP) & (local < num_rows)
        if FIXED:
            mine = mine & (local >= 0)
        position = base + local
        begin = base * 0
        if WINDOW:
            begin = tl.maximum(base + first + 1 - WINDOW, 0) // TILE * TILE
        end = base + tl.minimum(first + SPAN, num_rows)  # of what the last row sees
        num_tiles = tl.cdiv(end - begin, TILE)
        pieces = tl.minimum(most, tl.maximum(num_tiles // LEAST, 1))
        piece = turn % most
        if FIXED:
            pieces = 1
            piece = 0
        if piece < pieces:
            end = tl.minimum(begin + (piece + 1) * num_tiles // pieces * TILE, end)
            begin += piece * num_tiles // pieces * TILE
            row = (start + local).to(tl.int64)
            here = mine[:, None] & (column < DIM)[None, :]
            at = row[:, None] * stride_q + (head * DIM)[:, None] + column[None, :]
            queries = tl.load(q + at, mask=here, other=0.0)
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, WIDTH], tl.float32)
            edge = begin
            ids = block_ids(table, edge, end, BLOCK, TILE, False)
            if (not WINDOW) and (not FIXED):  # every row sees every key of the tiles before its own
                edge = tl.maximum(tl.minimum((base + first + 1) // TILE * TILE, end), begin)
                for key in range(begin, edge, TILE):
                    where = places(ids, key, stride_block, stride_key, BLOCK, TILE)
                    ids = block_ids(table, key + TILE, end, BLOCK, TILE, False)
                    keys = load_rows(keys_at, where, lane >= 0, DIM, WIDTH, False)
                    scores = score(queries, keys, scale, cap, CAPPED)
                    values = load_rows(values_at, where, lane >= 0, DIM, WIDTH, False)
                    acc, best, total = accumulate(acc, best, total, scores, values, factor)
            for done in range(0, end - edge, TILE):
                key = edge + done
                live = key + lane < end
                where = places(ids, key, stride_block, stride_key, BLOCK, TILE)
                ids = block_ids(table, key + TILE, end, BLOCK, TILE, False)
                keys = load_rows(keys_at, where, live, DIM, WIDTH, True)
                scores = score(queries, keys, scale, cap, CAPPED)
                seen = (key + lane)[None, :] <= position[:, None]
                if WINDOW:
                    seen = seen & ((key + lane)[None, :] > position[:, None] - WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
                values = load_rows(values_at, where, live, DIM, WIDTH, True)
                acc, best, total = accumulate(acc, best, total, scores, values, factor)

            sees = total > 0.0  # not every row has a key here
            total = tl.where(sees, total, 1.0)
            acc = acc / total[:, None]
            to = out + (row * HEADS + head)[:, None] * DIM + column[None, :]
            if pieces == 1:
                tl.store(to, acc.to(out.dtype.element_ty), mask=here)
            elif not FIXED:
                KV_HEADS: tl.constexpr = HEADS // GROUP
                place = ((turn * KV_HEADS + kv_head) * ROWS).to(tl.int64) + m
                tl.store(partial + place[:, None] * WIDTH + column[None, :], acc)
                tl.store(weight + place, tl.where(sees, best + tl.log2(total), float("-inf")))
                if is_last(arrived + tile * KV_HEADS + kv_head, pieces):
                    merge_rows(
                        to, here, partial, weight, turn - piece, pieces, kv_head,
                        KV_HEADS, ROWS, WIDTH,
                    )  # fmt: skip


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    plan: PrefillPlan,
    out: Tensor,
    *,
    settled: bool = False,
    followed: bool = False,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Causal attention of the plan's rows over their keys, into out (T, heads, head_dim).

    q (T, heads, head_dim), its rows at any stride; kv (num_blocks, 2, block_size, kv_heads,
    head_dim), one layer's view, in which the rows' own K and V stand already; block_tables
    (S, blocks) int32, seq_lens and query_starts as for the plan.  Other rows are left as they are.
    `settled`: this is not the plan's first use.  `followed`: the kernel launched next is
    `decode_attention` of other rows, `beside` this one.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = kv.shape[2:4]
    assert q.stride()[1:] == (head_dim, 1) and kv.stride()[3:] == (head_dim, 1)
    assert out.is_contiguous()
    tiles, pdl = plan.tiles, backend.dependent_launch(q.device)
    scale, cap, factor = score_factors(scale, softcap)
    launch(
        _prefill,
        (kv_heads, plan.programs),
        q,
        kv,
        block_tables,
        seq_lens,
        query_starts,
        plan.items,
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
        GROUP=heads // kv_heads,
        DIM=head_dim,
        WIDTH=width_of(head_dim),
        BLOCK=block_size,
        TILE=tiles.keys,
        LEAST=tiles.least,
        ROWS=tiles.rows,
        SPAN=plan.span,
        WINDOW=plan.window,
        CAPPED=softcap != 0.0,
        FIXED=plan.fixed,
        FOLLOWED=pdl and followed,
        EARLY=pdl and followed and settled,
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=pdl,
    )

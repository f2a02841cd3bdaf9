"""Attention of rows that stand alone in their sequence: split-KV over the block-major arena.

Goes in: q, one layer's view of the arena, block tables, a plan of the step (`decode_plan.py`).
Comes out: attention per row.  A program takes one item of the plan for one KV head; the heads that
share it are one padded product.  The pieces of a sequence that was cut are put together in their
order (`paged_merge.py`), so the same input gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_tiles import MERGED, decode_rows, width_of
from engine.kernels.decode_plan import DecodePlan, plan_word
from engine.kernels.dependent import follow_closely, let_next_come, wait_for_earlier
from engine.kernels.launch import launch
from engine.kernels.paged_merge import is_last, merge_apart, merge_heads
from engine.kernels.paged_tile import (
    accumulate,
    block_ids,
    load_rows,
    places,
    score,
    score_factors,
)


@triton.jit(
    do_not_specialize=["stride_table", "num_items"],
    do_not_specialize_on_alignment=["tables", "items", "arrived"],
)
def _decode(
    q,
    kv,
    tables,
    items,
    arrived,
    out,
    partial,
    weight,
    num_items,
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
    APART: tl.constexpr,
    TURNS: tl.constexpr,
    EARLY: tl.constexpr,
    BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Items (axis 1) of one KV head (axis 0), for the GROUP heads that share it.

    TURNS: programs are fewer than items.  EARLY: the plan was there before the kernel ahead began,
    and may be read before that one ends.  BESIDE, in place of it: so was all else, for that kernel
    is the prompts' of this layer (`paged_prefill.py`), which follows closely: nothing is waited for
    but its end.
    """
    kv_head = tl.program_id(0)
    turn = tl.program_id(1)
    programs = tl.num_programs(1)
    if BESIDE:
        let_next_come(PDL)
    elif not EARLY:
        follow_closely(PDL)
    item = items + turn * 8
    seq = plan_word(item)
    row = plan_word(item + 1)
    begin = plan_word(item + 2)
    stop = plan_word(item + 3)
    table = tables + seq.to(tl.int64) * stride_table
    ids = block_ids(table, begin, stop, BLOCK, TILE, EARLY or BESIDE)
    if EARLY:
        follow_closely(PDL)

    member = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    lane = tl.arange(0, TILE)
    heads = kv_head * GROUP + member
    here = (member < GROUP)[:, None] & (column < DIM)[None, :]
    keys_at = kv + kv_head * DIM
    values_at = keys_at + stride_side
    for done in range(0, num_items if TURNS else 1, programs):
        if row >= 0:
            at = row.to(tl.int64) * stride_q + heads[:, None] * DIM + column[None, :]
            if BESIDE:
                queries = tl.load(q + at, mask=here, other=0.0, cache_modifier=".cg")
            else:
                queries = tl.load(q + at, mask=here, other=0.0)
            length = plan_word(item + 4)
            place = plan_word(item + 5)
            pieces = plan_word(item + 6)
            piece = plan_word(item + 7)
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, WIDTH], tl.float32)
            for key in range(begin, stop, TILE):
                live = key + lane < stop
                where = places(ids, key, stride_block, stride_key, BLOCK, TILE)
                ids = block_ids(table, key + TILE, stop, BLOCK, TILE, BESIDE)
                keys = load_rows(keys_at, where, live, DIM, WIDTH, True)
                scores = score(queries, keys, scale, cap, CAPPED)
                seen = live
                if WINDOW:
                    seen = live & (key + lane >= length - WINDOW)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                values = load_rows(values_at, where, live, DIM, WIDTH, True)
                acc, best, total = accumulate(acc, best, total, scores, values, factor)

            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # padding has no keys
            if pieces == 1:
                to = (row.to(tl.int64) * HEADS + heads)[:, None] * DIM + column[None, :]
                tl.store(out + to, acc.to(out.dtype.element_ty), mask=here)
            else:
                part = (place + piece).to(tl.int64) * HEADS + heads
                tl.store(partial + part[:, None] * WIDTH + column[None, :], acc, mask=here)
                tl.store(weight + part, best + tl.log2(total), mask=member < GROUP)
                if not APART:  # noqa: SIM102  # one is known when compiled, the other when run
                    if is_last(arrived + place * (HEADS // GROUP) + kv_head, pieces):
                        one = tl.arange(0, MEMBERS)
                        merge_heads(
                            out, partial, weight, row, place, pieces, kv_head * GROUP + one,
                            one < GROUP, HEADS, MEMBERS, DIM, WIDTH, MERGE, 3,
                        )  # fmt: skip
        if TURNS:  # there and back again, so that whoever has a long one first has a short one next
            turn = 2 * (done + programs) - 1 - turn
            more = turn < num_items
            item = items + tl.where(more, turn, 0) * 8
            seq = plan_word(item)
            row = tl.where(more, plan_word(item + 1), -1)
            begin = plan_word(item + 2)
            stop = plan_word(item + 3)
            table = tables + seq.to(tl.int64) * stride_table
            ids = block_ids(table, begin, stop, BLOCK, TILE, BESIDE)
    # One that waits is enough for the launch to end last; the others make room.
    if BESIDE:  # noqa: SIM102  # one is known when compiled, the other when run
        if kv_head + tl.program_id(1) == 0:
            wait_for_earlier(PDL)


def may_run_beside(plan: DecodePlan, kv: Tensor) -> bool:
    """Whether no key and no value comes by L1, as each thread copies 16 bytes of a tile at a time.

    Of fewer, as with heads of 16 in fp32, L1 may answer, and ahead of the wait with what was there
    in the layer before: those of a model that pools have one place for their keys.
    """
    tiles, head_dim, itemsize = plan.tiles, kv.shape[4], kv.element_size()
    aligned = head_dim * itemsize % 16 == 0 and all(s % 16 == 0 for s in kv.stride()[:3])
    return aligned and tiles.keys * width_of(head_dim) * itemsize >= 16 * 32 * tiles.warps


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    out: Tensor,
    *,
    settled: bool = False,
    beside: bool = False,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Attention of the rows of `plan` over all their keys, into out (T, heads, head_dim).

    q (T, heads, head_dim), its rows at any stride; kv (num_blocks, 2, block_size, kv_heads,
    head_dim), one layer's view; block_tables (S, blocks) int32.  If the plan was made with
    query_starts, rows that are not its own are left; otherwise the rows of sequences of length 0
    become zero.  `settled`: this is not the plan's first use.  `beside`: the kernel launched just
    before is `prefill_attention` of other rows, `followed`; where `may_run_beside`.
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
    num_items, room = len(plan.items), len(plan.partial)
    turns = tiles.turns and room < num_items
    launch(
        _decode,
        (kv_heads, room if turns else num_items),
        q,
        kv,
        block_tables,
        plan.items,
        plan.arrived,
        out,
        plan.partial,
        plan.weight,
        num_items,
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
        APART=plan.apart,
        TURNS=turns,
        EARLY=pdl and settled and tiles.early and not beside,  # one form beside prompts
        BESIDE=pdl and beside,
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers or None,
        launch_pdl=pdl,
    )
    if plan.apart:
        launch(
            merge_apart,
            (heads, len(plan.sequences)),
            out,
            plan.partial,
            plan.weight,
            plan.sequences,
            HEADS=heads,
            DIM=head_dim,
            WIDTH=width,
            MERGE=min(triton.next_power_of_2(room), max(1, 2 * MERGED // width)),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )

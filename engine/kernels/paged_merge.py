"""Pieces of attention over parts of a sequence's keys, put together.

Goes in: pieces that several programs leave in memory, each with the log2 of its sum of
exponentials.  Comes out: the result.  Either a kernel of its own comes behind, or the program that
ends last does it: which one that is differs from run to run, what it adds and in which order does
not.  The only atomics count who has arrived: a counter starts at zero with a plan and is never set
back, every layer counts on from where the last one ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.decode_plan import plan_word
from engine.kernels.dependent import follow


@triton.jit
def is_last(counter, pieces):
    """Say that a piece is there; whether it was the last of `pieces`."""
    tl.debug_barrier()  # the piece is written by all threads, and told by one
    return tl.atomic_add(counter, 1, sem="acq_rel") % pieces == pieces - 1


@triton.jit
def merge_heads(
    out,
    partial,
    weight,
    row,
    first,
    pieces,
    head,
    mine,
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The row of the heads `head` (MEMBERS,) that are `mine`, from `pieces` pieces at `first`."""
    column = tl.arange(0, WIDTH)
    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, WIDTH], tl.float32)
    for done in tl.range(0, pieces, MERGE, num_stages=STAGES):
        piece = done + tl.arange(0, MERGE)
        live = (piece < pieces)[:, None] & mine[None, :]
        at = (first + piece).to(tl.int64)[:, None] * HEADS + head[None, :]
        scores = tl.load(weight + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            partial + at[:, :, None] * WIDTH + column[None, None, :],
            mask=live[:, :, None] & (column < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(best, tl.max(scores, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # heads of nobody
        share = tl.exp2(scores - shift[None, :])
        keep = tl.exp2(best - shift)
        total = total * keep + tl.sum(share, 0)
        acc = acc * keep[:, None] + tl.sum(parts * share[:, :, None], 0)
        best = higher
    acc = acc / tl.where(mine, total, 1.0)[:, None]
    at = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + column[None, :]
    here = mine[:, None] & (column < DIM)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize_on_alignment=["sequences"])
def merge_apart(
    out,
    partial,
    weight,
    sequences,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head (axis 0) of one sequence (axis 1), where it was cut."""
    follow(PDL)
    at = sequences + tl.program_id(1) * 4
    row = plan_word(at)
    first = plan_word(at + 1)
    pieces = plan_word(at + 2)
    if pieces > 1:
        head = tl.program_id(0) + tl.arange(0, 1)
        merge_heads(
            out, partial, weight, row, first, pieces, head, head >= 0,
            HEADS, 1, DIM, WIDTH, MERGE, 1,
        )  # fmt: skip


@triton.jit
def merge_rows(
    to,
    here,
    partial,
    weight,
    first,
    pieces,
    kv_head,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The rows of a tile of one KV head, at the pointers `to` (ROWS, WIDTH) where `here`."""
    m = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for piece in range(0, pieces):
        at = (((first + piece) * KV_HEADS + kv_head) * ROWS).to(tl.int64) + m
        scores = tl.load(weight + at, cache_modifier=".cg")
        part = tl.load(partial + at[:, None] * WIDTH + column[None, :], cache_modifier=".cg")
        higher = tl.maximum(best, scores)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(scores - shift)
        keep = tl.exp2(best - shift)
        total = total * keep + share
        acc = acc * keep[:, None] + part * share[:, None]
        best = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(to, acc.to(to.dtype.element_ty), mask=here)

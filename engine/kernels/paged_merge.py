"""Pieces of attention over parts of a sequence's keys, put together by whoever comes last.

Goes in: pieces that several programs leave in memory, each with the log2 of its sum of
exponentials, and a counter.  Comes out: the result.  Which program comes last differs from run to
run; what it adds and in which order does not.  The only atomics count who has arrived: a counter
starts at zero with a plan and is never set back, every layer counts on from where the last ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.decode_plan import plan_word


@triton.jit
def _is_last(counter, pieces):
    """Say that a piece is there; whether it was the last of `pieces`."""
    tl.debug_barrier()  # the piece is written by all threads, and told by one
    return tl.atomic_add(counter, 1, sem="acq_rel") % pieces == pieces - 1


@triton.jit
def merge_heads(
    segments,
    segment,
    size,
    arrived,
    row,
    kv_head,
    out,
    partial,
    weight,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Say that a piece of `segment` is there; if it was the last, put all of them together."""
    start = plan_word(segments + segment * 4 + 3)
    end = plan_word(segments + segment * 4 + 7)
    first = start // size
    pieces = (end - 1) // size - first + 1
    if _is_last(arrived + segment * KV_HEADS + kv_head, pieces):
        member = tl.arange(0, MEMBERS)
        column = tl.arange(0, WIDTH)
        mine = member < GROUP
        head = kv_head * GROUP + member
        best = tl.full([MEMBERS], float("-inf"), tl.float32)
        total = tl.zeros([MEMBERS], tl.float32)
        acc = tl.zeros([MEMBERS, WIDTH], tl.float32)
        for done in tl.range(0, pieces, MERGE, num_stages=3):  # the next ones are on their way
            piece = done + tl.arange(0, MERGE)
            live = (piece < pieces)[:, None] & mine[None, :]
            # The share in which a segment begins holds it as its last piece, the others as first.
            place = 2 * (first + piece) + (piece == 0).to(tl.int32)
            at = place.to(tl.int64)[:, None] * HEADS + head[None, :]
            scores = tl.load(weight + at, mask=live, other=float("-inf"), cache_modifier=".cg")
            parts = tl.load(
                partial + at[:, :, None] * WIDTH + column[None, None, :],
                mask=live[:, :, None] & (column < DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            higher = tl.maximum(best, tl.max(scores, 0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # heads of nobody
            part = tl.exp2(scores - shift[None, :])
            keep = tl.exp2(best - shift)
            total = total * keep + tl.sum(part, 0)
            acc = acc * keep[:, None] + tl.sum(parts * part[:, :, None], 0)
            best = higher
        acc = acc / tl.where(mine, total, 1.0)[:, None]
        at = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + column[None, :]
        here = mine[:, None] & (column < DIM)[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)


@triton.jit
def merge_rows(
    arrived,
    tile,
    pieces,
    first,
    kv_head,
    to,
    here,
    partial,
    weight,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Say that a piece of `tile` is there; if it was the last, put all of them together.

    The pieces are `pieces` from `first` on, and are added in that order, whoever comes last.
    """
    if _is_last(arrived + tile * KV_HEADS + kv_head, pieces):
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

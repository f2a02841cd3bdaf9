"""What the paged attention kernels share: a tile of K or V, scores, one step of softmax.

Keys stand in blocks of BLOCK tokens; a block's place is its id times a stride of about a million
elements, so every offset is int64.  What lies at or after a sequence's length is never loaded: it
may be another owner's bits.

Ids of blocks are read one tile ahead and kept in registers.  Read in the same turn as the keys they
lead to, they took a stage of the pipeline for themselves: with three stages a tile of keys was then
asked for only when the one before it had been worked off.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.hyperbolic import tanh


@triton.jit
def block_ids(
    table, start, end, BLOCK: tl.constexpr, TILE: tl.constexpr, FRESH: tl.constexpr
):  # (TILE,)
    """The block of each key of the tile at `start`, a multiple of TILE; 0 from `end` on.

    FRESH: from L2, as what is read ahead of the wait has to be.
    """
    lane = tl.arange(0, TILE)
    at, live = table + start // BLOCK + lane // BLOCK, start + lane < end
    if FRESH:
        ids = tl.load(at, mask=live, other=0, cache_modifier=".cg")
    else:
        ids = tl.load(at, mask=live, other=0)
    return ids


@triton.jit
def places(ids, start, stride_block, stride_key, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Offsets (TILE,) of the keys of the tile at `start`, whose blocks are `ids`."""
    within = tl.arange(0, TILE) % BLOCK  # the same for every tile
    if TILE < BLOCK:
        within += start % BLOCK
    return ids.to(tl.int64) * stride_block + within * stride_key


@triton.jit
def load_rows(
    base, at, live, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):  # (keys, WIDTH)
    """Rows at `base` + `at`, zero where they are not live and beyond DIM."""
    column = tl.arange(0, WIDTH)
    where = base + at[:, None] + column[None, :]
    if MASKED:
        if DIM == WIDTH:
            rows = tl.load(where, mask=live[:, None], other=0.0)
        else:
            rows = tl.load(where, mask=live[:, None] & (column < DIM)[None, :], other=0.0)
    else:
        if DIM == WIDTH:
            rows = tl.load(where)
        else:
            rows = tl.load(where, mask=(column < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def score(queries, keys, scale, cap, CAPPED: tl.constexpr):  # (rows, keys)
    """Scores that `accumulate` takes times its factor, which is in base 2 (`score_factors`)."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if CAPPED:
        scores = cap * tanh(scale * scores)
    return scores


@triton.jit
def accumulate(acc, best, total, scores, values, factor):
    """One step of the online softmax; a row that has seen nothing yet has best = -inf.

    `factor` is above 0: it joins the subtraction instead of costing a product for each score.
    """
    higher = tl.maximum(best, tl.max(scores, 1) * factor)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(scores * factor - shift[:, None])
    keep = tl.exp2(best - shift)
    total = total * keep + tl.sum(weight, 1)
    acc = tl.dot(weight.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return acc, higher, total


def score_factors(scale: float, softcap: float) -> tuple[float, float, float]:
    """`scale` and `cap` as `score` takes them, and the factor of `accumulate`."""
    assert scale > 0.0 and softcap >= 0.0, "scores are not turned around"
    log2e = 1.4426950408889634
    return (scale / softcap, softcap * log2e, 1.0) if softcap else (scale, 0.0, scale * log2e)

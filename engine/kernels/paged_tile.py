"""What the two paged attention kernels share: a tile of K or V, scores, one step of softmax.

Keys stand in blocks of BLOCK tokens; a block's place is its id times a stride of about a million
elements, so every offset is int64.  What lies at or after a sequence's length is never loaded: it
may be another owner's bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def places(table, key, live, stride_block, stride_key, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Offsets of the keys at positions `key`, by the sequence's row of the block table."""
    if MASKED:
        block = tl.load(table + key // BLOCK, mask=live, other=0)
    else:
        block = tl.load(table + key // BLOCK)
    return block.to(tl.int64) * stride_block + (key % BLOCK) * stride_key


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
    """Scores in base 2: `scale` and `cap` bring log2(e) with them (see `score_factors`)."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if CAPPED:  # tanh, from what every backend has
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    return scores


@triton.jit
def accumulate(acc, best, total, scores, values):
    """One step of the online softmax; a row that has seen nothing yet has best = -inf."""
    higher = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(best - shift)
    total = total * keep + tl.sum(weight, 1)
    acc = tl.dot(weight.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return acc, higher, total


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """`scale` and `cap` as `score` takes them."""
    log2e = 1.4426950408889634
    return (scale / softcap, softcap * log2e) if softcap else (scale * log2e, 0.0)

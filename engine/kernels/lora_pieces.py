"""The pieces of expand: tiles of B and what follows it, sums of h, and how both meet y.

Goes in: a slot's row of the table, places in the arena and in h.  Comes out: tiles in registers.
Knows no work items and no grids; `lora_expand.py` does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.lora_place import (
    HAS_BIAS,
    HAS_GAIN,
    first_rows,
    load_far,
    load_near,
    load_two,
    row_places,
    rows_of_block,
    two_places,
)


@triton.jit
def b_places(
    slot_row,
    begin,
    block,
    module,
    r,
    live,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
):
    """Where B's rows r lie.  Dividing by constants is cheap, by the module's stride it is not."""
    place = row_places(slot_row, begin, block, r, live, S0, BLOCK, UNIT, BLOCKS_AT)
    if S1 != S0:
        other = row_places(slot_row, begin, block, r, live, S1, BLOCK, UNIT, BLOCKS_AT)
        place = tl.where(module == 0, place, other)
    if S2 != S1:
        other = row_places(slot_row, begin, block, r, live, S2, BLOCK, UNIT, BLOCKS_AT)
        place = tl.where(module == 2, other, place)
    return place


@triton.jit
def load_b(
    arena,
    slot_row,
    begin,
    block,
    follows,
    module,
    r0,
    rank,
    c0,
    width,
    stride,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    NEAR: tl.constexpr,
    FIRST: tl.constexpr,  # r0 is 0
):
    """A (RANKS, COLUMNS) tile of the module's B.  NEAR: "two" where the entry says in which two
    blocks it mostly lies, True in one of them, False in any."""
    if NEAR == "two":
        first = first_rows(begin, module, S0, S1, S2, BLOCK, UNIT)
        each = rows_of_block(module, S0, S1, S2, BLOCK)
        here, there, left = two_places(
            slot_row, begin, block, follows, r0, rank, first, each, stride, BLOCK, UNIT, BLOCKS_AT,
            RANKS, FIRST,
        )  # fmt: skip
        b = load_two(arena, here, there, left, r0, rank, c0, width, stride, RANKS, COLUMNS, EVEN)
    elif NEAR:
        b = load_near(arena, begin, r0, rank, c0, width, stride, UNIT, RANKS, COLUMNS, EVEN)
    else:
        r = r0 + tl.arange(0, RANKS)
        place = b_places(
            slot_row, begin, block, module, r, r < rank, S0, S1, S2, BLOCK, UNIT, BLOCKS_AT
        )
        b = load_far(arena, place, r, rank, c0, width, COLUMNS, EVEN)
    return b


@triton.jit
def load_extras(
    arena,
    base_bias,
    flags,
    slot_row,
    begin,
    block,
    module,
    rank,
    scaling,
    c,
    inside,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    EXTRAS: tl.constexpr,
    BASE_BIAS: tl.constexpr,
):
    """For columns c: the adapter's bias, scaled; its gain; the base's own bias."""
    more, gain, own = 0.0, 1.0, 0.0
    if EXTRAS:
        biased, gained = (flags & HAS_BIAS) != 0, (flags & HAS_GAIN) != 0
        r = rank
        at = b_places(slot_row, begin, block, module, r, biased, S0, S1, S2, BLOCK, UNIT, BLOCKS_AT)
        more = scaling * tl.load(arena + at + c, mask=inside & biased, other=0.0).to(tl.float32)
        r = rank + biased.to(tl.int32)
        at = b_places(slot_row, begin, block, module, r, gained, S0, S1, S2, BLOCK, UNIT, BLOCKS_AT)
        gain = tl.load(arena + at + c, mask=inside & gained, other=0.0).to(tl.float32)
        at = b_places(
            slot_row, begin, block, module, r + 1, gained, S0, S1, S2, BLOCK, UNIT, BLOCKS_AT
        )
        gain += tl.load(arena + at + c, mask=inside & gained, other=0.0).to(tl.float32)
        own = gain * 0.0
        if BASE_BIAS:
            own = tl.load(base_bias + c, mask=inside & gained, other=0.0).to(tl.float32)
    return more, gain, own


@triton.jit
def joined(y, delta, more, gain, own, flags, EXTRAS: tl.constexpr):
    """What is stored.  An adapter without extras gets the bits that it has in any other step."""
    total = y.to(tl.float32) + delta
    if EXTRAS:
        total = y.to(tl.float32) + (delta + more)
        total = tl.where((flags & HAS_GAIN) != 0, gain * (total - own) + own, total)
    return total.to(y.dtype)


@triton.jit
def sum_row(
    hp,
    r0,
    rank,
    live,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """The partial sums of one row's ranks [r0, r0 + RANKS), added up; zero where not `live`.

    A tile of (splits, ranks), so that each is loaded by one thread: a vector of ranks alone would
    be loaded by every thread, once a split.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(SPLITS)
    split = tl.arange(0, PADDED)
    i = tl.arange(0, RANKS)
    mask = (split < SPLITS)[:, None] & ((i < rank - r0) & live)[None, :]
    at = hp + r0 + split[:, None] * H_SPLIT + i[None, :]
    partial = tl.load(at, mask=mask, other=0.0, cache_modifier=CACHE)
    return tl.sum(partial, axis=0)


@triton.jit
def sum_rows(p, r, rank, live, H_SPLIT: tl.constexpr, SPLITS: tl.constexpr, CACHE: tl.constexpr):
    """The partial sums at p (rows, ranks) where `live` (rows, 1) and r < rank, added in order.

    Loaded four ranks at a time; the up to three that are too many are thrown away.
    """
    mask = live & (r // 4 < (rank + 3) // 4)[None, :]
    total = tl.load(p, mask=mask, other=0.0, cache_modifier=CACHE)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(p + split * H_SPLIT, mask=mask, other=0.0, cache_modifier=CACHE)
    return tl.where(live & (r < rank)[None, :], total, 0.0)


@triton.jit
def scaled_product(h, b, scaling):
    """(RANKS,) scaled, times (RANKS, COLUMNS), in fp32."""
    return tl.sum((h * scaling)[:, None] * b.to(tl.float32), axis=0)


@triton.jit
def add_product(h, b, acc, PRECISION: tl.constexpr):
    """acc + h b, with h in two halves that keep 16 bits of it beside a b of bf16, and 21 beside one
    of fp16: that goes to tf32, which holds it exactly, since what fp32 holds may be too large for
    fp16.  "ieee" cuts nothing."""
    if PRECISION == "bf16x2":
        high = h.to(b.dtype)
        low = (h - high.to(tl.float32)).to(b.dtype)
        acc = tl.dot(low, b, acc)
        acc = tl.dot(high, b, acc)
    elif PRECISION == "tf32x2":
        b = b.to(tl.float32)
        high = (h.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # tf32's 19 bits
        acc = tl.dot(h - high, b, acc, input_precision="tf32")
        acc = tl.dot(high, b, acc, input_precision="tf32")
    else:
        acc = tl.dot(h, b.to(tl.float32), acc, input_precision="ieee")
    return acc

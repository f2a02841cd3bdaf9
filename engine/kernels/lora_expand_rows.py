"""What a program of expand does with its item: rows one after the other, or through tensor cores.

Goes in: pointers to the item's rows of h and y, what the slot's entry says, a tile of columns.
Comes out: y, corrected there.  With AHEAD, h comes from programs of the same launch and is used
before the kernel ahead has ended; of what that one writes, only y is touched, behind the wait.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.dependent import wait_for_earlier, wait_for_sums
from engine.kernels.lora_pieces import (
    add_product,
    b_places,
    joined,
    load_b,
    load_extras,
    scaled_product,
    sum_row,
    sum_rows,
)
from engine.kernels.lora_place import rows_in_first_block


@triton.jit
def near_or_far(
    hp,
    arena,
    yp,
    base_bias,
    arrived,
    awaited,
    flags,
    slot_row,
    begin,
    block,
    follows,
    module,
    rank,
    rows,
    scaling,
    c0,
    width,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    MANY: tl.constexpr,
    MORE: tl.constexpr,
    STREAMED: tl.constexpr,
    EXTRAS: tl.constexpr,
    BASE_BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """STREAMED: one body for all; else whether the run lies in one block decides."""
    stride = tl.where(module == 0, S0, tl.where(module == 1, S1, S2))
    stride = tl.multiple_of(stride, UNIT)
    if STREAMED:
        _few_rows(
            hp, arena, yp, base_bias, arrived, awaited, flags, slot_row, begin, block, follows,
            module, rank, rows, scaling, c0, width, stride, S0, S1, S2, Y_STRIDE, BLOCK, UNIT,
            BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS, COLUMNS, EVEN, MANY, "two", MORE, EXTRAS,
            BASE_BIAS, AHEAD, PDL,
        )  # fmt: skip
    elif rank <= rows_in_first_block(begin, stride, BLOCK, UNIT):
        _few_rows(
            hp, arena, yp, base_bias, arrived, awaited, flags, slot_row, begin, block, follows,
            module, rank, rows, scaling, c0, width, stride, S0, S1, S2, Y_STRIDE, BLOCK, UNIT,
            BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS, COLUMNS, EVEN, MANY, True, MORE, EXTRAS,
            BASE_BIAS, AHEAD, PDL,
        )  # fmt: skip
    else:
        _few_rows(
            hp, arena, yp, base_bias, arrived, awaited, flags, slot_row, begin, block, follows,
            module, rank, rows, scaling, c0, width, stride, S0, S1, S2, Y_STRIDE, BLOCK, UNIT,
            BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS, COLUMNS, EVEN, MANY, False, MORE, EXTRAS,
            BASE_BIAS, AHEAD, PDL,
        )  # fmt: skip


@triton.jit
def _few_rows(
    hp,
    arena,
    yp,
    base_bias,
    arrived,
    awaited,
    flags,
    slot_row,
    begin,
    block,
    follows,
    module,
    rank,
    rows,
    scaling,
    c0,
    width,
    stride,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    MANY: tl.constexpr,
    NEAR: tl.constexpr,  # how B is loaded: see `load_b`
    MORE: tl.constexpr,
    EXTRAS: tl.constexpr,
    BASE_BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to 4 rows, one after the other, against a tile of B that stays in registers."""
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    b = load_b(
        arena, slot_row, begin, block, follows, module, 0, rank, c0, width, stride, S0, S1, S2,
        BLOCK, UNIT, BLOCKS_AT, RANKS, COLUMNS, EVEN, NEAR, True,
    )  # fmt: skip  # (RANKS, COLUMNS), on its way while shrink ends
    c = c0 + tl.arange(0, COLUMNS)
    inside = c < width
    more, gain, own = load_extras(
        arena, base_bias, flags, slot_row, begin, block, module, rank, scaling, c, inside,
        S0, S1, S2, BLOCK, UNIT, BLOCKS_AT, EXTRAS, BASE_BIAS,
    )  # fmt: skip
    yp += c
    in1, in2, in3 = inside & (rows > 1), inside & (rows > 2), inside & (rows > 3)
    if AHEAD:
        wait_for_sums(arrived, awaited, PDL)
    else:  # all rows on their way before the first is used
        wait_for_earlier(PDL)
        y0 = tl.load(yp, mask=inside)
        if MANY:
            y1 = tl.load(yp + Y_STRIDE, mask=in1)
            y2 = tl.load(yp + 2 * Y_STRIDE, mask=in2)
            y3 = tl.load(yp + 3 * Y_STRIDE, mask=in3)
    h0 = sum_row(hp, 0, rank, True, H_SPLIT, SPLITS, RANKS, CACHE)
    if MANY:
        h1 = sum_row(hp + RH, 0, rank, rows > 1, H_SPLIT, SPLITS, RANKS, CACHE)
        h2 = sum_row(hp + 2 * RH, 0, rank, rows > 2, H_SPLIT, SPLITS, RANKS, CACHE)
        h3 = sum_row(hp + 3 * RH, 0, rank, rows > 3, H_SPLIT, SPLITS, RANKS, CACHE)
    d0 = scaled_product(h0, b, scaling)
    if MANY:
        d1, d2, d3 = d0 * 0.0, d0 * 0.0, d0 * 0.0
        if rows > 1:
            d1 = scaled_product(h1, b, scaling)
        if rows > 2:
            d2, d3 = scaled_product(h2, b, scaling), scaled_product(h3, b, scaling)
    for q in tl.range(RANKS, rank if MORE else RANKS, RANKS):
        b = load_b(
            arena, slot_row, begin, block, follows, module, q, rank, c0, width, stride, S0, S1,
            S2, BLOCK, UNIT, BLOCKS_AT, RANKS, COLUMNS, EVEN, NEAR, False,
        )  # fmt: skip
        d0 += scaled_product(sum_row(hp, q, rank, True, H_SPLIT, SPLITS, RANKS, CACHE), b, scaling)
        if MANY:
            if rows > 1:
                h1 = sum_row(hp + RH, q, rank, True, H_SPLIT, SPLITS, RANKS, CACHE)
                d1 += scaled_product(h1, b, scaling)
            if rows > 2:
                h2 = sum_row(hp + 2 * RH, q, rank, True, H_SPLIT, SPLITS, RANKS, CACHE)
                h3 = sum_row(hp + 3 * RH, q, rank, rows > 3, H_SPLIT, SPLITS, RANKS, CACHE)
                d2 += scaled_product(h2, b, scaling)
                d3 += scaled_product(h3, b, scaling)
    if AHEAD:  # of what is ahead, only y had still to come
        wait_for_earlier(PDL)
        y0 = tl.load(yp, mask=inside)
        if MANY:
            y1 = tl.load(yp + Y_STRIDE, mask=in1)
            y2 = tl.load(yp + 2 * Y_STRIDE, mask=in2)
            y3 = tl.load(yp + 3 * Y_STRIDE, mask=in3)
    tl.store(yp, joined(y0, d0, more, gain, own, flags, EXTRAS), mask=inside)
    if MANY:
        tl.store(yp + Y_STRIDE, joined(y1, d1, more, gain, own, flags, EXTRAS), mask=in1)
        tl.store(yp + 2 * Y_STRIDE, joined(y2, d2, more, gain, own, flags, EXTRAS), mask=in2)
        tl.store(yp + 3 * Y_STRIDE, joined(y3, d3, more, gain, own, flags, EXTRAS), mask=in3)


@triton.jit
def many_rows(
    hp,
    arena,
    yp,
    base_bias,
    arrived,
    awaited,
    flags,
    slot_row,
    begin,
    block,
    module,
    rank,
    rows,
    scaling,
    c0,
    width,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    LATE: tl.constexpr,
    MORE: tl.constexpr,
    EXTRAS: tl.constexpr,
    BASE_BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One item through the tensor cores, RUNS tiles of columns one after the other."""
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    r = tl.arange(0, RANKS)
    ok = r < rank
    place = b_places(slot_row, begin, block, module, r, ok, S0, S1, S2, BLOCK, UNIT, BLOCKS_AT)
    c = c0 + tl.arange(0, COLUMNS)
    b = tl.load(
        arena + place[:, None] + c[None, :],
        mask=ok[:, None] & (c < width)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )  # (RANKS, COLUMNS), on its way while shrink ends
    m = tl.arange(0, ROWS)
    live = (m < rows)[:, None]
    hp += m[:, None] * RH
    yp += m.to(tl.int64)[:, None] * Y_STRIDE
    if AHEAD:
        wait_for_sums(arrived, awaited, PDL)
    else:
        wait_for_earlier(PDL)
    h0 = sum_rows(hp + r[None, :], r, rank, live, H_SPLIT, SPLITS, CACHE) * scaling  # (ROWS, RANKS)
    for run in tl.static_range(RUNS):
        if run > 0:
            c = c0 + run * COLUMNS + tl.arange(0, COLUMNS)
            b = tl.load(
                arena + place[:, None] + c[None, :],
                mask=ok[:, None] & (c < width)[None, :],
                other=0.0,
            )
        inside = (c < width)[None, :]
        here = yp + c[None, :]
        if not LATE and not AHEAD:
            there = tl.load(here, mask=live & inside)
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        acc = add_product(h0, b, acc, PRECISION)
        for q in tl.range(RANKS, rank if MORE else RANKS, RANKS):
            rq = q + r
            okq = rq < rank
            at = b_places(
                slot_row, begin, block, module, rq, okq, S0, S1, S2, BLOCK, UNIT, BLOCKS_AT
            )
            bq = tl.load(arena + at[:, None] + c[None, :], mask=okq[:, None] & inside, other=0.0)
            hq = sum_rows(hp + rq[None, :], rq, rank, live, H_SPLIT, SPLITS, CACHE) * scaling
            acc = add_product(hq, bq, acc, PRECISION)
        if AHEAD and run == 0:  # of what is ahead, only y had still to come
            wait_for_earlier(PDL)
        if LATE or AHEAD:
            there = tl.load(here, mask=live & inside)
        more, gain, own = load_extras(
            arena, base_bias, flags, slot_row, begin, block, module, rank, scaling, c, c < width,
            S0, S1, S2, BLOCK, UNIT, BLOCKS_AT, EXTRAS, BASE_BIAS,
        )  # fmt: skip
        if EXTRAS:
            more, gain, own = more[None, :], gain[None, :], own[None, :]
        y = joined(there, acc, more, gain, own, flags, EXTRAS)
        tl.store(here, y, mask=live & inside)

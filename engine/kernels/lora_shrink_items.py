"""What a program of shrink does with its item: rows one after the other, or through tensor cores.

Goes in: x, the slot table, which split of which item.  Comes out: that split's part of h.  With
AHEAD no program waits: whoever launches the kernel knows that x is there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.dependent import wait_for_earlier
from engine.kernels.lora_place import (
    load_far,
    load_item,
    load_near,
    load_two,
    load_word,
    row_places,
    rows_in_first_block,
    two_places,
)


@triton.jit
def shrink_rows(
    x,
    arena,
    table,
    items,
    h,
    entry,
    place,  # of the split, and of the item in turns of SPLITS
    module,
    D_IN: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    MANY: tl.constexpr,
    DOT: tl.constexpr,
    STREAMED: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,  # x is read without a wait in this kernel: from L2
    PDL: tl.constexpr,
):
    """One module's chunk of an item, row by row or (DOT, where there are many) at once."""
    split = place % SPLITS
    start, rows, slot, r0 = load_item(items, place // SPLITS)
    slot_row = table + slot.to(tl.int64) * SLOT_WORDS
    e = slot_row + (entry + module) * 8
    rank = load_word(e)
    begin, block, follows = rank, rank, rank
    if STREAMED:  # all at once, as in expand
        begin, block, follows = load_word(e + 1), load_word(e + 4), load_word(e + 6)
    if (rows == 0) | (rank <= r0):
        wait_for_earlier(PDL)
    else:
        if not STREAMED:
            begin, block = load_word(e + 1), load_word(e + 4)
        k0 = split * CHUNK
        hp = h + (module * SPLITS + split).to(tl.int64) * H_SPLIT
        xp = x + start.to(tl.int64) * D_IN
        if DOT:
            if rows > 4:
                r = r0 + tl.arange(0, RANKS)
                ok = r < rank
                at = row_places(slot_row, begin, block, r, ok, STRIDE, BLOCK, UNIT, BLOCKS_AT)
                _many_rows(
                    xp, arena, hp, start, rows, at, r, ok, k0, D_IN, CHUNK, STEP, RH, ROWS, AHEAD,
                    PDL,
                )  # fmt: skip
            else:
                _near_or_far(
                    xp, arena, hp, start, rows, slot_row, begin, block, follows, r0, rank, k0, D_IN,
                    CHUNK, STRIDE, BLOCK, UNIT, BLOCKS_AT, RANKS, RH, MANY, STREAMED, AHEAD, PDL,
                )  # fmt: skip
        else:
            _near_or_far(
                xp, arena, hp, start, rows, slot_row, begin, block, follows, r0, rank, k0, D_IN,
                CHUNK, STRIDE, BLOCK, UNIT, BLOCKS_AT, RANKS, RH, MANY, STREAMED, AHEAD, PDL,
            )  # fmt: skip


@triton.jit
def _near_or_far(
    xp,
    arena,
    hp,
    start,
    rows,
    slot_row,
    begin,
    block,
    follows,
    r0,
    rank,
    k0,
    D_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RANKS: tl.constexpr,
    RH: tl.constexpr,
    MANY: tl.constexpr,
    STREAMED: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """STREAMED: one body for all.  Else the whole body twice: a tile that comes from one of two
    loads takes more registers."""
    if STREAMED:
        _few_rows(
            xp, arena, hp, start, rows, slot_row, begin, block, follows, r0, rank, k0, D_IN, CHUNK,
            STRIDE, BLOCK, UNIT, BLOCKS_AT, RANKS, RH, MANY, "two", AHEAD, PDL,
        )  # fmt: skip
    elif tl.minimum(r0 + RANKS, rank) <= rows_in_first_block(begin, STRIDE, BLOCK, UNIT):
        _few_rows(
            xp, arena, hp, start, rows, slot_row, begin, block, follows, r0, rank, k0, D_IN, CHUNK,
            STRIDE, BLOCK, UNIT, BLOCKS_AT, RANKS, RH, MANY, True, AHEAD, PDL,
        )  # fmt: skip
    else:
        _few_rows(
            xp, arena, hp, start, rows, slot_row, begin, block, follows, r0, rank, k0, D_IN, CHUNK,
            STRIDE, BLOCK, UNIT, BLOCKS_AT, RANKS, RH, MANY, False, AHEAD, PDL,
        )  # fmt: skip


@triton.jit
def _few_rows(
    xp,
    arena,
    hp,
    start,
    rows,
    slot_row,
    begin,
    block,
    follows,
    r0,
    rank,
    k0,
    D_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RANKS: tl.constexpr,
    RH: tl.constexpr,
    MANY: tl.constexpr,
    NEAR: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to 4 rows, one after the other, against a tile of A that stays in registers."""
    EVEN: tl.constexpr = D_IN % CHUNK == 0
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    r = r0 + tl.arange(0, RANKS)
    ok = r < rank
    if NEAR == "two":
        first = rows_in_first_block(begin, STRIDE, BLOCK, UNIT)
        here, there, left = two_places(
            slot_row, begin, block, follows, r0, rank, first, BLOCK // STRIDE, STRIDE, BLOCK, UNIT,
            BLOCKS_AT, RANKS, False,
        )  # fmt: skip
        a = load_two(arena, here, there, left, r0, rank, k0, D_IN, STRIDE, RANKS, CHUNK, EVEN)
    elif NEAR:
        a = load_near(arena, begin, r0, rank, k0, D_IN, STRIDE, UNIT, RANKS, CHUNK, EVEN)
    else:
        place = row_places(slot_row, begin, block, r, ok, STRIDE, BLOCK, UNIT, BLOCKS_AT)
        a = load_far(arena, place, r, rank, k0, D_IN, CHUNK, EVEN)
    # a (RANKS, CHUNK) is on its way while the kernel ahead ends.
    k = k0 + tl.arange(0, CHUNK)
    inside = k < D_IN
    wait_for_earlier(PDL)
    hp += start * RH + r
    x0 = tl.load(xp + k, mask=inside, other=0.0, cache_modifier=CACHE)
    if MANY:  # all rows on their way before the first is used
        x1 = tl.load(xp + D_IN + k, mask=inside & (rows > 1), other=0.0, cache_modifier=CACHE)
        x2 = tl.load(xp + 2 * D_IN + k, mask=inside & (rows > 2), other=0.0, cache_modifier=CACHE)
        x3 = tl.load(xp + 3 * D_IN + k, mask=inside & (rows > 3), other=0.0, cache_modifier=CACHE)
    tl.store(hp, _product(a, x0), mask=ok)
    if MANY:
        if rows > 1:
            tl.store(hp + RH, _product(a, x1), mask=ok)
        if rows > 2:
            tl.store(hp + 2 * RH, _product(a, x2), mask=ok)
        if rows > 3:
            tl.store(hp + 3 * RH, _product(a, x3), mask=ok)


@triton.jit
def _product(a, x):
    """(RANKS, CHUNK) times (CHUNK,) in fp32."""
    return tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)


@triton.jit
def _many_rows(
    xp,
    arena,
    hp,
    start,
    rows,
    place,
    r,
    ok,
    k0,
    D_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    RH: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One item through the tensor cores; the first tile of A is loaded before the wait."""
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    m = tl.arange(0, ROWS)
    step = tl.arange(0, STEP)
    live = (m < rows)[:, None]
    xp = xp + m[:, None] * D_IN
    k = k0 + step
    a = tl.load(
        arena + place[:, None] + k[None, :],
        mask=ok[:, None] & (k < D_IN)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    wait_for_earlier(PDL)
    xt = tl.load(xp + k[None, :], mask=live & (k < D_IN)[None, :], other=0.0, cache_modifier=CACHE)
    acc = tl.dot(xt, tl.trans(a), input_precision="ieee")
    for done in tl.range(STEP, CHUNK, STEP):
        k = k0 + done + step
        a = tl.load(
            arena + place[:, None] + k[None, :],
            mask=ok[:, None] & (k < D_IN)[None, :],
            other=0.0,
        )
        xt = tl.load(
            xp + k[None, :], mask=live & (k < D_IN)[None, :], other=0.0, cache_modifier=CACHE
        )
        acc = tl.dot(xt, tl.trans(a), acc, input_precision="ieee")
    tl.store(hp + (start + m)[:, None] * RH + r[None, :], acc, mask=live & ok[None, :])


@triton.jit
def shrink_tiles(
    x,
    arena,
    table,
    items,
    h,
    entry,
    item_place,  # of the split, and of the item in turns of SPLITS
    side,  # which SIDE modules
    D_IN: tl.constexpr,
    X_STRIDE: tl.constexpr,  # elements from a row of x to the next
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    NUM: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,  # as above
    PDL: tl.constexpr,
):
    """SIDE modules' chunk of an item, through the tensor cores."""
    CACHE: tl.constexpr = ".cg" if AHEAD else ""
    split = item_place % SPLITS
    start, rows, slot, r0 = load_item(items, item_place // SPLITS)
    slot_row = table + slot.to(tl.int64) * SLOT_WORDS
    n = tl.arange(0, SIDE * RANKS)
    module = side * SIDE + n // RANKS
    r = r0 + n % RANKS
    e = slot_row + (entry + module) * 8
    rank = tl.load(e, mask=module < NUM, other=0, cache_modifier=".cg")
    if (rows == 0) | (tl.max(rank, axis=0) <= r0):
        wait_for_earlier(PDL)
    else:
        ok = r < rank
        place = row_places(
            slot_row,
            tl.load(e + 1, mask=ok, other=0, cache_modifier=".cg"),
            tl.load(e + 4, mask=ok, other=0, cache_modifier=".cg"),
            r,
            ok,
            STRIDE,
            BLOCK,
            UNIT,
            BLOCKS_AT,
        )
        m = tl.arange(0, ROWS)
        live = (m < rows)[:, None]
        xp = x + (start + m).to(tl.int64)[:, None] * X_STRIDE
        k0 = split * CHUNK
        step = tl.arange(0, STEP)
        if CHUNK == STEP:  # one tile: A is on its way while the kernel ahead ends
            k = k0 + step
            inside = (k < D_IN)[None, :]
            a = tl.load(
                arena + place[:, None] + k[None, :],
                mask=ok[:, None] & inside,
                other=0.0,
                cache_modifier=".cg",
            )
            wait_for_earlier(PDL)
            xt = tl.load(xp + k[None, :], mask=live & inside, other=0.0, cache_modifier=CACHE)
            acc = tl.dot(xt, tl.trans(a), input_precision="ieee")
        else:
            wait_for_earlier(PDL)
            acc = tl.zeros([ROWS, SIDE * RANKS], dtype=tl.float32)
            for done in tl.range(0, CHUNK, STEP):
                k = k0 + done + step
                inside = (k < D_IN)[None, :]
                a = tl.load(
                    arena + place[:, None] + k[None, :], mask=ok[:, None] & inside, other=0.0
                )
                xt = tl.load(xp + k[None, :], mask=live & inside, other=0.0, cache_modifier=CACHE)
                acc = tl.dot(xt, tl.trans(a), acc, input_precision="ieee")
        hp = h + (module * SPLITS + split).to(tl.int64) * H_SPLIT + r
        hp = hp[None, :] + (start + m)[:, None] * RH
        tl.store(hp, acc, mask=live & ok[None, :])

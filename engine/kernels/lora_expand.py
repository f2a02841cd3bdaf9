"""Expand: y += scaling h B for the rows of every segment, with B read from the paged arena.

Goes in: shrink's partial sums h, work items, the slot table, y (T, sum of the group's widths).
Comes out: y, corrected in place.  Where the adapter has a bias or a gain (DoRA), y becomes
`gain (y - b + scaling (h B + bias)) + b`, with b the base's own bias, which y holds already.  The
partials are added and scaled in fp32 and the sum joins y in fp32 before it is rounded.  Read are
only the rows and ranks of h that shrink wrote; columns of a module that the adapter lacks, and rows
of no item, are neither read nor written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent import let_next_come, wait_for_earlier
from engine.kernels.lora_meta import LoraDevicePlan
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
from engine.kernels.lora_place import (
    load_item,
    load_word,
    rows_in_first_block,
)

#: How h, which is fp32, meets the tensor cores, by the arena's dtype.  One tf32 alone cut h to 10
#: bits, which failed 14 of 20 seeded runs in fp16 on an H200.
PRECISION = {torch.bfloat16: "bf16x2", torch.float16: "tf32x2", torch.float32: "ieee"}


def expand(
    y: Tensor, layer: int, group: str, plan: LoraDevicePlan, base_bias: Tensor | None = None
) -> None:
    """Correct y, contiguous, with what `shrink` left for the same layer and group.

    `base_bias` (sum of the group's widths,) is what the base's product has added to y.
    """
    store, tile = plan.store, plan.kind.tiles.expand
    shape = store.groups[group]
    widths = (*shape.widths, 0, 0)[:3]
    runs = tile.runs if store.arena.element_size() == 2 else 1  # fp32 fills the registers as it is
    tiles = [-(-w // (tile.columns * runs)) for w in widths]
    strides = [store.stride(w or shape.widths[-1]) for w in widths]
    total = sum(shape.widths)
    assert y.stride() == (total, 1) or y.shape[0] == 1, "y has gaps between its rows"
    options = {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if store.pdl:
        options["launch_pdl"] = True
    _expand[(sum(tiles) * plan.kind.expand_items,)](
        store.h,
        store.arena,
        store.table,
        plan.expand,
        y,
        y if base_bias is None else base_bias,
        store.entry(layer, group),
        W0=widths[0],
        W1=widths[1],
        W2=widths[2],
        T0=tiles[0],
        T1=tiles[1],
        T2=tiles[2],
        S0=strides[0],
        S1=strides[1],
        S2=strides[2],
        ALIGN=math.gcd(64, *shape.widths),
        Y_STRIDE=total,
        BLOCK=store.block,
        UNIT=store.unit,
        SLOT_WORDS=store.table.shape[1],
        BLOCKS_AT=store.blocks_at,
        RH=store.max_rank,
        H_SPLIT=store.h_rows(plan.kind.tiles) * store.max_rank,
        SPLITS=plan.kind.tiles.shrink.splits(shape.d_in),
        RANKS=tile.ranks,
        COLUMNS=tile.columns,
        RUNS=runs,
        ROWS=tile.rows,
        FORM=tile.form,
        PRECISION=PRECISION[store.arena.dtype],
        EVEN=all(w % tile.columns == 0 for w in shape.widths),
        LATE=tile.late,
        MORE=tile.all_ranks,
        DEEP=tile.deep and tile.all_ranks,
        EXTRAS=plan.kind.extras,
        BASE_BIAS=base_bias is not None,
        PDL=store.pdl,
        **options,
    )


@triton.jit(do_not_specialize=["entry"])
def _expand(
    h,
    arena,
    table,
    items,
    y,
    base_bias,
    entry,  # of the group's first module in the layer
    W0: tl.constexpr,  # widths of up to three modules
    W1: tl.constexpr,
    W2: tl.constexpr,
    T0: tl.constexpr,  # programs that they take
    T1: tl.constexpr,
    T2: tl.constexpr,
    S0: tl.constexpr,  # strides of their rows in the arena
    S1: tl.constexpr,
    S2: tl.constexpr,
    ALIGN: tl.constexpr,  # divides all three widths
    Y_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,  # tiles of columns end where the modules do
    LATE: tl.constexpr,
    MORE: tl.constexpr,  # ranks above RANKS occur
    DEEP: tl.constexpr,  # the next tile of B is on its way while one is used
    EXTRAS: tl.constexpr,  # biases and gains occur
    BASE_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_come(PDL)
    start, rows, slot, _ = load_item(items, tl.program_id(0) // (T0 + T1 + T2))
    # which module, its width and first column in y, and this program's first column in the module
    tile = tl.program_id(0) % (T0 + T1 + T2)
    module, width, left, first = tile * 0, tile * 0 + W0, tile * 0, tile
    if W1 > 0:
        second = tile >= T0
        module = second.to(tl.int32)
        width = tl.where(second, W1, W0)
        left = tl.where(second, W0, 0)
        first = tl.where(second, tile - T0, tile)
    if W2 > 0:
        third = tile >= T0 + T1
        module += third.to(tl.int32)
        width = tl.where(third, W2, width)
        left = tl.where(third, W0 + W1, left)
        first = tl.where(third, tile - T0 - T1, first)
    width, left = tl.multiple_of(width, ALIGN), tl.multiple_of(left, ALIGN)
    c0 = first * (COLUMNS * RUNS)
    slot_row = table + slot.to(tl.int64) * SLOT_WORDS
    e = slot_row + (entry + module) * 8
    rank = load_word(e)
    if (rows == 0) | (rank == 0):
        wait_for_earlier(PDL)
        return
    begin, block = load_word(e + 2), load_word(e + 5)
    scaling = load_word(e + 3).to(tl.float32, bitcast=True)
    flags = load_word(e + 6) if EXTRAS else 0
    base_bias += left
    hp = h + (module * SPLITS).to(tl.int64) * H_SPLIT + start * RH
    yp = y + start.to(tl.int64) * Y_STRIDE + left
    if FORM == "dot":
        _many_rows(
            hp, arena, yp, base_bias, flags, slot_row, begin, block, module, rank, rows,
            scaling, c0, width, S0, S1, S2, Y_STRIDE, BLOCK, UNIT, BLOCKS_AT, RH, H_SPLIT,
            SPLITS, RANKS, COLUMNS, RUNS, ROWS, PRECISION, LATE, MORE, EXTRAS, BASE_BIAS, PDL,
        )  # fmt: skip
    if FORM == "both":  # noqa: SIM102  # one is known when compiled, the other when run
        if rows > 4:
            _many_rows(
                hp, arena, yp, base_bias, flags, slot_row, begin, block, module, rank, rows,
                scaling, c0, width, S0, S1, S2, Y_STRIDE, BLOCK, UNIT, BLOCKS_AT, RH, H_SPLIT,
                SPLITS, RANKS, COLUMNS, RUNS, ROWS, PRECISION, LATE, MORE, EXTRAS, BASE_BIAS, PDL,
            )  # fmt: skip
            return
    if FORM != "dot":
        stride = tl.where(module == 0, S0, tl.where(module == 1, S1, S2))
        stride = tl.multiple_of(stride, UNIT)
        if rank <= rows_in_first_block(begin, stride, BLOCK, UNIT):
            _few_rows(
                hp, arena, yp, base_bias, flags, slot_row, begin, block, module, rank, rows,
                scaling, c0, width, stride, S0, S1, S2, Y_STRIDE, BLOCK, UNIT, BLOCKS_AT, RH,
                H_SPLIT, SPLITS, RANKS, COLUMNS, EVEN, ROWS > 1, True, MORE, DEEP, EXTRAS,
                BASE_BIAS, PDL,
            )  # fmt: skip
        else:
            _few_rows(
                hp, arena, yp, base_bias, flags, slot_row, begin, block, module, rank, rows,
                scaling, c0, width, stride, S0, S1, S2, Y_STRIDE, BLOCK, UNIT, BLOCKS_AT, RH,
                H_SPLIT, SPLITS, RANKS, COLUMNS, EVEN, ROWS > 1, False, MORE, DEEP, EXTRAS,
                BASE_BIAS, PDL,
            )  # fmt: skip


@triton.jit
def _few_rows(
    hp,
    arena,
    yp,
    base_bias,
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
    NEAR: tl.constexpr,
    MORE: tl.constexpr,
    DEEP: tl.constexpr,
    EXTRAS: tl.constexpr,
    BASE_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to 4 rows, one after the other, against a tile of B that stays in registers."""
    b = load_b(
        arena, slot_row, begin, block, module, 0, rank, c0, width, stride, S0, S1, S2,
        BLOCK, UNIT, BLOCKS_AT, RANKS, COLUMNS, EVEN, NEAR,
    )  # fmt: skip  # (RANKS, COLUMNS), on its way while shrink ends
    if DEEP:  # and the next one; beyond the rank nothing is loaded
        later = load_b(
            arena, slot_row, begin, block, module, RANKS, rank, c0, width, stride, S0, S1, S2,
            BLOCK, UNIT, BLOCKS_AT, RANKS, COLUMNS, EVEN, NEAR,
        )  # fmt: skip
    c = c0 + tl.arange(0, COLUMNS)
    inside = c < width
    more, gain, own = load_extras(
        arena, base_bias, flags, slot_row, begin, block, module, rank, scaling, c, inside,
        S0, S1, S2, BLOCK, UNIT, BLOCKS_AT, EXTRAS, BASE_BIAS,
    )  # fmt: skip
    wait_for_earlier(PDL)
    yp += c
    y0 = tl.load(yp, mask=inside)
    h0 = sum_row(hp, 0, rank, True, H_SPLIT, SPLITS, RANKS)
    if MANY:  # all rows on their way before the first is used
        in1, in2, in3 = inside & (rows > 1), inside & (rows > 2), inside & (rows > 3)
        y1 = tl.load(yp + Y_STRIDE, mask=in1)
        y2 = tl.load(yp + 2 * Y_STRIDE, mask=in2)
        y3 = tl.load(yp + 3 * Y_STRIDE, mask=in3)
        h1 = sum_row(hp + RH, 0, rank, rows > 1, H_SPLIT, SPLITS, RANKS)
        h2 = sum_row(hp + 2 * RH, 0, rank, rows > 2, H_SPLIT, SPLITS, RANKS)
        h3 = sum_row(hp + 3 * RH, 0, rank, rows > 3, H_SPLIT, SPLITS, RANKS)
    d0 = scaled_product(h0, b, scaling)
    if MANY:
        d1, d2, d3 = d0 * 0.0, d0 * 0.0, d0 * 0.0
        if rows > 1:
            d1 = scaled_product(h1, b, scaling)
        if rows > 2:
            d2, d3 = scaled_product(h2, b, scaling), scaled_product(h3, b, scaling)
    for q in tl.range(RANKS, rank if MORE else RANKS, RANKS):
        if DEEP:
            b = later
            later = load_b(
                arena, slot_row, begin, block, module, q + RANKS, rank, c0, width, stride, S0, S1,
                S2, BLOCK, UNIT, BLOCKS_AT, RANKS, COLUMNS, EVEN, NEAR,
            )  # fmt: skip
        else:
            b = load_b(
                arena, slot_row, begin, block, module, q, rank, c0, width, stride, S0, S1, S2,
                BLOCK, UNIT, BLOCKS_AT, RANKS, COLUMNS, EVEN, NEAR,
            )  # fmt: skip
        d0 += scaled_product(sum_row(hp, q, rank, True, H_SPLIT, SPLITS, RANKS), b, scaling)
        if MANY:
            if rows > 1:
                h1 = sum_row(hp + RH, q, rank, True, H_SPLIT, SPLITS, RANKS)
                d1 += scaled_product(h1, b, scaling)
            if rows > 2:
                h2 = sum_row(hp + 2 * RH, q, rank, True, H_SPLIT, SPLITS, RANKS)
                h3 = sum_row(hp + 3 * RH, q, rank, rows > 3, H_SPLIT, SPLITS, RANKS)
                d2 += scaled_product(h2, b, scaling)
                d3 += scaled_product(h3, b, scaling)
    tl.store(yp, joined(y0, d0, more, gain, own, flags, EXTRAS), mask=inside)
    if MANY:
        tl.store(yp + Y_STRIDE, joined(y1, d1, more, gain, own, flags, EXTRAS), mask=in1)
        tl.store(yp + 2 * Y_STRIDE, joined(y2, d2, more, gain, own, flags, EXTRAS), mask=in2)
        tl.store(yp + 3 * Y_STRIDE, joined(y3, d3, more, gain, own, flags, EXTRAS), mask=in3)


@triton.jit
def _many_rows(
    hp,
    arena,
    yp,
    base_bias,
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
    PDL: tl.constexpr,
):
    """One item through the tensor cores, RUNS tiles of columns one after the other."""
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
    wait_for_earlier(PDL)
    h0 = sum_rows(hp + r[None, :], r, rank, live, H_SPLIT, SPLITS) * scaling  # (ROWS, RANKS)
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
        if not LATE:
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
            hq = sum_rows(hp + rq[None, :], rq, rank, live, H_SPLIT, SPLITS) * scaling
            acc = add_product(hq, bq, acc, PRECISION)
        if LATE:
            there = tl.load(here, mask=live & inside)
        more, gain, own = load_extras(
            arena, base_bias, flags, slot_row, begin, block, module, rank, scaling, c, c < width,
            S0, S1, S2, BLOCK, UNIT, BLOCKS_AT, EXTRAS, BASE_BIAS,
        )  # fmt: skip
        if EXTRAS:
            more, gain, own = more[None, :], gain[None, :], own[None, :]
        y = joined(there, acc, more, gain, own, flags, EXTRAS)
        tl.store(here, y, mask=live & inside)

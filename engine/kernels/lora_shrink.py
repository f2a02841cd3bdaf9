"""Shrink: h = x Aᵀ for the rows of every segment, with A read from the paged arena.

Goes in: x (T, d_in), work items, the slot table.  Comes out: fp32 partial sums
h[module, split, row, rank], one split a chunk of inputs; expand adds them up.  Written are the rows
of the items and the ranks that the module has, nothing else: no atomics, no clearing.  One program
is one chunk of one item, so that work follows an adapter's own rank.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import let_next_come, wait_for_earlier
from engine.kernels.lora_meta import LoraDevicePlan, LoraStore
from engine.kernels.lora_place import (
    load_far,
    load_item,
    load_near,
    load_word,
    row_places,
    rows_in_first_block,
)
from engine.kernels.tiles import ShrinkTile


def shrink(x: Tensor, layer: int, group: str, plan: LoraDevicePlan) -> None:
    """Fill plan.store.h with the group's partial sums of x (T, d_in), contiguous."""
    store, tile = plan.store, plan.kind.tiles.shrink
    shape = store.groups[group]
    chunk, splits = tile.chunk_of(shape.d_in), tile.splits(shape.d_in)
    num = len(shape.widths)
    assert x.stride() == (shape.d_in, 1) or x.shape[0] == 1, "x has gaps between its rows"
    common = {
        "D_IN": shape.d_in,
        "STRIDE": store.stride(shape.d_in),
        "BLOCK": store.block,
        "UNIT": store.unit,
        "SLOT_WORDS": store.table.shape[1],
        "BLOCKS_AT": store.blocks_at,
        "RH": store.max_rank,
        "H_SPLIT": store.h_rows(plan.kind.tiles) * store.max_rank,
        "SPLITS": splits,
        "CHUNK": chunk,
        "RANKS": tile.ranks,
        "STEP": min(tile.step, chunk),
        "PDL": store.pdl,
        "num_warps": tile.warps,
        "num_stages": _stages(store, tile),
    }
    if store.pdl:
        common["launch_pdl"] = True
    args = (x, store.arena, store.table, plan.shrink, store.h, store.entry(layer, group))
    items = plan.kind.shrink_items  # along x: 1,024 rows of rank 512 are more than y can count
    if tile.form == "dot":
        side = min(tile.side, 1 << (num - 1).bit_length())
        grid = (splits * items, 1, -(-num // side))
        _shrink_tiles[grid](*args, NUM=num, SIDE=side, ROWS=tile.rows, **common)
    else:
        grid = (splits * items, 1, num)
        _shrink_rows[grid](
            *args, MANY=tile.rows > 1, DOT=tile.form == "both", ROWS=tile.rows, **common
        )


def _stages(store: LoraStore, tile: ShrinkTile) -> int:
    """As the tile wants it, if as many tiles of x and A fit into a multiprocessor."""
    size = (tile.rows + tile.side * tile.ranks) * tile.step * store.arena.element_size()
    fitting = int(0.9 * backend.shared_bytes(store.arena.device)) // size
    return max(1, min(tile.stages, fitting))


@triton.jit(do_not_specialize=["entry"])
def _shrink_rows(
    x,
    arena,
    table,
    items,
    h,
    entry,  # of the group's first module in the layer
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
    MANY: tl.constexpr,  # up to 4 rows an item, else 1
    DOT: tl.constexpr,  # up to ROWS rows an item: more than 4 go to the tensor cores
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    module = tl.program_id(2)
    let_next_come(PDL)
    start, rows, slot, r0 = load_item(items, tl.program_id(0) // SPLITS)
    slot_row = table + slot.to(tl.int64) * SLOT_WORDS
    e = slot_row + (entry + module) * 8
    rank = load_word(e)
    if (rows == 0) | (rank <= r0):
        wait_for_earlier(PDL)
        return
    begin, block = load_word(e + 1), load_word(e + 4)
    k0 = split * CHUNK
    hp = h + (module * SPLITS + split).to(tl.int64) * H_SPLIT
    xp = x + start.to(tl.int64) * D_IN
    if DOT:  # noqa: SIM102  # one is known when compiled, the other when run
        if rows > 4:
            r = r0 + tl.arange(0, RANKS)
            ok = r < rank
            place = row_places(slot_row, begin, block, r, ok, STRIDE, BLOCK, UNIT, BLOCKS_AT)
            _many_rows(
                xp, arena, hp, start, rows, place, r, ok, k0, D_IN, CHUNK, STEP, RH, ROWS, PDL
            )
            return
    near = tl.minimum(r0 + RANKS, rank) <= rows_in_first_block(begin, STRIDE, BLOCK, UNIT)
    if near:  # the whole body twice: a tile that comes from one of two loads takes more registers
        _few_rows(
            xp, arena, hp, start, rows, slot_row, begin, block, r0, rank, k0, D_IN, CHUNK,
            STRIDE, BLOCK, UNIT, BLOCKS_AT, RANKS, RH, MANY, True, PDL,
        )  # fmt: skip
    else:
        _few_rows(
            xp, arena, hp, start, rows, slot_row, begin, block, r0, rank, k0, D_IN, CHUNK,
            STRIDE, BLOCK, UNIT, BLOCKS_AT, RANKS, RH, MANY, False, PDL,
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
    PDL: tl.constexpr,
):
    """Up to 4 rows, one after the other, against a tile of A that stays in registers."""
    EVEN: tl.constexpr = D_IN % CHUNK == 0
    r = r0 + tl.arange(0, RANKS)
    ok = r < rank
    if NEAR:
        a = load_near(arena, begin, r0, rank, k0, D_IN, STRIDE, UNIT, RANKS, CHUNK, EVEN)
    else:
        place = row_places(slot_row, begin, block, r, ok, STRIDE, BLOCK, UNIT, BLOCKS_AT)
        a = load_far(arena, place, r, rank, k0, D_IN, CHUNK, EVEN)
    # a (RANKS, CHUNK) is on its way while the kernel ahead ends.
    k = k0 + tl.arange(0, CHUNK)
    inside = k < D_IN
    wait_for_earlier(PDL)
    hp += start * RH + r
    x0 = tl.load(xp + k, mask=inside, other=0.0)
    if MANY:  # all rows on their way before the first is used
        x1 = tl.load(xp + D_IN + k, mask=inside & (rows > 1), other=0.0)
        x2 = tl.load(xp + 2 * D_IN + k, mask=inside & (rows > 2), other=0.0)
        x3 = tl.load(xp + 3 * D_IN + k, mask=inside & (rows > 3), other=0.0)
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
    PDL: tl.constexpr,
):
    """One item through the tensor cores; the first tile of A is loaded before the wait."""
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
    xt = tl.load(xp + k[None, :], mask=live & (k < D_IN)[None, :], other=0.0)
    acc = tl.dot(xt, tl.trans(a), input_precision="ieee")
    for done in tl.range(STEP, CHUNK, STEP):
        k = k0 + done + step
        a = tl.load(
            arena + place[:, None] + k[None, :],
            mask=ok[:, None] & (k < D_IN)[None, :],
            other=0.0,
        )
        xt = tl.load(xp + k[None, :], mask=live & (k < D_IN)[None, :], other=0.0)
        acc = tl.dot(xt, tl.trans(a), acc, input_precision="ieee")
    tl.store(hp + (start + m)[:, None] * RH + r[None, :], acc, mask=live & ok[None, :])


@triton.jit(do_not_specialize=["entry"])
def _shrink_tiles(
    x,
    arena,
    table,
    items,
    h,
    entry,
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
    NUM: tl.constexpr,  # modules of the group
    SIDE: tl.constexpr,  # of which so many stand side by side
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    let_next_come(PDL)
    start, rows, slot, r0 = load_item(items, tl.program_id(0) // SPLITS)
    slot_row = table + slot.to(tl.int64) * SLOT_WORDS
    n = tl.arange(0, SIDE * RANKS)
    module = tl.program_id(2) * SIDE + n // RANKS
    r = r0 + n % RANKS
    e = slot_row + (entry + module) * 8
    rank = tl.load(e, mask=module < NUM, other=0, cache_modifier=".cg")
    if (rows == 0) | (tl.max(rank, axis=0) <= r0):
        wait_for_earlier(PDL)
        return
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
    xp = x + (start + m).to(tl.int64)[:, None] * D_IN
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
        xt = tl.load(xp + k[None, :], mask=live & inside, other=0.0)
        acc = tl.dot(xt, tl.trans(a), input_precision="ieee")
    else:
        wait_for_earlier(PDL)
        acc = tl.zeros([ROWS, SIDE * RANKS], dtype=tl.float32)
        for done in tl.range(0, CHUNK, STEP):
            k = k0 + done + step
            inside = (k < D_IN)[None, :]
            a = tl.load(arena + place[:, None] + k[None, :], mask=ok[:, None] & inside, other=0.0)
            xt = tl.load(xp + k[None, :], mask=live & inside, other=0.0)
            acc = tl.dot(xt, tl.trans(a), acc, input_precision="ieee")
    hp = h + (module * SPLITS + split).to(tl.int64) * H_SPLIT + r
    hp = hp[None, :] + (start + m)[:, None] * RH
    tl.store(hp, acc, mask=live & ok[None, :])

"""Adapters of a prompt as guests of the base's product: [x | s h] times [W | B]ᵀ, y made once.

A weight is stored with room behind the inputs of each output.  Goes in: shrink's partial sums h,
the items of rows and of guests, x and W with their room.  Comes out: s h behind x's rows and B, the
other way round, behind W's, as many columns of either as the guests have ranks.  The product of
both is then the base's and the adapters', rounded once: expand, which would read and write all of y
again, is not needed.  The room is the step's alone: nobody else reads it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent import let_next_come, wait_for_earlier
from engine.kernels.launch import Launcher, launcher_of
from engine.kernels.lora_meta import LoraDevicePlan
from engine.kernels.lora_pieces import b_places
from engine.kernels.lora_place import load_item, load_word, module_of

#: Outputs of a program that brings B.
OUTPUTS = 128


def augment(x: Tensor, weight: Tensor, layer: int, group: str, plan: LoraDevicePlan) -> int:
    """Fill the room behind x (T, d_in) and behind `weight` (sum of the group's widths, d_in + room)
    with what the plan's guests have there; comes out how many columns of it.

    x is a view that leaves at least as many elements between its rows.  Behind `shrink`.
    """
    store, kind = plan.store, plan.kind
    shape = store.groups[group]
    columns = kind.columns * len(shape.widths)
    assert kind.guests and not kind.rest_items and not kind.extras, "not a guests' plan"
    assert weight.shape == (sum(shape.widths), weight.stride(0)) and weight.stride(1) == 1
    assert x.shape[1] == shape.d_in and x.stride(1) == 1
    assert min(x.stride(0), weight.stride(0)) >= shape.d_in + columns, "no room for the guests"
    key = "augment", group
    known = plan.derived.get(key)
    if known is None:
        known = plan.derived[key] = _prepared(group, plan)
    launcher, grid = known
    launcher(
        grid,
        store.h,
        store.arena,
        store.table,
        plan.expand,
        x,
        weight,
        store.entry(layer, group),
        kind.expand_items,
        kind.columns,
        x.stride(0),
        weight.stride(0),
    )
    return columns


def _prepared(group: str, plan: LoraDevicePlan) -> tuple[Launcher, tuple[int, ...]]:
    store, kind = plan.store, plan.kind
    shape, tiles = store.groups[group], plan.kind.tiles
    widths = (*shape.widths, 0, 0)[:3]
    parts = [-(-width // OUTPUTS) for width in widths]
    options: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
    if store.pdl:
        options["launch_pdl"] = True
    launcher = launcher_of(
        _augment,
        D_IN=shape.d_in,
        NUM=len(shape.widths),
        **{f"W{i}": width for i, width in enumerate(widths)},
        **{f"T{i}": number for i, number in enumerate(parts)},
        **{f"S{i}": store.stride(w or shape.widths[-1]) for i, w in enumerate(widths)},
        BLOCK=store.block,
        UNIT=store.unit,
        SLOT_WORDS=store.table.shape[1],
        BLOCKS_AT=store.blocks_at,
        RH=store.max_rank,
        H_SPLIT=store.h_rows(tiles) * store.max_rank,
        SPLITS=tiles.shrink.splits(shape.d_in),
        ROWS=tiles.expand.rows,
        OUTPUTS=OUTPUTS,
        PDL=store.pdl,
        **options,
    )
    return launcher, (kind.expand_items + kind.guests * sum(parts),)


@triton.jit(do_not_specialize=["entry", "row_items"])
def _augment(
    h,
    arena,
    table,
    items,  # of rows (first row, rows, slot, its first column), of guests (that, columns, slot)
    x,
    weight,
    entry,  # of the group's first module in the layer
    row_items,
    columns,  # of one module: all guests' ranks, each rounded up to 16
    stride_x,
    stride_w,
    D_IN: tl.constexpr,
    NUM: tl.constexpr,  # modules of the group
    W0: tl.constexpr,  # their widths
    W1: tl.constexpr,
    W2: tl.constexpr,
    T0: tl.constexpr,  # programs that they take
    T1: tl.constexpr,
    T2: tl.constexpr,
    S0: tl.constexpr,  # strides of their rows of B in the arena
    S1: tl.constexpr,
    S2: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """An item's rows of s h, or OUTPUTS rows of a guest's B; zero where a column is not theirs."""
    let_next_come(PDL)
    place = tl.program_id(0)
    if place < row_items:
        start, rows, slot, first = load_item(items, place)
        wait_for_earlier(PDL)
        _sums_behind_x(
            h, table, x, start, rows, slot, first, entry, columns, stride_x, D_IN, NUM, SLOT_WORDS,
            RH, H_SPLIT, SPLITS, ROWS,
        )  # fmt: skip
    else:
        T: tl.constexpr = T0 + T1 + T2
        place -= row_items
        first, ranks, slot, _ = load_item(items, row_items + place // T)
        module, width, left, part = module_of(place % T, W0, W1, W2, T0, T1)
        slot_row = table + slot.to(tl.int64) * SLOT_WORDS
        e = slot_row + (entry + module) * 8
        rank, begin, block = load_word(e), load_word(e + 2), load_word(e + 5)
        n = part * OUTPUTS + tl.arange(0, OUTPUTS)
        mine = n < width
        to = weight + (left + n).to(tl.int64)[:, None] * stride_w + D_IN + first
        wait_for_earlier(PDL)  # the step before may still read the room
        for q in range(0, ranks, 16):
            r = q + tl.arange(0, 16)
            ok = r < rank
            at = b_places(slot_row, begin, block, module, r, ok, S0, S1, S2, BLOCK, UNIT, BLOCKS_AT)
            b = tl.load(
                arena + at[:, None] + n[None, :], mask=ok[:, None] & mine[None, :], other=0.0
            )
            for other in tl.static_range(NUM):
                value = tl.trans(tl.where(module == other, b, 0.0).to(b.dtype))
                tl.store(to + other * columns + r[None, :], value, mask=mine[:, None])


@triton.jit
def _sums_behind_x(
    h,
    table,
    x,
    start,
    rows,
    slot,
    first,
    entry,
    columns,
    stride_x,
    D_IN: tl.constexpr,
    NUM: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """All columns of an item's rows: its own slot's sums, scaled and rounded, zeros for others'."""
    m = tl.arange(0, ROWS)
    live = (m < rows)[:, None]
    row = start + m
    to = x + row.to(tl.int64)[:, None] * stride_x + D_IN
    for module in tl.static_range(NUM):
        e = table + slot.to(tl.int64) * SLOT_WORDS + (entry + module) * 8
        rank, scaling = load_word(e), load_word(e + 3).to(tl.float32, bitcast=True)
        hp = h + row[:, None] * RH
        for c in range(0, columns, 16):
            r = c - first + tl.arange(0, 16)
            here = live & ((r >= 0) & (r < rank))[None, :]
            total = tl.zeros([ROWS, 16], dtype=tl.float32)
            for split in tl.static_range(SPLITS):
                at = hp + (module * SPLITS + split) * H_SPLIT + r[None, :]
                total += tl.load(at, mask=here, other=0.0)
            column = module * columns + c + tl.arange(0, 16)
            value = (total * scaling).to(x.dtype.element_ty)
            tl.store(to + column[None, :], value, mask=live)

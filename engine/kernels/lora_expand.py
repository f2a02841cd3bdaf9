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
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent import let_next_come, wait_for_earlier
from engine.kernels.launch import Launcher, launcher_of
from engine.kernels.lora_expand_rows import many_rows, near_or_far
from engine.kernels.lora_meta import LoraDevicePlan
from engine.kernels.lora_place import BLOCK_BITS, FLAGS_AT, load_item, load_word, module_of

#: How h, which is fp32, meets the tensor cores, by the arena's dtype.  One tf32 alone cut h to 10
#: bits, which failed 14 of 20 seeded runs in fp16 on an H200.
PRECISION = {torch.bfloat16: "bf16x2", torch.float16: "tf32x2", torch.float32: "ieee"}


def expand(
    y: Tensor, layer: int, group: str, plan: LoraDevicePlan, base_bias: Tensor | None = None
) -> None:
    """Correct y, contiguous, with what `shrink` left for the same layer and group.

    `base_bias` (sum of the group's widths,) is what the base's product has added to y.
    """
    store = plan.store
    total = sum(store.groups[group].widths)
    assert y.stride() == (total, 1) or y.shape[0] == 1, "y has gaps between its rows"
    key = "expand", group, base_bias is not None
    known = plan.derived.get(key)
    if known is None:
        known = plan.derived[key] = _prepared(group, plan, biased=base_bias is not None)
    launcher, grid = known
    launcher(
        grid,
        store.h,
        store.arena,
        store.table,
        plan.expand,
        y,
        y if base_bias is None else base_bias,
        store.entry(layer, group),
    )


def _prepared(
    group: str, plan: LoraDevicePlan, *, biased: bool
) -> tuple[Launcher, tuple[int, ...]]:
    store, tile = plan.store, plan.kind.tiles.expand
    form = constants(group, plan)
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    if store.pdl:
        options["launch_pdl"] = True
    launcher = launcher_of(_expand, **form, BASE_BIAS=biased, PDL=store.pdl, **options)
    return launcher, (tiles_of(form) * plan.kind.expand_items,)


def constants(group: str, plan: LoraDevicePlan) -> dict[str, Any]:
    """What the kernel is compiled for, by name."""
    store, tile = plan.store, plan.kind.tiles.expand
    shape = store.groups[group]
    widths = (*shape.widths, 0, 0)[:3]
    runs = tile.runs if store.arena.element_size() == 2 else 1  # fp32 fills the registers as it is
    tiles = [-(-w // (tile.columns * runs)) for w in widths]
    strides = [store.stride(w or shape.widths[-1]) for w in widths]
    return {
        **{f"W{i}": width for i, width in enumerate(widths)},
        **{f"T{i}": number for i, number in enumerate(tiles)},
        **{f"S{i}": stride for i, stride in enumerate(strides)},
        "ALIGN": math.gcd(64, *shape.widths),
        "Y_STRIDE": sum(shape.widths),
        "BLOCK": store.block,
        "UNIT": store.unit,
        "SLOT_WORDS": store.table.shape[1],
        "BLOCKS_AT": store.blocks_at,
        "RH": store.max_rank,
        "H_SPLIT": store.h_rows(plan.kind.tiles) * store.max_rank,
        "SPLITS": plan.kind.tiles.shrink.splits(shape.d_in),
        "RANKS": tile.ranks,
        "COLUMNS": tile.columns,
        "RUNS": runs,
        "ROWS": tile.rows,
        "FORM": tile.form,
        "PRECISION": PRECISION[store.arena.dtype],
        "EVEN": all(w % tile.columns == 0 for w in shape.widths),
        "LATE": tile.late,
        "MORE": tile.all_ranks,
        "STREAMED": tile.streamed and store.block // max(strides) >= tile.ranks,
        "EXTRAS": plan.kind.extras,
    }


def tiles_of(form: dict[str, Any]) -> int:
    """Programs of an item."""
    return int(form["T0"] + form["T1"] + form["T2"])


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
    STREAMED: tl.constexpr,  # no tile of B lies in more than two blocks, and it leaves L2 first
    EXTRAS: tl.constexpr,  # biases and gains occur
    BASE_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_come(PDL)
    expand_item(
        h, arena, table, items, y, base_bias, h, 0, entry, tl.program_id(0), W0, W1, W2, T0, T1, T2,
        S0, S1, S2, ALIGN, Y_STRIDE, BLOCK, UNIT, SLOT_WORDS, BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS,
        COLUMNS, RUNS, ROWS, FORM, PRECISION, EVEN, LATE, MORE, STREAMED, EXTRAS, BASE_BIAS,
        False, PDL,
    )  # fmt: skip


@triton.jit
def expand_item(
    h,
    arena,
    table,
    items,
    y,
    base_bias,
    arrived,  # AHEAD: where shrink's programs are counted
    awaited,  # AHEAD: how many there are
    entry,
    place,  # of the tile of columns, and of the item in turns of them
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    ALIGN: tl.constexpr,
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
    EVEN: tl.constexpr,
    LATE: tl.constexpr,
    MORE: tl.constexpr,
    STREAMED: tl.constexpr,
    EXTRAS: tl.constexpr,
    BASE_BIAS: tl.constexpr,
    AHEAD: tl.constexpr,  # h comes from programs of this kernel, and is used ahead of the wait
    PDL: tl.constexpr,
):
    """One tile of columns of an item."""
    start, rows, slot, _ = load_item(items, place // (T0 + T1 + T2))
    tile = place % (T0 + T1 + T2)
    module, width, left, first = module_of(tile, W0, W1, W2, T0, T1)
    width, left = tl.multiple_of(width, ALIGN), tl.multiple_of(left, ALIGN)
    c0 = first * (COLUMNS * RUNS)
    slot_row = table + slot.to(tl.int64) * SLOT_WORDS
    e = slot_row + (entry + module) * 8
    rank = load_word(e)
    begin, follows, block = rank, rank, rank
    if STREAMED:  # all of the entry at once, needed or not: one turn to memory instead of two
        begin, follows, block = load_word(e + 2), load_word(e + 7), load_word(e + 5)
    if (rows == 0) | (rank == 0):
        wait_for_earlier(PDL)
    else:
        if not STREAMED:
            begin, block = load_word(e + 2), load_word(e + 5)
        scaling = load_word(e + 3).to(tl.float32, bitcast=True)
        flags = block >> FLAGS_AT
        block = block & BLOCK_BITS
        base_bias += left
        hp = h + (module * SPLITS).to(tl.int64) * H_SPLIT + start * RH
        yp = y + start.to(tl.int64) * Y_STRIDE + left
        if FORM == "dot":
            many_rows(
                hp, arena, yp, base_bias, arrived, awaited, flags, slot_row, begin, block, module,
                rank, rows, scaling, c0, width, S0, S1, S2, Y_STRIDE, BLOCK, UNIT, BLOCKS_AT, RH,
                H_SPLIT, SPLITS, RANKS, COLUMNS, RUNS, ROWS, PRECISION, LATE, MORE, EXTRAS,
                BASE_BIAS, AHEAD, PDL,
            )  # fmt: skip
        elif FORM == "both":
            if rows > 4:
                many_rows(
                    hp, arena, yp, base_bias, arrived, awaited, flags, slot_row, begin, block,
                    module, rank, rows, scaling, c0, width, S0, S1, S2, Y_STRIDE, BLOCK, UNIT,
                    BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS, COLUMNS, RUNS, ROWS, PRECISION, LATE,
                    MORE, EXTRAS, BASE_BIAS, AHEAD, PDL,
                )  # fmt: skip
            else:
                near_or_far(
                    hp, arena, yp, base_bias, arrived, awaited, flags, slot_row, begin, block,
                    follows, module, rank, rows, scaling, c0, width, S0, S1, S2, Y_STRIDE, BLOCK,
                    UNIT, BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS, COLUMNS, EVEN, ROWS > 1, MORE,
                    STREAMED, EXTRAS, BASE_BIAS, AHEAD, PDL,
                )  # fmt: skip
        else:
            near_or_far(
                hp, arena, yp, base_bias, arrived, awaited, flags, slot_row, begin, block, follows,
                module, rank, rows, scaling, c0, width, S0, S1, S2, Y_STRIDE, BLOCK, UNIT,
                BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS, COLUMNS, EVEN, ROWS > 1, MORE,
                STREAMED, EXTRAS,
                BASE_BIAS, AHEAD, PDL,
            )  # fmt: skip

"""Shrink: h = x Aᵀ for the rows of every segment, with A read from the paged arena.

Goes in: x (T, d_in), work items, the slot table.  Comes out: fp32 partial sums
h[module, split, row, rank], one split a chunk of inputs; expand adds them up.  Written are the rows
of the items and the ranks that the module has, nothing else: no atomics, no clearing.  One program
is one chunk of one item, so that work follows an adapter's own rank.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.dependent import let_next_come
from engine.kernels.launch import Launcher, launcher_of
from engine.kernels.lora_meta import LoraDevicePlan, LoraStore
from engine.kernels.lora_shrink_items import shrink_rows, shrink_tiles
from engine.kernels.tiles import ShrinkTile


def shrink(x: Tensor, layer: int, group: str, plan: LoraDevicePlan) -> None:
    """Fill plan.store.h with the group's partial sums of x (T, d_in), contiguous, or with gaps
    between its rows where the tile's form is "dot"."""
    store, d_in = plan.store, plan.store.groups[group].d_in
    gap = x.stride(0) - d_in if x.shape[0] > 1 else 0
    assert x.stride(1) == 1 and (gap == 0 or plan.kind.tiles.shrink.form == "dot"), "gaps in x"
    key = "shrink", group, gap
    known = plan.derived.get(key)
    if known is None:
        known = plan.derived[key] = _prepared(group, plan, gap)
    launcher, grid = known
    launcher(grid, x, store.arena, store.table, plan.shrink, store.h, store.entry(layer, group))


def _prepared(group: str, plan: LoraDevicePlan, gap: int) -> tuple[Launcher, tuple[int, ...]]:
    store, tile = plan.store, plan.kind.tiles.shrink
    form = constants(group, plan)
    options = {
        **form,
        "PDL": store.pdl,
        "num_warps": tile.warps,
        "num_stages": stages_of(store, tile),
    }
    if tile.form == "dot":
        options["X_STRIDE"] = form["D_IN"] + gap
    if store.pdl:
        options["launch_pdl"] = True
    # along x: 1,024 rows of rank 512 are more than y can count
    grid = (form["SPLITS"] * plan.kind.shrink_items, 1, sides(group, plan))
    return launcher_of(_shrink_tiles if tile.form == "dot" else _shrink_rows, **options), grid


def constants(group: str, plan: LoraDevicePlan) -> dict[str, Any]:
    """What the kernel of the tile's form is compiled for, by name."""
    store, tile = plan.store, plan.kind.tiles.shrink
    shape = store.groups[group]
    chunk, num = tile.chunk_of(shape.d_in), len(shape.widths)
    if tile.form == "dot":
        form: dict[str, Any] = {"NUM": num, "SIDE": _side(num, tile)}
    else:
        streamed = tile.streamed and store.block // store.stride(shape.d_in) >= tile.ranks
        form = {"MANY": tile.rows > 1, "DOT": tile.form == "both", "STREAMED": streamed}
    return form | {
        "D_IN": shape.d_in,
        "STRIDE": store.stride(shape.d_in),
        "BLOCK": store.block,
        "UNIT": store.unit,
        "SLOT_WORDS": store.table.shape[1],
        "BLOCKS_AT": store.blocks_at,
        "RH": store.max_rank,
        "H_SPLIT": store.h_rows(plan.kind.tiles) * store.max_rank,
        "SPLITS": tile.splits(shape.d_in),
        "CHUNK": chunk,
        "RANKS": tile.ranks,
        "STEP": min(tile.step, chunk),
        "ROWS": tile.rows,
    }


def sides(group: str, plan: LoraDevicePlan) -> int:
    """Programs that share the group's modules."""
    num, tile = len(plan.store.groups[group].widths), plan.kind.tiles.shrink
    return -(-num // _side(num, tile)) if tile.form == "dot" else num


def _side(num: int, tile: ShrinkTile) -> int:
    return min(tile.side, 1 << (num - 1).bit_length())


def stages_of(store: LoraStore, tile: ShrinkTile) -> int:
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
    STREAMED: tl.constexpr,  # no tile of A lies in more than two blocks, and it leaves L2 first
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_come(PDL)
    shrink_rows(
        x, arena, table, items, h, entry, tl.program_id(0), tl.program_id(2), D_IN, STRIDE, BLOCK,
        UNIT, SLOT_WORDS, BLOCKS_AT, RH, H_SPLIT, SPLITS, CHUNK, RANKS, STEP, MANY, DOT,
        STREAMED, ROWS, False, PDL,
    )  # fmt: skip


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
    X_STRIDE: tl.constexpr,  # D_IN, and more where there are gaps
    PDL: tl.constexpr,
):
    let_next_come(PDL)
    shrink_tiles(
        x, arena, table, items, h, entry, tl.program_id(0), tl.program_id(2), D_IN, X_STRIDE,
        STRIDE, BLOCK, UNIT, SLOT_WORDS, BLOCKS_AT, RH, H_SPLIT, SPLITS, CHUNK, RANKS, STEP, NUM,
        SIDE, ROWS, False, PDL,
    )  # fmt: skip

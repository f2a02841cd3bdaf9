"""Expand and the MLP's gate in one pass over a long prompt's rows.

Goes in: shrink's partial sums h, the work items of adapters and those of the rows between them, y
(T, gate and up side by side) of the base's product.  Comes out: the gated rows (T, ffn), to the bit
what `lora_expand.py` and then `fused.py` give, but for a rounding of fp16 above rank 16.  y is left
as the base made it: its corrected form is never written, nor read again, which is most of what
adapters move in a prompt.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import lora_expand, tiles
from engine.kernels.dependent import let_next_come, wait_for_earlier
from engine.kernels.fused import opened
from engine.kernels.launch import Launcher, launcher_of
from engine.kernels.lora_meta import LoraDevicePlan
from engine.kernels.lora_pieces import add_product, sum_rows
from engine.kernels.lora_place import load_item, load_word, row_places

#: The fused module whose halves are gated.
GROUP = "gate_up"
#: What expand is compiled for in the same way.
_EXPANDS = (
    *("BLOCK", "UNIT", "SLOT_WORDS", "BLOCKS_AT", "RH", "H_SPLIT", "SPLITS", "RANKS", "ROWS"),
    *("PRECISION", "MORE"),
)


def gated(y: Tensor, layer: int, plan: LoraDevicePlan, *, gelu: bool) -> Tensor:
    """What the MLP's gate makes of y (T, 2 * ffn), contiguous, once y is corrected -> (T, ffn).

    `plan` has items for every row of y, and no adapter with a bias or a gain.
    """
    store, kind = plan.store, plan.kind
    width = y.shape[1] // 2
    assert store.groups[GROUP].widths == (width, width), "not a gate's group"
    assert kind.rest_items is not None and not kind.extras, "not a gate's plan"
    assert y.stride() == (2 * width, 1) or y.shape[0] == 1, "y has gaps between its rows"
    out = torch.empty(y.shape[0], width, dtype=y.dtype, device=y.device)
    key = "gate", gelu
    known = plan.derived.get(key)
    if known is None:
        known = plan.derived[key] = _prepared(plan, width, gelu=gelu)
    launcher, grid = known
    entry = store.entry(layer, GROUP)
    adapters = kind.expand_items
    launcher(grid, store.h, store.arena, store.table, plan.expand, y, out, entry, adapters)
    return out


def _prepared(plan: LoraDevicePlan, width: int, *, gelu: bool) -> tuple[Launcher, tuple[int, ...]]:
    store, kind = plan.store, plan.kind
    form, tile = lora_expand.constants(GROUP, plan), tiles.GATE
    halves = store.arena.element_size() == 2
    runs = tile.runs if halves else 1  # fp32 fills the registers as it is
    programs = -(-width // (tile.columns * runs))
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": 1}
    if store.pdl:
        options["launch_pdl"] = True
    launcher = launcher_of(
        _gated,
        WIDTH=width,
        STRIDE=form["S0"],
        TILES=programs,
        COLUMNS=tile.columns,
        RUNS=runs,
        **{name: form[name] for name in _EXPANDS},
        GELU=gelu,
        PDL=store.pdl,
        **options,
    )
    return launcher, (programs * (kind.expand_items + (kind.rest_items or 0)),)


@triton.jit(do_not_specialize=["entry", "adapters"])
def _gated(
    h,
    arena,
    table,
    items,
    y,
    out,
    entry,  # of the gate in the layer; up's is behind it
    adapters,  # so many items have a slot; the others' rows are the base's
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    RH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    PRECISION: tl.constexpr,
    MORE: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """RUNS tiles of columns of an item's rows, in both halves."""
    let_next_come(PDL)
    item = tl.program_id(0) // TILES
    c0 = tl.program_id(0) % TILES * (COLUMNS * RUNS)
    start, rows, slot, _ = load_item(items, item)
    m = tl.arange(0, ROWS)
    live = (m < rows)[:, None]
    row = (start + m).to(tl.int64)[:, None]
    wait_for_earlier(PDL)
    if item < adapters:
        slot_row = table + slot.to(tl.int64) * SLOT_WORDS
        e = slot_row + entry * 8
        hp = h + (start + m)[:, None] * RH
        hp_up = hp + SPLITS * H_SPLIT
        h_gate = _sums(hp, e, 0, live, H_SPLIT, SPLITS, RANKS)
        h_up = _sums(hp_up, e + 8, 0, live, H_SPLIT, SPLITS, RANKS)
        for run in tl.static_range(RUNS):
            c = c0 + run * COLUMNS + tl.arange(0, COLUMNS)
            ok = live & (c < WIDTH)[None, :]
            at = y + row * (2 * WIDTH) + c[None, :]
            gate = tl.load(at, mask=ok, other=0.0)  # both on their way before the products
            up = tl.load(at + WIDTH, mask=ok, other=0.0)
            gate = _corrected(
                gate, h_gate, hp, arena, slot_row, e, c, live, WIDTH, STRIDE, BLOCK, UNIT,
                BLOCKS_AT, H_SPLIT, SPLITS, RANKS, ROWS, COLUMNS, PRECISION, MORE,
            )  # fmt: skip
            up = _corrected(
                up, h_up, hp_up, arena, slot_row, e + 8, c, live, WIDTH, STRIDE, BLOCK,
                UNIT, BLOCKS_AT, H_SPLIT, SPLITS, RANKS, ROWS, COLUMNS, PRECISION, MORE,
            )  # fmt: skip
            value = opened(gate, up, out.dtype.element_ty, GELU)
            tl.store(out + row * WIDTH + c[None, :], value, mask=ok)
    else:
        for run in tl.static_range(RUNS):
            c = c0 + run * COLUMNS + tl.arange(0, COLUMNS)
            ok = live & (c < WIDTH)[None, :]
            at = y + row * (2 * WIDTH) + c[None, :]
            gate = tl.load(at, mask=ok, other=0.0).to(tl.float32)
            up = tl.load(at + WIDTH, mask=ok, other=0.0).to(tl.float32)
            value = opened(gate, up, out.dtype.element_ty, GELU)
            tl.store(out + row * WIDTH + c[None, :], value, mask=ok)


@triton.jit
def _sums(hp, e, q, live, H_SPLIT: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr):
    """(ROWS, RANKS) of h from rank q on, of the module with entry e, scaled."""
    r = q + tl.arange(0, RANKS)
    scaling = load_word(e + 3).to(tl.float32, bitcast=True)
    return sum_rows(hp + r[None, :], r, load_word(e), live, H_SPLIT, SPLITS, "") * scaling


@triton.jit
def _corrected(
    base,
    h_first,
    hp,
    arena,
    slot_row,
    e,
    c,
    live,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    MORE: tl.constexpr,
):
    """`base`, a tile (ROWS, COLUMNS) of one half, with its module's share added, rounded as expand
    would store it, in fp32.  Without the module (rank 0) the base's bits."""
    rank, begin, block = load_word(e), load_word(e + 2), load_word(e + 5)
    r = tl.arange(0, RANKS)
    inside = (c < WIDTH)[None, :]
    place = row_places(slot_row, begin, block, r, r < rank, STRIDE, BLOCK, UNIT, BLOCKS_AT)
    b = tl.load(arena + place[:, None] + c[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
    acc = add_product(h_first, b, tl.zeros([ROWS, COLUMNS], dtype=tl.float32), PRECISION)
    for q in tl.range(RANKS, rank if MORE else RANKS, RANKS):
        rq = q + r
        okq = rq < rank
        place = row_places(slot_row, begin, block, rq, okq, STRIDE, BLOCK, UNIT, BLOCKS_AT)
        b = tl.load(arena + place[:, None] + c[None, :], mask=okq[:, None] & inside, other=0.0)
        acc = add_product(_sums(hp, e, q, live, H_SPLIT, SPLITS, RANKS), b, acc, PRECISION)
    wide = base.to(tl.float32)
    total = tl.where(rank > 0, wide + acc, wide)  # a sum with 0 would lose the sign of -0
    return total.to(base.dtype).to(tl.float32)

"""Shrink and expand in one launch, which runs beside the base's product.

Goes in: x, y of the product that was launched just before with `closely`, the step's plan.  Comes
out: y, corrected as by `lora_shrink.py` and `lora_expand.py`, to the bit.

The product's programs let this kernel come once they have all waited for the kernel ahead of them,
so what that one and those before it wrote is there when this one begins: x is read, and h
overwritten, ahead of the wait.  The first programs of the grid are shrink's; they are counted when
their part of h is written, and end.  The others are expand's: they multiply with h while the
product still runs, and wait for it only to read and write y.  At least one of those waits in every
launch, so the launch ends after all that came before, as `dependent.py` asks for.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import lora_expand, lora_shrink
from engine.kernels.dependent import let_next_come
from engine.kernels.launch import Launcher, launcher_of
from engine.kernels.lora_expand import expand_item
from engine.kernels.lora_meta import LoraDevicePlan, LoraStore
from engine.kernels.lora_shrink_items import shrink_rows, shrink_tiles

#: What shrink alone is compiled for.
_OWN = ("D_IN", "STRIDE", "CHUNK", "STEP", "NUM", "SIDE", "MANY", "DOT")
_counters: dict[tuple[torch.device, int], Tensor] = {}


def begin(store: LoraStore) -> None:
    """Nobody has arrived: once ahead of a step, in which a layer's group is joined at most once."""
    arrived(store).zero_()


def joined(
    y: Tensor,
    x: Tensor,
    layer: int,
    group: str,
    plan: LoraDevicePlan,
    base_bias: Tensor | None = None,
) -> None:
    """Correct y (T, sum of the group's widths) for x (T, d_in), both contiguous."""
    store = plan.store
    shape, total = store.groups[group], sum(store.groups[group].widths)
    assert x.stride() == (shape.d_in, 1) or x.shape[0] == 1, "x has gaps between its rows"
    assert y.stride() == (total, 1) or y.shape[0] == 1, "y has gaps between its rows"
    key = "joint", group, base_bias is not None
    known = plan.derived.get(key)
    if known is None:
        known = plan.derived[key] = _prepared(group, plan, biased=base_bias is not None)
    launcher, grid, shrinks = known
    launcher(
        grid,
        x,
        store.arena,
        store.table,
        plan.shrink,
        plan.expand,
        store.h,
        y,
        y if base_bias is None else base_bias,
        arrived(store),
        shrinks,
        store.entry(layer, group),
    )


def _prepared(
    group: str, plan: LoraDevicePlan, *, biased: bool
) -> tuple[Launcher, tuple[int, ...], int]:
    store, tiles = plan.store, plan.kind.tiles
    of_shrink = lora_shrink.constants(group, plan)
    of_expand = lora_expand.constants(group, plan)
    own = {"NUM": 0, "SIDE": 1, "MANY": False, "DOT": False} | of_shrink
    one_step = own["CHUNK"] == own["STEP"] or tiles.shrink.form == "vec"
    options: dict[str, Any] = {
        "num_warps": max(tiles.shrink.warps, tiles.expand.warps),
        "num_stages": 1 if one_step else lora_shrink.stages_of(store, tiles.shrink),
    }
    if store.pdl:
        options["launch_pdl"] = True
    shrinks = awaited(plan, group)
    launcher = launcher_of(
        _joint,
        SIDES=lora_shrink.sides(group, plan),
        TILES=tiles.shrink.form == "dot",
        SHRINK_RANKS=of_shrink["RANKS"],
        SHRINK_ROWS=of_shrink["ROWS"],
        SHRINK_STREAMED=of_shrink.get("STREAMED", False),
        **{name: own[name] for name in _OWN},
        **of_expand,
        BASE_BIAS=biased,
        PDL=store.pdl,
        **options,
    )
    programs = shrinks + lora_expand.tiles_of(of_expand) * plan.kind.expand_items
    return launcher, (programs,), shrinks


def awaited(plan: LoraDevicePlan, group: str) -> int:
    """Programs of shrink's."""
    splits = plan.kind.tiles.shrink.splits(plan.store.groups[group].d_in)
    return splits * plan.kind.shrink_items * lora_shrink.sides(group, plan)


def arrived(store: LoraStore) -> Tensor:
    """A counter for each layer's group, at the place of its first module's entry; one set a stream,
    whose kernels take turns.  `begin` writes it before it is read, in a graph as well."""
    device = store.h.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found, entries = _counters.get((device, stream)), store.blocks_at // 8
    if found is None or len(found) < entries:
        with torch.inference_mode(False):  # `begin` writes it outside of that mode too
            found = torch.zeros(entries, dtype=torch.int32, device=device)
        _counters[device, stream] = found
    return found


@triton.jit(do_not_specialize=["entry", "shrinks"])
def _joint(
    x,
    arena,
    table,
    shrink_items,
    expand_items,
    h,
    y,
    base_bias,
    arrived,
    shrinks,  # programs
    entry,  # of the group's first module in the layer
    SIDES: tl.constexpr,
    TILES: tl.constexpr,
    SHRINK_RANKS: tl.constexpr,
    SHRINK_ROWS: tl.constexpr,
    D_IN: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    NUM: tl.constexpr,
    SIDE: tl.constexpr,
    MANY: tl.constexpr,
    DOT: tl.constexpr,
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
    SHRINK_STREAMED: tl.constexpr,
    EXTRAS: tl.constexpr,
    BASE_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_come(PDL)
    program = tl.program_id(0)
    arrived += entry
    if program < shrinks:
        if TILES:
            shrink_tiles(
                x, arena, table, shrink_items, h, entry, program // SIDES, program % SIDES, D_IN,
                D_IN, STRIDE, BLOCK, UNIT, SLOT_WORDS, BLOCKS_AT, RH, H_SPLIT, SPLITS, CHUNK,
                SHRINK_RANKS, STEP, NUM, SIDE, SHRINK_ROWS, True, False,
            )  # fmt: skip
        else:
            shrink_rows(
                x, arena, table, shrink_items, h, entry, program // SIDES, program % SIDES, D_IN,
                STRIDE, BLOCK, UNIT, SLOT_WORDS, BLOCKS_AT, RH, H_SPLIT, SPLITS, CHUNK,
                SHRINK_RANKS, STEP, MANY, DOT, SHRINK_STREAMED, SHRINK_ROWS, True, False,
            )  # fmt: skip
        tl.debug_barrier()  # the atomic is one thread's: it stands for what all of them have stored
        tl.atomic_add(arrived, 1, sem="release", scope="gpu")
    else:
        expand_item(
            h, arena, table, expand_items, y, base_bias, arrived, shrinks, entry,
            program - shrinks, W0, W1, W2, T0, T1, T2, S0, S1, S2, ALIGN, Y_STRIDE, BLOCK, UNIT,
            SLOT_WORDS, BLOCKS_AT, RH, H_SPLIT, SPLITS, RANKS, COLUMNS, RUNS, ROWS, FORM, PRECISION,
            EVEN, LATE, MORE, STREAMED, EXTRAS, BASE_BIAS, True, PDL,
        )  # fmt: skip

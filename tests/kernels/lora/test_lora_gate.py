"""Adapters and the MLP's gate in one pass, against expand and then the gate: the same bits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from engine.kernels import fused
from engine.kernels import tiles as choices
from engine.kernels.lora import lora_apply, lora_gated, lora_gates, lora_shrink
from engine.kernels.lora_meta import Segment, group_shapes
from engine.layout import GROUPS

Make = Callable[..., Any]
Rows = Callable[[Sequence[tuple[int, int]]], tuple[list[Segment], int]]

GATE_UP = GROUPS["gate_up"]
#: What slots 0 to 2 have on gate and on up; 0 = nothing.
FLEETS: dict[str, list[tuple[int, int]]] = {
    "rank 16": [(16, 16), (16, 16), (16, 16)],
    "one half": [(8, 0), (0, 5), (16, 3)],
    "to rank 64": [(64, 64), (8, 33), (40, 0)],
}
#: (slot, rows) in row order; slot -1 = base rows.
STEPS = {
    "one adapter": [(0, 37)],
    "base around": [(-1, 3), (0, 33), (-1, 34), (1, 1), (2, 5), (-1, 1)],
}


def halves(gate: int, up: int) -> Mapping[tuple[int, str], int]:
    ranks = {(1, GATE_UP[0]): gate, (1, GATE_UP[1]): up}
    return {key: rank for key, rank in ranks.items() if rank}


@pytest.mark.parametrize(
    ("fleet", "step", "shape", "dtype", "gelu"),
    [
        ("rank 16", "one adapter", "even", torch.float16, False),
        ("rank 16", "base around", "odd", torch.float32, True),
        ("one half", "base around", "odd", torch.float16, False),
        ("to rank 64", "one adapter", "odd", torch.float32, False),
        ("to rank 64", "base around", "even", torch.float16, True),
    ],
    ids=["rank 16", "base around", "one half", "higher ranks", "all of it"],
)
def test_a_prompt_gets_the_bits_of_expand_and_then_the_gate(
    make_pool: Make,
    rows_of: Rows,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    dtype: torch.dtype,
    gelu: bool,
    fleet: str,
    step: str,
) -> None:
    """With several runs of columns too, and rows and columns that no tile divides."""
    pool = make_pool(shape, dtype, num_blocks=400)
    for slot, ranks in enumerate(FLEETS[fleet]):
        pool.add(slot, halves(*ranks))
    wide = fleet == "to rank 64"
    segments, total = rows_of(STEPS[step])
    tiles = choices.PREFILL_WIDE if wide else choices.PREFILL
    # fp32 has one run, and the interpreter's product rounds as its width has it
    columns = tiles.expand.columns if dtype is torch.float32 else 64
    monkeypatch.setattr(choices, "GATE", choices.GateTile(columns, 2, 4))
    meta = pool.plan(segments, total, tiles)
    assert lora_gates(meta)
    y, x = pool.operands("gate_up", total)
    before = y.clone()
    store = meta.device.store
    store.h.fill_(torch.nan)
    lora_shrink(x, layer=1, modules=GATE_UP, meta=meta)
    got = lora_gated(y, layer=1, meta=meta, gelu=gelu)
    assert torch.equal(y, before)
    widths = group_shapes(pool.layout)["gate_up"].widths
    lora_apply(y, x, layer=1, modules=GATE_UP, splits=widths, meta=meta)
    assert not torch.equal(y, before)
    wanted = fused.gelu_mul(y) if gelu else fused.silu_mul(y)
    if got.is_cuda and dtype is torch.float16 and wide:
        # h and its scaling may become one operation with what is done to the product: not in both.
        torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    else:
        assert torch.equal(got, wanted)


def test_steps_that_are_padded_or_have_gains_go_the_usual_way(
    make_pool: Make, rows_of: Rows, whole: Callable[[int], Any]
) -> None:
    from engine.ladder import Rung

    pool = make_pool("odd", torch.float32, num_blocks=400)
    pool.add(0, whole(4))
    pool.add(1, whole(4), gain=True)
    segments, total = rows_of([(0, 40)])
    assert lora_gates(pool.plan(segments, total, choices.PREFILL))
    assert not lora_gates(pool.plan(segments, total, choices.MIXED))
    assert not lora_gates(pool.plan(segments, total, choices.PREFILL, rung=Rung(64, 8)))
    segments, total = rows_of([(0, 40), (1, 40)])
    assert not lora_gates(pool.plan(segments, total, choices.PREFILL))

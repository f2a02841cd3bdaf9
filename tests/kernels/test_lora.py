"""The LoRA op against the reference."""

from collections.abc import Callable

import pytest
import torch

from engine.kernels.lora import lora_apply
from engine.kernels.lora_meta import LoraMeta, LoraRows, Segment
from engine.kernels.reference import reference_lora

Pair = Callable[..., LoraRows]

MODULES, SPLITS, D_IN = ("q_proj", "k_proj", "v_proj"), (33, 10, 7), 29
SEGMENTS = (Segment(2, 3, 5), Segment(3, 9, 1), Segment(11, 12, 9))
ROWS = 13


def batch(pair: Pair, dtype: torch.dtype = torch.float32) -> LoraMeta:
    """Slot 5 has all modules, slot 1 no k_proj and other ranks, slot 9 nothing in this layer."""
    whole = {
        (3, module): pair(rank, D_IN, width, cuts_a=cuts, cuts_b=cuts[:1], dtype=dtype)
        for module, width, rank, cuts in zip(
            MODULES, SPLITS, (1, 4, 8), ((), (1,), (2, 7)), strict=True
        )
    }
    partial = {
        (3, "q_proj"): pair(16, D_IN, 33, cuts_b=(5, 6), scaling=2.5, dtype=dtype),
        (3, "v_proj"): pair(3, D_IN, 7, scaling=-0.1, dtype=dtype),
        (2, "k_proj"): pair(3, D_IN, 10, dtype=dtype),
    }
    return LoraMeta(SEGMENTS, {5: whole, 1: partial, 9: {(0, "q_proj"): pair(2, D_IN, 33)}})


def apply(
    y: torch.Tensor, x: torch.Tensor, meta: LoraMeta, *, deterministic: bool = False
) -> torch.Tensor:
    out = y.clone()
    lora_apply(
        out,
        x,
        layer=3,
        modules=MODULES,
        splits=SPLITS,
        meta=meta,
        deterministic=deterministic,
    )
    return out


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_lora_equals_the_reference(
    pair: Pair, dtype: torch.dtype, tolerance: float, deterministic: bool
) -> None:
    meta = batch(pair, dtype)
    y, x = torch.randn(ROWS, sum(SPLITS)).to(dtype), torch.randn(ROWS, D_IN).to(dtype)
    expected = y.clone()
    reference_lora(expected, x, layer=3, modules=MODULES, splits=SPLITS, meta=meta)
    got = apply(y, x, meta, deterministic=deterministic)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert not torch.equal(got, y)


def test_half_precision_rounds_only_once(pair: Pair) -> None:
    """h and the sum are fp32: the result is the exact one, rounded to bf16."""
    meta = batch(pair, torch.bfloat16)
    y, x = torch.randn(ROWS, sum(SPLITS)).bfloat16(), torch.randn(ROWS, D_IN).bfloat16()
    exact = y.double()
    for segment in meta.segments:
        for i, module in enumerate(MODULES):
            rows = meta.slots[segment.slot].get((3, module))
            if rows is not None:
                h = rows.scaling * (
                    x[segment.start : segment.end].double() @ torch.cat(rows.a).double().t()
                )
                columns = slice(sum(SPLITS[:i]), sum(SPLITS[: i + 1]))
                exact[segment.start : segment.end, columns] += h @ torch.cat(rows.b).double()
    off = (apply(y, x, meta).double() - exact).abs() / exact.abs().clamp(min=1e-2)
    assert off.max() <= 2**-8  # half a unit in the last place of bf16


@pytest.mark.parametrize("deterministic", [False, True])
def test_base_rows_and_absent_modules_keep_their_bits(pair: Pair, deterministic: bool) -> None:
    y, x = torch.randn(ROWS, sum(SPLITS)), torch.randn(ROWS, D_IN)
    y[0] = torch.nan  # even what is no number stays as it is
    got = apply(y, x, batch(pair), deterministic=deterministic)
    base = [0, 1, 9, 10, 12]
    assert torch.equal(got[base].view(torch.int32), y[base].view(torch.int32))
    assert torch.equal(got[3:9, 33:43], y[3:9, 33:43])  # slot 1 has no k_proj in this layer
    assert torch.equal(got[11], y[11])  # slot 9 has nothing in this layer
    changed = (got != y)[2:9, :33]
    assert changed.all()


def test_nothing_around_an_adapters_rows_is_read(pair: Pair) -> None:
    got = apply(torch.randn(ROWS, sum(SPLITS)), torch.randn(ROWS, D_IN), batch(pair))
    assert got.isfinite().all()  # the fixture lays the rows among NaN


def test_a_neighbours_poison_stays_with_the_neighbour(pair: Pair) -> None:
    meta = batch(pair)
    x, y = torch.randn(ROWS, D_IN), torch.randn(ROWS, sum(SPLITS))
    clean = apply(y, x, meta)
    x[3:9] = torch.nan
    poisoned = apply(y, x, meta)
    assert poisoned[3:9, :33].isnan().all()
    others = [0, 1, 2, 9, 10, 11, 12]
    assert torch.equal(poisoned[others], clean[others])


def test_a_slot_without_rows_is_an_error_and_never_the_base(pair: Pair) -> None:
    meta = LoraMeta((Segment(0, 1, 4),), batch(pair).slots)
    with pytest.raises(KeyError):
        apply(torch.randn(1, sum(SPLITS)), torch.randn(1, D_IN), meta)


def test_pieces_give_what_the_whole_gives(pair: Pair) -> None:
    rows = pair(8, D_IN, 33, cuts_a=(1, 2, 5), cuts_b=(7,))
    whole = LoraRows(rows.scaling, 8, (torch.cat(rows.a),), (torch.cat(rows.b),))
    y, x = torch.randn(6, sum(SPLITS)), torch.randn(6, D_IN)
    results = [
        apply(y, x, LoraMeta((Segment(0, 6, 0),), {0: {(3, "q_proj"): pieces}}))
        for pieces in (rows, whole)
    ]
    assert torch.equal(*results)


def test_deterministic_rows_do_not_depend_on_their_segment(pair: Pair) -> None:
    slots = {0: {(3, "q_proj"): pair(16, D_IN, 33)}}
    y, x = torch.randn(40, sum(SPLITS)), torch.randn(40, D_IN)
    together = apply(y, x, LoraMeta((Segment(0, 40, 0),), slots), deterministic=True)
    for row in range(40):
        alone = apply(
            y[row : row + 1],
            x[row : row + 1],
            LoraMeta((Segment(0, 1, 0),), slots),
            deterministic=True,
        )
        assert torch.equal(alone[0], together[row])

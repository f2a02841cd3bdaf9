"""Adapters as guests of the base's product, against the product and the correction in fp64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from engine.kernels import tiles as choices
from engine.kernels.lora import lora_augments
from engine.kernels.lora_meta import LoraMeta, Segment, group_shapes
from engine.layout import GROUPS, ROOMY_GROUPS
from engine.models.layers import Build, LoraLinear

Make = Callable[..., Any]
Rows = Callable[[Sequence[tuple[int, int]]], tuple[list[Segment], int]]
Whole = Callable[[int], Mapping[tuple[int, str], int]]
ROOM = 64


def product(pool: Any, meta: LoraMeta, group: str, total: int) -> tuple[torch.Tensor, ...]:
    """x, the weight, and what the product with guests gives; all room is NaN before."""
    shape = group_shapes(pool.layout)[group]
    _, x = pool.operands(group, total)
    device, num = x.device, len(shape.widths)
    build = Build(device, pool.dtype, deterministic=False, room=ROOM)
    linear = LoraLinear(group, 1, shape.d_in, shape.widths, build, bias=False)
    assert linear.room == num * ROOM
    linear.roomy.fill_(torch.nan)
    noise = torch.randn(linear.weight.shape, generator=pool.generator) * 0.05
    linear.weight.data.copy_(noise)
    place = linear.place_for(x, meta)
    assert place is not None
    place.as_strided((total, place.stride(0)), place.stride()).fill_(torch.nan)
    place.copy_(x)
    meta.device.store.h.fill_(torch.nan)  # type: ignore[union-attr]
    return x, linear.weight.data, linear(place, meta)


def check(pool: Any, segments: list[Segment], total: int, meta: LoraMeta, group: str) -> None:
    x, weight, got = product(pool, meta, group, total)
    base = x.double().cpu() @ weight.double().cpu().T
    exact = pool.exact(base.clone(), x, 1, group, segments)
    unit = torch.finfo(pool.dtype).eps
    delta = exact - base
    spread = delta.pow(2).mean().sqrt()
    # y is rounded once, and so is h, of which every number of the correction is a sum
    room = unit * (0.51 * exact.abs() + 1e-3) + 0.6 * unit * (delta.abs() + 4 * spread)
    if pool.dtype is torch.float32:
        room += 3e-6 * (base.abs() + 1)
    off = (got.double().cpu() - exact).abs()
    assert (off <= room).all(), f"{group}: off by {float((off - room).max())}"
    assert spread > 0.1 * unit  # there is something to be wrong about


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=["fp16", "fp32", "bf16"],
)
@pytest.mark.parametrize("group", ROOMY_GROUPS)
@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        ([16], [(0, 70)]),
        ([5, 33], [(1, 33), (0, 40), (1, 1)]),
        ([16, 1, 16, 3], [(2, 3), (0, 64), (3, 17), (1, 1), (2, 40)]),
    ],
    ids=["one", "two of odd ranks", "four that fill the room"],
)
def test_the_product_with_guests_is_the_bases_and_theirs(
    make_pool: Make,
    rows_of: Rows,
    whole: Whole,
    dtype: torch.dtype,
    group: str,
    ranks: list[int],
    step: list[tuple[int, int]],
) -> None:
    pool = make_pool("odd", dtype, num_blocks=400)
    for slot, rank in enumerate(ranks):
        pool.add(slot, whole(rank))
    segments, total = rows_of(step)
    wide = max(ranks) > choices.NARROW
    tiles = choices.PREFILL_WIDE if wide else choices.PREFILL
    meta = pool.plan(segments, total, tiles, room=ROOM)
    assert lora_augments(meta)
    check(pool, segments, total, meta, group)


def test_a_module_that_a_guest_lacks_adds_nothing(make_pool: Make, rows_of: Rows) -> None:
    pool = make_pool("even", torch.float16, num_blocks=400)
    pool.add(0, {(1, "k_proj"): 16, (1, "up_proj"): 7, (0, "q_proj"): 16})
    pool.add(1, {(1, "q_proj"): 9, (1, "down_proj"): 16})
    segments, total = rows_of([(0, 33), (1, 40)])
    meta = pool.plan(segments, total, choices.PREFILL, room=ROOM)
    for group in ROOMY_GROUPS:
        check(pool, segments, total, meta, group)


def test_a_slot_that_changed_hands_brings_its_new_adapter(
    make_pool: Make, rows_of: Rows, whole: Whole
) -> None:
    pool = make_pool("odd", torch.float16, num_blocks=800)
    segments, total = rows_of([(0, 40)])
    for rank in (16, 4):
        pool.add(0, whole(rank))
        meta = pool.plan(segments, total, choices.PREFILL, room=ROOM)
        check(pool, segments, total, meta, "qkv")


def test_who_does_not_fit_is_corrected_behind_the_product(
    make_pool: Make, rows_of: Rows, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside rows of the base, whose bits are those of the base's own product, with a gain,
    in padded steps and in those of no prompts."""
    from engine.ladder import Rung

    pool = make_pool("odd", torch.float16, num_blocks=800)
    for slot, rank in enumerate((16, 33, 16, 1)):
        pool.add(slot, whole(rank))
    pool.add(4, whole(4), gain=True)

    def guests(step: list[tuple[int, int]], tiles: Any = choices.PREFILL_WIDE, **how: Any) -> bool:
        segments, total = rows_of(step)
        return lora_augments(pool.plan(segments, total, tiles, room=ROOM, **how))

    assert guests([(0, 40), (2, 40), (3, 9), (0, 9)])
    assert guests([(1, 40), (3, 9)])
    assert not guests([(1, 40), (3, 9), (2, 9)])
    assert not guests([(0, 40), (-1, 1)])
    assert not guests([(0, 40), (4, 9)])
    assert not guests([(0, 40)], choices.MIXED)
    assert not guests([(0, 40)], rung=Rung(64, 8))
    assert not guests([(0, 40)], None, deterministic=True)
    assert guests([(0, 1), (2, 1)], None) is False  # binds the planner of the engine's own choices
    compiled = pool.planner(room=ROOM).every_choice
    assert any(lora_augments(meta) for meta in compiled())
    monkeypatch.setattr(choices, "AUGMENTED", False)
    assert not guests([(0, 40)])
    assert not any(lora_augments(meta) for meta in compiled())


def test_a_prompts_rows_have_room_only_where_guests_come(
    make_pool: Make, rows_of: Rows, whole: Whole
) -> None:
    pool = make_pool("odd", torch.float16, num_blocks=400)
    pool.add(0, whole(16))
    segments, total = rows_of([(0, 40)])
    build = Build(torch.device("cpu"), torch.float16, deterministic=False, room=ROOM)
    x = torch.zeros(total, 192, dtype=torch.float16)
    for group in GROUPS:
        shape = group_shapes(pool.layout)[group]
        linear = LoraLinear(group, 0, shape.d_in, shape.widths, build, bias=False)
        place = linear.place_for(x, pool.plan(segments, total, choices.PREFILL, room=ROOM))
        if group == "o":
            assert place is None and linear.room == 0
        else:
            assert place is not None and place.shape == (total, shape.d_in)
            assert place.stride(0) == shape.d_in + ROOM * len(shape.widths)
        assert linear.place_for(x, pool.plan(segments, total, choices.PREFILL)) is None
        assert linear.place_for(x, None) is None

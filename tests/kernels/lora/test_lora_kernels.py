"""The LoRA kernels against fp64: on a card, or on Triton's interpreter."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.kernels import tiles as choices
from engine.kernels.lora_meta import Segment
from engine.kernels.tiles import Tiles
from engine.ladder import Rung
from engine.layout import GROUPS, MODULES

Make = Callable[..., Any]
Whole = Callable[[int], dict[tuple[int, str], int]]
Rows = Callable[[Sequence[tuple[int, int]]], tuple[list[Segment], int]]

#: What the pool's slots hold, one after the other; a pair of numbers is (attention, MLP).
RANKS: dict[str, list[Any]] = {
    "1": [1, 1, 1],
    "2-6": [2, 4, 6],
    "8": [8, 8, 8],
    "16": [16, 16, 16],
    "24": [24, 24, 24],
    "64": [64, 64, 64],
    "128": [128, 16, 1],
    "256 and 512": [{"k_proj": 256, "o_proj": 512, "up_proj": 256, "down_proj": 512}, 16, 1],
    "mixed": [8, 64, 16],
    "by module": [(4, 16), (16, 64), (33, 1)],
    "some modules": [{"q_proj": 8, "down_proj": 5}, {"v_proj": 20, "up_proj": 3}, {"o_proj": 16}],
}
#: (slot, rows) in row order; slot -1 = base rows.
POPULATIONS: dict[str, list[tuple[int, int]]] = {
    "one row": [(0, 1)],
    "one adapter": [(1, 9)],
    "one adapter, long": [(1, 37)],
    "distinct": [(0, 1), (1, 1), (2, 1)],
    "half base": [(-1, 3), (0, 1), (1, 1)],
    "uniform few": [(0, 3), (1, 4), (2, 2)],
    "skewed": [(-1, 1), (0, 17), (1, 1), (2, 5)],
    "base between": [(0, 2), (-1, 2), (2, 3), (-1, 1)],
    "chunks and decodes": [(0, 1), (1, 2), (2, 18)],
}
FORCED: list[Tiles | None] = [
    None,
    choices.ALONE_WIDE,
    choices.FEW_WIDE,
    choices.MIXED_WIDE,
    choices.SOLO_WIDE,
    choices.PREFILL_WIDE,
]
SHAPES = ("smollm2", "odd", "even")
DTYPES = (torch.float32, torch.float16)


def ranks_of(spec: Any) -> dict[tuple[int, str], int]:
    """A slot's ranks in layers 0 and 1, from an entry of RANKS."""
    if isinstance(spec, int):
        spec = (spec, spec)
    if isinstance(spec, tuple):
        attention, mlp = spec
        spec = {m: attention if i < 4 else mlp for i, m in enumerate(MODULES)}
    return {(layer, module): rank for layer in range(2) for module, rank in spec.items()}


def suits(tiles: Tiles | None, population: str) -> bool:
    """Whether the population's longest segment is one that the forced tiles are made for."""
    longest = max(rows for slot, rows in POPULATIONS[population] if slot >= 0)
    total = sum(rows for _, rows in POPULATIONS[population])
    if tiles in (choices.ALONE_WIDE, choices.FEW_WIDE):
        return longest <= 4
    return tiles is None or total <= 100


def pairwise_cases(count: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Cases in which every two values of any two axes meet, and as many more as make `count`."""
    axes: list[list[Any]] = [
        *(list(RANKS), list(POPULATIONS), list(range(len(FORCED)))),
        *(list(SHAPES), list(DTYPES), list(GROUPS)),
    ]
    pairs = list(itertools.combinations(range(len(axes)), 2))
    missing = {
        (i, a, j, b)
        for i, j in pairs
        for a in axes[i]
        for b in axes[j]
        if (i, j) != (1, 2) or suits(FORCED[b], a)
    }
    rng = random.Random(1)
    cases: list[tuple[Any, ...]] = []
    enough = 0

    def worth(offer: tuple[Any, ...]) -> int:
        met = sum((i, offer[i], j, offer[j]) in missing for i, j in pairs)
        return met - (offer[3] == "smollm2")  # the smaller shapes are quicker

    while missing or len(cases) < count:
        offers = [tuple(rng.choice(axis) for axis in axes) for _ in range(60)]
        if not missing:
            offers = [o for o in offers if o[3] != "smollm2"]
        else:  # each offer has one of the missing pairs at least
            i, a, j, b = min(missing, key=str)
            offers = [(*o[:i], a, *o[i + 1 : j], b, *o[j + 1 :]) for o in offers]
        fitting = [o for o in offers if suits(FORCED[o[2]], o[1])]
        best = max(fitting, key=worth)
        cases.append(best)
        if missing:
            missing -= {(i, best[i], j, best[j]) for i, j in pairs}
            enough = len(cases)
    return cases[:enough], cases[enough:]


CASES, MORE_CASES = pairwise_cases(300)


@pytest.fixture(scope="module")
def filled(make_pool: Make) -> Callable[[str, torch.dtype, str], Any]:
    """`filled(shape, dtype, ranks)`: a pool whose slots 0-2 hold an entry of RANKS; kept."""
    pools: dict[tuple[Any, ...], Any] = {}

    def make(shape: str, dtype: torch.dtype, ranks: str) -> Any:
        key = shape, dtype, ranks
        if key not in pools:
            pool = make_pool(shape, dtype, num_blocks=700, max_rank=512, seed=len(pools))
            for slot, spec in enumerate(RANKS[ranks]):
                pool.add(slot, ranks_of(spec))
            pools[key] = pool
        return pools[key]

    return make


@pytest.mark.parametrize(
    ("ranks", "population", "forced", "shape", "dtype", "group"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.late) for case in MORE_CASES)],
    ids=[
        f"{i}-{'-'.join(map(str, case))}".replace("torch.", "")
        for i, case in enumerate([*CASES, *MORE_CASES])
    ],
)
def test_kernels_give_what_fp64_gives(
    filled: Any,
    rows_of: Rows,
    ranks: str,
    population: str,
    forced: int,
    shape: str,
    dtype: torch.dtype,
    group: str,
) -> None:
    """Values where an adapter is, the bits that were there before everywhere else."""
    segments, total = rows_of(POPULATIONS[population])
    filled(shape, dtype, ranks).check(segments, total, groups=[group], tiles=FORCED[forced])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_narrow_prefill_tiles_give_it_too(
    filled: Any, rows_of: Rows, dtype: torch.dtype
) -> None:
    segments, total = rows_of([(-1, 2), (0, 70), (1, 1), (2, 5)])
    for group in GROUPS:
        pool = filled("odd", dtype, "16")
        pool.check(segments, total, groups=[group], tiles=choices.PREFILL)


@pytest.mark.late
@pytest.mark.parametrize("population", [[(0, 4096)], [(-1, 300), (0, 2500), (1, 1295), (2, 1)]])
def test_rows_by_the_thousand_give_it_too(
    make_pool: Make, whole: Whole, rows_of: Rows, population: list[tuple[int, int]]
) -> None:
    pool = make_pool("odd", torch.float16, max_rows=4096)
    for slot, rank in enumerate((16, 5, 64)):
        pool.add(slot, whole(rank))
    segments, total = rows_of(population)
    pool.check(segments, total, groups=["qkv"])


def test_h_in_two_halves_keeps_twice_the_bits(
    filled: Any, rows_of: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bf16 has on a card, with the halves that the interpreter has."""
    from engine.kernels import lora_expand

    monkeypatch.setattr(lora_expand, "PRECISION", {torch.float16: "bf16x2"})
    segments, total = rows_of([(0, 7), (1, 30), (2, 6)])
    for tiles in (None, choices.PREFILL_WIDE):
        filled("odd", torch.float16, "mixed").check(segments, total, groups=["qkv"], tiles=tiles)


#: Tiles, whether the base has a bias, dtype.  Quickly, each tile meets both of either.
BIASED = [
    pytest.param(tiles, biased, dtype, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
    for i, tiles in enumerate([None, choices.ALONE, choices.MIXED_WIDE, choices.PREFILL_WIDE])
    for j, biased in enumerate([False, True])
    for k, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("tiles", "biased", "dtype"), BIASED)
def test_biases_and_gains_touch_the_rows_of_their_adapter_alone(
    make_pool: Make,
    whole: Whole,
    rows_of: Rows,
    dtype: torch.dtype,
    biased: bool,
    tiles: choices.Tiles | None,
) -> None:
    """Blocks of 12 rows: runs of B, and what lies behind them, cross their borders."""
    pool = make_pool("odd", dtype, num_blocks=400)
    pool.add(0, whole(4), bias=True)
    pool.add(1, whole(11), gain=True)
    pool.add(2, whole(16), bias=True, gain=True)
    pool.add(3, whole(6))
    length = 1 if tiles is choices.ALONE else 5
    segments, total = rows_of([(0, 1), (-1, 2), (1, length), (2, 1), (3, length), (2, 1), (1, 1)])
    pool.check(segments, total, tiles=tiles, biased=biased)


def test_a_plain_adapter_has_the_same_bits_beside_one_with_a_gain(
    make_pool: Make, whole: Whole, rows_of: Rows
) -> None:
    pool = make_pool("odd", torch.float16)
    pool.add(0, whole(8))
    pool.add(1, whole(8))
    y, x = pool.operands("qkv", 4)
    before = pool.apply(y, x, 0, "qkv", pool.plan(*rows_of([(0, 2), (1, 2)])))
    pool.add(1, whole(8), gain=True, bias=True)
    after = pool.apply(y, x, 0, "qkv", pool.plan(*rows_of([(0, 2), (1, 2)])))
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2:], after[2:])


@pytest.mark.parametrize(
    ("ranks", "chunk"), [((4, 8, 16), 0), ((4, 40, 16), 21)], ids=["decode alone", "and a chunk"]
)
def test_a_mixed_steps_short_segments_have_launches_of_their_own(
    make_pool: Make, whole: Whole, rows_of: Rows, ranks: tuple[int, ...], chunk: int
) -> None:
    """Ten of one row or two, base rows before them, behind them a chunk of one or of the base."""
    pool = make_pool("odd", torch.float16, num_slots=12, num_blocks=2000)
    for slot in range(11):
        pool.add(slot, whole(ranks[slot % 3]), bias=slot == 7)
    decode = [(-1, 2), *((slot, 1 + (slot == 4)) for slot in range(10))]
    segments, total = rows_of([*decode, (10 if chunk else -1, chunk or 21)])
    rung = Rung(128, 20)
    plan = pool.plan(segments, total, rung=rung).device
    assert plan.kind.tiles.name.startswith("mixed" if chunk else "few")
    assert (plan.short is not None) == bool(chunk)
    pool.check(segments, total, groups=["qkv", "down"], rung=rung)


def test_a_slot_that_was_given_anew_is_followed_under_the_same_rows(
    make_pool: Make, whole: Whole, rows_of: Rows
) -> None:
    pool = make_pool("odd", torch.float32)
    segments, total = rows_of([(0, 2), (1, 1)])
    pool.add(1, whole(4))
    seen = []
    for rank in (4, 4, 16, 2):
        pool.add(0, whole(rank))
        meta = pool.plan(segments, total)
        pool.generator.manual_seed(5)
        y, x = pool.operands("o", total)
        seen.append(pool.apply(y, x, 1, "o", meta))
        exact = pool.exact(y, x, 1, "o", segments)
        torch.testing.assert_close(seen[-1].double().cpu(), exact, atol=1e-5, rtol=1e-5)
    for one, other in itertools.combinations(seen, 2):
        assert torch.equal(one[2], other[2]) and not torch.equal(one[:2], other[:2])


def test_one_batch_twice_gives_the_same_bits(filled: Any, rows_of: Rows) -> None:
    pool = filled("odd", torch.float16, "mixed")
    segments, total = rows_of([(0, 3), (1, 20), (2, 1)])
    meta = pool.plan(segments, total)
    y, x = pool.operands("gate_up", total)
    assert torch.equal(pool.apply(y, x, 0, "gate_up", meta), pool.apply(y, x, 0, "gate_up", meta))


def test_deterministic_rows_do_not_depend_on_their_neighbours(filled: Any, rows_of: Rows) -> None:
    pool = filled("odd", torch.float16, "mixed")
    segments, total = rows_of([(-1, 1), (1, 5), (2, 1)])
    y, x = pool.operands("o", total)
    together = pool.apply(y, x, 0, "o", pool.plan(segments, total, deterministic=True))
    pool.check(segments, total, groups=["o"], deterministic=True)
    for segment in segments:
        for row in range(segment.start, segment.end):
            plan = pool.plan([Segment(0, 1, segment.slot)], 1, deterministic=True)
            alone = pool.apply(y[row : row + 1], x[row : row + 1], 0, "o", plan)
            assert torch.equal(alone[0], together[row])


def test_a_layer_without_the_group_is_left_alone(make_pool: Make, rows_of: Rows) -> None:
    """No program has work: each still waits and ends, and nothing is written."""
    pool = make_pool("odd", torch.float32)
    pool.add(0, {(0, "q_proj"): 8})
    segments, total = rows_of([(0, 2)])
    pool.check(segments, total, layer=1)
    pool.check(segments, total, layer=0)


def test_rows_of_one_run_may_lie_in_many_blocks(
    make_pool: Make, whole: Whole, rows_of: Rows
) -> None:
    """Blocks of little more than a row: nearly every row starts in another one."""
    for block_rows in (1, 2, 3):
        pool = make_pool("odd", torch.float32, block_rows=block_rows, num_blocks=1000)
        pool.add(0, whole(9))
        pool.add(1, whole(17))
        segments, total = rows_of([(0, 1), (1, 6)])
        pool.check(segments, total, groups=["qkv", "down"])


@pytest.mark.parametrize(
    ("population", "tiles", "dtype", "groups"),
    [
        ("half base", choices.ALONE, torch.float16, ("qkv",)),
        ("half base", choices.ALONE_WIDE, torch.float32, ("qkv", "o")),
        ("uniform few", choices.FEW_WIDE, torch.float16, ("gate_up",)),
        ("skewed", choices.MIXED_WIDE, torch.float16, ("qkv", "down")),
        ("one adapter, long", choices.SOLO_WIDE, torch.float16, ("gate_up",)),
        ("one adapter, long", choices.PREFILL_WIDE, torch.float32, ("down",)),
    ],
)
def test_one_launch_gives_the_bits_of_two(
    filled: Any,
    rows_of: Rows,
    population: str,
    tiles: Tiles,
    dtype: torch.dtype,
    groups: tuple[str, ...],
) -> None:
    """On the interpreter, where the programs that are counted have all run before the others."""
    from engine.kernels import lora_joint

    pool = filled("odd", dtype, "16" if tiles == choices.ALONE else "mixed")
    segments, total = rows_of(POPULATIONS[population])
    meta = pool.plan(segments, total, tiles)
    lora_joint.begin(meta.device.store)
    for group in groups:
        y, x = pool.operands(group, total)
        two = pool.apply(y, x, 1, group, meta)
        meta.device.store.h.fill_(torch.nan)
        lora_joint.joined(y, x, 1, group, meta.device)
        assert torch.equal(y, two) and y.isfinite().all()
        assert lora_joint.awaited(meta.device, group) > 0
        counted = lora_joint.arrived(meta.device.store)[meta.device.store.entry(1, group)]
        assert int(counted) == lora_joint.awaited(meta.device, group)

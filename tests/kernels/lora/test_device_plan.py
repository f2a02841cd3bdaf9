"""Work items and the slot table: what the kernels are told, before anything is computed."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.adapters import device_slots, work_items
from engine.adapters.device_slots import DeviceSlots, most_blocks, outline_of, starts
from engine.adapters.lora_classes import rung
from engine.adapters.plan import StepPlanner
from engine.adapters.slots import SlotTable
from engine.adapters.work_items import cut_runs
from engine.errors import AdapterInvalid
from engine.kernels import lora_place, tiles
from engine.ladder import Rung
from engine.layout import MODULE_ID, MODULES, BlockLayout, Shapes, place
from engine.messages import PackedManifest, PackedModule, SamplingParams
from engine.sequence import Chunk, Sequence, StepWork

Make = Callable[..., Any]


def random_modules(rng: random.Random, layers: int, highest: int) -> tuple[PackedModule, ...]:
    return tuple(
        PackedModule(layer, module, rng.randint(1, highest), rng.uniform(-2, 2))
        for layer in range(layers)
        for module in MODULES
        if rng.random() < 0.8
    )


def random_layout(rng: random.Random) -> BlockLayout:
    width = [rng.choice([40, 100, 128, 192, 576, 1000]) for _ in range(4)]
    hidden, q, kv, ffn = width
    dims = (
        *((hidden, q), (hidden, kv), (hidden, kv), (q, hidden)),
        *((hidden, ffn), (hidden, ffn), (ffn, hidden)),
    )
    return BlockLayout(Shapes(3, dims), "float16", 256 * rng.choice([8, 9, 13, 64, 1000]))


def test_numbers_are_where_place_puts_the_rows() -> None:
    rng = random.Random(0)
    for _ in range(200):
        layout = random_layout(rng)
        modules = random_modules(rng, 3, rng.choice([1, 9, 70]))
        placed = place(modules, layout)
        found = starts(
            tuple((m.layer, MODULE_ID[m.module], m.rank, m.b_rows) for m in modules), layout
        )
        assert found.tolist() == [
            [
                m.layer * len(MODULES) + MODULE_ID[m.module],
                m.rank,
                *(m.a.pieces[0].block, m.a.pieces[0].offset // 256),
                *(m.b.pieces[0].block, m.b.pieces[0].offset // 256),
            ]
            for m in placed.modules
        ]
        assert placed.num_blocks <= most_blocks(layout, max([m.rank for m in modules], default=0))


def test_a_slots_row_says_rank_places_scaling_and_blocks() -> None:
    layout = random_layout(random.Random(4))
    modules = (PackedModule(1, "v_proj", 5, -0.75), PackedModule(2, "down_proj", 3, 0.5))
    blocks = [9, 4, 7][: place(modules, layout).num_blocks]
    row = np.full(3 * len(MODULES) * 8 + 4, 77, dtype=np.int32)
    outline_of(modules, layout).fill(row, 3 * len(MODULES) * 8, blocks)
    entries = row[: 3 * len(MODULES) * 8].reshape(-1, 8)
    entry = entries[len(MODULES) + 2]
    units = layout.block_bytes // 256
    assert entry[lora_place.RANK] == 5 and entry[lora_place.A_START] == 9 * units
    assert entry[lora_place.SCALING].view(np.float32) == np.float32(-0.75)
    assert (entry[lora_place.A_BLOCK], entry[lora_place.B_BLOCK]) == (0, 0)
    follows = [*blocks, 0][1]
    assert (entry[lora_place.A_NEXT], entry[lora_place.B_NEXT]) == (follows, follows)
    assert entries[:, 0].sum() == 8, "what the adapter lacks has rank 0"
    assert row[3 * len(MODULES) * 8 :][: len(blocks)].tolist() == blocks


def manifest(rev: str, modules: tuple[PackedModule, ...]) -> PackedManifest:
    return PackedManifest(
        rev=rev,
        path="",
        layout="",
        num_blocks=1,
        true_bytes=1,
        max_rank=max(m.rank for m in modules),
        changes_kv=True,
        modules=modules,
    )


def test_what_is_in_an_adapter_is_gone_through_once_for_all_that_are_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(5)
    layout, whole = random_layout(rng), random_modules(rng, 3, 9)
    kinds = [
        tuple(PackedModule(layer, module, 4, 2.0) for layer in range(3) for module in MODULES),
        whole,
        whole[:4],
        tuple(replace(m, scaling=m.scaling + 1.0) for m in whole),
        (replace(whole[0], bias=True), *whole[1:]),
    ]
    slots = DeviceSlots(layout, num_slots=3, max_rank=16, device=torch.device("cpu"))
    made = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return outline_of(*args)

    monkeypatch.setattr(device_slots, "outline_of", counted)
    for n in range(60):
        modules = kinds[n % 5]
        blocks = rng.sample(range(1000), place(modules, layout).num_blocks)
        slots.put(n % 3, manifest(f"r{n}", tuple(replace(m) for m in modules)), blocks)
        row = np.full(slots.table.shape[1], 77, dtype=np.int32)
        outline_of(modules, layout).fill(row, slots.blocks_at, blocks)
        used = slots.blocks_at + len(blocks)
        assert slots.table[n % 3, :used].tolist() == row[:used].tolist()
        assert slots.max_rank[n % 3] == max(m.rank for m in modules)
        assert slots.extras[n % 3] == any(m.bias for m in modules)
    assert len(made) == len(kinds)


def test_the_host_and_the_kernels_agree_on_the_words() -> None:
    assert device_slots.ENTRY_WORDS == lora_place.ENTRY_WORDS
    assert work_items.ITEM_WORDS == lora_place.ITEM_WORDS
    assert lora_place.FLAGS_AT.value == device_slots.FLAGS_AT
    assert lora_place.HAS_BIAS.value == device_slots.HAS_BIAS
    assert lora_place.HAS_GAIN.value == device_slots.HAS_GAIN


def test_what_follows_bs_rows_is_said_above_its_block() -> None:
    layout = random_layout(random.Random(4))
    modules = (
        PackedModule(0, "q_proj", 5, 1.0, gain=True),
        PackedModule(2, "down_proj", 3, 0.5, bias=True),
    )
    entries = outline_of(modules, layout).entries
    flags = entries[:, lora_place.B_BLOCK] >> device_slots.FLAGS_AT
    last = 2 * len(MODULES) + len(MODULES) - 1
    assert flags[0] == device_slots.HAS_GAIN and flags[last] == device_slots.HAS_BIAS
    assert flags.sum() == flags[0] + flags[last]
    placed = place(modules, layout).modules
    blocks = entries[[0, last], lora_place.B_BLOCK] & lora_place.BLOCK_BITS.value
    assert blocks.tolist() == [m.b.pieces[0].block for m in placed]


def test_a_rank_that_the_workspace_cannot_hold_is_refused(make_pool: Make, whole: Any) -> None:
    pool = make_pool("odd", torch.float32, max_rank=16)
    with pytest.raises(AdapterInvalid, match="rank 17 exceeds max_rank = 16"):
        pool.add(0, whole(17))


def test_rungs_are_powers_of_two() -> None:
    assert [rung(n) for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]


def sequence(slot: int) -> Sequence:
    return Sequence(
        request_id="r",
        tokens=[1] * 64,
        num_prompt=64,
        sampling=SamplingParams(),
        rev=None if slot < 0 else str(slot),
        identity="base",
        salt="",
        priority=50,
        order=0,
        slot=slot,
    )


def chunks(*parts: tuple[int, int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(sequence(slot), 0, length, True) for slot, length in parts)


def test_runs_join_neighbours_of_a_slot_and_leave_base_rows_out() -> None:
    runs, total = cut_runs(chunks((-1, 3), (-1, 1), (0, 1), (0, 4), (2, 2), (5, 1)))
    assert total == 12 and runs.T.tolist() == [[4, 5, 0], [9, 2, 2], [11, 1, 5]]
    runs, total = cut_runs(chunks((3, 2), (-1, 1), (3, 1)))
    assert total == 4 and runs.T.tolist() == [[0, 2, 3], [3, 1, 3]]
    assert cut_runs(chunks((-1, 4)))[0].size == 0


@pytest.mark.parametrize("tiles_", (*tiles.ALL, tiles.DETERMINISTIC), ids=lambda t: t.name)
def test_items_cover_each_row_and_rank_once(make_pool: Make, tiles_: tiles.Tiles) -> None:
    """By brute force: which (row, rank tile) of which slot the items name."""
    rng = random.Random(2)
    pool = make_pool("odd", torch.float32, num_slots=64, max_rank=128)
    planner = pool.planner(tiles_)
    words = np.full(planner.words, -1, dtype=np.int64)
    for _ in range(30):
        runs, row = [], 0
        for slot in rng.sample(range(64), rng.randint(1, min(20, tiles_.most_rows // 24))):
            row += rng.choice([0, 0, 3])
            length = rng.randint(1, 20)
            runs.append((row, length, slot))
            row += length
            pool.slots.max_rank[slot] = rng.randint(1, 128 if tiles_.expand.all_ranks else 16)
        row += rng.choice([0, min(40, tiles_.most_rows - row)])
        kind = planner.write(np.array(runs).T, row, words)
        used = words[-planner.words_of(kind) :].view(np.int32).reshape(-1, 4)
        shrink, expand = used[: kind.shrink_items], used[kind.shrink_items :]
        expand, rest = expand[: kind.expand_items], expand[kind.expand_items :]
        assert len(expand) == kind.expand_items
        covered = [
            (start + i, slot) for start, rows, slot, _ in expand.tolist() for i in range(rows)
        ]
        assert sorted(covered) == [(a + i, slot) for a, n, slot in runs for i in range(n)]
        covered = [
            (start + i, slot, first)
            for start, rows, slot, first in shrink.tolist()
            for i in range(rows)
        ]
        assert sorted(covered) == [
            (a + i, slot, first)
            for a, n, slot in runs
            for i in range(n)
            for first in range(0, int(pool.slots.max_rank[slot]), tiles_.shrink.ranks)
        ]
        assert expand[:, 1].max() <= tiles_.expand.rows
        assert (kind.rest_items is not None) == (tiles.for_prompts(tiles_))
        if kind.rest_items is not None:
            base = set(range(row)) - {a + i for a, n, _ in runs for i in range(n)}
            left = [start + i for start, rows, *_ in rest.tolist() for i in range(rows)]
            assert len(rest) == kind.rest_items and sorted(left) == sorted(base)
        assert shrink[:, 1].max() <= tiles_.shrink.rows


def test_a_step_takes_the_least_graph_that_holds_its_items(make_pool: Make, whole: Any) -> None:
    pool = make_pool("odd", torch.float32)
    for slot in range(8):
        pool.add(slot, whole(8))
    planner = pool.planner()
    planner.bind(torch.zeros(planner.words, dtype=torch.int64))
    words = np.full(planner.words, 7, dtype=np.int64)
    rung_ = Rung(8, 8)
    known = [plan.device.kind for plan in planner.classes(rung_)]
    assert len(set(known)) == len(known)

    def written(count: int, length: int = 1) -> Any:
        runs = [[length * n for n in range(count)], [length] * count, range(count)]
        return planner.write(np.array(runs), count * length, words, rung_, known)

    assert written(1) == written(4) != written(5) == written(8)
    assert {written(n) for n in (1, 5)} < set(known)
    assert planner.view(written(3)) is planner.view(written(4))
    kind = written(3)
    used = words[-planner.words_of(kind) :].view(np.int32).reshape(-1, 4)
    shrink, expand = used[: kind.shrink_items], used[kind.shrink_items :]
    assert expand[3:].tolist() == [[0] * 4] and not shrink[3:].any(), "the rest has no rows"
    assert expand[:3, 1].tolist() == shrink[:3, 1].tolist() == [1] * 3
    pool.slots.max_rank[:] = 120
    assert written(4) in known, "the graph of twice as many of half the rank"
    rare = written(8)
    assert rare not in known and rare.shrink_items == rung(8 * 15), "a graph of its own, later"


@pytest.mark.parametrize("rung_", [Rung(1, 1), Rung(6, 6), Rung(64, 64), Rung(64, 20)], ids=str)
@pytest.mark.parametrize("max_rank", [8, 16, 40, 128])
def test_usual_steps_find_a_graph(make_pool: Make, max_rank: int, rung_: Rung) -> None:
    """Ranks up to 16, and up to 64, in runs of any lengths; no class is captured twice."""
    rng = random.Random(3)
    pool = make_pool("odd", torch.float32, num_slots=64, max_rank=max_rank)
    planner = pool.planner()
    planner.bind(torch.zeros(planner.words, dtype=torch.int64))
    words = np.zeros(planner.words, dtype=np.int64)
    for coarse in (1, 4):
        known = [plan.device.kind for plan in planner.classes(rung_, coarse)]
        assert len(set(known)) == len(known)
        wide = any(kind.tiles.expand.all_ranks for kind in known)
        assert wide == (max_rank > tiles.NARROW)
        for _ in range(200):
            total = rng.randint(1 if rung_.single else 2, rung_.rows)
            most = total if rung_.single else min(rung_.seqs, total - 1)
            edges = sorted(rng.sample(range(1, total), min(rng.randint(1, most), total) - 1))
            starts = [0, *edges]
            lengths = [b - a for a, b in itertools.pairwise([*starts, total])]
            slots = rng.sample(range(64), len(starts))
            pool.slots.max_rank[slots] = rng.randint(1, min(max_rank, 64))
            runs = np.array([starts, lengths, slots])
            assert planner.write(runs, total, words, rung_, known) in known


def test_the_step_planner_brings_a_slots_row_up_to_date_in_the_step_that_uses_it(
    make_pool: Make,
) -> None:
    """The very same work: only the slot table knows that slot 0 changed hands."""
    pool = make_pool("odd", torch.float32)
    manifests = {
        rev: pool.manifest((PackedModule(0, "q_proj", rank, 1.0),), 1)
        for rev, rank in (("a", 3), ("b", 7))
    }
    table = SlotTable(2)
    planner = StepPlanner(pool.arena, table.rows, manifests.__getitem__, pool.planner())
    work = StepWork(chunks((-1, 2), (0, 1)))
    assert planner.meta(StepWork(chunks((-1, 2)))) is None
    for rev, rank in (("a", 3), ("b", 7), ("a", 3)):
        row = table.claim(rev, [5], pinned=False, priority=50, now=0.0)
        with pytest.raises(AssertionError, match="before its copy is complete"):
            planner.meta(work)
        row.ready = True
        meta = planner.meta(work)
        assert meta.device.expand.tolist() == [[2, 1, 0, 0]]
        assert pool.slots.table[0, lora_place.RANK].item() == rank
        assert pool.slots.max_rank[0] == rank
        table.free(row)


def test_both_halves_of_a_joined_launch_have_as_many_warps_as_alone() -> None:
    """With others, one launch would sum in another order than two: an eager step than its graph."""
    for each in tiles.ALL:
        assert each.shrink.warps == each.expand.warps, each.name

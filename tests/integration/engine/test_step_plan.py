"""What a step's arrays and its plan hold, before anything is computed."""

from pathlib import Path

import pytest
import torch

from engine.adapters.plan import StepPlanner, cut_segments
from engine.adapters.slots import SlotTable
from engine.batch import Batcher
from engine.kernels.lora import Segment
from engine.memory.arena import Arena
from engine.messages import SamplingParams
from engine.models.spec import read_spec
from engine.sequence import Chunk, Sequence, StepWork


def sequence(name: str, tokens: list[int], *, slot: int = -1, blocks: list[int] = ()) -> Sequence:
    return Sequence(
        request_id=name,
        tokens=tokens,
        num_prompt=len(tokens),
        sampling=SamplingParams(),
        rev=None if slot < 0 else f"rev{slot}",
        identity="base",
        salt="",
        priority=50,
        order=0,
        blocks=list(blocks),
        slot=slot,
    )


@pytest.fixture
def arena(model_dir) -> Arena:
    spec = read_spec(model_dir)
    layout = spec.block_layout(block_size=16, dtype="float32")
    return Arena(spec, layout, block_size=16, num_blocks=64, device=torch.device("cpu"))


def test_a_batch_holds_the_rows_of_its_chunks_in_order() -> None:
    cpu = torch.device("cpu")
    batcher = Batcher(max_rows=32, max_seqs=4, max_blocks=4, block_size=16, device=cpu)
    decode = sequence("d", list(range(100, 118)), blocks=[7, 3])
    prefill = sequence("p", list(range(200, 240)), blocks=[5, 9, 2])
    work = StepWork((Chunk(decode, 17, 1, True), Chunk(prefill, 14, 20, False)))
    for _ in range(2):  # the buffer is used again and carries nothing over
        batch = batcher.pack(work)
        assert batch.tokens.tolist() == [117, *range(214, 234)]
        assert batch.positions.tolist() == [17, *range(14, 34)]
        expected = [3 * 16 + 1, 5 * 16 + 14, 5 * 16 + 15]
        expected += [9 * 16 + i for i in range(16)] + [2 * 16, 2 * 16 + 1]
        assert batch.attn.slot_mapping.tolist() == expected
        assert batch.attn.block_tables.tolist() == [[7, 3, 0], [5, 9, 2]]
        assert batch.attn.query_starts == (0, 1, 21) and batch.attn.seq_lens == (18, 34)
        assert batch.sample_rows.tolist() == [0] and batch.sampled == (decode,)
        batcher.pack(StepWork((Chunk(sequence("x", [1] * 9, blocks=[60]), 0, 9, True),)))


def test_segments_join_neighbours_of_a_slot_and_leave_base_rows_out() -> None:
    slots = [(-1, 3), (-1, 1), (0, 1), (0, 4), (2, 2), (5, 1)]
    chunks = [
        Chunk(sequence(str(i), [1] * length, slot=slot), 0, length, True)
        for i, (slot, length) in enumerate(slots)
    ]
    assert cut_segments(chunks) == (Segment(4, 9, 0), Segment(9, 11, 2), Segment(11, 12, 5))
    assert cut_segments(chunks[:2]) == ()


def test_the_plan_follows_a_slot_that_was_given_anew_under_the_same_work(arena, adapters) -> None:
    """The very same StepWork twice: only the slot table knows that slot 0 changed hands."""
    table = SlotTable(1)
    manifests = {a.rev: a.manifest for a in adapters}
    planner = StepPlanner(arena, table.rows, manifests.__getitem__)
    work = StepWork((Chunk(sequence("r", [1, 2], slot=0), 0, 2, True),))
    seen = []
    for adapter, first in ((adapters[0], 0), (adapters[2], 20), (adapters[0], 40)):
        blocks = range(first, first + adapter.manifest.num_blocks)
        row = table.claim(adapter.rev, blocks, pinned=False, priority=50, now=0.0)
        row.ready = True
        pairs = planner.meta(work).slots[0]
        assert set(pairs) == set(adapter.tensors)
        assert planner.meta(work).slots[0] is pairs, "made once while it stays"
        seen.append(next(iter(pairs.values())).a[0].data_ptr())
        table.free(row)
    starts = [arena.bytes[first].data_ptr() for first in (0, 20, 40)]
    assert seen == starts


def test_a_slot_whose_copy_is_not_complete_cannot_be_planned(arena, adapters) -> None:
    table = SlotTable(1)
    table.claim(adapters[0].rev, range(20), pinned=False, priority=50, now=0.0)
    planner = StepPlanner(arena, table.rows, lambda _: adapters[0].manifest)
    with pytest.raises(AssertionError, match="before its copy is complete"):
        planner.meta(StepWork((Chunk(sequence("r", [1], slot=0), 0, 1, True),)))


def test_views_show_the_rows_that_were_packed(arena, adapters) -> None:
    adapter = adapters[1]
    blocks = [30 - i for i in range(adapter.manifest.num_blocks)]  # backwards: order is the list's
    body = bytearray(Path(adapter.manifest.path).read_bytes())
    raw = torch.frombuffer(body, dtype=torch.uint8)
    arena.bytes[blocks] = raw.view(len(blocks), -1)
    table = SlotTable(1)
    table.claim(adapter.rev, blocks, pinned=False, priority=50, now=0.0).ready = True
    planner = StepPlanner(arena, table.rows, lambda _: adapter.manifest)
    work = StepWork((Chunk(sequence("r", [1], slot=0), 0, 1, True),))
    for key, pair in planner.meta(work).slots[0].items():
        a, b = adapter.tensors[key]
        assert torch.equal(torch.cat(pair.a), a) and torch.equal(torch.cat(pair.b).T, b)
        assert pair.scaling == 2.0 / 8 and pair.rank == 8

"""What a step's arrays and its plan hold, before anything is computed."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.adapters.plan import StepPlanner, cut_segments
from engine.adapters.slots import SlotTable
from engine.adapters.work_items import cut_runs
from engine.batch import Batcher
from engine.kernels.lora_meta import Segment
from engine.ladder import Ladder, Rung
from engine.memory.arena import Arena
from engine.messages import SamplingParams
from engine.models.spec import read_spec
from engine.sequence import Chunk, Sequence, StepWork


def sequence(
    name: str, tokens: list[int], *, slot: int = -1, blocks: list[int] = (), activation: int = 0
) -> Sequence:
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
        activation=activation,
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


@pytest.fixture
def padding() -> Batcher:
    """Sizes of a card, on the CPU."""
    cpu = torch.device("cpu")
    sizes = {"max_rows": 32, "max_seqs": 6, "max_blocks": 4, "block_size": 16}
    ladder = Ladder(max_seqs=6, mixed_rows=12)
    return Batcher(**sizes, device=cpu, ladder=ladder, lookahead=True, plan_words=4)


def test_decode_steps_are_padded_to_a_rung_with_rows_of_nobody(padding) -> None:
    full = [Chunk(sequence(str(n), [n] * 9, blocks=[n]), 8, 1, True) for n in range(1, 7)]
    padding.pack(StepWork(tuple(full)))  # leaves numbers where padding will be
    chunks = [full[0], Chunk(sequence("x", [5] * 20, blocks=[8, 9]), 19, 1, False), full[2]]
    batch = padding.pack(StepWork(tuple(chunks)))
    assert batch.tokens.tolist() == [1, 5, 3, 0]
    assert batch.positions.tolist() == [8, 19, 8, 0]
    assert batch.attn.slot_mapping.tolist() == [24, 9 * 16 + 3, 56, -1]
    assert batch.attn.seq_lens == (9, 20, 9, 0)
    assert batch.attn.seq_lens_device.tolist() == [9, 20, 9, 0]
    assert batch.attn.query_starts == (0, 1, 2, 3, 4)
    assert batch.attn.query_starts_device.tolist() == [0, 1, 2, 3, 4]
    assert batch.attn.block_tables.shape == (4, 4)
    assert batch.attn.block_tables[:3, :2].tolist() == [[1, 0], [8, 9], [3, 0]]
    assert batch.rung == (4, 4) and batch.attn.single_rows and not batch.samples_every_row
    assert batch.sample_rows.tolist() == [0, 2]
    assert padding.pack(StepWork(tuple(full))).samples_every_row


def test_mixed_steps_are_padded_with_rows_and_sequences_of_nobody(padding) -> None:
    full = [Chunk(sequence(str(n), [9] * 2, blocks=[n]), 0, 2, True) for n in range(1, 7)]
    padding.pack(StepWork(tuple(full)))  # leaves numbers where padding will be
    decode = sequence("d", [7] * 3, blocks=[1])
    prefill = sequence("p", [8] * 5, blocks=[2])
    begun = sequence("b", [6] * 9, blocks=[3])
    chunks = (Chunk(decode, 2, 1, True), Chunk(prefill, 0, 5, True), Chunk(begun, 0, 2, False))
    batch = padding.pack(StepWork(chunks))
    assert batch.rung == (12, 6) and not batch.attn.single_rows
    assert batch.tokens.tolist() == [7, *[8] * 5, 6, 6, 0, 0, 0, 0]
    assert batch.positions.tolist() == [2, *range(5), 0, 1, 0, 0, 0, 0]
    assert batch.attn.slot_mapping.tolist() == [18, *range(32, 37), 48, 49, -1, -1, -1, -1]
    assert batch.attn.query_starts == batch.attn.seq_lens == (), "a graph knows none of them"
    assert batch.attn.query_starts_device.tolist() == [0, 1, 6, 8, 8, 8, 8]
    assert batch.attn.seq_lens_device.tolist() == [3, 5, 2, 0, 0, 0]
    assert batch.attn.block_tables.shape == (6, 4)
    assert batch.sampled == (decode, prefill) and not batch.samples_every_row
    assert batch.sample_rows.tolist() == [0, 5]


def test_sampled_rows_are_padded_with_the_first_row(padding) -> None:
    seqs = [sequence(str(n), [n] * 2, blocks=[n]) for n in range(6)]
    padding.pack(StepWork(tuple(Chunk(seq, 0, 2, True) for seq in seqs)))  # leaves a row
    batch = padding.pack(StepWork(tuple(Chunk(seq, 0, 2, True) for seq in seqs[:5])))
    assert batch.sample_rows.tolist() == [1, 3, 5, 7, 9, 0] and len(batch.sampled) == 5


def test_drafts_follow_the_known_tokens_and_each_of_their_rows_is_drawn_for(padding) -> None:
    decode = sequence("d", [7] * 3, blocks=[1])
    drafting = sequence("s", list(range(100, 119)), blocks=[4, 5])
    prefill = sequence("p", [8] * 5, blocks=[2])
    chunks = (
        Chunk(decode, 2, 1, True),
        Chunk(drafting, 18, 4, True, drafts=(31, 32, 33)),
        Chunk(prefill, 0, 3, False),
    )
    batch = padding.pack(StepWork(chunks))
    assert batch.tokens.tolist()[:8] == [7, 118, 31, 32, 33, 8, 8, 8]
    assert batch.positions.tolist()[:8] == [2, 18, 19, 20, 21, 0, 1, 2]
    assert batch.attn.slot_mapping.tolist()[1:5] == [5 * 16 + 2 + i for i in range(4)]
    assert batch.attn.seq_lens_device.tolist()[:3] == [3, 22, 3]
    assert batch.sample_rows.tolist()[:5] == [0, 1, 2, 3, 4]
    assert batch.sampled == (decode, *[drafting] * 4)
    assert batch.ahead == {2: (31,), 3: (31, 32), 4: (31, 32, 33)}
    assert drafting.tokens == list(range(100, 119))
    assert padding.pack(StepWork(chunks[:1])).ahead == {}


def test_more_is_drawn_for_than_there_are_sequences_where_there_are_drafts() -> None:
    ladder = Ladder(max_seqs=6, mixed_rows=12, max_draws=17)
    assert [ladder.samples(n) for n in (1, 3, 6, 9, 17)] == [1, 4, 8, 16, 17]
    assert Ladder(max_seqs=6, mixed_rows=12).draws == (1, 2, 4, 6)


def test_steps_beyond_the_ladder_are_not_padded(padding) -> None:
    prefill = sequence("p", [8] * 13, blocks=[2])
    batch = padding.pack(StepWork((Chunk(prefill, 0, 13, True),)))
    assert batch.rung is None and len(batch.tokens) == 13
    assert batch.attn.query_starts == (0, 13) and batch.attn.seq_lens == (13,)


def test_a_short_prompt_beside_64_who_decode_is_padded_to_80_or_96_rows_and_only_once() -> None:
    ladder = Ladder(max_seqs=256, mixed_rows=512)
    assert [rung for rung in ladder.mixed if rung.rows in (80, 96)] == [Rung(80, 79), Rung(96, 95)]
    assert ladder.find(64 + 16, 64 + 1) == Rung(80, 79)
    assert ladder.find(64 + 17, 64 + 1) == Rung(96, 95)
    assert ladder.find(64 + 33, 64 + 1) == Rung(128, 127)
    assert ladder.find(63 + 17, 63 + 1) == Rung(80, 79)
    assert ladder.find(63 + 33, 63 + 1) == Rung(96, 95)
    assert ladder.find(63 + 34, 63 + 1) == Rung(128, 64)


def test_rungs_hold_every_step_up_to_their_sizes() -> None:
    for max_seqs, mixed_rows, often in (
        *((1, 64, 0), (6, 12, 192), (64, 512, 192), (300, 512, 200)),
        *((700, 300, 8), (5, 0, 0), (5, 1, 1)),
    ):
        ladder = Ladder(max_seqs=max_seqs, mixed_rows=mixed_rows, often=often)
        if max_seqs < often <= mixed_rows:
            assert ladder.find(often, 2).rows == often
        assert len(set(ladder.all)) == len(ladder.all) and ladder.all[0].rows == max(
            max_seqs, mixed_rows
        )
        for rows in range(1, mixed_rows + 2):
            for seqs in {1, 2, 63, 64, 65, rows // 2, rows - 1} & set(range(1, max_seqs + 1)):
                if seqs >= rows:
                    continue
                rung = ladder.find(rows, seqs)
                assert (rung is None) == (rows > mixed_rows)
                assert rung is None or (rung >= (rows, seqs) and rung.seqs >= seqs)
                assert rung is None or not rung.single
        for rows in range(1, max_seqs + 1):
            rung = ladder.find(rows, rows)
            assert rung.single and rows <= rung.rows < max(2 * rows, 2)
            assert rows <= ladder.samples(rows) <= max_seqs


def test_every_steps_tensors_lie_at_the_same_addresses(padding) -> None:
    def addresses(batch) -> list[int]:
        attn = batch.attn
        tensors = (batch.tokens, batch.positions, attn.slot_mapping, attn.block_tables)
        lengths = (attn.seq_lens_device, attn.query_starts_device)
        return [t.data_ptr() for t in (*tensors, *lengths)]

    blank = addresses(padding.blank(Rung(2, 2)))
    for n, rows in ((1, 1), (4, 1), (2, 3)):
        seqs = [sequence(str(i), [i] * 30, blocks=[i, 9]) for i in range(n)]
        chunks = tuple(Chunk(seq, 30 - rows, rows, True) for seq in seqs)
        assert addresses(padding.pack(StepWork(chunks))) == blank
    mixed = padding.blank(Rung(12, 6))
    assert addresses(mixed) == blank and mixed.attn.query_starts == ()
    assert mixed.attn.query_starts_device.tolist() == [0] * 7


def test_a_row_may_stand_on_a_token_that_is_still_being_drawn(padding) -> None:
    known, drawn = sequence("k", [4, 5, 6], blocks=[1]), sequence("d", [7, 8], blocks=[2])
    padding.ids[:3] = torch.tensor([70, 71, 72])
    work = StepWork((Chunk(known, 2, 1, True), Chunk(drawn, 2, 1, True)))
    batch = padding.pack(work, {drawn: 1})
    assert batch.tokens.tolist() == [6, 71] and batch.positions.tolist() == [2, 2]
    padding.ids[1] = 99  # the next draw: this step has its token already
    assert batch.tokens.tolist() == [6, 71]


def test_one_copy_brings_the_plan_and_all_else_that_is_in_use(padding, monkeypatch) -> None:
    told, sent = [], []

    def fill(words, rung) -> int:
        told.append(rung)
        words[-3:] = [3, 1, 4]
        return 3

    send = lambda end, first=0: sent.append((first, end))  # noqa: E731
    monkeypatch.setattr(padding._ring, "send", send)
    work = StepWork(tuple(Chunk(sequence("r", [1] * 9, blocks=[5]), 8, 1, True) for _ in range(3)))
    batch = padding.pack(work, plan=fill)
    assert padding.plan.tolist()[1:] == [3, 1, 4] and told == [(4, 4)]
    [(first, end)] = sent
    words = padding._words
    assert words[first:].data_ptr() == padding.plan[1:].data_ptr()
    last = batch.attn.block_tables[2:3]
    assert words[end:].data_ptr() == last.data_ptr() + last.numel() * last.element_size()


def test_a_block_list_is_read_anew_when_a_sequence_runs_again(padding) -> None:
    seq = sequence("r", [1] * 40, blocks=[1, 2])
    work = StepWork((Chunk(seq, 30, 1, True),))
    assert padding.pack(work).attn.block_tables[0, :2].tolist() == [1, 2]
    seq.blocks += [3]
    batch = padding.pack(StepWork((Chunk(seq, 39, 1, True),)))
    assert batch.attn.block_tables[0, :3].tolist() == [1, 2, 3]
    seq.blocks = [7, 8]
    assert padding.pack(work).attn.block_tables[0, :2].tolist() == [7, 8]


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


def test_a_chunk_that_crosses_its_activation_is_cut_in_both_plans() -> None:
    draw = random.Random(3)
    crossed = 0
    for _ in range(300):
        chunks, slots = [], []
        for n in range(draw.randrange(1, 7)):
            slot, activation = draw.randrange(-1, 3), draw.choice([0, 0, draw.randrange(12)])
            start, length = draw.randrange(12), draw.randrange(1, 9)
            seq = sequence(str(n), [0] * 30, slot=slot, activation=activation)
            chunks.append(Chunk(seq, start, length, False))
            own = [slot if start + i >= activation else -1 for i in range(length)]
            crossed += slot >= 0 and len(set(own)) == 2
            slots += own
        segments = cut_segments(chunks)
        seen = [-1] * len(slots)
        for segment in segments:
            seen[segment.start : segment.end] = [segment.slot] * (segment.end - segment.start)
        assert seen == slots
        assert all(a.end < b.start or a.slot != b.slot for a, b in pairwise(segments))
        assert len(segments) <= len(chunks), "more than the plan has room for"
        runs, total = cut_runs(chunks)
        assert total == len(slots)
        assert [Segment(a, a + n, slot) for a, n, slot in runs.T.tolist()] == list(segments)
    assert crossed > 50

"""What a rehearsal leaves uncompiled: nothing that a step within the limits may need."""

import itertools
import random

import numpy as np
import pytest
import torch

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.adapters.plan import StepPlanner
from engine.adapters.slots import SlotTable
from engine.config import EngineConfig
from engine.kernels.tiles import ALL, PREFILL, PREFILL_WIDE
from engine.ladder import Ladder
from engine.memory.arena import Arena
from engine.messages import PackedManifest, PackedModule
from engine.models.spec import read_spec
from engine.rehearsal import rehearse
from engine.sequence import Chunk, Sequence, StepWork
from engine.speculation import draft_rows

LONGEST, SLOTS = 256, 3


class Planning:
    """A runner that plans its steps as on a card, and is done."""

    def __init__(self, spec, config: EngineConfig, room: int = 0) -> None:
        self.config, self.room = config, room
        self.layout = spec.block_layout(block_size=16, dtype="float32")
        cpu, rows = torch.device("cpu"), config.max_batch_tokens
        arena = Arena(spec, self.layout, block_size=16, num_blocks=64, device=cpu)
        highest = config.max_rank
        slots = DeviceSlots(self.layout, num_slots=SLOTS, max_rank=highest, device=cpu)
        limits = {"max_rows": rows, "max_seqs": config.max_num_seqs, "max_rank": highest}
        device = DevicePlanner(arena, slots, **limits, room=room)
        self.planner = StepPlanner(arena, {}, lambda rev: pytest.fail("nobody's slot"), device)
        mixed_rows = min(config.graph_tokens, rows)
        self.ladder = Ladder(max_seqs=config.max_num_seqs, mixed_rows=mixed_rows)
        self.words = np.zeros(self.planner.plan_words, dtype=np.int64)
        self.planner.bind(torch.from_numpy(self.words))
        self.pretending = self.planner.pretending
        self.met, self.slots = set(), set()

    def run(self, work: StepWork) -> None:
        rows, seqs = sum(chunk.length for chunk in work.chunks), len(work.chunks)
        assert rows <= self.config.max_batch_tokens and seqs <= self.config.max_num_seqs
        meta = self.planner.meta(work, self.words, self.ladder.find(rows, seqs))
        self.slots |= {chunk.seq.slot for chunk in work.chunks}
        kind = meta and meta.device.kind
        while kind is not None:
            self.met.add((kind.tiles, kind.extras, kind.guests > 0))
            kind = kind.short

    def start_over(self) -> None:
        pass


def one_module(layout, rank: int, gain: bool) -> PackedManifest:
    return PackedManifest(
        rev="a",
        path="",
        layout=layout.id,
        num_blocks=1,
        true_bytes=0,
        max_rank=rank,
        changes_kv=True,
        modules=(PackedModule(0, "q_proj", rank, 1.0, gain=gain),),
    )


def random_step(draw: random.Random, config: EngineConfig) -> StepWork:
    """Chunks of one of two slots or of the base model, in any order, or of some of these."""
    slots = draw.choice([(-1, 0, 1), (-1, 0, 1), (0, 1), (1,)])
    left = draw.choice([8, 90, config.max_batch_tokens - 90, config.max_batch_tokens])
    most, chunks = draw.choice([2, config.max_num_seqs]), []
    while left > 0 and len(chunks) < most:
        length = min(draw.choice([1, 1, 2, 5, 60, 140, LONGEST]), left)
        slot = draw.choice(slots)
        seq = Sequence("r", [0] * 4, 4, None, None, "", "", 0, 0, slot=slot)
        chunks.append(Chunk(seq, 0, length, True))
        left -= length
    return StepWork(tuple(chunks))


@pytest.mark.parametrize(
    "sizes",
    [{}, {"graph_tokens": 0}, {"max_num_seqs": 2}, {"max_batch_tokens": 96}, {"max_rank": 12}],
    ids=str,
)
@pytest.mark.parametrize("room", [0, 32])
def test_the_lora_kernels_of_every_step_that_can_come_are_run(model_dir, sizes, room) -> None:
    given = {"max_num_seqs": 64, "max_batch_tokens": 1500, "max_rank": 40, "slots": SLOTS, **sizes}
    config = EngineConfig(model="m", max_model_len=LONGEST, num_blocks=64, **given)
    rehearsed, came = (Planning(read_spec(model_dir), config, room) for _ in range(2))
    rehearse(rehearsed, config, rehearsed.layout, max_len=LONGEST, num_blocks=64)
    assert rehearsed.slots == {-1, 0}

    table, draw = SlotTable(SLOTS), random.Random(0)
    for rev in "ab":
        table.claim(rev, [ord(rev) % 7] * 9, pinned=False, priority=0, now=0.0).ready = True
    ranks = {config.max_rank, min(room or 3, config.max_rank), 3}
    for rank, gain in itertools.product(sorted(ranks), (False, True)):
        manifest = one_module(came.layout, rank, gain)
        with came.pretending(table.rows, lambda rev, it=manifest: it):
            for _ in range(300):
                came.run(random_step(draw, config))
    assert came.met and came.met <= rehearsed.met
    guests = {(tiles, False, True) for tiles in (PREFILL, PREFILL_WIDE) if room}
    whole = set(itertools.product(ALL, (False, True), (False,))) | guests
    assert sizes or (rehearsed.met == whole and came.met >= guests)


@pytest.mark.parametrize("tokens, seqs, rows", [(4, 64, 1500), (8, 3, 1500), (8, 60, 70)])
def test_the_largest_draw_with_drafts_is_run(model_dir, tokens, seqs, rows) -> None:
    config = EngineConfig(
        model="m",
        max_model_len=LONGEST,
        num_blocks=64,
        max_num_seqs=seqs,
        max_batch_tokens=rows,
        max_rank=12,
        slots=SLOTS,
        speculation="ngram",
        speculation_tokens=tokens,
    )
    runner = Planning(read_spec(model_dir), config)
    runner.ladder = Ladder(max_seqs=seqs, mixed_rows=64, max_draws=seqs + draft_rows(seqs, tokens))
    draws, run = [], runner.run

    def note(work: StepWork) -> None:
        draws.append(sum(chunk.draws for chunk in work.chunks))
        run(work)

    runner.run = note
    rehearse(runner, config, runner.layout, max_len=LONGEST, num_blocks=64)
    assert max(draws) == min(seqs + draft_rows(seqs, tokens), rows)
    assert {min(n, rows) for n in runner.ladder.draws if n >= seqs} <= set(draws)

"""Rows of adapters' own at the ends, of a whole step in one launch, against `lora_ends` adapter by
adapter: on a card, or on Triton's interpreter."""

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton and the kernels are imported

from engine.adapters.own_rows import MOST_ROWS, OwnTable, PlacedRows, Run
from engine.kernels.lora_ends import replace_embedding, replace_head
from engine.kernels.lora_meta import LoraRows, OwnRows
from engine.kernels.lora_own import look_up, replace_embeddings, replace_logits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, LAST = 90, 3
#: Slot -> ids that it has rows for.
OWN: dict[int, list[int]] = {
    0: [5],
    1: [0, 3, 4, 60, 89],
    2: [*range(7, 90, 3)],
    5: [88, 89],
}
#: (rows, slot) side by side; slot 4 has none.
OWNERS = ((3, -1), (4, 1), (1, 0), (5, 2), (2, 4), (6, 1), (2, 5))
COUNT = sum(count for count, _ in OWNERS)


@dataclass
class Ends:
    """Slots' rows in an arena, each on a border, those of a slot in two pieces."""

    slots: dict[int, LoraRows]
    table: OwnTable

    def runs(self, owners=OWNERS) -> list[Run]:
        runs, row = [], 0
        for count, slot in owners:
            if entry := self.table.find(slot, "lm_head"):
                assert entry == self.table.find(slot, "embed_tokens")
                runs.append((row, count, entry))
            row += count
        return runs

    def rows(self, owners=OWNERS) -> OwnRows:
        return self.table.send(self.runs(owners), sum(count for count, _ in owners))


def make(width: int, dtype: torch.dtype) -> Ends:
    stride = -(-width // 128) * 128
    arena = torch.full((150, stride), torch.nan, dtype=dtype, device=DEVICE)
    table, slots, first = OwnTable(arena.view(-1), 64), {}, 0
    for slot, ids in OWN.items():
        half = len(ids) // 2
        pieces = []
        for count in filter(None, (half, len(ids) - half)):
            pieces.insert(0, arena[first : first + count, :width])
            first += count + 1
        for piece in pieces:
            piece.copy_(torch.randn(piece.shape))
        at = [p.storage_offset() + stride * torch.arange(len(p), device=DEVICE) for p in pieces]
        told = torch.tensor(ids, device=DEVICE)
        slots[slot] = LoraRows(1.0, len(ids), tuple(pieces), (), ids=told, places=torch.cat(at))
        both = {(LAST, f"{end}.rows"): slots[slot] for end in ("embed_tokens", "lm_head")}
        table.note(slot, LAST, both)
    return Ends(slots, table)


def by_segments(change) -> None:
    row = 0
    for count, slot in OWNERS:
        change(slice(row, row + count), slot)
        row += count


@pytest.mark.parametrize("width", [72, 512, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_embeddings_are_those_of_each_adapter_to_the_bit(width: int, dtype: torch.dtype) -> None:
    ends = make(width, dtype)
    tokens = torch.randint(0, VOCAB, (COUNT,), device=DEVICE)
    tokens[3:7] = torch.tensor([0, 89, 1, 60])
    for scale in (1.0, 7.5):
        x = torch.randn(COUNT + 2, width, device=DEVICE).to(dtype)
        wanted = x.clone()

        def change(rows: slice, slot: int, to: Tensor = wanted, scale: float = scale) -> None:
            if slot in ends.slots:
                replace_embedding(to[rows], tokens[rows], ends.slots[slot], scale)

        by_segments(change)
        assert not torch.equal(wanted, x)
        replace_embeddings(x, tokens, ends.rows(), scale)
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_looked_up_are_own_rows_where_there_are_some_and_else_the_bases(
    dtype: torch.dtype, scale: float
) -> None:
    """With padding behind, of which the table says nothing, and an id beyond the base's table."""
    ends, width = make(72, dtype), 72
    base = torch.randn(VOCAB - 1, width, device=DEVICE).to(dtype)
    tokens = torch.randint(0, VOCAB - 1, (COUNT + 5,), device=DEVICE)
    tokens[3:7] = torch.tensor([0, VOCAB - 1, 1, 60])
    tokens[-1] = VOCAB - 1  # nobody's
    wanted = base[tokens.clamp(max=VOCAB - 2)]
    wanted = wanted * scale if scale != 1.0 else wanted

    def change(rows: slice, slot: int) -> None:
        if slot in ends.slots:
            replace_embedding(wanted[rows], tokens[rows], ends.slots[slot], scale)

    by_segments(change)
    placed = PlacedRows(ends.table._arena, COUNT + 5)
    assert not torch.equal(look_up(tokens, base, placed.rows, scale), wanted)
    placed.fill(ends.runs(), COUNT)
    assert torch.equal(look_up(tokens, base, placed.rows, scale), wanted)
    assert torch.equal(look_up(tokens, base, ends.rows(), scale), wanted)


@pytest.mark.parametrize("count", [1, 40, VOCAB])
def test_an_embedding_of_its_own_is_looked_up_as_far_as_it_goes(count: int) -> None:
    own = torch.randn(count, 72, device=DEVICE)
    table, places = OwnTable(own.view(-1), 8), 72 * torch.arange(count, device=DEVICE)
    rows = LoraRows(1.0, count, (own,), (), places=places)
    table.note(3, LAST, {(LAST, "embed_tokens.rows"): rows})
    base, tokens = torch.randn(60, 72, device=DEVICE), torch.randint(0, 60, (8,), device=DEVICE)
    tokens[:3] = torch.tensor([count - 1, min(count, 59), 0])
    theirs = base[tokens.clamp(max=59)]
    wanted = torch.where((tokens < count)[:, None], own[tokens.clamp(max=count - 1)], theirs)
    entry = table.find(3, "embed_tokens")
    assert torch.equal(look_up(tokens, base, table.send([(0, 8, entry)], 8), 1.0), wanted)


def test_a_placed_table_says_nothing_of_rows_that_are_no_more() -> None:
    ends = make(72, torch.float32)
    placed, sent = PlacedRows(ends.table._arena, 40), []
    send = placed._ring.send
    placed._ring.send = lambda words: (sent.append(words), send(words))
    counts = placed.rows.table[:, 2]
    placed.fill([], 12)
    assert not sent
    placed.fill(ends.runs(), COUNT)
    assert int((counts > 0).sum()) == 4 + 1 + 5 + 6 + 2
    placed.fill(ends.runs(), COUNT)
    placed.fill(ends.runs([(2, -1), (1, 1)]), 3)
    assert counts.tolist() == [0, 0, 5, *[0] * 37]
    placed.fill(ends.runs([(2, -1), (1, 0)]), 3)  # as many runs, and another's
    assert counts.tolist() == [0, 0, len(OWN[0]), *[0] * 37] and len(OWN[0]) != 5
    placed.fill([], 30)
    placed.fill([], 30)
    assert not counts.any() and len(sent) == 4


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(("width", "dtype"), [(72, torch.float32), (700, torch.float16)])
def test_logits_are_those_of_each_adapter_and_others_stay(
    width: int, dtype: torch.dtype, cap: float
) -> None:
    ends, x = make(width, dtype), torch.randn(COUNT, width, device=DEVICE).to(dtype)
    y = torch.randn(COUNT, VOCAB + 9, device=DEVICE)[:, :VOCAB]
    before, wanted = y.clone(), y.clone()
    changed = torch.zeros_like(y, dtype=torch.bool)

    def change(rows: slice, slot: int) -> None:
        if slot in ends.slots:
            replace_head(wanted[rows], x[rows], ends.slots[slot], deterministic=False)
            if cap:
                part = wanted[rows][:, OWN[slot]]
                wanted[rows, OWN[slot]] = cap * torch.tanh(part / cap)
            changed[rows, OWN[slot]] = True

    by_segments(change)
    replace_logits(y, x, ends.rows(), cap)
    torch.testing.assert_close(y, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(y[~changed], before[~changed]) and changed.any()


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    ends, x = make(700, torch.float32), torch.randn(COUNT, 700, device=DEVICE)
    together, alone = torch.zeros(2, COUNT, VOCAB, device=DEVICE)
    replace_logits(together, x, ends.rows(), 0.0)
    row = 0
    for count, slot in OWNERS:
        for n in range(row, row + count):
            if slot in ends.slots:
                replace_logits(alone[n : n + 1], x[n : n + 1], ends.rows([(1, slot)]), 0.0)
        row += count
    assert torch.equal(together, alone) and together.any()


def test_many_rows_and_those_beside_factors_are_left_to_others() -> None:
    arena = torch.zeros(1 << 16, device=DEVICE)
    table, ids = OwnTable(arena, 8), torch.arange(MOST_ROWS + 1, device=DEVICE)
    rows = LoraRows(1.0, 1, (arena[None],), (), ids=ids, places=ids)
    few = LoraRows(1.0, 1, (arena[None],), (), ids=ids[:9], places=ids[:9])
    whole = LoraRows(1.0, 1, (arena[None],), (), places=ids)
    head, embedding = (LAST, "lm_head.rows"), (LAST, "embed_tokens.rows")
    for pairs, found in (
        ({head: rows, embedding: rows}, [False, True]),
        ({head: few, (LAST, "lm_head"): few, embedding: whole}, [False, True]),
        ({head: whole, embedding: few, (LAST, "embed_tokens"): few}, [False, False]),
        ({head: few}, [True, False]),
        ({}, [False, False]),
    ):
        table.note(3, LAST, pairs)
        ends = [table.find(3, end) is not None for end in ("lm_head", "embed_tokens")]
        assert ends == found


def test_the_table_has_what_each_row_is_owed() -> None:
    ends = make(72, torch.float32)
    own = ends.rows()
    counts = own.table[:, 2].tolist()
    assert counts == [len(OWN.get(slot, ())) for count, slot in OWNERS for _ in range(count)]
    assert own.most == max(map(len, OWN.values())) and own.table.dtype == torch.int64
    assert np.prod(own.table.shape) == 3 * COUNT


def test_a_step_of_the_same_runs_has_the_table_of_the_last_unless_its_rows_are_more() -> None:
    ends = make(72, torch.float32)
    first = ends.table.send(ends.runs(), COUNT)
    assert ends.table.send(ends.runs(), COUNT) is first
    more = ends.table.send(ends.runs(), COUNT + 2).table
    assert len(more) == COUNT + 2 and not more[COUNT:, 2].any()

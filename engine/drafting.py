"""Drafting: drafts in the scheduler's steps, from the rows that they are given to what is kept.

Goes in: steps as they are built, and what was drawn in them.  Comes out: rows of drafts and blocks
for them; and whether a step has to wait for what the one before it draws.  Which drafts are worth
it is `speculation`'s; they come from the text itself, or from a model that drafts.

Such a model has KV of its own in the blocks of those it drafts for, of the same tokens, whatever
adapter they run on.  It is filled when there is a draft to make, and not before: of a long prompt a
part at a time, of what others have filled nothing, and a sequence gets no draft until it is whole.
Nothing else hangs on it, so that a hole in it costs no more than a draft that is wrong.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.admission import StepBuilder
from engine.kv_blocks import KvBlocks
from engine.sequence import Chunk, Sequence, Status, StepWork
from engine.speculation import ROWS, Speculation


@dataclass(frozen=True, slots=True)
class Ask:
    """Of the model that drafts: KV of `seq.tokens[start : start + length]`, which ends with the
    last token if there are drafts to make behind it: `count` of them.  `seq` has blocks for all."""

    seq: Sequence
    start: int
    length: int
    count: int


class DraftModel(Protocol):
    """A model that drafts; `engine/draft_model.py`."""

    def propose(self, asks: Seq[Ask], fences: Seq[object]) -> list[tuple[int, ...]]:
        """A draft for each of `asks`, of the length that it says.  Waits for the device.

        `fences`: what the device has to wait for first.
        """
        ...


@dataclass(slots=True)
class _Place:
    """How far the draft model's KV of a sequence goes, in the blocks that it has in this stay."""

    stay: int
    computed: int = 0  # tokens, all of them the sequence's own


class Drafting:
    """One a scheduler.  `rows`: of a step while somebody decodes, and of what `model` computes in
    one pass; enough for everybody who gets a draft to have two."""

    def __init__(
        self,
        speculation: Speculation,
        blocks: KvBlocks,
        model: DraftModel | None,
        rows: int,
        block_size: int,
    ) -> None:
        self._speculation, self._blocks, self._model = speculation, blocks, model
        self._rows, self._block_size = pass_rows(rows), block_size
        self._places: dict[Sequence, _Place] = {}

    def must_know(self, work: StepWork) -> bool:
        """Whether the next step waits until launched `work` is settled, or is better for it.

        Nobody knows how many rows drafts leave behind, and nobody is given any on a token that is
        still being drawn.
        """
        if not self._speculation.tokens:
            return False
        if any(chunk.drafts for chunk in work.chunks):
            return True
        drawing = [c.seq for c in work.chunks if c.samples and c.seq.status is Status.RUNNING]
        if not self._speculation.open(len(drawing)):
            return False
        by_model = self._model is not None
        due = self._speculation.is_due
        return any(seq.doom is None and due(seq, by_model=by_model) for seq in drawing)

    def add_rows(self, step: StepBuilder) -> None:
        """Drafts for those who decode, all of whose tokens are known."""
        if not self._speculation.tokens:
            return
        decoding = step.decoding
        most = self._speculation.open(len(decoding))
        known = [seq for seq in decoding if not seq.owed] if most else []
        if self._model is not None:
            self._add_of_model(self._model, known, most, step)
        else:
            self._add_of_text(known, most, step)

    def keep(self, chunk: Chunk, right: int, accepted: int) -> None:
        """Rows of the drafts that were right count as computed; of the others nothing stays."""
        seq = chunk.seq
        if chunk.stay == seq.stay and seq.status is Status.RUNNING:
            seq.num_computed += accepted
            self._blocks.enter_full(seq)
            self._blocks.trim(seq)
            place = self._places.get(seq)
            if place is not None:  # its own last token is one that the model has not seen yet
                first = chunk.start + 1
                self._advance(seq, place, first + min(accepted, len(chunk.drafts) - 1))
        self._speculation.note(seq, len(chunk.drafts), accepted, right=right)

    def forget(self, seq: Sequence) -> None:
        """It has ended."""
        self._places.pop(seq, None)
        self._speculation.forget(seq)

    # ------------------------------------------------------------- one level down
    def _add_of_text(self, known: list[Sequence], most: int, step: StepBuilder) -> None:
        for seq in known:
            drafts = self._speculation.drafts(seq, most)
            if drafts:
                drafts = drafts[: self._blocks.take_for_drafts(seq, len(drafts), step)]
            if drafts:
                step.draft(seq, drafts)

    def _add_of_model(
        self, model: DraftModel, known: list[Sequence], most: int, step: StepBuilder
    ) -> None:
        asks = self._asks(known, most, step)
        if not asks:
            return
        for ask, drafts in zip(asks, model.propose(asks, step.fences), strict=True):
            self._advance(ask.seq, self._places[ask.seq], ask.start + ask.length)
            if drafts:
                step.draft(ask.seq, drafts)

    def _asks(self, known: list[Sequence], most: int, step: StepBuilder) -> list[Ask]:
        """Those with the fewest rows to go first: a long prompt that comes keeps nobody waiting."""
        wanted = [(s, n) for s in known if (n := self._speculation.longest(s, most))]
        goals = [(len(seq.tokens) - self._place(seq).computed, seq, n) for seq, n in wanted]
        goals.sort(key=lambda goal: goal[0])
        asks, rows = [], self._rows
        for missing, seq, count in goals:
            start = self._places[seq].computed
            if missing <= rows:
                count = self._blocks.take_for_drafts(seq, count, step)
                length = missing if count else 0
            else:  # whole blocks: a block that is opened is cleared, and others may share it
                count, length = 0, (start + rows) // self._block_size * self._block_size - start
            if length > 0:
                asks.append(Ask(seq, start, length, count))
                rows -= length
        return asks

    def _place(self, seq: Sequence) -> _Place:
        """How far the model is, with what it need not compute because others have."""
        place = self._places.get(seq)
        if place is None or place.stay != seq.stay:
            place = self._places[seq] = _Place(seq.stay)
        place.computed = self._blocks.find_drafted(seq, place.computed)
        return place

    def _advance(self, seq: Sequence, place: _Place, computed: int) -> None:
        self._blocks.note_drafted(seq, place.computed, computed)
        place.computed = computed


def pass_rows(rows: int) -> int:
    """Rows of a draft model's pass, where a step has `rows` of them while somebody decodes."""
    return max(rows, ROWS)

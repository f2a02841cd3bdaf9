"""Drafting: drafts in the scheduler's steps, from the rows that they are given to what is kept.

Goes in: steps as they are built, and what was drawn in them.  Comes out: rows of drafts and blocks
for them; and whether a step has to wait for what the one before it draws.  Which drafts are worth
it is `speculation`'s.
"""

from engine.admission import StepBuilder
from engine.kv_blocks import KvBlocks
from engine.sequence import Chunk, Status, StepWork
from engine.speculation import Speculation


class Drafting:
    """One a scheduler."""

    def __init__(self, speculation: Speculation, blocks: KvBlocks) -> None:
        self._speculation, self._blocks = speculation, blocks

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
        return any(seq.doom is None and self._speculation.is_due(seq) for seq in drawing)

    def add_rows(self, step: StepBuilder) -> None:
        """Drafts for those who decode, all of whose tokens are known."""
        if not self._speculation.tokens:
            return
        decoding = step.decoding
        most = self._speculation.open(len(decoding))
        for seq in decoding if most else ():
            if seq.owed:
                continue
            drafts = self._speculation.drafts(seq, most)
            if drafts:
                drafts = drafts[: self._blocks.take_for_drafts(seq, len(drafts), step)]
            if drafts:
                step.draft(seq, drafts)

    def keep(self, chunk: Chunk, right: int, accepted: int) -> None:
        """Rows of the drafts that were right count as computed; of the others nothing stays."""
        seq = chunk.seq
        if chunk.stay == seq.stay and seq.status is Status.RUNNING:
            seq.num_computed += accepted
            self._blocks.enter_full(seq)
            self._blocks.trim(seq)
        self._speculation.note(seq, len(chunk.drafts), accepted, right=right)

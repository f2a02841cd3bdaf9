"""The step plan: which rows of a step use which slot, and where that slot's adapter lies.

Goes in: the slot table's rows, their manifests, and each step's chunks.  Comes out: a LoraMeta of
segments and views into the arena.  Segments are cut anew from every step's own chunks, and a slot's
views are used for the generation that they were made for alone: a slot that changed hands under an
unchanged set of requests cannot be missed.  Knows nothing of tiers and of who is evicted.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from engine.adapters.slots import SlotRow
from engine.kernels.lora import LoraMeta, LoraRows, Segment
from engine.layout import place
from engine.memory.arena import Arena
from engine.messages import PackedManifest
from engine.sequence import Chunk, StepWork
from engine.upload import Words

Pairs = Mapping[tuple[int, str], LoraRows]


class StepPlanner:
    """Keeps the views of revisions in use.  `rows` is the slot table's own, read only."""

    #: int64 words of each step's upload that `meta` fills; see `bind`.
    device_words = 0

    def __init__(
        self,
        arena: Arena,
        rows: Mapping[int, SlotRow],
        manifest_of: Callable[[str], PackedManifest],
    ) -> None:
        self._arena = arena
        self._rows = rows
        self._manifest_of = manifest_of
        self._views: dict[int, tuple[int, Pairs]] = {}  # slot -> generation, views

    def bind(self, words: Tensor) -> None:
        """Where on the device the `device_words` of every step's upload arrive, once at start."""

    def classes(self, rows: int) -> Sequence[LoraMeta]:
        """A plan for each graph class that a decode-only step of `rows` rows may have."""
        return ()

    def meta(self, work: StepWork, words: Words | None = None) -> LoraMeta | None:
        """The plan of one step; None when no row of it uses an adapter.

        `words` is this step's share of the upload, to be filled.
        """
        segments = cut_segments(work.chunks)
        if not segments:
            return None
        return LoraMeta(segments, {s.slot: self._current(s.slot) for s in segments})

    def _current(self, slot: int) -> Pairs:
        """Views for what is in `slot` now; made at its first use, as long as it stays there."""
        row = self._rows[slot]
        generation, pairs = self._views.get(slot, (-1, {}))
        if generation != row.generation:
            assert row.ready, f"slot {slot} is used before its copy is complete"
            self._drop_freed()
            pairs = self._pairs(self._manifest_of(row.rev), row.blocks)
            self._views[slot] = (row.generation, pairs)
        return pairs

    def _drop_freed(self) -> None:
        for slot in [s for s in self._views if s not in self._rows]:
            del self._views[slot]

    def _pairs(self, manifest: PackedManifest, blocks: Sequence[int]) -> Pairs:
        return {
            (m.layer, m.module): LoraRows(
                scaling=m.scaling,
                rank=m.rank,
                a=self._arena.pieces(m.a, blocks),
                b=self._arena.pieces(m.b, blocks),
            )
            for m in place(manifest.modules, self._arena.layout).modules
        }


def cut_segments(chunks: Sequence[Chunk]) -> tuple[Segment, ...]:
    """Neighbouring chunks of one slot are one segment; rows of the base model are in none."""
    segments: list[Segment] = []
    row = 0
    for chunk in chunks:
        end, slot = row + chunk.length, chunk.seq.slot
        if segments and segments[-1].slot == slot and segments[-1].end == row:
            segments[-1] = Segment(segments[-1].start, end, slot)
        elif slot >= 0:
            segments.append(Segment(row, end, slot))
        row = end
    return tuple(segments)

"""The step plan: which rows of a step use which slot, and where that slot's adapter lies.

Goes in: the slot table's rows, their manifests, and each step's chunks.  Comes out: a LoraMeta, of
segments and views into the arena, or of work items for the kernels of a card.  Segments are cut
anew from every step's own chunks, and what is known of a slot is used for the generation that it
was made for alone: a slot that changed hands under an unchanged set of requests cannot be missed.
Knows nothing of tiers and of who is evicted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from torch import Tensor

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.own_rows import OwnTable, PlacedRows, Run
from engine.adapters.slots import SlotRow
from engine.adapters.work_items import cut_runs
from engine.kernels.lora_meta import LoraClass, LoraMeta, LoraRows, OwnRows, Segment
from engine.ladder import Rung
from engine.layout import ENDS, PlacedModule, place
from engine.memory.arena import Arena
from engine.messages import PackedManifest, PackedModule
from engine.sequence import Chunk, StepWork
from engine.upload import Words, to_device

Pairs = Mapping[tuple[int, str], LoraRows]


class StepPlanner:
    """Plans steps.  `rows` is the slot table's own, read only.

    With `device` plans are for the kernels, in the `plan_words` of a step's upload; without, views
    of revisions in use are kept, and nothing is uploaded.
    """

    def __init__(
        self,
        arena: Arena,
        rows: Mapping[int, SlotRow],
        manifest_of: Callable[[str], PackedManifest],
        device: DevicePlanner | None = None,
    ) -> None:
        self._arena = arena
        self._rows = rows
        self._manifest_of = manifest_of
        self._device = device
        #: int64 of a step's upload that are the plan's.
        self.plan_words = 0 if device is None else device.words
        self._generations: dict[int, int] = {}  # slot -> of its row in the device's table
        self._views: dict[int, tuple[int, Pairs]] = {}  # slot -> generation, views
        self._ends: dict[int, Pairs] = {}  # slots that were planned for and have any: those alone
        self._own: OwnTable | None = None  # of these, what the kernels take
        if device is not None:
            self._own = OwnTable(device.store.arena, device.store.max_rows)
        self._placed: PlacedRows | None = None
        #: Called when a slot is planned for that was given anew; None = nobody listens.
        self.on_slot: Callable[[SlotRow, PackedManifest], None] | None = None

    def bring(self, slot: int) -> None:
        """Plan for a slot that a step to come uses, as another rank has done."""
        if self._device is None:
            self._current(slot)
        else:
            self._put(self._device, slot)

    def told(self, segments: Sequence[Segment], kind: LoraClass | None) -> LoraMeta | None:
        """A plan that another rank has made: of `segments`, or, for the kernels, of `kind`, whose
        items are in the upload."""
        if kind is not None:
            assert self._device is not None
            return self._device.view(kind)
        if not segments:
            return None
        return LoraMeta(tuple(segments), {s.slot: self._current(s.slot) for s in segments})

    def bind(self, words: Tensor) -> None:
        """Where the plan's part of every upload arrives: (plan_words,) int64, never moved."""
        if self._device is not None:
            self._device.bind(words)

    def every_choice(self) -> Iterable[LoraMeta]:
        """A plan for each form of the kernels; none without a device.  Only once it is bound."""
        return self._device.every_choice() if self._device is not None else ()

    def meta(
        self,
        work: StepWork,
        words: Words | None = None,
        rung: Rung | None = None,
        known: Sequence[LoraClass] = (),
    ) -> LoraMeta | None:
        """The plan of one step; None when no row of it uses an adapter.

        `words` is the plan's region of the upload that is being filled; without one, a plan for the
        kernels takes an upload of its own.  `rung` is what the step is padded to, and `known` are
        the classes that it has graphs for.  Changed rows of the slot table are copied on the
        current stream, so that this step's kernels find them and no earlier step's do.
        """
        if self._device is not None:
            return self._on_device(self._device, work, words, rung, known)
        segments = cut_segments(work.chunks)
        if not segments:
            return None
        return LoraMeta(segments, {s.slot: self._current(s.slot) for s in segments})

    def of_runs(
        self,
        runs: Iterable[tuple[int, int]],
        rung: Rung | None = None,
        known: Sequence[LoraClass] = (),
    ) -> LoraMeta | None:
        """A plan of (rows, slot) that lie side by side, for steps that are not packed by a Batcher;
        slot -1 = the base model.  None if all are the base's.  `rung` and `known` as of `meta`."""
        segments, row = [], 0
        for count, slot in runs:
            if slot >= 0:
                segments.append(Segment(row, row + count, slot))
            row += count
        joined = join(segments)
        if not joined:
            return None
        if self._device is None:
            return LoraMeta(joined, {s.slot: self._current(s.slot) for s in joined})
        for segment in joined:
            self._put(self._device, segment.slot)
        told = [(s.start, s.end - s.start, s.slot) for s in joined]
        return self._device.send(np.array(told, dtype=np.int64).T, row, rung, known)

    def ends_of(self, slot: int) -> Pairs:
        """What the adapter in `slot`, which was planned for in this step, has behind the layers."""
        return self._ends.get(slot, {})

    def alone(self, slot: int, rows: int) -> LoraMeta:
        """A plan of `rows` rows of `slot` alone, in an upload of its own: the steps' plans stay."""
        if self._device is None:
            return LoraMeta((Segment(0, rows, slot),), {slot: self._current(slot)})
        self._put(self._device, slot)
        return self._device.apart(np.array([[0], [rows], [slot]], dtype=np.int64), rows)

    @property
    def has_ends(self) -> bool:
        """Whether any slot that was planned for has something at the model's ends."""
        return bool(self._ends)

    def own_embeddings(self) -> OwnRows | None:
        """Where `place_own` says from now on which rows have embeddings of their adapters' own;
        None without kernels, which would look there."""
        if self._device is not None:
            store = self._device.store
            self._placed = PlacedRows(store.arena, store.max_rows)
        return self._placed.rows if self._placed is not None else None

    def place_own(self, owners: Iterable[tuple[int, int]]) -> bool:
        """Say it of the next step; `owners` as in `ends`.  False: some have what has to be computed
        ahead, as `ends` has it, and nothing is said."""
        runs, row = list[Run](), 0
        for count, slot in owners:
            if count and self._changes(slot, "embed_tokens"):
                entry = None
                if self._own is not None and self._placed is not None:
                    entry = self._own.find(slot, "embed_tokens")
                if entry is None:
                    return False
                runs.append((row, count, entry))
            row += count
        if self._placed is not None:
            self._placed.fill(runs, row)
        return True

    def ends(
        self, owners: Iterable[tuple[int, int]], module: str, *, joined: bool = False
    ) -> LoraMeta | None:
        """Of rows ahead of the layers, or behind them, those whose adapters have `module` there;
        mostly None.

        `owners` are (rows, slot), side by side; -1 = the base model.  `meta` must have planned for
        the slots in this step.  Segments are for plain torch, on a card too; with `joined` rows
        that the kernels take together are in none.
        """
        if not self._ends:
            return None
        segments, runs, row = list[Segment](), list[Run](), 0
        own = self._own if joined else None
        for count, slot in owners:
            if count and self._changes(slot, module):
                entry = own.find(slot, module) if own is not None else None
                if entry is None:
                    segments.append(Segment(row, row + count, slot))
                else:
                    runs.append((row, count, entry))
            row += count
        if own is None or not runs:
            return LoraMeta(join(segments), self._ends) if segments else None
        return LoraMeta(join(segments), self._ends, own=own.send(runs, row))

    def _changes(self, slot: int, module: str) -> bool:
        return any(_end_of(key[1]) == module for key in self._ends.get(slot, ()))

    def words_of(self, meta: LoraMeta | None) -> int:
        """How many of the `plan_words`, up to the last, a plan of this step has filled."""
        if self._device is None or meta is None or meta.device is None:
            return 0
        return self._device.words_of(meta.device.kind)

    def classes(self, rung: Rung, coarse: int = 1) -> list[LoraMeta]:
        """Plans to capture graphs of steps of `rung` for; fewer if `coarse` is above 1."""
        return [] if self._device is None else self._device.classes(rung, coarse)

    @contextmanager
    def pretending(
        self, rows: Mapping[int, SlotRow], manifest_of: Callable[[str], PackedManifest]
    ) -> Iterator[None]:
        """Plan for other slots than the table's for a while, and know nothing of them afterwards.

        No slot of the table may have been planned for yet.
        """
        assert not self._generations and not self._views, "a slot has been planned for"
        kept = self._rows, self._manifest_of
        self._rows, self._manifest_of = rows, manifest_of
        try:
            yield
        finally:
            self._rows, self._manifest_of = kept
            self._generations.clear()
            self._views.clear()
            self._ends.clear()
            if self._own is not None:
                self._own.forget()

    def _on_device(
        self,
        device: DevicePlanner,
        work: StepWork,
        words: Words | None,
        rung: Rung | None,
        known: Sequence[LoraClass],
    ) -> LoraMeta | None:
        runs, total = cut_runs(work.chunks)
        if not runs.size:
            return None
        for slot in np.unique(runs[2]).tolist():
            self._put(device, slot)
        if words is None:
            return device.send(runs, total)
        return device.view(device.write(runs, total, words, rung, known))

    def _put(self, device: DevicePlanner, slot: int) -> None:
        """Bring the slot's row of the device's table up to date."""
        row = self._rows[slot]
        if self._generations.get(slot) != row.generation:
            assert row.ready, f"slot {slot} is used before its copy is complete"
            manifest = self._manifest_of(row.rev)
            device.slots.put(slot, manifest, row.blocks)
            if self.on_slot is not None:
                self.on_slot(row, manifest)
            self._note_ends(slot, self._pairs(manifest, row.blocks, ends=True))
            self._generations[slot] = row.generation

    def _current(self, slot: int) -> Pairs:
        """Views for what is in `slot` now; made at its first use, as long as it stays there."""
        row = self._rows[slot]
        generation, pairs = self._views.get(slot, (-1, {}))
        if generation != row.generation:
            assert row.ready, f"slot {slot} is used before its copy is complete"
            self._drop_freed()
            manifest = self._manifest_of(row.rev)
            if self.on_slot is not None:
                self.on_slot(row, manifest)
            pairs = self._pairs(manifest, row.blocks)
            self._views[slot] = (row.generation, pairs)
            self._note_ends(slot, {key: pair for key, pair in pairs.items() if key[1] in ENDS})
        return pairs

    def _drop_freed(self) -> None:
        for slot in [s for s in self._views if s not in self._rows]:
            del self._views[slot]

    def _note_ends(self, slot: int, pairs: Pairs) -> None:
        self._ends.pop(slot, None)
        if pairs:
            self._ends[slot] = pairs
        if self._own is not None:
            self._own.note(slot, self._arena.layout.shapes.num_layers, pairs)

    def _pairs(
        self, manifest: PackedManifest, blocks: Sequence[int], *, ends: bool = False
    ) -> Pairs:
        """Of every module, or of those at the ends alone."""
        if ends and not (manifest.modules and manifest.modules[-1].module in ENDS):
            return {}  # they would be the last
        placed = place(manifest.modules, self._arena.layout).modules
        return {
            (m.layer, m.module): self._rows_of(m, told, blocks)
            for m, told in zip(placed, manifest.modules, strict=True)
            if not ends or m.module in ENDS
        }

    def _rows_of(self, m: PlacedModule, told: PackedModule, blocks: Sequence[int]) -> LoraRows:
        a, b = (self._arena.pieces(run, blocks) for run in (m.a, m.b))
        rows = LoraRows(m.scaling, m.rank, a, b, m.bias, m.gain)
        if not told.replaces:
            return rows
        device = self._arena.device
        places = np.concatenate([p.storage_offset() + np.arange(len(p)) * p.stride(0) for p in a])
        ids = to_device(np.array(told.tokens), device) if told.tokens else None
        return replace(rows, ids=ids, places=to_device(places, device))


def _end_of(module: str) -> str:
    return module.removesuffix(".rows")


def cut_segments(chunks: Sequence[Chunk]) -> tuple[Segment, ...]:
    """Neighbouring rows of one slot are one segment; rows of the base model are in none."""
    segments: list[Segment] = []
    row = 0
    for chunk in chunks:
        end, slot = row + chunk.length, chunk.seq.slot
        row += chunk.inactive
        if slot >= 0 and row < end:
            segments.append(Segment(row, end, slot))
        row = end
    return join(segments)


def join(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Neighbours of one slot as one."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].slot == segment.slot and joined[-1].end == segment.start:
            joined[-1] = Segment(joined[-1].start, segment.end, segment.slot)
        else:
            joined.append(segment)
    return tuple(joined)

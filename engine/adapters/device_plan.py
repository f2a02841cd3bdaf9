"""The step plan for the kernels: a step's runs of rows, cut into work items on the host.

Goes in: runs (first row, rows, slot), and the highest rank in each slot.  Comes out: int32 items in
a region of the step's one upload, and the class of CUDA graph that reads them there.  A padded step
takes the least class that it has a graph for and that holds its items; the rest of the class's grid
is items of no rows.  A few dozen numpy calls, whatever the number of requests.  Knows not who asked
for what.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.adapters.device_slots import DeviceSlots
from engine.kernels import backend
from engine.kernels.lora_meta import LoraClass, LoraDevicePlan, LoraMeta, LoraStore, group_shapes
from engine.kernels.tiles import (
    ALL,
    DETERMINISTIC,
    GRAPHED,
    GRAPHED_MIXED,
    NARROW,
    PREFILL_ROWS,
    Graphed,
    Shape,
    Tiles,
    pick,
)
from engine.ladder import Rung
from engine.memory.arena import DTYPES, Arena
from engine.sequence import Chunk
from engine.upload import UploadRing, Words

Ints = npt.NDArray[np.int64]
Part = TypeVar("Part", npt.NDArray[np.int32], Tensor)
#: As in engine/kernels/lora_place.py: first row, rows, slot, first rank.
ITEM_WORDS = 4
#: Items of the smallest grid: as many programs of the widest group still run at once.
LEAST_GRID = 4
#: Plans of that many classes are kept: steps that are not padded bring new ones without end.
KEPT = 256


class DevicePlanner:
    """Cuts steps of at most `max_rows` rows and `max_seqs` segments.

    `choose` finds a step's tiles among `choices`; `deterministic` holds all steps to one.
    """

    def __init__(
        self,
        arena: Arena,
        slots: DeviceSlots,
        *,
        max_rows: int,
        max_seqs: int,
        max_rank: int,
        deterministic: bool = False,
        choose: Callable[[Shape], Tiles] = pick,
        choices: Iterable[Tiles] = ALL,
    ) -> None:
        self.slots = slots
        self._choose = (lambda shape: DETERMINISTIC) if deterministic else choose
        choices = (DETERMINISTIC,) if deterministic else tuple(choices)
        layout, device = arena.layout, arena.device
        store = LoraStore(
            arena=arena.bytes.view(-1).view(DTYPES[layout.dtype]),
            table=slots.table,
            h=torch.empty(0, device=device),
            groups=group_shapes(layout),
            block=layout.block_bytes // layout.itemsize,
            blocks_at=slots.blocks_at,
            max_rank=-(-max_rank // 16) * 16,
            max_rows=max_rows,
            pdl=backend.dependent_launch(device),
        )
        elements = max(store.h_elements(tiles) for tiles in choices)
        # NaN: whoever reads what nobody wrote is found out.
        self.store = replace(store, h=torch.full((elements,), torch.nan, device=device))
        self._max_rank = max_rank
        most = [_most_items(tiles, max_rows, max_seqs, max_rank) for tiles in choices]
        self._most_shrink, self._most_expand = map(max, zip(*most, strict=True))
        #: int64 of the step's upload that the items take.
        self.words = (self._most_expand + self._most_shrink) * ITEM_WORDS // 2
        self._items = torch.empty(0, dtype=torch.int32, device=device)
        self._metas: dict[LoraClass, LoraMeta] = {}
        self._ring: UploadRing | None = None
        self._aside: UploadRing | None = None

    def write(
        self,
        runs: Ints,
        total_rows: int,
        words: Words,
        rung: Rung | None = None,
        known: Sequence[LoraClass] = (),
    ) -> LoraClass:
        """Put the items of `runs` (3, n > 0: first rows, rows, slots) into `words` of the upload.

        The slots' rows of the table must be up to date.  `rung` and `known` as in `StepPlanner`.
        """
        starts, rows, slots = runs
        ranks = self.slots.max_rank[slots].astype(np.int64)
        mixed = rung is not None and not rung.single
        height = rung.rows if rung else total_rows
        shape = Shape(height, rows.size, int(rows.max()), int(ranks.max()), mixed)
        tiles = self._choose(shape)
        assert total_rows <= min(self.store.max_rows, tiles.most_rows), "more rows than planned"
        assert tiles.expand.all_ranks or shape.max_rank <= tiles.expand.ranks, "a rank is too high"
        order = np.argsort(-ranks, kind="stable")  # the longest work first
        starts, rows, slots, ranks = starts[order], rows[order], slots[order], ranks[order]
        expand = _cut(starts, rows, slots, tiles.expand.rows)
        if tiles.shrink.rows == tiles.expand.rows:
            shrink, shrink_ranks = expand, np.repeat(ranks, -(-rows // tiles.expand.rows))
        else:
            shrink = _cut(starts, rows, slots, tiles.shrink.rows)
            shrink_ranks = np.repeat(ranks, -(-rows // tiles.shrink.rows))
        shrink = _cut_ranks(shrink, shrink_ranks, tiles.shrink.ranks)
        kind = LoraClass(tiles, len(shrink), len(expand), bool(self.slots.extras[slots].any()))
        if rung is not None:
            kind = _padded(kind, rung.rows, known)
        shrink_words, expand_words = self._parts(kind, words.view(np.int32))
        _fill(shrink_words, shrink)
        _fill(expand_words, expand)
        return kind

    def bind(self, words: Tensor) -> None:
        """From now on plans lie in `words`: (self.words,) int64 on the device, never moved."""
        assert words.numel() == self.words
        self._items = words.view(torch.int32)
        self._metas.clear()

    def view(self, kind: LoraClass) -> LoraMeta:
        """The plan that the next upload brings, for a step of `kind`; the same object each time."""
        meta = self._metas.get(kind)
        if meta is None:
            if len(self._metas) >= KEPT:
                self._metas.clear()
            meta = self._metas[kind] = self._meta(kind, self._items)
        return meta

    def _meta(self, kind: LoraClass, items: Tensor) -> LoraMeta:
        shrink, expand = self._parts(kind, items)
        plan = LoraDevicePlan(
            store=self.store,
            kind=kind,
            shrink=shrink.view(-1, ITEM_WORDS),
            expand=expand.view(-1, ITEM_WORDS),
        )
        return LoraMeta(device=plan)

    def words_of(self, kind: LoraClass) -> int:
        """How much of `words` a step of `kind` has written, up to the end."""
        return (kind.shrink_items + kind.expand_items) * ITEM_WORDS // 2

    def classes(self, rung: Rung, coarse: int = 1) -> list[LoraMeta]:
        """Plans of the classes that steps of `rung` usually meet; fewer if `coarse` is above 1."""
        metas: list[LoraMeta] = []
        for usual in GRAPHED if rung.single else GRAPHED_MIXED:
            if usual.tiles.expand.all_ranks and self._max_rank <= NARROW:
                continue  # no step is ever wide
            tiles = -(-min(usual.rank, self._max_rank) // usual.tiles.shrink.ranks)
            for items in _grids(usual, rung, coarse):
                metas.append(self.view(LoraClass(usual.tiles, items * tiles, items)))
        return metas

    def _parts(self, kind: LoraClass, items: Part) -> tuple[Part, Part]:
        """Where a plan of `kind` lies among `items`: at their end, so that it is in one piece."""
        expand, shrink = kind.expand_items * ITEM_WORDS, kind.shrink_items * ITEM_WORDS
        end = len(items) - expand
        assert end >= shrink, "more items than the upload has room for"
        return items[end - shrink : end], items[end:]

    def send(self, runs: Ints, total_rows: int) -> LoraMeta:
        """`write` and `view` by an upload of its own, for steps that are packed without a plan."""
        if self._ring is None:
            self._ring = UploadRing(self.words, self.store.arena.device)
            self.bind(self._ring.device_words)
        kind = self.write(runs, total_rows, self._ring.next())
        self._ring.send(self.words)
        return self.view(kind)

    def apart(self, runs: Ints, total_rows: int) -> LoraMeta:
        """A plan beside the steps' plans, whose places it leaves alone; valid until the next one.

        The first call allocates.
        """
        if self._aside is None:
            self._aside = UploadRing(self.words, self.store.arena.device)
        kind = self.write(runs, total_rows, self._aside.next())
        self._aside.send(self.words, self.words - self.words_of(kind))
        return self._meta(kind, self._aside.device_words.view(torch.int32))


def cut_runs(chunks: Sequence[Chunk]) -> tuple[Ints, int]:
    """Neighbouring rows of one slot as (3, n): first rows, rows, slots; and the step's rows.

    Rows of the base model are in no run.
    """
    count = len(chunks)
    slots = np.fromiter((c.seq.slot for c in chunks), dtype=np.int64, count=count)
    lengths = np.fromiter((c.length for c in chunks), dtype=np.int64, count=count)
    early = [i for i, c in enumerate(chunks) if c.start < c.seq.activation]
    if early:
        slots, lengths = _cut_early(slots, lengths, early, [chunks[i].inactive for i in early])
    ends = np.cumsum(lengths)
    last = np.append(np.flatnonzero(slots[1:] != slots[:-1]), len(slots) - 1)
    run_ends, run_slots = ends[last], slots[last]
    run_starts = np.append(0, run_ends[:-1])
    used = run_slots >= 0
    runs = np.stack((run_starts, run_ends - run_starts, run_slots))[:, used]
    return runs, int(ends[-1])


def _cut_early(
    slots: Ints, lengths: Ints, early: list[int], inactive: list[int]
) -> tuple[Ints, Ints]:
    """Chunks `early` begin with `inactive` rows of the base model: slots and lengths of the parts
    that have rows."""
    lengths[early] -= inactive
    lengths = np.insert(lengths, early, inactive)
    slots = np.insert(slots, early, -1)
    return slots[lengths > 0], lengths[lengths > 0]


def rung(count: int) -> int:
    """The power of two that holds `count` items."""
    return 1 << (count - 1).bit_length()


def _grids(usual: Graphed, rung: Rung, coarse: int) -> list[int]:
    """Numbers of items that graphs of `rung` are captured for; the last is the most there are."""
    rows, seqs = rung
    if not usual.least <= rows <= usual.tiles.most_rows:
        return []
    most = -(-rows // usual.share) if rung.single else min(rows, rows // usual.share + seqs)
    size = LEAST_GRID if rung.single else 2 * LEAST_GRID
    grids = []
    while size < most:
        grids.append(size)
        size *= usual.growth * coarse
    return [*grids, most]


def _padded(kind: LoraClass, rows: int, known: Sequence[LoraClass]) -> LoraClass:
    """The least class of `known` that holds `kind`'s items, or one that holds steps like it."""
    fitting = [
        other
        for other in known
        if other.tiles is kind.tiles
        and other.extras == kind.extras
        and other.shrink_items >= kind.shrink_items
        and other.expand_items >= kind.expand_items
    ]
    if fitting:
        return min(fitting, key=lambda other: other.shrink_items + other.expand_items)
    expand = min(max(rung(kind.expand_items), LEAST_GRID), rows)
    return LoraClass(kind.tiles, max(rung(kind.shrink_items), expand), expand, kind.extras)


def _cut(starts: Ints, rows: Ints, slots: Ints, height: int) -> npt.NDArray[np.int32]:
    """(n, 4) items of at most `height` rows, in the runs' order."""
    counts = -(-rows // height)
    run = np.repeat(np.arange(rows.size), counts)
    tile = np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.zeros((run.size, ITEM_WORDS), dtype=np.int32)
    items[:, 0] = starts[run] + tile * height
    items[:, 1] = np.minimum(rows[run] - tile * height, height)
    items[:, 2] = slots[run]
    return items


def _cut_ranks(items: npt.NDArray[np.int32], ranks: Ints, size: int) -> npt.NDArray[np.int32]:
    """Each item as often as its slot's highest rank needs tiles of `size`."""
    counts = -(-ranks // size)
    if counts.max() == 1:
        return items
    item = np.repeat(np.arange(len(items)), counts)
    tile = np.arange(item.size) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = items[item]
    cut[:, 3] = tile * size
    return cut


def _fill(region: npt.NDArray[np.int32], items: npt.NDArray[np.int32]) -> None:
    """Write the items, and then items of no rows."""
    region[: items.size] = items.ravel()
    region[items.size :] = 0


def _most_items(tiles: Tiles, max_rows: int, max_seqs: int, max_rank: int) -> tuple[int, int]:
    """Most items (shrink, expand), padding included, that a step of `tiles` has."""
    rows = min(max_rows, tiles.most_rows)
    alone = tiles.shrink.form == "vec" and tiles.most_rows <= PREFILL_ROWS  # an item a segment

    def most(height: int) -> int:
        return max(min(rows, max_seqs if alone else rows // height + max_seqs), LEAST_GRID)

    rank_tiles = -(-max_rank // tiles.shrink.ranks)
    return rung(most(tiles.shrink.rows) * rank_tiles), rung(most(tiles.expand.rows))

"""The step plan for the kernels: a step's runs of rows, cut into work items on the host.

Goes in: runs (first row, rows, slot), and the highest rank in each slot.  Comes out: int32 items in
a region of the step's one upload, and the class of CUDA graph that reads them there.  A few dozen
numpy calls, whatever the number of requests.  Knows nothing of who asked for what.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.adapters.device_slots import DeviceSlots
from engine.kernels import backend
from engine.kernels.lora_meta import LoraClass, LoraDevicePlan, LoraMeta, LoraStore, group_shapes
from engine.kernels.tiles import ALL, DETERMINISTIC, GRAPHED, PREFILL_ROWS, Shape, Tiles, pick
from engine.memory.arena import DTYPES, Arena
from engine.sequence import Chunk
from engine.upload import UploadRing, Words

Ints = npt.NDArray[np.int64]
#: As in engine/kernels/lora_place.py: first row, rows, slot, first rank.
ITEM_WORDS = 4


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
        limits = max_rows, max_seqs, max_rank
        self._most_expand = max(_most_items(t, *limits)[1] for t in choices)
        self._most_shrink = max(_most_items(t, *limits)[0] for t in choices)
        #: int64 of the step's upload that the items take.
        self.words = (self._most_expand + self._most_shrink) * ITEM_WORDS // 2
        self._items = torch.empty(0, dtype=torch.int32, device=device)
        self._metas: dict[LoraClass, LoraMeta] = {}
        self._ring: UploadRing | None = None

    def write(self, runs: Ints, total_rows: int, words: Words) -> LoraClass:
        """Put the items of `runs` (3, n > 0: first rows, rows, slots) into `words` of the upload.

        The slots' rows of the table must be up to date.
        """
        starts, rows, slots = runs
        ranks = self.slots.max_rank[slots].astype(np.int64)
        shape = Shape(total_rows, rows.size, int(rows.max()), int(ranks.max()))
        tiles = self._choose(shape)
        assert total_rows <= min(self.store.max_rows, tiles.most_rows), "more rows than planned"
        assert tiles.expand.all_ranks or shape.max_rank <= tiles.expand.ranks, "a rank is too high"
        order = np.argsort(-ranks, kind="stable")  # the longest work first
        starts, rows, slots, ranks = starts[order], rows[order], slots[order], ranks[order]
        items = words.view(np.int32)
        border = self._most_expand * ITEM_WORDS
        expand = _cut(starts, rows, slots, tiles.expand.rows)
        if tiles.shrink.rows == tiles.expand.rows:
            shrink, shrink_ranks = expand, np.repeat(ranks, -(-rows // tiles.expand.rows))
        else:
            shrink = _cut(starts, rows, slots, tiles.shrink.rows)
            shrink_ranks = np.repeat(ranks, -(-rows // tiles.shrink.rows))
        shrink = _cut_ranks(shrink, shrink_ranks, tiles.shrink.ranks)
        return LoraClass(
            tiles,
            shrink_items=_fill(items[border:], shrink, tiles),
            expand_items=_fill(items[:border], expand, tiles),
        )

    def bind(self, words: Tensor) -> None:
        """From now on plans lie in `words`: (self.words,) int64 on the device, never moved."""
        assert words.numel() == self.words
        self._items = words.view(torch.int32)
        self._metas.clear()

    def view(self, kind: LoraClass) -> LoraMeta:
        """The plan that the next upload brings, for a step of `kind`; the same object each time."""
        meta = self._metas.get(kind)
        if meta is None:
            border = self._most_expand * ITEM_WORDS
            expand = self._items[: kind.expand_items * ITEM_WORDS]
            shrink = self._items[border : border + kind.shrink_items * ITEM_WORDS]
            plan = LoraDevicePlan(
                store=self.store,
                kind=kind,
                shrink=shrink.view(-1, ITEM_WORDS),
                expand=expand.view(-1, ITEM_WORDS),
            )
            meta = LoraMeta(device=plan)
            self._metas[kind] = meta
        return meta

    def words_of(self, kind: LoraClass) -> int:
        """How much of `words` a step of `kind` has written, from the front."""
        return (self._most_expand + kind.shrink_items) * ITEM_WORDS // 2

    def classes(self, rows: int) -> list[LoraMeta]:
        """Plans of the classes that a decode step of `rows` rows meets while ranks are low.

        Others are as right, and are met by fleets of higher ranks.
        """
        metas = []
        for tiles, share in GRAPHED:
            items = 1
            while items * share <= rows:
                metas.append(self.view(LoraClass(tiles, items, items)))
                items *= 2
        return metas

    def send(self, runs: Ints, total_rows: int) -> LoraMeta:
        """`write` and `view` by an upload of its own, for steps that are packed without a plan."""
        if self._ring is None:
            self._ring = UploadRing(self.words, self.store.arena.device)
            self.bind(self._ring.device_words)
        kind = self.write(runs, total_rows, self._ring.next())
        self._ring.send(self.words)
        return self.view(kind)


def cut_runs(chunks: Sequence[Chunk]) -> tuple[Ints, int]:
    """Neighbouring chunks of one slot as (3, n): first rows, rows, slots; and the step's rows.

    Rows of the base model are in no run.
    """
    count = len(chunks)
    slots = np.fromiter((c.seq.slot for c in chunks), dtype=np.int64, count=count)
    ends = np.cumsum(np.fromiter((c.length for c in chunks), dtype=np.int64, count=count))
    last = np.append(np.flatnonzero(slots[1:] != slots[:-1]), count - 1)
    run_ends, run_slots = ends[last], slots[last]
    run_starts = np.append(0, run_ends[:-1])
    used = run_slots >= 0
    runs = np.stack((run_starts, run_ends - run_starts, run_slots))[:, used]
    return runs, int(ends[-1])


def rung(count: int) -> int:
    """The power of two that holds `count` items: what a graph's grid is padded to."""
    return 1 << (count - 1).bit_length()


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


def _fill(region: npt.NDArray[np.int32], items: npt.NDArray[np.int32], tiles: Tiles) -> int:
    """Write items and their padding; returns the grid."""
    count, used = len(items), items.size
    grid = rung(count) if tiles.most_rows <= PREFILL_ROWS else count  # prompts are in no graph
    assert grid * ITEM_WORDS <= region.size, "more items than the upload has room for"
    region[:used] = items.ravel()
    region[used : grid * ITEM_WORDS] = 0
    return grid


def _most_items(tiles: Tiles, max_rows: int, max_seqs: int, max_rank: int) -> tuple[int, int]:
    """Most items (shrink, expand), padding included, that a step of `tiles` has."""
    rows = min(max_rows, tiles.most_rows)

    alone = tiles.shrink.form == "vec" and tiles.most_rows <= PREFILL_ROWS  # an item a segment

    def most(height: int) -> int:
        return min(rows, max_seqs if alone else rows // height + max_seqs)

    rank_tiles = -(-max_rank // tiles.shrink.ranks)
    return rung(most(tiles.shrink.rows) * rank_tiles), rung(most(tiles.expand.rows))

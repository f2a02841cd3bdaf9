"""The step plan for the kernels: a step's runs of rows, cut into work items on the host.

Goes in: runs (first row, rows, slot), and the highest rank in each slot.  Comes out: int32 items in
a region of the step's one upload, and the class of CUDA graph that reads them there.  A padded step
takes the least class that it has a graph for and that holds its items; the rest of the class's grid
is items of no rows.  A few dozen numpy calls, whatever the number of requests.  Knows not who asked
for what.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.adapters.device_slots import DeviceSlots
from engine.adapters.lora_classes import most_items, padded, usual_classes
from engine.adapters.work_items import ITEM_WORDS, Ints, cut_ranks, cut_rows, fill, rest_of
from engine.kernels import backend
from engine.kernels import tiles as tile_choices
from engine.kernels.lora_meta import LoraClass, LoraDevicePlan, LoraMeta, LoraStore, group_shapes
from engine.kernels.tiles import (
    ALL,
    DETERMINISTIC,
    FEW,
    FEW_ROWS,
    FEW_WIDE,
    GRAPHED_SHORT,
    GUEST_RANKS,
    MANY_SHORT,
    NARROW,
    Shape,
    Tiles,
    for_prompts,
    pick,
    pick_short,
)
from engine.ladder import Rung
from engine.memory.arena import DTYPES, Arena
from engine.upload import UploadRing, Words

Part = TypeVar("Part", npt.NDArray[np.int32], Tensor)
#: Plans of that many classes are kept: steps that are not padded bring new ones without end.
KEPT = 256


class DevicePlanner:
    """Cuts steps of at most `max_rows` rows and `max_seqs` segments.

    `choose` finds a step's tiles among `choices`; `deterministic` holds all steps to one.  `room`:
    columns for each module behind the base's weights, in which a prompt's adapters may be guests.
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
        room: int = 0,
    ) -> None:
        self.slots = slots
        self._choose = (lambda shape: DETERMINISTIC) if deterministic else choose
        choices = (DETERMINISTIC,) if deterministic else tuple(choices)
        self._choices = choices
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
        limits = max_rows, max_seqs, max_rank
        most = most_items(choices, *limits)
        self._room = 0 if deterministic else room
        most += self._room // GUEST_RANKS
        if not deterministic:
            most += most_items((FEW, FEW_WIDE), *limits)
        #: int64 of the step's upload that the items take.
        self.words = most * ITEM_WORDS // 2
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
        rows, slots = runs[1:]
        ranks = self.slots.max_rank[slots]
        mixed = rung is not None and not rung.single
        height = rung.rows if rung else total_rows
        shape = Shape(height, rows.size, int(rows.max()), int(ranks.max()), mixed)
        tiles = self._choose(shape)
        assert total_rows <= min(self.store.max_rows, tiles.most_rows), "more rows than planned"
        is_short = rows <= FEW_ROWS
        if tiles in GRAPHED_SHORT and mixed and is_short.sum() >= MANY_SHORT:
            parts = self._split(runs, is_short, shape)
        else:
            parts = [self._cut(runs, tiles)]
            if for_prompts(tiles) and rung is None:
                parts = [self._for_prompt(parts[0], runs, total_rows)]
        kind = parts[0].kind
        if len(parts) == 2:
            kind = replace(kind, short=parts[1].kind)
        if rung is not None:
            kind = padded(kind, rung.rows, known)
        items, part_kind = words.view(np.int32), kind
        for part in parts:
            shrink_words, expand_words, items = _places(part_kind, items)
            fill(shrink_words, part.shrink)
            fill(expand_words, part.expand)
            part_kind = part_kind.short or part_kind
        return kind

    def _split(self, runs: Ints, is_short: npt.NDArray[np.bool_], shape: Shape) -> list["_Part"]:
        """Long runs, if there are any, and short ones, each with tiles of their own."""
        ranks = self.slots.max_rank[runs[2]]
        short = self._cut(runs[:, is_short], pick_short(int(ranks[is_short].max())))
        if is_short.all():
            return [short]
        tiles = self._choose(shape._replace(max_rank=int(ranks[~is_short].max())))
        return [self._cut(runs[:, ~is_short], tiles), short]

    def _for_prompt(self, part: "_Part", runs: Ints, total_rows: int) -> "_Part":
        """The same with its adapters as guests, if there are no other rows, and room for all of
        them; else with items of the base's rows."""
        rest = rest_of(runs, total_rows)
        if rest.size or part.kind.extras or not tile_choices.AUGMENTED:
            return part.with_rest(rest)
        slots = np.unique(runs[2])
        columns = -(-self.slots.max_rank[slots].astype(np.int64) // GUEST_RANKS) * GUEST_RANKS
        if columns.sum() > self._room:
            return part.with_rest(rest)
        return part.with_guests(slots, columns)

    def _cut(self, runs: Ints, tiles: Tiles) -> "_Part":
        """Work items of some runs, those of the highest ranks first: the longest work."""
        starts, rows, slots = runs
        ranks = self.slots.max_rank[slots].astype(np.int64)
        assert tiles.expand.all_ranks or ranks.max() <= tiles.expand.ranks, "a rank is too high"
        order = np.argsort(-ranks, kind="stable")
        starts, rows, slots, ranks = starts[order], rows[order], slots[order], ranks[order]
        expand = cut_rows(starts, rows, slots, tiles.expand.rows)
        if tiles.shrink.rows == tiles.expand.rows:
            shrink, shrink_ranks = expand, np.repeat(ranks, -(-rows // tiles.expand.rows))
        else:
            shrink = cut_rows(starts, rows, slots, tiles.shrink.rows)
            shrink_ranks = np.repeat(ranks, -(-rows // tiles.shrink.rows))
        shrink = cut_ranks(shrink, shrink_ranks, tiles.shrink.ranks)
        extras = bool(self.slots.extras[slots].any())
        return _Part(LoraClass(tiles, len(shrink), len(expand), extras), shrink, expand)

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
            meta = LoraMeta(device=self._plan(kind, self._items))
            self._metas[kind] = meta
        return meta

    def _plan(self, kind: LoraClass, items: Tensor) -> LoraDevicePlan:
        shrink, expand, rest = _places(kind, items)
        return LoraDevicePlan(
            store=self.store,
            kind=kind,
            shrink=shrink.view(-1, ITEM_WORDS),
            expand=expand.view(-1, ITEM_WORDS),
            short=self._plan(kind.short, rest) if kind.short else None,
        )

    def words_of(self, kind: LoraClass) -> int:
        """How much of `words` a step of `kind` has written, up to the end."""
        return kind.num_items * ITEM_WORDS // 2

    def every_choice(self) -> Iterator[LoraMeta]:
        """A plan for each form that the kernels have: every choice of tiles that the ranks allow,
        with extras and without."""
        for tiles in self._choices:
            narrow = self._max_rank <= NARROW and len(self._choices) > 1
            if narrow and tiles.expand.all_ranks:
                continue  # no step is ever wide
            for extras in (False, True):
                gates = for_prompts(tiles) and not extras
                yield self.view(LoraClass(tiles, 1, 1, extras, rest_items=0 if gates else None))
                if gates and self._room and tile_choices.AUGMENTED:
                    yield self.view(
                        LoraClass(tiles, 1, 1, guests=1, columns=min(self._room, GUEST_RANKS))
                    )

    def classes(self, rung: Rung, coarse: int = 1) -> list[LoraMeta]:
        """Plans of the classes that steps of `rung` usually meet; fewer if `coarse` is above 1."""
        return [self.view(kind) for kind in usual_classes(rung, self._max_rank, coarse)]

    def send(
        self,
        runs: Ints,
        total_rows: int,
        rung: Rung | None = None,
        known: Sequence[LoraClass] = (),
    ) -> LoraMeta:
        """`write` and `view` by an upload of its own, for steps that are packed without a plan."""
        if self._ring is None:
            self._ring = UploadRing(self.words, self.store.arena.device)
            self.bind(self._ring.device_words)
        kind = self.write(runs, total_rows, self._ring.next(), rung, known)
        self._ring.send(self.words, self.words - self.words_of(kind))
        return self.view(kind)

    def apart(self, runs: Ints, total_rows: int) -> LoraMeta:
        """A plan beside the steps' plans, whose places it leaves alone; valid until the next one.

        The first call allocates.
        """
        if self._aside is None:
            self._aside = UploadRing(self.words, self.store.arena.device)
        kind = self.write(runs, total_rows, self._aside.next())
        self._aside.send(self.words, self.words - self.words_of(kind))
        return LoraMeta(device=self._plan(kind, self._aside.device_words.view(torch.int32)))


@dataclass(frozen=True, slots=True)
class _Part:
    """Items that are launched together, before padding."""

    kind: LoraClass
    shrink: npt.NDArray[np.int32]
    expand: npt.NDArray[np.int32]

    def with_rest(self, runs: Ints) -> "_Part":
        """The same with items of the base's rows behind those of the adapters."""
        starts, rows, slots = runs
        rest = cut_rows(starts, rows, slots, self.kind.tiles.expand.rows)
        kind = replace(self.kind, rest_items=len(rest))
        return replace(self, kind=kind, expand=np.concatenate((self.expand, rest)))

    def with_guests(self, slots: Ints, columns: Ints) -> "_Part":
        """The same with each of `slots` in so many columns of the room, side by side."""
        firsts = np.cumsum(columns) - columns
        expand = self.expand.copy()  # shrink's may be the same
        expand[:, 3] = firsts[np.searchsorted(slots, expand[:, 2])]
        guests = np.stack((firsts, columns, slots, np.zeros_like(slots)), axis=1)
        kind = replace(self.kind, guests=len(slots), columns=int(columns.sum()))
        return replace(self, kind=kind, expand=np.concatenate((expand, guests.astype(np.int32))))


def _places(kind: LoraClass, items: Part) -> tuple[Part, Part, Part]:
    """Where a plan of `kind` lies among `items`, shrink and expand, and what is left for the next.

    At their end, so that all of it is in one piece beside what follows in the upload.
    """
    middle = len(items) - kind.later_items * ITEM_WORDS
    begin = middle - kind.shrink_items * ITEM_WORDS
    assert begin >= 0, "more items than the upload has room for"
    return items[begin:middle], items[middle:], items[:begin]

"""What the LoRA ops are told of a step: segments, rows in the arena, the plan on the device.

Plain data of the kernels; `adapters/plan.py` and `adapters/device_plan.py` build it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.kernels.tiles import Tiles
from engine.layout import GROUPS, MODULE_ID, MODULES, ROW_ALIGN, BlockLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, end) of the step use `slot`; rows of the base model are in no segment."""

    start: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True)
class LoraRows:
    """One LoRA pair where it lies in the arena: pieces of rows, in rank order.

    The `a` pieces are (rows_i, d_in), the `b` pieces (rows_i, d_out), rank-major; either add up to
    `rank` rows and may be cut at different places.  Behind B's rows come the bias and the two
    halves of the gain, where the pair has them.
    """

    scaling: float
    rank: int
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    bias: bool = False
    gain: bool = False
    #: Rows that replace the base's: their token ids, ascending (None = all from 0 on), and where
    #: each row begins in the memory that the pieces lie in, in elements.
    ids: Tensor | None = None
    places: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Fused modules, side by side in y."""

    first: int  # id of the first one
    d_in: int
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoraStore:
    """What all steps have in common; its tensors never move."""

    arena: Tensor  # (elements,): the whole pool, in its dtype
    table: Tensor  # (slots, words) int32; see engine/kernels/lora_place.py
    h: Tensor  # (elements,) fp32: shrink's partial sums, expand's input
    groups: Mapping[str, GroupShape]
    block: int  # elements of a pool block
    blocks_at: int  # word of a slot's row where its block ids begin
    max_rank: int  # ranks that a row of h has room for
    max_rows: int  # rows of a step
    pdl: bool  # a kernel may be launched before the one ahead has ended

    @property
    def unit(self) -> int:
        """Elements of the 256 bytes in which places are counted."""
        return ROW_ALIGN // self.arena.element_size()

    def stride(self, width: int) -> int:
        """Elements from a row of `width` to the next."""
        return -(-width // self.unit) * self.unit

    def entry(self, layer: int, group: str) -> int:
        """Place of the group's first module among a slot's entries."""
        return layer * len(MODULES) + self.groups[group].first

    def h_rows(self, tiles: Tiles) -> int:
        """Rows of one partial sum in h."""
        return min(self.max_rows, tiles.most_rows)

    def h_elements(self, tiles: Tiles) -> int:
        """Elements of h that `tiles` may need."""
        return h_elements(self.groups.values(), tiles, self.h_rows(tiles), self.max_rank)


def h_elements(groups: Iterable[GroupShape], tiles: Tiles, rows: int, max_rank: int) -> int:
    """Numbers of h that a step of `rows` rows may need, whose ranks are at most `max_rank`."""
    return max(len(g.widths) * tiles.shrink.splits(g.d_in) for g in groups) * rows * max_rank


def group_shapes(layout: BlockLayout) -> dict[str, GroupShape]:
    """The layout's fused groups, by name."""
    shapes = {}
    for group, modules in GROUPS.items():
        dims = [layout.shapes.dims[MODULE_ID[m]] for m in modules]
        shapes[group] = GroupShape(MODULE_ID[modules[0]], dims[0][0], tuple(d for _, d in dims))
    return shapes


@dataclass(frozen=True, slots=True)
class LoraClass:
    """What a CUDA graph bakes in: a step's tiles, and its grids, which are padded to rungs.

    `short`: the step's short segments have items and tiles of their own, and launches too.
    """

    tiles: Tiles
    shrink_items: int
    expand_items: int
    extras: bool = False  # some row's adapter has a bias or a gain
    short: "LoraClass | None" = None
    #: Items of the base's rows, for the gate of a prompt; None: they are not listed.
    rest_items: int | None = None
    #: Adapters that are guests of the base's products, and the columns of a module that they take
    #: of the room there (`lora_augment.py`).
    guests: int = 0
    columns: int = 0

    @property
    def later_items(self) -> int:
        """Those of expand, and what lies behind them."""
        return self.expand_items + (self.rest_items or 0) + self.guests

    @property
    def num_items(self) -> int:
        """Items of all its grids."""
        own = self.shrink_items + self.later_items
        return own + (self.short.num_items if self.short else 0)


@dataclass(frozen=True, slots=True)
class LoraDevicePlan:
    """One step on the device.  An item is (first row, rows, slot, first rank); 0 rows = padding."""

    store: LoraStore
    kind: LoraClass
    shrink: Tensor  # (kind.shrink_items, 4) int32
    #: (kind.later_items, 4) int32, all ranks: in place of the first rank there is the slot's first
    #: column, where there are guests; the rest's are of no slot; a guest's is (first column,
    #: columns, slot).
    expand: Tensor
    short: "LoraDevicePlan | None" = None  # of `kind.short`; its rows are others
    #: What the kernels have worked out from the above: the same for every layer.
    derived: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class LoraMeta:
    """The step's segments, and slot -> (layer, module) -> rows for every slot among them.

    With `device` set the plan lies on the device, and the rest is not looked at.
    """

    segments: tuple[Segment, ...] = ()
    slots: Mapping[int, Mapping[tuple[int, str], LoraRows]] = field(default_factory=dict)
    device: LoraDevicePlan | None = None
    #: Of one of the model's ends: rows of it that are in none of the segments.
    own: "OwnRows | None" = None


#: Of a row in `OwnRows.table`.
OWN_WORDS = 3


@dataclass(frozen=True, slots=True)
class OwnRows:
    """For each of a step's first rows which ids its adapter has rows of its own for, at one end."""

    #: (rows, OWN_WORDS) int64: where its ids and its rows' places lie, as addresses of int64, and
    #: how many there are of each; 0 = none.  Without ids, of an embedding, 0: tokens from 0 on.
    table: Tensor
    most: int  # the highest count
    arena: Tensor  # as one row: places count its elements

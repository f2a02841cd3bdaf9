"""The LoRA correction of one fused projection: y += scaling * (x Aᵀ) B, segment by segment.

Goes in: the projection's input and output, and which rows belong to which slot.  Comes out: the
output, corrected in place.  h = x Aᵀ, the scaling and the sum are in fp32, whatever the dtypes.
Rows of no segment and columns of an absent module are not touched.  Knows no names and no requests.

A plan on the device goes through the Triton kernels (`lora_shrink.py`, `lora_expand.py`), which are
imported only then; anything else through plain torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kernels.gemm import by_tiles
from engine.kernels.tiles import Tiles
from engine.layout import GROUPS, MODULE_ID, MODULES, ROW_ALIGN, BlockLayout

#: (fused modules) -> their group's name.
GROUP_OF = {modules: group for group, modules in GROUPS.items()}


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
    `rank` rows and may be cut at different places.
    """

    scaling: float
    rank: int
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]


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
        splits = max(len(g.widths) * tiles.shrink.splits(g.d_in) for g in self.groups.values())
        return splits * self.h_rows(tiles) * self.max_rank


def group_shapes(layout: BlockLayout) -> dict[str, GroupShape]:
    """The layout's fused groups, by name."""
    shapes = {}
    for group, modules in GROUPS.items():
        dims = [layout.shapes.dims[MODULE_ID[m]] for m in modules]
        shapes[group] = GroupShape(MODULE_ID[modules[0]], dims[0][0], tuple(d for _, d in dims))
    return shapes


@dataclass(frozen=True, slots=True)
class LoraClass:
    """What a CUDA graph bakes in: a step's tiles, and its grids, which are padded to rungs."""

    tiles: Tiles
    shrink_items: int
    expand_items: int


@dataclass(frozen=True, slots=True)
class LoraDevicePlan:
    """One step on the device.  An item is (first row, rows, slot, first rank); 0 rows = padding."""

    store: LoraStore
    kind: LoraClass
    shrink: Tensor  # (kind.shrink_items, 4) int32
    expand: Tensor  # (kind.expand_items, 4) int32, all ranks: first rank 0


@dataclass(frozen=True, slots=True)
class LoraMeta:
    """The step's segments, and slot -> (layer, module) -> rows for every slot among them.

    With `device` set the plan lies on the device, and the rest is not looked at.
    """

    segments: tuple[Segment, ...] = ()
    slots: Mapping[int, Mapping[tuple[int, str], LoraRows]] = field(default_factory=dict)
    device: LoraDevicePlan | None = None


def lora_apply(
    y: Tensor,
    x: Tensor,
    *,
    layer: int,
    modules: Sequence[str],
    splits: Sequence[int],
    meta: LoraMeta,
    deterministic: bool = False,
) -> None:
    """Correct y (T, sum of splits) in place for x (T, d_in).

    `modules` are fused side by side in y, `splits` are their widths.  A segment whose slot is not
    in `meta.slots` is a KeyError: it must never be answered with the base model alone.
    """
    if meta.device is not None:
        lora_apply_cuda(y, x, layer, GROUP_OF[tuple(modules)], meta.device)
        return
    for segment in meta.segments:
        pairs = meta.slots[segment.slot]
        x_rows, y_rows = x[segment.start : segment.end], y[segment.start : segment.end]
        column = 0
        for module, width in zip(modules, splits, strict=True):
            pair = pairs.get((layer, module))
            if pair is not None:
                _add(y_rows[:, column : column + width], x_rows, pair, deterministic)
            column += width


def lora_apply_cuda(y: Tensor, x: Tensor, layer: int, group: str, plan: LoraDevicePlan) -> None:
    """Correct y (T, sum of the group's widths) in place for x (T, d_in): two launches, no sync.

    y, x and the arena have one dtype.  `plan` is the step's own; its store's h is overwritten.
    """
    from engine.kernels.lora_expand import expand
    from engine.kernels.lora_shrink import shrink

    assert x.dtype == y.dtype == plan.store.arena.dtype, "dtypes differ"
    shrink(x, layer, group, plan)
    expand(y, layer, group, plan)


def _add(y: Tensor, x: Tensor, pair: LoraRows, deterministic: bool) -> None:
    """y (rows, d_out) += scaling * (x Aᵀ) B."""
    a, b = _whole(pair.a), _whole(pair.b)  # (rank, d_in), (rank, d_out)
    x = x.float()
    if deterministic:
        delta = by_tiles(x, lambda tile: (tile @ a.t()).mul_(pair.scaling) @ b)
        y.copy_(y.float() + delta)
        return
    h = (x @ a.t()).mul_(pair.scaling)  # (rows, rank)
    if y.dtype == torch.float32:
        y.addmm_(h, b)
    else:
        y.copy_(torch.addmm(y.float(), h, b))


def _whole(pieces: tuple[Tensor, ...]) -> Tensor:
    """The pieces as one fp32 matrix; without a copy where there is one piece of fp32."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole.float()

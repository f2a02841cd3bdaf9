"""The LoRA correction of one fused projection: y += scaling * (x Aᵀ) B, segment by segment.

Goes in: the projection's input and output, and which rows belong to which slot.  Comes out: the
output, corrected in place.  h = x Aᵀ, the scaling and the sum are in fp32, whatever the dtypes.
Rows of no segment and columns of an absent module are not touched.  Knows no names and no requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.gemm import by_tiles


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
class LoraMeta:
    """The step's segments, and slot -> (layer, module) -> rows for every slot among them."""

    segments: tuple[Segment, ...]
    slots: Mapping[int, Mapping[tuple[int, str], LoraRows]]
    #: Steps of one class and one number of rows replay one graph; -1 = never from a graph.
    graph_class: int = -1


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
    for segment in meta.segments:
        pairs = meta.slots[segment.slot]
        x_rows, y_rows = x[segment.start : segment.end], y[segment.start : segment.end]
        column = 0
        for module, width in zip(modules, splits, strict=True):
            pair = pairs.get((layer, module))
            if pair is not None:
                _add(y_rows[:, column : column + width], x_rows, pair, deterministic)
            column += width


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

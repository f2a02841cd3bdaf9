"""Whose bytes are where: from a place in the packed stream back to a module.

Goes in: a placement, a block, offsets in it.  Comes out: layer, module and factor.  The other way
round is `layout.place`.  Torch-free.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.layout import Placement

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes [start, end) of a block are rows of one module."""

    start: int
    end: int
    layer: int
    module: str
    factor: str  # A or B; what lies behind B's rows counts as B


class Owners:
    """Every block's stretches, in order."""

    def __init__(self, placement: Placement) -> None:
        self._blocks: list[list[Stretch]] = [[] for _ in range(placement.num_blocks)]
        for placed in placement.modules:
            for factor, run in (("A", placed.a), ("B", placed.b)):
                for piece in run.pieces:
                    end = piece.offset + piece.rows * run.stride
                    stretch = Stretch(piece.offset, end, placed.layer, placed.module, factor)
                    self._blocks[piece.block].append(stretch)

    def differing(self, block: int, ours: Bytes, theirs: Bytes) -> list[tuple[Stretch, int]]:
        """The stretches of `block` in which two versions of it differ, and in how many bytes; what
        lies in no row counts for the stretch before it, or the first."""
        places = np.flatnonzero(ours != theirs)
        if not places.size:
            return []
        stretches = self._blocks[block]
        starts = np.array([stretch.start for stretch in stretches])
        which = np.maximum(np.searchsorted(starts, places, "right") - 1, 0)
        numbers, counts = np.unique(which, return_counts=True)
        return [(stretches[i], int(n)) for i, n in zip(numbers, counts, strict=True)]

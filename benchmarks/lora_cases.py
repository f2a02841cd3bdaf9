"""The steps whose LoRA correction `lora_kernels.py` times, and the tiles that it tries on each."""

from dataclasses import dataclass

import checkout  # noqa: F401
import numpy as np

from engine.kernels import tiles as choices
from engine.kernels.lora_meta import group_shapes
from engine.kernels.tiles import ExpandTile, Shape, ShrinkTile, Tiles
from engine.layout import BlockLayout, Shapes

LAYERS, SLOTS, MAX_RANK, MAX_ROWS = 32, 64, 512, 4096
#: Columns for guests behind the weights of a chain that has any.
ROOM = 64
HIDDEN, KV, FFN = 4096, 1024, 14336
DIMS = (
    *((HIDDEN, HIDDEN), (HIDDEN, KV), (HIDDEN, KV), (HIDDEN, HIDDEN)),
    *((HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN)),
)
LAYOUT = BlockLayout(Shapes(LAYERS, DIMS), "bfloat16", 2 << 20)
BANDWIDTH = 4.27e12  # of a copy, measured on an H200


@dataclass(frozen=True)
class Case:
    name: str
    slots: tuple[int, ...]  # of each row, in row order
    ranks: tuple[int, ...]  # of each slot
    shrinks: tuple[ShrinkTile, ...]
    expands: tuple[ExpandTile, ...]

    @property
    def runs(self) -> np.ndarray:
        """(3, n): first rows, rows, slots."""
        slots = np.array(self.slots)
        edges = np.flatnonzero(np.append(True, slots[1:] != slots[:-1]))
        return np.stack((edges, np.diff(np.append(edges, len(slots))), slots[edges]))

    @property
    def floor_ms(self) -> float:
        active = sum(self.ranks[slot] for slot in set(self.slots))
        moved = active * sum(a + b for a, b in DIMS) * 2 * LAYERS
        if len(self.slots) > choices.PREFILL_ROWS:
            rows = sum(g.d_in + 2 * sum(g.widths) for g in group_shapes(LAYOUT).values())
            moved += len(self.slots) * rows * 2 * LAYERS
        return 1e3 * moved / BANDWIDTH


def _vec(rows: int, *sizes: tuple[int, int, int]) -> tuple[ShrinkTile, ...]:
    return tuple(ShrinkTile("vec", rows, r, chunk, chunk, warps=w) for r, chunk, w in sizes)


def _few(
    rows: int, *sizes: tuple[int, int, int], all_ranks: bool = False
) -> tuple[ExpandTile, ...]:
    return tuple(
        ExpandTile("vec", rows, r, columns, warps=w, all_ranks=all_ranks) for r, columns, w in sizes
    )


ALONE_S = _vec(
    *(1, (8, 2048, 4), (8, 1024, 2), (8, 512, 1), (8, 1024, 1), (4, 1024, 1), (16, 1024, 4)),
    *((16, 512, 1), (8, 2048, 2), (4, 2048, 2)),
)
ALONE_E = _few(
    1, (16, 512, 2), (16, 1024, 4), (16, 256, 1), (16, 1024, 2), (16, 2048, 8), (16, 512, 1)
)
WIDE_E = _few(
    *(1, (32, 512, 4), (16, 512, 2), (16, 1024, 4), (16, 256, 1), (8, 512, 1), (8, 1024, 2)),
    *((16, 2048, 8), (8, 2048, 4), (32, 512, 8)),
    all_ranks=True,
)
FEW_S = _vec(4, (8, 2048, 4), (8, 1024, 4), (16, 1024, 4), (8, 1024, 2), (4, 2048, 4))
FEW_E = _few(4, (16, 512, 2), (16, 256, 2), (16, 512, 4), (16, 256, 1))
MIXED_S = (
    ShrinkTile("both", 16, 16, 512, 1024, step=256),
    ShrinkTile("both", 16, 16, 512, 512, step=512),
    ShrinkTile("dot", 16, 16, 512, 1024, step=1024),
    ShrinkTile("dot", 16, 16, 256, 512, step=512),
    ShrinkTile("dot", 16, 16, 512, 1024, step=128, side=4, stages=3),
)
MIXED_E = (
    ExpandTile("both", 16, 16, 256, all_ranks=False),
    ExpandTile("both", 16, 16, 512, all_ranks=False),
    ExpandTile("dot", 16, 16, 256, all_ranks=False),
    ExpandTile("dot", 16, 16, 128, warps=2, all_ranks=False),
)
SOLO_S = (
    ShrinkTile("dot", 16, 16, 256, 512, step=512),
    ShrinkTile("dot", 16, 16, 512, 1024, step=1024),
    ShrinkTile("both", 16, 16, 512, 1024, step=256),
    ShrinkTile("dot", 32, 16, 256, 512, step=512),
    ShrinkTile("dot", 64, 16, 256, 512, step=256, side=4),
    ShrinkTile("dot", 64, 16, 512, 1024, step=128, side=4, stages=3),
)
SOLO_E = (
    ExpandTile("dot", 16, 16, 256, all_ranks=False),
    ExpandTile("dot", 16, 16, 128, warps=2, all_ranks=False),
    ExpandTile("dot", 32, 16, 128, all_ranks=False),
    ExpandTile("dot", 64, 16, 128, all_ranks=False),
    ExpandTile("dot", 64, 16, 64, all_ranks=False),
)
PREFILL_S = (
    ShrinkTile("dot", 64, 16, 1024, 2048, step=64, side=4, stages=4),
    ShrinkTile("dot", 64, 16, 1024, 2048, step=128, side=4, stages=3),
    ShrinkTile("dot", 128, 16, 1024, 2048, step=64, side=4, warps=8, stages=4),
    ShrinkTile("dot", 64, 16, 2048, 4096, step=64, side=4, stages=5),
    ShrinkTile("dot", 32, 16, 2048, 4096, step=128, side=4, stages=4),
)
PREFILL_E = (
    ExpandTile("dot", 32, 16, 256, runs=4, late=True, all_ranks=False),
    ExpandTile("dot", 32, 16, 256, runs=1, late=True, all_ranks=False),
    ExpandTile("dot", 32, 16, 256, runs=4, all_ranks=False),
    ExpandTile("dot", 16, 16, 512, runs=2, late=True, all_ranks=False),
    ExpandTile("dot", 64, 16, 128, runs=4, late=True, all_ranks=False),
    ExpandTile("dot", 64, 16, 256, runs=2, warps=8, late=True, all_ranks=False),
)

R16, R8 = (16,) * SLOTS, (8,) * SLOTS
MIX = tuple((8, 16, 32, 64)[slot % 4] for slot in range(SLOTS))


def shared(rows: int, adapters: int, chunk: int = 0) -> tuple[int, ...]:
    """Slots of rows that adapters use in turn, and of a prompt's chunk on the first of them."""
    return tuple(sorted([row % adapters for row in range(rows)] + [0] * chunk))


CASES = (
    Case("T=1 k=1", shared(1, 1), R16, ALONE_S, ALONE_E),
    Case("T=16 k=16", shared(16, 16), R16, ALONE_S[:3], ALONE_E[:3]),
    Case("T=64 k=1", shared(64, 1), R16, SOLO_S, SOLO_E),
    Case("T=64 k=8", shared(64, 8), R16, MIXED_S, MIXED_E),
    Case("T=64 k=32", shared(64, 32), R16, FEW_S, FEW_E),
    Case("T=64 k=64", shared(64, 64), R16, ALONE_S + FEW_S[:1], ALONE_E + FEW_E[:1]),
    Case("T=64 k=64 ranks 8-64", shared(64, 64), MIX, ALONE_S, WIDE_E),
    Case("T=64 k=32 rank 8", shared(64, 32), R8, FEW_S[:3], FEW_E[:3]),
    Case("mixed T=64+128 k=8", shared(64, 8, 128), R16, MIXED_S + SOLO_S[4:], MIXED_E + SOLO_E[2:]),
    Case("mixed T=64+128 k=64", shared(64, 64, 128), R16, MIXED_S, MIXED_E),
    Case("mixed T=512 k=1", shared(512, 1), R16, SOLO_S + PREFILL_S[:1], SOLO_E + PREFILL_E[:2]),
    Case("prefill T=2048 k=1", shared(2048, 1), R16, PREFILL_S, PREFILL_E),
    Case("prefill T=4096 k=8", shared(4096, 8), R16, PREFILL_S[:3], PREFILL_E),
    Case("prefill T=2048 k=1 rank 64", (3,) * 2048, MIX, (), ()),  # as the engine does it
)
CHOICES = (
    *choices.ALL,
    *(
        Tiles("rival", s, e, MAX_ROWS if len(case.slots) > choices.PREFILL_ROWS else 1024)
        for case in CASES
        for s in case.shrinks
        for e in case.expands
    ),
)


def rival(case: Case, shrink: ShrinkTile, expand: ExpandTile) -> Tiles:
    most = 1 << 30 if len(case.slots) > choices.PREFILL_ROWS else choices.PREFILL_ROWS
    return Tiles("rival", shrink, expand, most)


def picked_by_engine(case: Case) -> Tiles:
    runs = case.runs
    longest, ranks = int(runs[1].max()), [case.ranks[slot] for slot in case.slots]
    return choices.pick(Shape(len(case.slots), runs.shape[1], longest, max(ranks)))

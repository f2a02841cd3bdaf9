"""Where rows of random adapters lie: on borders, within a block, each in a place of its own."""

import itertools
import random

import pytest

from engine.layout import MODULES, ROW_ALIGN, BlockLayout, Shapes, place
from engine.messages import PackedModule

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@pytest.mark.parametrize("seed", range(40))
def test_rows_start_on_borders_cross_none_of_blocks_and_share_no_byte(seed: int) -> None:
    draw = random.Random(seed)
    dtype, itemsize = draw.choice(list(DTYPES.items()))
    dims = tuple((draw.randint(1, 900), draw.randint(1, 900)) for _ in MODULES)
    widest = max(width for pair in dims for width in pair) * itemsize
    block_bytes = widest + draw.randint(ROW_ALIGN, 40 * ROW_ALIGN)  # not always a multiple of 256
    modules = [
        PackedModule(
            layer,
            module,
            draw.choice([1, 2, 6, 16, 33]),
            1.0,
            bias=draw.random() < 0.2,
            gain=draw.random() < 0.2,
        )
        for layer in range(3)
        for module in MODULES
        if draw.random() < 0.7
    ]
    placement = place(modules, BlockLayout(Shapes(3, dims), dtype, block_bytes))
    taken: list[tuple[int, int, int]] = []  # block, first byte, byte behind the last
    needed = 0
    for packed, placed in zip(modules, placement.modules, strict=True):
        d_in, d_out = dims[MODULES.index(packed.module)]
        rows_of_b = packed.rank + packed.bias + 2 * packed.gain
        for run, rows, width in ((placed.a, packed.rank, d_in), (placed.b, rows_of_b, d_out)):
            assert (run.width, sum(piece.rows for piece in run.pieces)) == (width, rows)
            needed += rows * width * itemsize
            for piece in run.pieces:
                starts = [piece.offset + i * run.stride for i in range(piece.rows)]
                assert all(start % ROW_ALIGN == 0 for start in starts)
                assert starts[-1] + width * itemsize <= block_bytes
                taken += [(piece.block, start, start + width * itemsize) for start in starts]
    taken.sort()
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(taken))
    assert {block for block, _, _ in taken} == set(range(placement.num_blocks))
    assert placement.true_bytes == needed

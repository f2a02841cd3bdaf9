"""The gain of a DoRA module: its magnitudes over the norms of the adapted weight's rows.

PEFT divides by the norms of W + s B A in every forward pass, though neither W nor the adapter
changes while it is served: so it is done once here, from the base's files, some rows at a time.
All modules of an 8B base took 26 s of one core.

Products are in float32 and sums of squares in float64, from the file's own numbers; what PEFT
rounds to a bf16 base's dtype on its way is not rounded here.

Goes in: W's rows, A, B, the scaling and the magnitudes.  Comes out: one number an output, for the
packer.  Torch-free; knows no names and no files.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Elements of W at a time: 16 MiB, thrice that with its copy and product.
CHUNK = 1 << 22


def gain(
    magnitude: Floats, rows: Callable[[int, int], Floats], a: Floats, b: Floats, scaling: float
) -> NDArray[np.float64]:
    """magnitude / ‖W + scaling · B A‖ by row, (d_out,); infinite or NaN where a norm is zero, NaN
    where it is beyond float32: over it any magnitude would be 0.

    `rows(first, last)` are those of W, (last - first, d_in); a is (rank, d_in), b (d_out, rank).
    """
    step = max(1, CHUNK // a.shape[1])
    squares = np.empty(len(b), np.float64)
    for first in range(0, len(b), step):
        last = min(first + step, len(b))
        with np.errstate(over="ignore", invalid="ignore"):
            adapted = (b[first:last] * np.float32(scaling)) @ a
            adapted += rows(first, last)
            np.square(adapted, out=adapted)
        squares[first:last] = adapted.sum(axis=1, dtype=np.float64)
    squares[np.isinf(squares)] = np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        return magnitude.astype(np.float64) / np.sqrt(squares)

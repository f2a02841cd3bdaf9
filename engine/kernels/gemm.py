"""Matrix products of activations with weights.

Goes in: rows and a weight.  Comes out: rows.  With `deterministic`, a row's bits do not depend on
how many rows stand beside it: a BLAS picks its kernel by the number of rows, so every product is
made in tiles of TILE rows, the last one padded with zeros.  Knows nothing of layers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows of a fixed tile.  At 16 the weights are read once for 16 decode rows, and a lone row costs
#: little more than a matrix-vector product, which is bound by the same reading.
TILE = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, deterministic: bool) -> Tensor:
    """x (rows, d_in) @ weight (d_out, d_in) transposed + bias -> (rows, d_out), in x's dtype."""
    if deterministic:
        return by_tiles(x, lambda tile: F.linear(tile, weight, bias))
    return F.linear(x, weight, bias)


def by_tiles(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `product` to tiles of exactly TILE contiguous rows and drop the padding."""
    rows = x.shape[0]
    padded = x.new_zeros(-(-rows // TILE) * TILE, x.shape[1])
    padded[:rows] = x
    return torch.cat([product(tile) for tile in torch.split(padded, TILE)])[:rows]

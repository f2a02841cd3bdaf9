"""Matrix products of activations with weights.

Goes in: rows and a weight.  Comes out: rows.  With `deterministic`, a row's bits do not depend on
how many rows stand beside it.  A BLAS picks its kernel by the number of rows, so on a card one tile
of our own is taken for every number of rows, and elsewhere every product is made in tiles of TILE
rows, the last one padded with zeros.  Knows nothing of layers.

The Triton kernels (`gemm_device.py`) are imported only when `gemm_tiles.py` chooses them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import backend, gemm_tiles

#: Rows of a fixed tile.  At 16 the weights are read once for 16 decode rows, and a lone row costs
#: little more than a matrix-vector product, which is bound by the same reading.
TILE = 16


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    deterministic: bool,
    out: Tensor | None = None,
    closely: bool = False,
) -> Tensor:
    """x (rows, d_in) @ weight (d_out, d_in) transposed + bias -> (rows, d_out), in x's dtype.

    With `out` (rows, d_out), written there in its dtype: straight from fp32 by our own kernels.
    `closely` where `leads` says so: the kernel launched next may read x ahead of its own wait.
    """
    if x.is_cuda:
        y = _own_product(x, weight, bias, deterministic, out, closely)
        if y is not None:
            return y
    if deterministic:
        y = by_tiles(x, lambda tile: F.linear(tile, weight, bias))
    else:
        y = F.linear(x, weight, bias)
    return y if out is None else out.copy_(y)


def _own_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deterministic: bool,
    out: Tensor | None,
    closely: bool,
) -> Tensor | None:
    """The product by the Triton kernels; None where torch's is chosen."""
    rows, (d_out, d_in), itemsize = x.shape[0], weight.shape, x.element_size()
    if deterministic:
        tile = gemm_tiles.fixed(d_out, d_in, itemsize)
    elif (picked := gemm_tiles.pick(rows, d_out, d_in, itemsize)) is not None:
        tile = picked
    else:
        return None
    from engine.kernels.gemm_device import product

    serial = deterministic and gemm_tiles.is_serial(tile, rows, d_out)
    return product(x, weight, bias, tile, out=out, serial=serial, closely=closely)


def leads(x: Tensor, weight: Tensor, *, deterministic: bool) -> bool:
    """Whether the product of x (rows, d_in) is one that the kernel behind it may run beside.

    That is our own on a card with dependent launches, whose programs are all there at once: where
    they take turns, what comes behind begins with the last of them and wins nothing.
    """
    if deterministic or not backend.dependent_launch(x.device):
        return False
    d_out, d_in = weight.shape
    tile = gemm_tiles.pick(x.shape[0], d_out, d_in, x.element_size())
    return tile is not None and tile.form in gemm_tiles.LEADING


def by_tiles(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `product` to tiles of exactly TILE contiguous rows and drop the padding."""
    rows = x.shape[0]
    padded = x.new_zeros(-(-rows // TILE) * TILE, x.shape[1])
    padded[:rows] = x
    if rows <= TILE:
        return product(padded)[:rows]
    return torch.cat([product(tile) for tile in torch.split(padded, TILE)])[:rows]

"""Launches the products with weights: y = x Wᵀ + b on a card.

Goes in: x (rows, d_in), a weight (d_out, d_in), a `Tile`.  Comes out: y (rows, d_out), rounded once
from fp32.  Knows nothing of layers; may be captured in a graph.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels import backend
from engine.kernels.gemm_kernels import tiled_product, vector_product
from engine.kernels.gemm_tiles import Tile
from engine.kernels.launch import launch

#: Output tiles whose partial sums can be counted at a time.
COUNTERS = 1 << 16


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    out: Tensor | None = None,
    serial: bool = False,
    closely: bool = False,
) -> Tensor:
    """x (rows, d_in) @ weight (d_out, d_in) transposed + bias -> (rows, d_out).

    Written to `out` if given, in its dtype, else in x's.  Last axes are contiguous; the weight and
    the bias are written by no kernel that may still run.  `serial` ("dot" alone): one program a
    tile makes all splits, with the same bits.  Takes 1 to tile.rows rows in the vector form.
    `closely`: the kernel launched next may read, ahead of its wait, what x's own kernel wrote.
    """
    rows, (d_out, d_in) = x.shape[0], weight.shape
    if out is None:
        out = torch.empty(rows, d_out, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    assert x.dtype == weight.dtype and x.shape[1] == d_in and out.shape == (rows, d_out)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    if tile.form == "stream" and (serial or not _can_stream(x, weight)):
        tile = tile._replace(form="dot", rows=triton.next_power_of_2(tile.rows))
    tile = tile.fitted(d_in, x.element_size(), backend.shared_bytes(x.device))
    blocks, tiles = triton.cdiv(rows, tile.rows), triton.cdiv(d_out, tile.outputs)
    parallel = not serial and tile.splits > 1 and blocks * tiles <= COUNTERS
    partial, counters = out, out
    if parallel:
        partial = torch.empty(tile.splits, rows, d_out, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
    pdl = backend.dependent_launch(x.device)
    common = {
        "OUTPUTS": tile.outputs,
        "STEP": tile.step,
        "SPLITS": tile.splits,
        "AT_ONCE": _at_once(tile),
        "BIAS": bias is not None,
        "PDL": pdl,
        "CLOSELY": closely,
        "num_warps": tile.warps,
        "launch_pdl": pdl,
    }
    ends = (x if bias is None else bias, out, partial, counters, rows, d_out)
    if tile.form == "vector":
        assert rows <= tile.rows and (parallel or tile.splits == 1)
        even = tile.splits * tile.step == d_in
        strides = x.stride(0), weight.stride(0), out.stride(0)
        launch(
            vector_product,
            (tiles, tile.splits),
            x,
            weight,
            *ends,
            d_in,
            *strides,
            ROWS=tile.rows,
            EVEN=even,
            **common,
        )
        return out
    grid = (blocks, tiles, tile.splits if parallel else 1)
    serial = tile.splits > 1 and not parallel
    if tile.form == "stream" and not serial:
        _stream(grid, x, weight, ends, out.stride(0), tile, common)
    else:
        _dot(grid, x, weight, ends, out.stride(0), tile, common | {"SERIAL": serial})
    return out


def _dot(
    grid: tuple[int, ...],
    x: Tensor,
    weight: Tensor,
    ends: tuple[Any, ...],
    stride_out: int,
    tile: Tile,
    common: dict[str, Any],
) -> None:
    tma, d_in = tile.tma and _aligned(weight) and _aligned(x), weight.shape[1]
    x_tiles, w_tiles = x, weight
    if tma:
        x_tiles = TensorDescriptor.from_tensor(x, [tile.rows, tile.step])
        w_tiles = TensorDescriptor.from_tensor(weight, [tile.outputs, tile.step])
    launch(
        tiled_product,
        grid,
        x,
        weight,
        x_tiles,
        w_tiles,
        *ends,
        d_in,
        x.stride(0),
        weight.stride(0),
        stride_out,
        ROWS=tile.rows,
        CHUNK=tile.chunk(d_in),
        EVEN=tile.splits * tile.chunk(d_in) == d_in,
        TMA=tma,
        STAGES=tile.stages,
        **common,
    )


def _can_stream(x: Tensor, weight: Tensor) -> bool:
    halves = x.element_size() == 2
    return halves and backend.is_hopper(x.device) and _aligned(x) and _aligned(weight)


def _stream(
    grid: tuple[int, ...],
    x: Tensor,
    weight: Tensor,
    ends: tuple[Any, ...],
    stride_out: int,
    tile: Tile,
    common: dict[str, Any],
) -> None:
    from engine.kernels.gemm_stream import described, streamed_product

    rows = 1 << (tile.rows.bit_length() - 1)  # the larger product's, of what may be two
    rest = tile.rows - rows
    x_tiles = described(x, rows, tile.step)
    launch(
        streamed_product,
        grid,
        x_tiles,
        described(x, rest, tile.step) if rest else x_tiles,
        described(weight, tile.outputs, tile.step),
        *ends,
        stride_out,
        ROWS=rows,
        REST=rest,
        STEPS=tile.chunk(weight.shape[1]) // tile.step,
        STAGES=tile.stages,
        **common,
    )


def _at_once(tile: Tile) -> int:
    """Partial sums that a thread has registers to load together: else each costs a latency."""
    values = max(1, tile.rows * tile.outputs // (32 * tile.warps))
    return max(n for n in range(1, max(1, 64 // values) + 1) if tile.splits % n == 0)


def _aligned(matrix: Tensor) -> bool:
    """Every row begins at a multiple of 16 bytes."""
    return matrix.data_ptr() % 16 == matrix.stride(0) * matrix.element_size() % 16 == 0


_counters_of: dict[tuple[torch.device, int], Tensor] = {}


def _counters(device: torch.device) -> Tensor:
    """Zeros, and zeros again behind every kernel; one set a stream, whose kernels take turns."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _counters_of.get((device, stream))
    if found is None:
        # Zeroed in a graph, they would be garbage until its first replay, for others as well.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a split product must run once on the stream before its capture")
        found = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _counters_of[device, stream] = found
    return found

"""The product of deterministic mode: on a card, or on Triton's interpreter."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are imported

from engine.kernels import gemm_tiles
from engine.kernels.gemm_device import product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with a BLAS, whose bits depend on where in a tile a row lies."""

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        a, b = a.astype(dtype), b.astype(dtype)
        total = np.zeros((a.shape[0], b.shape[1]), dtype)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[k]
        return total

    if DEVICE == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", matmul)


@pytest.mark.parametrize(
    ("dtype", "d_out", "d_in", "bias"),
    [
        (torch.float16, 130, 576, False),
        (torch.float16, 64, 200, True),
        (torch.float32, 40, 200, True),
        pytest.param(torch.float16, 130, 576, True, marks=pytest.mark.slow),
        pytest.param(torch.float16, 64, 200, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, 40, 200, False, marks=pytest.mark.slow),
    ],
)
def test_a_row_has_the_same_bits_in_any_batch_and_place(
    dtype: torch.dtype, d_out: int, d_in: int, bias: bool
) -> None:
    tile = gemm_tiles.fixed(d_out, d_in, dtype.itemsize)
    assert tile.splits > 1
    weight = torch.randn(d_out, d_in, device=DEVICE).to(dtype)
    added = torch.randn(d_out, device=DEVICE).to(dtype) if bias else None
    rows = torch.randn(2048 if d_out == 64 else 200, d_in, device=DEVICE).to(dtype)

    def of(batch: Tensor) -> Tensor:
        return product(batch, weight, added, tile)  # the splits side by side

    whole = product(rows, weight, added, tile, serial=True)
    want = rows.double() @ weight.double().t() + (0 if added is None else added.double())
    torch.testing.assert_close(whole.double(), want, atol=1e-3, rtol=1e-3)
    for first, last in ((0, 1), (len(rows) - 1, len(rows)), (100, 164), (13, 83)):
        assert torch.equal(of(rows[first:last]), whole[first:last])
    order = torch.randperm(70)
    assert torch.equal(of(rows[order]), whole[order])
    assert torch.equal(product(rows[order], weight, added, tile, serial=True), whole[order])


def test_many_rows_make_their_splits_one_after_the_other() -> None:
    tile = gemm_tiles.fixed(4096, 4096, 2)
    serial = [gemm_tiles.is_serial(tile, rows, 4096) for rows in (1, 64, 2048)]
    assert serial == [False, False, True]


def test_splits_follow_the_weight_alone_and_share_the_steps_evenly() -> None:
    for d_out, d_in in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576)):
        tile = gemm_tiles.fixed(d_out, d_in, 2)
        fitted = tile.fitted(d_in, 2, 227 << 10)
        assert fitted.splits == tile.splits and fitted.splits * fitted.chunk(d_in) == d_in
        assert tile._replace(splits=1) == gemm_tiles.FIXED

"""The products with weights: on a card, or on Triton's interpreter."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are imported

from engine.kernels import gemm_device, gemm_tiles
from engine.kernels.gemm import linear
from engine.kernels.gemm_device import product
from engine.kernels.gemm_tiles import Rule, Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Norm of the error over the norm of the result: the rounding of the result, and of fp32 sums.
ERRORS = {torch.float32: 1e-6, torch.float16: 3e-4}
DTYPES = list(ERRORS)

ALONE = Tile("vector", 1, 4, 1024)
FEW = Tile("vector", 4, 8, 128, warps=2)
DOT = Tile("dot", 16, 64, 128, 3)
WIDE = Tile("dot", 32, 64, 64, stages=2)
COPIED = DOT._replace(tma=True)
STREAM = DOT._replace(form="stream")


def among_nans(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random rows with NaN on all sides, 16 bytes apart at least."""
    around = torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype, device=DEVICE)
    around[1:-1, 8 : columns + 8] = torch.randn(rows, columns)
    return around[1:-1, 8 : columns + 8]


def check(
    tile: Tile, rows: int, d_out: int, d_in: int, dtype: torch.dtype, *, bias: bool = False
) -> None:
    """Into a view among NaN, against fp64; nothing around it is touched."""
    x, weight = among_nans(rows, d_in, dtype), among_nans(d_out, d_in, dtype)
    added = torch.randn(d_out, device=DEVICE).to(dtype) * 8 if bias else None
    around = torch.full((rows + 2, d_out + 16), torch.nan, dtype=dtype, device=DEVICE)
    got = product(x, weight, added, tile, out=around[1:-1, 8:-8])
    want = x.double() @ weight.double().t()
    if added is not None:
        want += added.double()
    assert float((got.double() - want).norm() / want.norm()) <= ERRORS[dtype]
    assert int(around.isfinite().sum()) == rows * d_out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tile", "rows", "d_out", "d_in"),
    [
        (ALONE, 1, 37, 576),
        (ALONE, 1, 12, 2560),  # three splits, the last one half empty
        (FEW, 1, 9, 200),
        (FEW, 3, 40, 300),
        (FEW, 4, 16, 128),
        (DOT, 1, 100, 576),
        (DOT, 2, 64, 384),  # whole steps and splits
        (DOT, 17, 65, 24),  # one split is left
        (DOT, 40, 130, 520),
        (WIDE, 33, 96, 576),
        (WIDE, 70, 63, 72),
        (COPIED, 5, 70, 576),
        (COPIED, 20, 64, 200),
        (STREAM, 40, 130, 520),  # plain tiles, but on Hopper
        (STREAM._replace(rows=24), 40, 130, 520),  # and rows of a power of two
    ],
)
def test_the_product_equals_fp64s(
    tile: Tile, rows: int, d_out: int, d_in: int, dtype: torch.dtype
) -> None:
    check(tile, rows, d_out, d_in, dtype, bias=rows % 2 == 1)


@pytest.mark.parametrize("tile", [ALONE, DOT, WIDE, COPIED])
def test_the_shape_of_a_small_models_qkv(tile: Tile) -> None:
    check(tile, 1, 960, 576, torch.float16)


@pytest.mark.parametrize("tile", [DOT, COPIED, FEW])
def test_rows_that_no_copy_engine_takes_are_loaded_plainly(tile: Tile) -> None:
    """A width of 13 numbers: no second row begins at a multiple of 16 bytes."""
    x, weight = (torch.randn(n, 13, device=DEVICE).half() for n in (3, 21))
    want = x.double() @ weight.double().t()
    got = product(x, weight, None, tile)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-3)


def test_no_row_is_no_work() -> None:
    x, weight = torch.randn(0, 24, device=DEVICE), torch.randn(8, 24, device=DEVICE)
    assert product(x, weight, None, DOT).shape == (0, 8)


@pytest.mark.parametrize("tile", [ALONE, DOT])
def test_the_counters_are_zero_again(tile: Tile) -> None:
    for rows in (1, 1) if tile.form == "vector" else (1, 33):
        check(tile, rows, 70, 2100, torch.float32)
    counters = list(gemm_device._counters_of.values())
    assert counters and all(int(c.count_nonzero()) == 0 for c in counters)


@pytest.mark.parametrize("tile", [ALONE, DOT])
def test_fp32_results_of_halves_are_not_rounded_on_the_way(tile: Tile) -> None:
    x, weight = (torch.randn(n, 700, device=DEVICE).half() for n in (1, 40))
    out = torch.full((1, 40), torch.nan, device=DEVICE)
    assert product(x, weight, None, tile, out=out) is out
    want = x.double() @ weight.double().t()
    assert float((out.double() - want).norm() / want.norm()) < 1e-6


# ---------------------------------------------------------------- the choice
@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gemm_tiles, "OWN", True)
    yield


def test_a_fitted_tile_has_no_empty_split_and_fits_in_shared_memory() -> None:
    tiles = [rule.tile for rule in gemm_tiles.RULES if rule.tile] + [ALONE, FEW, DOT, WIDE]
    for tile in [*tiles, gemm_tiles.FIXED_WIDE]:
        for d_in in (8, 72, 576, 4096, 14336):
            fitted = tile.fitted(d_in, 2, 96 << 10)
            chunk = fitted.chunk(d_in)
            assert (fitted.splits - 1) * chunk < d_in <= fitted.splits * chunk
            assert fitted.fitted(d_in, 2, 96 << 10) == fitted
            if fitted.form == "dot":
                used = fitted.stages * (fitted.rows + fitted.outputs) * fitted.step * 2
                assert used <= 96 << 10


def test_the_first_rule_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch, own: None) -> None:
    rest = Rule(16, 1 << 30, 8192, None), Rule(64, 1 << 30, 9999, DOT)
    monkeypatch.setattr(gemm_tiles, "RULES", (Rule(1, 4096, 8192, ALONE), *rest))
    assert gemm_tiles.pick(1, 4096, 4096, 2) == ALONE
    assert gemm_tiles.pick(1, 4097, 4096, 2) is None  # the second rule: torch
    assert gemm_tiles.pick(17, 4096, 8192, 2) == gemm_tiles.pick(2, 4096, 9000, 2) == DOT
    assert gemm_tiles.pick(65, 4096, 4096, 2) is None
    assert gemm_tiles.pick(1, 4096, 4096, 4) is None  # fp32
    assert gemm_tiles.pick(1, 576, 576, 2) is None  # small


def test_every_rule_holds_the_rows_that_it_takes() -> None:
    for rule in gemm_tiles.RULES:
        assert rule.tile is None or rule.tile.form == "dot" or rule.rows <= rule.tile.rows


def test_torchs_product_goes_into_out_in_its_dtype() -> None:
    x, weight = torch.randn(3, 24).half(), torch.randn(10, 24).half()
    for deterministic in (False, True):
        out = torch.full((3, 10), torch.nan)
        assert linear(x, weight, None, deterministic=deterministic, out=out) is out
        assert torch.equal(out, linear(x, weight, None, deterministic=deterministic).float())

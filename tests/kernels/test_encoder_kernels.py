"""The encoder's row kernels against torch: on a card, or on Triton's interpreter."""

import itertools
import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are imported

from engine.kernels import elementwise
from engine.kernels.layer_norm import sum_norm
from engine.kernels.pool_rows import KINDS, pool_rows
from engine.pooling.pooler import POOLS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {
    torch.float32: {"atol": 2e-6, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
}
LENGTHS = (5, 1, 40, 16, 23)


def rows_apart(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random rows with NaN between them."""
    around = torch.full((rows, columns + 24), torch.nan, dtype=dtype, device=DEVICE)
    around[:, :columns] = torch.randn(rows, columns)
    return around[:, :columns]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "columns"), [(3, 384), (1, 1024), (4, 7)])
def test_the_norm_of_a_sum_equals_torchs(
    rows: int, columns: int, dtype: torch.dtype, biased: bool, keep: bool
) -> None:
    x, delta = rows_apart(rows, columns, dtype) + 2, rows_apart(rows, columns, dtype) * 3
    weight, shift = torch.randn(2, columns, device=DEVICE).to(dtype)
    bias, total, before = shift if biased else None, x + delta, x.clone()
    got = sum_norm(x, delta, weight, bias, 1e-12, keep=keep)
    want = elementwise.layer_norm(total, weight, bias, 1e-12)
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])
    assert torch.equal(x, total if keep else before)


def test_the_norm_of_rows_far_from_zero_keeps_their_differences() -> None:
    x = 1000 + torch.randn(2, 96, device=DEVICE)
    weight = torch.ones(96, device=DEVICE)
    got = sum_norm(x, torch.zeros_like(x), weight, None, 1e-5, keep=False)
    want = torch.nn.functional.layer_norm(x.double(), (96,), eps=1e-5).float()
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", [200, 7])
def test_sequences_are_pooled_as_one_by_one(width: int, dtype: torch.dtype, kind: str) -> None:
    left_out = (2, 0, 17, 15, 0)
    x = rows_apart(sum(LENGTHS), width, dtype)
    got = pool_rows(x, spans(left_out), kind)
    want = [
        POOLS[kind](rows.float(), left)  # type: ignore[index]
        for rows, left in zip(x.split(LENGTHS), left_out, strict=True)
    ]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.stack(want), atol=2e-6, rtol=1e-5)


def test_a_sequence_is_pooled_to_the_same_bits_wherever_it_lies() -> None:
    x = rows_apart(sum(LENGTHS), 64, torch.float16)
    together = pool_rows(x, spans((0,) * 5), "mean")
    for one, rows in zip(together, x.split(LENGTHS), strict=True):
        alone = torch.tensor([[0, 0, len(rows)]], dtype=torch.int32, device=DEVICE)
        assert torch.equal(pool_rows(rows, alone, "mean")[0], one)


def spans(left_out: tuple[int, ...]) -> Tensor:
    edges = itertools.pairwise(itertools.accumulate(LENGTHS, initial=0))
    told = [(a, a + left, b) for (a, b), left in zip(edges, left_out, strict=True)]
    return torch.tensor(told, dtype=torch.int32, device=DEVICE)

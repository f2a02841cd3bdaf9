"""The tangent that soft caps are made of, against fp64: on a card, or on Triton's interpreter."""

import os

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are imported

import triton
import triton.language as tl

from engine.kernels.hyperbolic import tanh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _tanh(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tanh(tl.load(x + at)))


def test_small_arguments_keep_their_digits_and_large_ones_end_at_one() -> None:
    sizes = np.geomspace(1e-6, 30.0, 1022).tolist()
    x = torch.tensor([0.0, float("inf"), *sizes, -0.0, float("-inf"), *(-s for s in sizes)])
    out = torch.full_like(x, torch.nan).to(DEVICE)
    _tanh[(1,)](x.to(DEVICE), out, SIZE=len(x))
    exact = torch.tanh(x.double())
    off = (out.cpu().double() - exact).abs()
    # By exponentials alone a thousandth of 1e-4 would be lost, and all of 1e-7.
    assert (off <= 2e-6 * exact.abs()).all(), (off / exact.abs()).max()

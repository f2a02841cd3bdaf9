"""The fused row kernels against `elementwise.py`: on a card, or on Triton's interpreter."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are imported

from engine.kernels import elementwise, fused, fused_heads
from engine.kernels.reference import reference_write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {
    torch.float32: {"atol": 2e-6, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2},
}
EXACT = {"atol": 0.0, "rtol": 0.0}
DTYPES = [torch.float32, torch.float16]


def wide_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random rows that stand apart, with NaN between them."""
    around = torch.full((rows, columns + 24), torch.nan, dtype=dtype, device=DEVICE)
    around[:, :columns] = torch.randn(rows, columns)
    return around[:, :columns]


@pytest.mark.parametrize("add_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 576), (3, 200), (2, 4096), (5, 7)])
def test_the_norm_equals_torchs(rows: int, columns: int, dtype: torch.dtype, add_one: bool) -> None:
    x, weight = wide_rows(rows, columns, dtype), torch.randn(columns, device=DEVICE).to(dtype)
    before = x.clone()
    got = fused.rms_norm(x, weight, 1e-5, add_one=add_one)
    want = elementwise.rms_norm(x, weight, 1e-5, add_one=add_one)
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])
    assert torch.equal(x, before)


@pytest.mark.parametrize("add_one", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 576), (3, 200), (2, 4096)])
def test_the_norm_adds_in_place_first_and_rounds_the_sum(
    rows: int, columns: int, dtype: torch.dtype, normed: bool, add_one: bool
) -> None:
    """What is added may have a norm of its own, as in Gemma."""
    x, delta = wide_rows(rows, columns, dtype), wide_rows(rows, columns, dtype) * 3
    weight, before = torch.randn(2, columns, device=DEVICE).to(dtype)
    summand = elementwise.rms_norm(delta, before, 1e-6, add_one=add_one) if normed else delta
    total = x + summand
    got = fused.rms_norm(
        x, weight, 1e-6, delta, delta_weight=before if normed else None, add_one=add_one
    )
    torch.testing.assert_close(x, total, **(TOLERANCES[dtype] if normed else EXACT))
    want = elementwise.rms_norm(x, weight, 1e-6, add_one=add_one)
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


def test_one_is_added_to_the_weight_before_anything_is_rounded() -> None:
    """A weight of 2^-13 is lost beside 1 in fp16, and the product is rounded once."""
    x = torch.randn(3, 64, device=DEVICE).half()
    weight = torch.full((64,), 2.0**-13, dtype=torch.float16, device=DEVICE)
    wide = x.float()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + 2.0**-13)
    got = fused.rms_norm(x, weight, 1e-6, add_one=True).float()
    assert ((got - exact).abs() <= exact.abs() * 2.0**-11 + 1e-6).all()


def test_the_norm_of_a_small_row_is_computed_in_fp32() -> None:
    x = torch.full((1, 8), 1e-4, dtype=torch.float16, device=DEVICE)  # its square underflows
    got = fused.rms_norm(x, torch.ones_like(x[0]), 0.0)
    torch.testing.assert_close(got, torch.ones_like(got))


@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1536), (3, 520), (2, 33)])
def test_the_gate_equals_torchs(rows: int, columns: int, dtype: torch.dtype, op: str) -> None:
    gate_up = wide_rows(rows, 2 * columns, dtype) * 6
    want = getattr(elementwise, op)(gate_up, deterministic=True)  # torch on every device
    torch.testing.assert_close(getattr(fused, op)(gate_up), want, **TOLERANCES[dtype])


@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
def test_the_gate_of_large_values_is_finite(op: str) -> None:
    gate_up = torch.tensor([[-3e4, 3e4, 1.0, 1.0]], dtype=torch.float16, device=DEVICE)
    assert getattr(fused, op)(gate_up).tolist() == [[0.0, 30000.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 131), (3, 2500)])
def test_capped_logits_equal_torchs(rows: int, columns: int, dtype: torch.dtype) -> None:
    logits = wide_rows(rows, columns, dtype) * 30
    logits[0, :3] = torch.tensor([-6e4, 6e4, 0.0])
    want = elementwise.cap_logits(logits, 30.0, deterministic=True)
    around = torch.full((rows + 1, columns), 7.0, device=DEVICE)
    got = fused.cap_logits(logits, 30.0, around[:rows])
    assert got.data_ptr() == around.data_ptr() and around[rows].eq(7).all()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused.cap_logits(logits, 30.0), want, atol=1e-5, rtol=1e-5)


ROTATIONS = [
    {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16},
    {"heads": 6, "kv_heads": 2, "head_dim": 34, "block_size": 8},
    {"heads": 2, "kv_heads": 2, "head_dim": 80, "block_size": 16},
    {"heads": 3, "kv_heads": 1, "head_dim": 96, "block_size": 16},
    {"heads": 4, "kv_heads": 1, "head_dim": 256, "block_size": 32},
]


@pytest.mark.parametrize(
    ("shape", "dtype", "turned", "norm"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if i % 2 else [])
        for i, case in enumerate(
            (shape, dtype, turned, norm)
            for shape in ROTATIONS
            for turned in (1.0, 0.75, 0.0)
            for norm in ("no norm", "norm", "norm by 1 + weight")
            for dtype in (DTYPES if (turned == 0.75) == (norm == "norm") else DTYPES[::-1])
        )
    ],
)
def test_rotation_and_write_equal_torchs(
    paged: Callable[..., Any], shape: Any, dtype: torch.dtype, turned: float, norm: str
) -> None:
    """The whole head turns, or its first columns, or nothing."""
    case = paged([(5, 4), (0, 3), (9, 1)], dtype=dtype, **shape)
    heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    rows = case.meta.query_starts[-1]
    qkv = wide_rows(rows, (heads + 2 * kv_heads) * head_dim, dtype)
    weights = [(1 + torch.randn(head_dim, device=DEVICE)).to(dtype) for _ in range(2)]
    half = int(head_dim * turned) // 2
    angles = None
    if half:
        positions = torch.arange(3, 3 + rows, device=DEVICE)
        inv_freq = torch.rand(half, device=DEVICE)
        angles = elementwise.angles(positions, inv_freq, 1.25, deterministic=False)
    parts = torch.split(qkv.clone(), [heads * head_dim, *[kv_heads * head_dim] * 2], dim=1)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in parts)
    normed, add_one = norm != "no norm", norm == "norm by 1 + weight"
    if normed:
        q = elementwise.rms_norm(q, weights[0], 1e-6, add_one=add_one)
        k = elementwise.rms_norm(k, weights[1], 1e-6, add_one=add_one)
    if angles is not None:
        q, k = elementwise.rotate(q, *angles), elementwise.rotate(k, *angles)
    want_kv = case.kv.clone()
    reference_write_kv(k.cpu(), v.cpu(), want_kv, case.meta)

    around = torch.full((case.kv.shape[0], 3, *case.kv.shape[1:]), 7.0, dtype=dtype, device=DEVICE)
    around[:, 1] = case.kv
    got = fused_heads.rotate_and_write(
        qkv,
        around[:, 1],
        case.meta.slot_mapping.to(DEVICE),
        angles,
        heads=heads,
        q_weight=weights[0] if normed else None,
        k_weight=weights[1] if normed else None,
        eps=1e-6,
        add_one=add_one,
    )
    for part, want in zip(got, (q, k, v), strict=True):
        torch.testing.assert_close(part, want, **TOLERANCES[dtype])
        assert part.data_ptr() >= qkv.data_ptr() and part.stride(0) == qkv.stride(0)
    torch.testing.assert_close(around[:, 1].cpu(), want_kv, equal_nan=True, **TOLERANCES[dtype])
    assert (around[:, 0] == 7).all() and (around[:, 2] == 7).all()


def test_a_row_without_a_slot_writes_nothing() -> None:
    kv = torch.zeros(3, 2, 8, 1, 16, device=DEVICE)
    qkv = torch.ones(2, 4 * 16, device=DEVICE)
    slots = torch.tensor([-1, 8], device=DEVICE)
    still = torch.ones(2, 1, 8, device=DEVICE), torch.zeros(2, 1, 8, device=DEVICE)
    fused_heads.rotate_and_write(qkv, kv, slots, still, heads=2)
    assert kv[1, :, 0].eq(1).all() and kv.sum() == 32


def test_a_slot_may_lie_beyond_two_to_the_31_elements() -> None:
    """The arena is mapped, and only a few of its pages are ever touched."""
    flat = torch.empty((1 << 31) + (1 << 20), dtype=torch.float16, device=DEVICE)
    kv = flat.as_strided((3, 2, 8, 1, 16), (1 << 30, 128, 16, 16, 1))
    kv[2] = 0
    qkv = torch.ones(1, 3 * 16, dtype=torch.float16, device=DEVICE)
    still = torch.ones(1, 1, 8, device=DEVICE), torch.zeros(1, 1, 8, device=DEVICE)
    fused_heads.rotate_and_write(qkv, kv, torch.tensor([21], device=DEVICE), still, heads=1)
    assert kv[2, :, 5].eq(1).all() and kv[2].sum() == 32

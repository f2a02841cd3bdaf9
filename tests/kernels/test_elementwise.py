"""Norm, rotation and gate."""

import pytest
import torch

from engine.kernels import elementwise
from engine.kernels.gemm import TILE, linear


def test_the_norm_is_cast_back_before_the_weight_product() -> None:
    """As Llama does; with the product in fp32, as Gemma does, bf16 results differ."""
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    got = elementwise.rms_norm(x, weight, 1e-5)
    assert torch.equal(got, weight * normed.bfloat16())
    assert not torch.equal(got, (weight.float() * normed).bfloat16())


def test_a_norm_by_one_plus_its_weight_is_rounded_after_the_product() -> None:
    x, weight = torch.randn(9, 64).bfloat16(), (0.1 * torch.randn(64)).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    got = elementwise.rms_norm(x, weight, 1e-5, add_one=True)
    assert torch.equal(got, (normed * (1 + weight.float())).bfloat16())
    assert not torch.equal(got, (normed * (1 + weight).float()).bfloat16())


def test_the_norm_of_a_small_row_is_computed_in_fp32() -> None:
    x = torch.full((1, 8), 1e-4, dtype=torch.float16)  # its square underflows in fp16
    got = elementwise.rms_norm(x, torch.ones(8, dtype=torch.float16), 0.0)
    torch.testing.assert_close(got, torch.ones_like(got))


def test_rotation_turns_halves_against_each_other() -> None:
    x = torch.tensor([[[1.0, 2.0, 30.0, 40.0]]])
    quarter = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])  # first pair by 90 degrees
    got = elementwise.rotate(x, *quarter)
    assert got.tolist() == [[[-30.0, 2.0, 1.0, 40.0]]]


def test_a_partial_rotation_lets_the_rest_of_the_head_pass() -> None:
    x = torch.tensor([[[1.0, 2.0, 30.0, 40.0, 5.0, 6.0]]])
    quarter = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    got = elementwise.rotate(x, *quarter)
    assert got.tolist() == [[[-30.0, 2.0, 1.0, 40.0, 5.0, 6.0]]]


def test_rotation_of_bf16_rounds_only_its_result() -> None:
    x = torch.randn(5, 3, 16).bfloat16()
    cos, sin = elementwise.angles(torch.arange(5), torch.rand(8), 1.0, deterministic=False)
    exact = elementwise.rotate(x.float(), cos, sin)
    assert torch.equal(elementwise.rotate(x, cos, sin), exact.bfloat16())


def test_magnitude_scales_both_cos_and_sin() -> None:
    positions, inv_freq = torch.tensor([0, 7]), torch.rand(4)
    plain = elementwise.angles(positions, inv_freq, 1.0, deterministic=False)
    scaled = elementwise.angles(positions, inv_freq, 1.5, deterministic=False)
    assert all(torch.equal(s, p * 1.5) for s, p in zip(scaled, plain, strict=True))


def test_the_gate_comes_first() -> None:
    gate_up = torch.tensor([[3.0, 0.0, 2.0, 5.0]])
    got = elementwise.silu_mul(gate_up, deterministic=False)
    torch.testing.assert_close(got, torch.tensor([[6.0 / (1 + torch.e**-3), 0.0]]))


def test_the_tanh_form_of_gelu_is_not_the_exact_one() -> None:
    gate, up = torch.randn(4, 50), torch.randn(4, 50)
    got = elementwise.gelu_mul(torch.cat((gate, up), dim=1), deterministic=False)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    torch.testing.assert_close(got, 0.5 * gate * (1 + tanh) * up)
    assert (got - torch.nn.functional.gelu(gate) * up).abs().max() > 1e-4


def test_capped_logits_are_in_fp32_and_never_beyond_the_cap() -> None:
    logits = torch.tensor([[1e4, -1e4, 30.0, 0.0]]).bfloat16()
    out = torch.empty(1, 4)
    got = elementwise.cap_logits(logits, 30.0, out, deterministic=False)
    assert got is out and got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([[30.0, -30.0, 30 * 0.76159416, 0.0]]))


@pytest.mark.parametrize("width", [7, 33, 520])
def test_deterministic_ops_give_a_row_the_same_bits_in_any_batch(width: int) -> None:
    rows = torch.randn(41, 2 * width)
    weight, bias = torch.randn(19, 2 * width), torch.randn(19)
    positions, inv_freq = torch.arange(0, 4100, 100), torch.rand(width)
    gates = elementwise.silu_mul, elementwise.gelu_mul
    gated = [gate(rows, deterministic=True) for gate in gates]
    capped = elementwise.cap_logits(rows, 2.0, deterministic=True)
    product = linear(rows, weight, bias, deterministic=True)
    turns = elementwise.angles(positions, inv_freq, 1.0, deterministic=True)
    for first in (0, 3, 40):
        some = slice(first, first + 1)
        for gate, together in zip(gates, gated, strict=True):
            assert torch.equal(gate(rows[some], deterministic=True), together[some])
        assert torch.equal(
            elementwise.cap_logits(rows[some], 2.0, deterministic=True), capped[some]
        )
        assert torch.equal(linear(rows[some], weight, bias, deterministic=True), product[some])
        alone = elementwise.angles(positions[some], inv_freq, 1.0, deterministic=True)
        assert all(torch.equal(a, t[some]) for a, t in zip(alone, turns, strict=True))


def test_a_threads_share_may_end_within_a_row() -> None:
    """silu's scalar tail then lies elsewhere in the row than it does for the row alone."""
    torch.set_num_threads(2)
    for _ in range(40):  # the two ways differ in a few values of a hundred
        rows = torch.randn(131, 2 * 519)
        together = elementwise.silu_mul(rows, deterministic=True)
        middle = elementwise.silu_mul(rows[65:66], deterministic=True)
        assert torch.equal(middle, together[65:66])


@pytest.mark.parametrize("rows", [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE])
def test_tiles_of_any_number_of_rows_give_the_plain_product(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(10, 24), torch.randn(10)
    tiled = linear(x, weight, bias, deterministic=True)
    torch.testing.assert_close(tiled, linear(x, weight, bias, deterministic=False))

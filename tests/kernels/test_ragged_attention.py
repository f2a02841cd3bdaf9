"""Attention of packed sequences against the same sums written out row by row."""

import pytest
import torch
from torch import Tensor

from engine.kernels import ragged_attention as module
from engine.kernels.ragged_attention import Ragged, ragged_attention

LENGTHS = (5, 1, 40, 5, 23)


SEEN = (5, 1, 7, 2, 23)


def by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    seen: tuple[int, ...] = LENGTHS,
) -> Tensor:
    out, first = torch.zeros_like(q), 0
    for length, count in zip(LENGTHS, seen, strict=True):
        for i in range(length):
            low, high = (max(0, i - window), min(count, i + window + 1)) if window else (0, count)
            if low >= high:
                continue
            rows = slice(first + low, first + high)
            scores = scale * torch.einsum("hd,khd->hk", q[first + i], k[rows])
            out[first + i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[rows])
        first += length
    return out


def tensors(heads: int = 3, head_dim: int = 10) -> list[Tensor]:
    torch.manual_seed(2)
    return list(torch.randn(3, sum(LENGTHS), heads, head_dim))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 22, 39, 100])
def test_each_row_sees_its_own_sequence_within_the_window(
    monkeypatch: pytest.MonkeyPatch, window: int, deterministic: bool
) -> None:
    monkeypatch.setattr(module, "STRIP", 7)
    q, k, v = tensors()
    got = ragged_attention(
        q, k, v, Ragged(LENGTHS), scale=0.4, window=window, deterministic=deterministic
    )
    torch.testing.assert_close(got, by_rows(q, k, v, 0.4, window), atol=1e-5, rtol=1e-5)


def test_deterministic_rows_keep_their_bits_beside_others() -> None:
    q, k, v = tensors()
    all_of_them = ragged_attention(q, k, v, Ragged(LENGTHS), scale=0.4, deterministic=True)
    last = slice(51, 74)
    alone = ragged_attention(q[last], k[last], v[last], Ragged((23,)), scale=0.4)
    assert torch.equal(all_of_them[last], alone)


def test_sequences_of_one_length_are_found_wherever_they_lie() -> None:
    ragged = Ragged(LENGTHS)
    assert ragged.starts == (0, 5, 6, 46, 51, 74)
    assert ragged.groups == ((1, (5,)), (5, (0, 46)), (23, (51,)), (40, (6,)))
    assert ragged.on_device.tolist() == list(ragged.starts)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [0, 4, 39])
def test_rows_that_nobody_sees_see_the_others(window: int, deterministic: bool) -> None:
    """One that has none of the others in its window gets nothing."""
    q, k, v = tensors()
    ragged = Ragged(LENGTHS, seen=SEEN)
    assert ragged.half_seen == ((6, 40, 7), (46, 5, 2))
    got = ragged_attention(q, k, v, ragged, scale=0.4, window=window, deterministic=deterministic)
    torch.testing.assert_close(got, by_rows(q, k, v, 0.4, window, SEEN), atol=1e-5, rtol=1e-5)
    assert bool((got[6 + 12 : 46] == 0).all()) == (window == 4)


@pytest.mark.gpu
@pytest.mark.parametrize("seen", [LENGTHS, SEEN])
@pytest.mark.parametrize("window", [0, 4])
def test_the_cards_kernel_computes_the_same(window: int, seen: tuple[int, ...]) -> None:
    q, k, v = (x.bfloat16() for x in tensors(head_dim=32))
    expected = by_rows(q.float(), k.float(), v.float(), 0.4, window, seen)
    device = torch.device("cuda")
    ragged = Ragged(LENGTHS, device, seen=None if seen == LENGTHS else seen)
    got = ragged_attention(*(x.to(device) for x in (q, k, v)), ragged, scale=0.4, window=window)
    torch.testing.assert_close(got.cpu().float(), expected, atol=2e-2, rtol=2e-2)

"""LoRA at the model's ends, from pieces of folded rows, against the plain formulas."""

import pytest
import torch

from engine.kernels.lora_ends import (
    add_embedding,
    add_head,
    replace_embedding,
    replace_head,
    unfolded,
)
from engine.kernels.lora_meta import LoraRows

RANK, HIDDEN = 5, 24


def cut(rows: torch.Tensor, folds: int, *borders: int) -> tuple[torch.Tensor, ...]:
    """(n, width) as pieces of rows that are folded and padded as the packer does it."""
    width = -(-rows.shape[1] // folds)
    padded = torch.nn.functional.pad(rows, (0, folds * width - rows.shape[1]), value=torch.nan)
    return torch.tensor_split(padded.reshape(-1, width), borders)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("bias", "gain"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("folds", "borders"), [(1, ()), (1, (2,)), (3, ()), (3, (4, 8)), (2, (1, 3, 9)), (4, (2, 5))]
)
def test_a_head_is_corrected_whatever_the_places_of_its_rows(
    folds: int, borders: tuple[int, ...], bias: bool, gain: bool, deterministic: bool
) -> None:
    vocab = 37
    rows = torch.randn(RANK + bias + 2 * gain, vocab)
    a = torch.randn(RANK, HIDDEN)
    pair = LoraRows(0.7, RANK, cut(a, 1, 2), cut(rows, folds, *borders), bias, gain)
    x, y = torch.randn(19, HIDDEN), torch.randn(19, vocab)
    wanted = y + 0.7 * (x @ a.T @ rows[:RANK])
    if bias:
        wanted += 0.7 * rows[RANK]
    if gain:
        wanted *= rows[-2] + rows[-1]
    add_head(y, x, pair, deterministic=deterministic)
    assert torch.allclose(y, wanted, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("folds", "borders"), [(1, ()), (1, (2,)), (3, ()), (3, (4, 8)), (2, (1, 3, 9)), (4, (2, 5))]
)
def test_an_embedding_is_corrected_whatever_the_places_of_its_rows(
    folds: int, borders: tuple[int, ...], deterministic: bool
) -> None:
    a, b, x = torch.randn(RANK, 37), torch.randn(RANK, HIDDEN), torch.randn(19, HIDDEN)
    tokens = torch.tensor([0, 36, 9, 10, 18, 19, 12, 13, 24, 25, 26, 27, 9, 36, 1, 2, 3, 4, 5])
    pair = LoraRows(0.7, RANK, cut(a, folds, *borders), cut(b, 1, 3))
    wanted = x + 3.0 * 0.7 * (a[:, tokens].T @ b)
    add_embedding(x, tokens, pair, 37, 3.0, deterministic=deterministic)
    assert torch.allclose(x, wanted, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("ids", [None, [0, 2, 17, 30, 36]])
def test_rows_of_an_adapters_own_replace_the_bases_and_no_others(
    ids: list[int] | None, deterministic: bool
) -> None:
    """They lie in two blocks of one arena, the second ahead of the first, each row on a border."""
    base, x = torch.randn(37, HIDDEN), torch.randn(19, HIDDEN)
    count = 37 if ids is None else len(ids)
    own, arena = torch.randn(count, HIDDEN), torch.full((80, HIDDEN + 8), torch.nan)
    pieces = arena[50 : 50 + 3, :HIDDEN], arena[4 : 4 + count - 3, :HIDDEN]
    for piece, rows in zip(pieces, own.split((3, count - 3)), strict=True):
        piece.copy_(rows)
    stride = HIDDEN + 8
    places = torch.cat([p.storage_offset() + stride * torch.arange(len(p)) for p in pieces])
    own_ids = None if ids is None else torch.tensor(ids)
    rows = LoraRows(1.0, count, pieces, (), ids=own_ids, places=places)
    changed = base.clone()
    changed[slice(None) if ids is None else ids] = own
    tokens = torch.tensor([0, 36, 9, 10, 18, 19, 12, 13, 24, 25, 26, 27, 9, 36, 1, 2, 30, 17, 5])
    embedded, logits = 3.0 * base[tokens], x @ base.T
    before = logits.clone()
    replace_embedding(embedded, tokens, rows, 3.0)
    replace_head(logits, x, rows, deterministic=deterministic)
    assert torch.equal(embedded, 3.0 * changed[tokens])
    assert torch.allclose(logits, x @ changed.T, atol=1e-5)
    if ids is not None:
        others = [i for i in range(37) if i not in ids]
        assert torch.equal(logits[:, others], before[:, others])


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it_where_that_is_wanted() -> None:
    pair = LoraRows(1.0, RANK, (torch.randn(RANK, HIDDEN),), cut(torch.randn(RANK, 37), 2, 3))
    x, y = torch.randn(40, HIDDEN), torch.randn(40, 37)
    alone, together = y[7:8].clone(), y.clone()
    add_head(alone, x[7:8], pair, deterministic=True)
    add_head(together, x, pair, deterministic=True)
    assert torch.equal(alone[0], together[7])


def test_rows_of_one_piece_are_read_where_they_lie() -> None:
    rows = torch.randn(4, 30)
    assert unfolded((rows,), 30).data_ptr() == rows.data_ptr()
    assert torch.equal(unfolded(cut(rows, 4, 3, 7), 30), rows)

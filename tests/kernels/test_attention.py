"""The attention ops against the reference."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.kernels.attention import paged_attention, write_kv
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.reference import reference_attention, reference_write_kv

Paged = Callable[..., Any]

BATCHES: list[Sequence[tuple[int, int]]] = [
    [(0, 1)],
    [(0, 23)],
    [(8, 8)],
    [(13, 9)],
    [(16, 1), (7, 1), (0, 1), (8, 1)],
    [(7, 1), (15, 1)],
    [(300, 1), (3, 1), (5, 1), (90, 1), (0, 1)],  # too uneven to be padded together
    [(40, 1), (0, 17), (12, 5), (0, 1), (77, 1), (31, 40)],
]
WINDOWS = [0, 1, 5, 16, 1000]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_equals_the_reference(
    paged: Paged, batch: Sequence[tuple[int, int]], window: int, deterministic: bool
) -> None:
    case = paged(batch)
    expected = reference_attention(case.q, case.kv, case.meta, scale=0.3, window=window)
    got = paged_attention(
        case.q, case.kv, case.meta, scale=0.3, window=window, deterministic=deterministic
    )
    assert got.shape == case.q.shape
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16},
        {"heads": 4, "kv_heads": 4, "head_dim": 6, "block_size": 32},
        {"heads": 8, "kv_heads": 1, "head_dim": 10, "block_size": 64},
    ],
)
def test_attention_equals_the_reference_in_other_shapes(
    paged: Paged, shape: dict[str, int], deterministic: bool
) -> None:
    case = paged(BATCHES[-1], **shape)
    expected = reference_attention(case.q, case.kv, case.meta, scale=0.2, window=7)
    got = paged_attention(
        case.q, case.kv, case.meta, scale=0.2, window=7, deterministic=deterministic
    )
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("batch", [[(16, 1)], [(0, 23)], *BATCHES[-2:]])
def test_capped_scores_equal_the_reference(
    paged: Paged, batch: Sequence[tuple[int, int]], window: int, deterministic: bool
) -> None:
    case = paged(batch)
    how = {"scale": 0.3, "window": window, "softcap": 0.7}
    got = paged_attention(case.q, case.kv, case.meta, deterministic=deterministic, **how)
    expected = reference_attention(case.q, case.kv, case.meta, **how)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_in_bf16_is_within_its_rounding(paged: Paged, deterministic: bool) -> None:
    case = paged(BATCHES[-1], dtype=torch.bfloat16)
    expected = reference_attention(case.q, case.kv, case.meta, scale=0.3, window=0)
    got = paged_attention(
        case.q, case.kv, case.meta, scale=0.3, window=0, deterministic=deterministic
    )
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_a_window_counts_the_row_itself(paged: Paged) -> None:
    case = paged([(10, 1)])
    block, offset = divmod(int(case.meta.slot_mapping[0]), case.meta.block_size)
    own = case.kv[block, 1, offset].repeat_interleave(3, dim=0)  # (heads, head_dim)
    for deterministic in (False, True):
        got = paged_attention(
            case.q, case.kv, case.meta, scale=1.0, window=1, deterministic=deterministic
        )
        torch.testing.assert_close(got[0], own)


def test_write_puts_every_row_where_the_reference_does(paged: Paged) -> None:
    case = paged([(5, 4), (0, 17)])
    k, v = torch.randn(21, 2, 24), torch.randn(21, 2, 24)
    expected = case.kv.clone()
    reference_write_kv(k, v, expected, case.meta)
    write_kv(k, v, case.kv, case.meta)
    written = case.meta.slot_mapping // 8, case.meta.slot_mapping % 8
    assert torch.equal(case.kv[written[0], :, written[1]], expected[written[0], :, written[1]])


def test_write_leaves_the_blocks_of_others_as_they_are(paged: Paged) -> None:
    case = paged([(5, 4), (0, 17)])
    before = case.kv.clone()
    rows = torch.randn(21, 2, 24)
    write_kv(rows, rows, case.kv, case.meta)
    others = [b for b in range(case.kv.shape[0]) if b not in case.meta.block_tables.unique()]
    same = torch.equal(case.kv[others].nan_to_num(7.0), before[others].nan_to_num(7.0))
    assert others and same


def test_a_row_sees_nothing_of_a_blocks_last_owner(paged: Paged) -> None:
    """The arena is poisoned with NaN: one that is read anywhere would show."""
    case = paged([(0, 3), (9, 1), (0, 12), (64, 1)])
    for window in WINDOWS:
        for deterministic in (False, True):
            got = paged_attention(
                case.q, case.kv, case.meta, scale=0.3, window=window, deterministic=deterministic
            )
            assert got.isfinite().all()


def test_a_block_opened_by_one_step_keeps_its_rows_in_the_next() -> None:
    kv = torch.full((4, 2, 8, 1, 4), torch.nan)
    tables = torch.tensor([[2, 3]], dtype=torch.int32)
    rows = torch.randn(11, 1, 4)
    for position in range(11):
        slot = int(tables[0, position // 8]) * 8 + position % 8
        meta = AttentionMeta((0, 1), (position + 1,), torch.tensor([slot]), tables, 8)
        write_kv(rows[position : position + 1], rows[position : position + 1], kv, meta)
    assert torch.equal(torch.cat((kv[2, 0], kv[3, 0, :3])), rows)


def test_what_is_derived_from_a_meta_is_made_once_for_all_layers(paged: Paged) -> None:
    case = paged([(5, 1), (0, 4)])
    for _ in range(3):
        paged_attention(case.q, case.kv, case.meta, scale=0.3, window=4, deterministic=False)
    kept = dict(case.meta.derived)
    paged_attention(case.q, case.kv, case.meta, scale=0.3, window=4, deterministic=False)
    assert all(case.meta.derived[key] is value for key, value in kept.items())
    assert set(kept) == {"write", 4}


def test_sixty_four_decodes_are_one_product_a_layer(
    paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = paged([(20 + i % 7, 1) for i in range(64)] + [(0, 9)])
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args) or sdpa(*args, **kwargs),
    )
    paged_attention(case.q, case.kv, case.meta, scale=0.3, window=0, deterministic=False)
    assert len(calls) == 2  # all decodes, and the chunk


def test_fixed_attention_gives_a_row_the_same_bits_however_it_comes(paged: Paged) -> None:
    case = paged([(100, 1), (0, 150), (63, 1)], head_dim=64, block_size=16)
    tables, lens = case.meta.block_tables, case.meta.seq_lens

    def attend(s: int, first: int, last: int) -> torch.Tensor:
        """Rows first..last of sequence s alone, whose K and V are already written."""
        offset = case.meta.query_starts[s + 1] - lens[s]
        meta = AttentionMeta((0, last - first), (last,), torch.empty(0), tables[s : s + 1], 16)
        q = case.q[offset + first : offset + last]
        return paged_attention(q, case.kv, meta, scale=0.1, window=window, deterministic=True)

    for window in (0, 40):
        together = paged_attention(
            case.q, case.kv, case.meta, scale=0.1, window=window, deterministic=True
        )
        parts = [attend(0, 100, 101)]
        parts += [attend(1, a, b) for a, b in [(0, 1), (1, 18), (18, 64), (64, 149), (149, 150)]]
        parts += [attend(2, 63, 64)]
        assert torch.equal(torch.cat(parts), together)

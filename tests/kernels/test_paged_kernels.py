"""The attention kernels against the reference: on a card, or on Triton's interpreter."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are imported

from engine.kernels import attention_device, backend
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_tiles import (
    DecodeTiles,
    PrefillTiles,
    decode_bytes,
    decode_tiles,
    prefill_bytes,
    prefill_tiles,
)
from engine.kernels.decode_plan import plan_decode
from engine.kernels.paged_decode import decode_attention
from engine.kernels.paged_prefill import prefill_attention
from engine.kernels.prefill_plan import plan_prefill
from engine.kernels.reference import reference_attention

Paged = Callable[..., Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = DecodeTiles(keys=16, programs_per_sm=4, least=1)
SMALL = PrefillTiles(rows=16, keys=16, warps=4, stages=2, least=2)
TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-4},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def poisoned(case: Any) -> Any:
    """NaN in every place that no sequence has written, those inside its own blocks too."""
    written = torch.zeros(case.kv.shape[0], case.kv.shape[2], dtype=torch.bool)
    for s, length in enumerate(case.meta.seq_lens):
        for position in range(length):
            block = case.meta.block_tables[s, position // case.meta.block_size]
            written[block, position % case.meta.block_size] = True
    case.kv.masked_fill_(~written[:, None, :, None, None], torch.nan)
    return case


def on_device(case: Any) -> tuple[Tensor, Tensor, AttentionMeta]:
    """The case where the kernels run, with q as the engine has it: a part of wider rows."""
    rows, heads, head_dim = case.q.shape
    wide = torch.full((rows, (heads + 2) * head_dim), torch.nan, dtype=case.q.dtype, device=DEVICE)
    q = wide[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    q.copy_(case.q)
    arena = torch.full(
        (case.kv.shape[0], 3, *case.kv.shape[1:]), torch.nan, dtype=case.kv.dtype, device=DEVICE
    )
    kv = arena[:, 1]
    kv.copy_(case.kv)
    meta = replace(
        case.meta,
        slot_mapping=case.meta.slot_mapping.to(DEVICE),
        block_tables=case.meta.block_tables.to(DEVICE),
        derived={},
    )
    return q, kv, meta


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decode(case: Any, *, window: int = 0, softcap: float = 0.0, tiles: DecodeTiles = TILES) -> Any:
    q, kv, meta = on_device(case)
    lens = ints(meta.seq_lens)
    plan = plan_decode(lens, None, heads=q.shape[1], kv=kv, window=window, tiles=tiles)
    for settled in (False, True) if DEVICE == "cuda" else (False,):  # as layers do
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
        decode_attention(
            q,
            kv,
            meta.block_tables,
            plan,
            out,
            settled=settled,
            scale=0.3,
            softcap=softcap,
        )
    return out.cpu(), plan


def prefill(case: Any, *, window: int = 0, softcap: float = 0.0, tiles: Any = SMALL) -> Tensor:
    q, kv, meta = on_device(case)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
    lens, starts = ints(meta.seq_lens), ints(meta.query_starts)
    heads = q.shape[1]
    plan = plan_prefill(
        lens, starts, num_rows=q.shape[0], heads=heads, kv=kv, window=window, tiles=tiles
    )
    prefill_attention(q, kv, meta.block_tables, lens, starts, plan, out, scale=0.3, softcap=softcap)
    return out.cpu()


def expected(case: Any, *, window: int = 0, softcap: float = 0.0) -> Tensor:
    return reference_attention(
        case.q, case.kv, case.meta, scale=0.3, window=window, softcap=softcap
    )


SINGLES = [(0, 1), (15, 1), (16, 1), (40, 1), (100, 1)]
MIXED = [(16, 1), (0, 17), (12, 5), (0, 1), (37, 1), (31, 20)]
SHAPES = [
    {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16},
    {"heads": 2, "kv_heads": 2, "head_dim": 80, "block_size": 8},
    {"heads": 4, "kv_heads": 1, "head_dim": 96, "block_size": 32},
    {"heads": 4, "kv_heads": 1, "head_dim": 128, "block_size": 16},
    {"heads": 2, "kv_heads": 1, "head_dim": 256, "block_size": 64},
    {"heads": 6, "kv_heads": 2, "head_dim": 34, "block_size": 16},
    {"heads": 17, "kv_heads": 1, "head_dim": 16, "block_size": 8},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_equals_the_reference(paged: Paged, shape: Any, dtype: torch.dtype) -> None:
    case = poisoned(paged(SINGLES[-3:], dtype=dtype, **shape))
    got, _ = decode(case)
    torch.testing.assert_close(got, expected(case), **TOLERANCES[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 33, 1000])
def test_decode_sees_the_window_alone(paged: Paged, window: int) -> None:
    case = poisoned(paged(SINGLES))
    got, plan = decode(case, window=window)
    torch.testing.assert_close(got, expected(case, window=window), **TOLERANCES[torch.float32])
    items = plan.items[plan.items[:, 1] >= 0]
    for s, (context, _) in enumerate(SINGLES):
        read = items[items[:, 0] == s]
        first = max(0, context + 1 - window) // 16 * 16
        assert (int(read[:, 2].min()), int(read[:, 3].max())) == (first, context + 1)
        assert int((read[:, 3] - read[:, 2]).sum()) == context + 1 - first


@pytest.mark.parametrize("batch", [[(70, 1)], [(0, 1)], SINGLES[:2], SINGLES])
def test_decode_with_capped_scores(paged: Paged, batch: Any) -> None:
    case = poisoned(paged(batch))
    got, _ = decode(case, softcap=0.7)
    torch.testing.assert_close(got, expected(case, softcap=0.7), **TOLERANCES[torch.float32])


def pieces_of(plan: Any) -> list[list[int]]:
    """Tiles of each sequence's pieces, and the check that the longest items come first."""
    items = [item for item in plan.items.tolist() if item[1] >= 0]
    found: dict[int, list[int]] = {}
    for seq, _, begin, stop, *_ in items:
        found.setdefault(seq, []).append(-(-(stop - begin) // plan.tiles.keys))
    sizes = [found[item[0]][0] for item in items]
    assert sizes == sorted(sizes, reverse=True)
    return [found[s] for s in sorted(found)]


CUTS = [
    (1, 1, 9, [[7, 7, 6], [1], [3], [1]]),  # a fair share of 4 programs is 6.25 tiles
    (1, 1, 13, [[20], [1], [3], [1]]),
    (4, 1, 9, [[2] * 10, [1], [3], [1]]),
    (4, 3, 9, [[4, 4, 4, 4, 4], [1], [3], [1]]),
    (10, 1, 4, [[1] * 20, [1], [1, 1, 1], [1]]),
]


@pytest.mark.parametrize(
    ("programs", "least", "whole", "want", "apart", "turns"),
    [
        pytest.param(*cut, apart, turns, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
        for i, cut in enumerate(CUTS)
        for j, apart in enumerate([0, 8])
        for k, turns in enumerate([False, True])
    ],
)
def test_a_sequence_is_cut_if_it_is_much_longer_than_a_fair_share(
    paged: Paged, programs: int, least: int, whole: int, want: Any, apart: int, turns: bool
) -> None:
    """And its pieces are put together behind the kernel, or by whoever of them ends last."""
    case = poisoned(paged([(310, 1), (3, 1), (40, 1), (15, 1)], heads=3, kv_heads=1))
    tiles = TILES._replace(
        programs_per_sm=programs, least=least, whole=whole, apart=apart, turns=turns
    )
    got, plan = decode(case, tiles=tiles)
    torch.testing.assert_close(got, expected(case), **TOLERANCES[torch.float32])
    assert plan.apart == (apart == 8)
    if DEVICE == "cpu":
        assert pieces_of(plan) == want


def test_whoever_comes_last_puts_the_same_bits_together(paged: Paged) -> None:
    """Programs that count on from another number let another one be the last to come."""
    case = poisoned(paged([(310, 1), (3, 1), (170, 1)]))
    q, kv, meta = on_device(case)
    tiles = TILES._replace(apart=0, whole=4)
    plan = plan_decode(ints(meta.seq_lens), None, heads=6, kv=kv, tiles=tiles)

    def run() -> Tensor:
        out = torch.full(q.shape, torch.nan, device=DEVICE)
        decode_attention(q, kv, meta.block_tables, plan, out, scale=0.3)
        return out

    first = run()
    cut = plan.sequences[[0, 2]]
    pieces = plan.arrived[cut[:, 1].long(), 0].tolist()
    assert pieces == cut[:, 2].tolist() and min(pieces) > 1
    for _ in range(1, max(pieces)):
        plan.arrived.add_(1)  # the pieces of the run before are still there, and are the same
        assert torch.equal(run(), first)


def test_padding_sequences_give_zeros_and_take_no_tiles(paged: Paged) -> None:
    case = poisoned(paged(SINGLES))
    lens = [0, *case.meta.seq_lens[1:4], 0]
    meta = replace(case.meta, seq_lens=tuple(lens))
    want = expected(case)
    want[[0, 4]] = 0
    case.meta = meta
    got, plan = decode(case)
    torch.testing.assert_close(got, want, **TOLERANCES[torch.float32])
    items = [item for item in plan.items.tolist() if item[1] >= 0]
    assert [item[0] for item in items if item[3] == 0] == [0, 4]


def test_a_step_of_padding_alone_is_zeros(paged: Paged) -> None:
    case = paged([(5, 1), (9, 1)])
    case.meta = replace(case.meta, seq_lens=(0, 0))
    got, plan = decode(case)
    assert not got.any() and not plan.items[:, 3].any()


def test_three_hundred_sequences_are_planned_in_several_looks() -> None:
    lens = torch.randint(0, 90, (300,)).tolist()
    kv = torch.empty(1, 2, 16, 1, 16, device=DEVICE)
    plan = plan_decode(ints(lens), None, heads=1, kv=kv, tiles=TILES)
    sizes = [-(-n // 16) for n in lens]
    order = sorted(range(300), key=lambda s: (-sizes[s], s))
    assert plan.items[:300, 0].tolist() == order
    assert plan.items[:300, 3].tolist() == [lens[s] for s in order]
    assert (plan.items[300:, 1] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_equals_the_reference(paged: Paged, shape: Any, dtype: torch.dtype) -> None:
    case = poisoned(paged([(0, 1), (0, 19), (21, 6)], dtype=dtype, **shape))
    tiles = SMALL._replace(rows=32 if shape["heads"] == 17 else 16)
    torch.testing.assert_close(prefill(case, tiles=tiles), expected(case), **TOLERANCES[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
def test_prefill_sees_the_window_alone(paged: Paged, window: int) -> None:
    case = poisoned(paged(MIXED, head_dim=16))
    want = expected(case, window=window)
    torch.testing.assert_close(prefill(case, window=window), want, **TOLERANCES[torch.float32])


def test_prefill_with_capped_scores_and_other_tiles(paged: Paged) -> None:
    case = poisoned(paged(MIXED, head_dim=16))
    want = expected(case, softcap=0.7)
    for tiles in (SMALL, SMALL._replace(rows=64, keys=32)):
        got = prefill(case, softcap=0.7, tiles=tiles)
        torch.testing.assert_close(got, want, **TOLERANCES[torch.float32])


@pytest.mark.parametrize(
    ("window", "least"),
    [
        (0, 1),
        (0, 100),
        (60, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 3), (60, 1), (60, 100)]),
    ],
)
def test_a_chunk_behind_a_long_prefix_is_cut_into_pieces(
    paged: Paged, window: int, least: int
) -> None:
    """And whoever of them comes last puts the same bits together."""
    case = poisoned(paged([(200, 3), (3, 2), (130, 5)], heads=2, kv_heads=1))
    q, kv, meta = on_device(case)
    lens, starts = ints(meta.seq_lens), ints(meta.query_starts)
    tiles = SMALL._replace(programs_per_sm=4, least=least)
    plan = plan_prefill(lens, starts, num_rows=10, heads=2, kv=kv, window=window, tiles=tiles)

    def run() -> Tensor:
        out = torch.full(q.shape, torch.nan, device=DEVICE)
        prefill_attention(q, kv, meta.block_tables, lens, starts, plan, out, scale=0.3)
        return out

    first = run()
    want = expected(case, window=window)
    torch.testing.assert_close(first.cpu(), want, **TOLERANCES[torch.float32])
    if DEVICE == "cpu":
        assert plan.items[:4].tolist() == [[3, 5], [0, 0], [1, 0], [2, 0]]  # 16 programs at once
        tiles_of = (5, 5) if window else (13, 9)
        pieces = [max(1, min(5, n // least)) for n in tiles_of]
        assert plan.arrived[[0, 2], 0].tolist() == [n if n > 1 else 0 for n in pieces]
    for _ in range(4):
        plan.arrived.add_(1)  # the pieces of the run before are still there, and are the same
        assert torch.equal(run(), first)


def as_captured(meta: AttentionMeta, *, seqs: int, rows: int) -> AttentionMeta:
    """What a graph of `seqs` sequences knows of a step; padding sequences stand at `rows`."""
    more = seqs - len(meta.seq_lens)
    return replace(
        meta,
        query_starts=(),
        seq_lens=(),
        block_tables=torch.nn.functional.pad(meta.block_tables, (0, 1, 0, more)),
        seq_lens_device=ints([*meta.seq_lens, *[0] * more]),
        query_starts_device=ints([*meta.query_starts, *[rows] * more]),
        derived={},
    )


@pytest.mark.parametrize(
    ("deterministic", "seqs"),
    [
        (False, 0),
        (False, 8),
        (True, 64),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(True, 0), (True, 8), (False, 64)]
        ),
    ],
)
def test_a_mixed_step_equals_the_reference(paged: Paged, seqs: int, deterministic: bool) -> None:
    """With the host's tuples, or with the device's alone and padding behind rows and sequences."""
    case = poisoned(paged(MIXED, head_dim=16))
    q, kv, meta = on_device(case)
    rows = q.shape[0]
    if seqs:
        meta, q = as_captured(meta, seqs=seqs, rows=rows), torch.cat((q, q[:5]))
    for _ in range(2):  # layers
        got = attention_device.device_attention(
            q, kv, meta, scale=0.3, window=7, deterministic=deterministic
        )
    want = expected(case, window=7)
    torch.testing.assert_close(got[:rows].cpu(), want, **TOLERANCES[torch.float32])


def test_a_captured_step_of_chunks_alone_or_of_nothing_harms_nobody(paged: Paged) -> None:
    """A graph launches both kernels, whatever its rows turn out to be."""
    case = poisoned(paged([(0, 9), (12, 5)], head_dim=16))
    q, kv, meta = on_device(case)
    captured = as_captured(meta, seqs=5, rows=14)
    got = attention_device.device_attention(q, kv, captured, scale=0.3, window=0)
    torch.testing.assert_close(got.cpu(), expected(case), **TOLERANCES[torch.float32])
    nothing = replace(
        captured, seq_lens_device=ints([0] * 5), query_starts_device=ints([0] * 6), derived={}
    )
    again = attention_device.device_attention(q, kv, nothing, scale=0.3, window=0)
    assert again.shape == q.shape


def test_a_step_of_single_rows_launches_no_prefill(
    paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = poisoned(paged(SINGLES, head_dim=16))
    q, kv, meta = on_device(case)
    monkeypatch.delattr(attention_device, "prefill_attention")
    got = attention_device.device_attention(q, kv, meta, scale=0.3, window=0)
    torch.testing.assert_close(got.cpu(), expected(case), **TOLERANCES[torch.float32])


def test_a_step_of_chunks_launches_no_decode(paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    case = poisoned(paged([(0, 5), (9, 2)], head_dim=16))
    q, kv, meta = on_device(case)
    monkeypatch.delattr(attention_device, "plan_decode")
    got = attention_device.device_attention(q, kv, meta, scale=0.3, window=0)
    torch.testing.assert_close(got.cpu(), expected(case), **TOLERANCES[torch.float32])


def through_sdpa(monkeypatch: pytest.MonkeyPatch, *, rows: int, step: int) -> None:
    """What cuDNN does on a card, by any means, for prompts of `rows` rows or more."""
    monkeypatch.setattr(attention_device, "fits_sdpa", lambda *_: True)
    monkeypatch.setattr(attention_device, "SDPA_ROWS", rows)
    monkeypatch.setattr(attention_device, "SDPA_STEP", step)
    monkeypatch.setattr(attention_device, "_SDPA", [torch.nn.attention.SDPBackend.MATH])


def test_a_long_uncached_prompt_goes_through_sdpa_beside_others(
    paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys in the arena are not even looked at."""
    through_sdpa(monkeypatch, rows=20, step=8)
    case = poisoned(paged([(8, 1), (0, 24), (0, 6), (3, 24), (0, 25)], head_dim=16))
    want = expected(case)
    q, kv, meta = on_device(case)
    k = torch.full((q.shape[0], *kv.shape[3:]), torch.nan, device=DEVICE)
    v = torch.full_like(k, torch.nan)
    for position in range(24):
        block = meta.block_tables[1, position // 8]
        k[1 + position], v[1 + position] = kv[block, :, position % 8]
    kv[meta.block_tables[1, :3].long()] = torch.nan
    got = attention_device.device_attention(q, kv, meta, scale=0.3, window=0, fresh=(k, v))
    torch.testing.assert_close(got.cpu(), want, **TOLERANCES[torch.float32])


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float16), (40, torch.float32)])
def test_the_fixed_way_gives_a_row_the_same_bits_however_it_comes(
    paged: Paged, window: int, dtype: torch.dtype
) -> None:
    """Alone, in a batch, in chunks cut anywhere, behind a cached prefix, decoded one by one."""
    case = poisoned(paged([(70, 1), (0, 68), (37, 4)], head_dim=64, block_size=16, dtype=dtype))
    q, kv, meta = on_device(case)

    def attend(rows: Tensor, meta: AttentionMeta) -> Tensor:
        return attention_device.device_attention(
            rows, kv, replace(meta, derived={}), scale=0.1, window=window, deterministic=True
        )

    def part(s: int, first: int, last: int) -> Tensor:
        """Rows first..last of sequence s alone, whose K and V are already written."""
        place = meta.query_starts[s + 1] - meta.seq_lens[s]
        tables = meta.block_tables[s : s + 1]
        alone = replace(meta, query_starts=(0, last - first), seq_lens=(last,), block_tables=tables)
        return attend(q[place + first : place + last], alone)

    together = attend(q, meta)
    want = reference_attention(case.q, case.kv, case.meta, scale=0.1, window=window)
    torch.testing.assert_close(together.cpu(), want, **TOLERANCES[dtype])
    cuts = [(0, 70, 71)]
    cuts += [(1, a, b) for a, b in [(0, 1), (1, 18), (18, 63), (63, 64), (64, 68)]]
    cuts += [(2, 37, 38), (2, 38, 41)]
    assert torch.equal(torch.cat([part(*cut) for cut in cuts]), together)


def test_offsets_beyond_two_to_the_31_elements(paged: Paged) -> None:
    """The arena is mapped, and only a few of its pages are ever touched."""
    case = paged([(20, 1), (3, 6)], head_dim=16, block_size=8)
    blocks, half = case.kv.shape[0], case.kv[0, 0].numel()
    stride = (1 << 31) // (blocks - 2)
    flat = torch.empty(stride * blocks, dtype=torch.float16, device=DEVICE)
    far = flat.as_strided(case.kv.shape, (stride, half, *case.kv.stride()[2:]))
    tables = blocks - 1 - case.meta.block_tables  # the reference's first block comes last here
    for b in range(blocks):
        far[blocks - 1 - b].copy_(case.kv[b])
    lens, starts = ints(case.meta.seq_lens), ints(case.meta.query_starts)
    q = case.q.half().to(DEVICE)
    tables = tables.to(DEVICE)
    out = torch.empty_like(q)
    single = plan_decode(lens, starts, heads=6, kv=far, tiles=TILES)
    decode_attention(q, far, tables, single, out, scale=0.3)
    chunk = plan_prefill(lens, starts, num_rows=7, heads=6, kv=far, singles=False, tiles=SMALL)
    prefill_attention(q, far, tables, lens, starts, chunk, out, scale=0.3)
    torch.testing.assert_close(out.cpu().float(), expected(case), **TOLERANCES[torch.float16])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_tiles_fit_the_shared_memory_of_small_and_large_cards(head_dim: int, itemsize: int) -> None:
    for shared in (99 << 10, 163 << 10, 227 << 10):
        for group in (1, 4, 8):
            tile = decode_tiles(group, head_dim, itemsize, shared)
            needed = decode_bytes(tile, group, head_dim, itemsize)
            assert tile.programs_per_sm >= 1 and tile.programs_per_sm * needed <= shared
        for rows, group in ((1, 1), (64, 3), (512, 8), (2048, 4), (2048, 71)):
            chunk = prefill_tiles(rows, group, head_dim, itemsize, shared)
            assert chunk.rows >= group and chunk.keys >= 16
            if group <= 8:
                assert prefill_bytes(chunk, head_dim, itemsize) <= shared


def test_a_tensor_on_the_cpu_keeps_to_torch() -> None:
    assert not backend.use_kernels(torch.zeros(1))

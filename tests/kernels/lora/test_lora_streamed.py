"""Runs of A and B that lie in one block or across several, placed by what their entry says."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.kernels import lora_expand
from engine.kernels import tiles as choices
from engine.kernels.lora_joint import begin, joined
from engine.kernels.lora_meta import Segment
from engine.kernels.tiles import Tiles

Make = Callable[..., Any]
Rows = Callable[[Sequence[tuple[int, int]]], tuple[list[Segment], int]]

#: Of slots 0 to 5: below a tile of 16, one, and several of them.
RANKS = (8, 64, 33, 16, 100, 1)


def small(tiles: Tiles) -> Tiles:
    """The tiles with small sizes, so that rows of the pool's shapes are several of them."""
    shrink = tiles.shrink._replace(chunk=64, wide_chunk=64, streamed=True)
    return tiles._replace(shrink=shrink, expand=tiles.expand._replace(columns=64, streamed=True))


@pytest.mark.parametrize(
    ("tiles", "dtype", "block_rows", "streamed"),
    [
        (choices.ALONE_WIDE, torch.float16, 70, True),
        (choices.ALONE_WIDE, torch.float32, 17, True),
        (choices.FEW_WIDE, torch.float16, 40, True),
        (choices.ALONE_WIDE, torch.float16, 12, False),
        (choices.ALONE_WIDE, torch.float16, 6, False),
    ],
    ids=[
        "one row",
        "a tile in nearly a block",
        "few rows",
        "blocks without a tile of B",
        "or of A",
    ],
)
def test_rows_get_their_adapters_share_wherever_its_rows_lie(
    make_pool: Make,
    whole: Callable[[int], Any],
    rows_of: Rows,
    tiles: Tiles,
    dtype: torch.dtype,
    block_rows: int,
    streamed: bool,
) -> None:
    """With a bias and a gain behind them too."""
    pool = make_pool("odd", dtype, block_rows=block_rows, num_blocks=1800)
    for slot, rank in enumerate(RANKS):
        pool.add(slot, whole(rank), bias=slot == 1, gain=slot == 2)
    most = tiles.expand.rows
    segments, total = rows_of([(slot, 1 + slot % most) for slot in range(len(RANKS))] + [(-1, 2)])
    plan = pool.plan(segments, total, small(tiles)).device
    assert lora_expand.constants("down", plan)["STREAMED"] is streamed
    groups = ("qkv",) if most > 1 else ("qkv", "down")
    pool.check(segments, total, layer=1, groups=groups, tiles=small(tiles))


def test_one_launch_beside_the_product_gives_the_same_bits(
    make_pool: Make, whole: Callable[[int], Any], rows_of: Rows
) -> None:
    pool = make_pool("odd", torch.float16, block_rows=40, num_blocks=900)
    for slot, rank in enumerate(RANKS[:4]):
        pool.add(slot, whole(rank))
    segments, total = rows_of([(slot, 1) for slot in range(4)])
    meta = pool.plan(segments, total, small(choices.ALONE_WIDE))
    y, x = pool.operands("qkv", total)
    want, got = pool.apply(y, x, 1, "qkv", meta), y.clone()
    meta.device.store.h.fill_(torch.nan)
    begin(meta.device.store)
    joined(got, x, 1, "qkv", meta.device)
    assert torch.equal(got, want) and not torch.equal(got, y)

"""Tiles that are as high as a slot's rank asks for: what expand makes of them, and their items."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.adapters.lora_classes import most_items, padded
from engine.adapters.work_items import cut_columns
from engine.kernels import tiles as choices
from engine.kernels.lora_joint import begin, joined
from engine.kernels.lora_meta import LoraClass, Segment
from engine.kernels.tiles import ExpandTile, Tiles

Make = Callable[..., Any]
Rows = Callable[[Sequence[tuple[int, int]]], tuple[list[Segment], int]]

#: Of slots 0 to 5: below a tile, more than one, more than the highest.
RANKS = (8, 64, 33, 16, 100, 1)


def tall(tiles: Tiles, **changes: Any) -> Tiles:
    """The tiles with small sizes, so that rows of the pool's shapes are several of them."""
    expand = tiles.expand._replace(columns=64, **changes)
    return tiles._replace(shrink=tiles.shrink._replace(chunk=64, wide_chunk=64), expand=expand)


@pytest.mark.parametrize(
    ("tiles", "shape", "dtype", "block_rows", "changes"),
    [
        (choices.ALONE_WIDE, "odd", torch.float16, 70, {"tall": 4, "pieces": True}),
        (choices.ALONE_WIDE, "odd", torch.float16, 12, {"tall": 4, "pieces": True}),
        (choices.FEW_WIDE, "odd", torch.float32, 100, {"tall": 2, "pieces": True}),
        (choices.FEW_WIDE, "odd", torch.float16, 70, {"tall": 4, "pieces": False, "ranks": 8}),
    ],
    ids=["one row", "blocks that hold no tile", "few rows", "two bodies"],
)
def test_rows_get_their_adapters_share_whatever_the_height(
    make_pool: Make,
    whole: Callable[[int], Any],
    rows_of: Rows,
    tiles: Tiles,
    shape: str,
    dtype: torch.dtype,
    block_rows: int,
    changes: dict[str, Any],
) -> None:
    """Runs of B lie in one block or across two; with a bias and a gain behind them too."""
    pool = make_pool(shape, dtype, block_rows=block_rows, num_blocks=900)
    for slot, rank in enumerate(RANKS):
        pool.add(slot, whole(rank), bias=slot == 1, gain=slot == 2)
    most = tiles.expand.rows
    segments, total = rows_of([(slot, 1 + slot % most) for slot in range(len(RANKS))] + [(-1, 2)])
    groups = ("qkv", "down")
    pool.check(segments, total, layer=1, groups=groups, tiles=tall(tiles, **changes))


def test_a_module_of_less_rank_than_its_slot_is_read_by_high_tiles(
    make_pool: Make, rows_of: Rows
) -> None:
    pool = make_pool("odd", torch.float16, block_rows=70, num_blocks=300)
    pool.add(0, {(1, "q_proj"): 3, (1, "v_proj"): 60})
    segments, total = rows_of([(0, 1)])
    tiles = tall(choices.ALONE_WIDE, tall=4, pieces=True)
    pool.check(segments, total, layer=1, groups=("qkv",), tiles=tiles)


def test_one_launch_beside_the_product_gives_the_same_bits(
    make_pool: Make, whole: Callable[[int], Any], rows_of: Rows
) -> None:
    pool = make_pool("odd", torch.float16, block_rows=70, num_blocks=900)
    for slot, rank in enumerate(RANKS[:4]):
        pool.add(slot, whole(rank))
    segments, total = rows_of([(slot, 1) for slot in range(4)])
    meta = pool.plan(segments, total, tall(choices.ALONE_WIDE, tall=4, pieces=True))
    y, x = pool.operands("qkv", total)
    want, got = pool.apply(y, x, 1, "qkv", meta), y.clone()
    meta.device.store.h.fill_(torch.nan)
    begin(meta.device.store)
    joined(got, x, 1, "qkv", meta.device)
    assert torch.equal(got, want) and not torch.equal(got, y)


def test_an_items_parts_are_as_many_as_its_tile_is_high() -> None:
    items = np.array([[0, 1, 5, 0], [1, 1, 6, 0], [2, 1, 7, 0], [3, 1, 8, 0]], dtype=np.int32)
    cut = cut_columns(items, np.array([100, 33, 17, 16]), 16, 4)
    slots, heights, parts = cut[:, 2], cut[:, 3] % 16, cut[:, 3] // 16
    assert slots.tolist() == [5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 8]
    assert heights.tolist() == [4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 1]
    assert parts.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0]


def test_a_tile_is_as_high_as_the_rank_asks_and_no_higher_than_it_may_be() -> None:
    tile = ExpandTile("vec", 1, 16, 1024, tall=4)
    heights = {rank: tile.height(rank) for rank in (1, 16, 17, 32, 33, 64, 65, 512)}
    assert heights == {1: 1, 16: 1, 17: 2, 32: 2, 33: 4, 64: 4, 65: 4, 512: 4}
    assert ExpandTile("vec", 1, 16, 1024).height(512) == 1


def test_a_steps_items_have_room_for_every_part() -> None:
    tiles = tall(choices.ALONE_WIDE, tall=4)
    items, most = 64 * 4, most_items((tiles,), 64, 64, 64)
    kind = padded(LoraClass(tiles, 64 * 8, items), 64, ())
    assert kind.expand_items == items and kind.num_items <= most

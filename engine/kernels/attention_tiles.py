"""Tile sizes of the attention kernels, and which prefill goes where: choices as data.

Goes in: shapes and the card's shared memory.  Comes out: a few small integers.  A choice that was
measured says so, with its numbers in docs/bench-log.md; `benchmarks/kernels_attention.py` measures
them again.
"""

from typing import NamedTuple

import torch


class DecodeTiles(NamedTuple):
    """Of the split-KV decode kernel."""

    keys: int = 64  # of one tile; a multiple of every block size up to 64
    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 8  # what the keys of a step are cut for


class PrefillTiles(NamedTuple):
    """Of the prefill kernel."""

    rows: int = 128  # query rows x heads of one group
    keys: int = 64
    warps: int = 8
    stages: int = 3


#: Rows of the padded product of a decode: the tensor cores' smallest.
DECODE_ROWS = 16
#: Steps of at most this many rows take the smaller prefill tile, so that a graph's mixed step of
#: 512 rows still fills the card.
SMALL_PREFILL = 512
#: A whole prompt of at least this many rows goes through cuDNN, if it is a multiple of the step:
#: cuDNN builds a plan for every length that it has not seen, which takes longer than it saves.
SDPA_ROWS, SDPA_STEP = 2048, 256


def width_of(head_dim: int) -> int:
    """head_dim as the kernels' tiles have it: a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def decode_tiles(head_dim: int, itemsize: int, shared_bytes: int) -> DecodeTiles:
    """The default, made smaller until two programs fit on a multiprocessor."""
    tiles = DecodeTiles()
    if itemsize > 2:  # no tensor cores: the product's operands lie in registers
        tiles = tiles._replace(keys=16)
    while tiles.keys > 16 and 2 * _pipeline(tiles, head_dim, itemsize) > shared_bytes:
        tiles = tiles._replace(keys=tiles.keys // 2)
    while tiles.stages > 1 and 2 * _pipeline(tiles, head_dim, itemsize) > shared_bytes:
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles


def prefill_tiles(
    num_rows: int, group: int, head_dim: int, itemsize: int, shared_bytes: int
) -> PrefillTiles:
    """Tiles for a step of `num_rows` rows, whose `group` heads share a KV head."""
    width = width_of(head_dim)
    tiles = PrefillTiles()
    if num_rows <= SMALL_PREFILL or width > 128 or itemsize > 2:
        tiles = PrefillTiles(rows=64, keys=64 if width <= 128 else 32, warps=4)
    if itemsize > 2:
        tiles = tiles._replace(rows=16, keys=16, stages=2)
    tiles = tiles._replace(rows=max(tiles.rows, 1 << (group - 1).bit_length()))

    def needs(t: PrefillTiles) -> int:
        return t.rows * width * itemsize + _pipeline(t, head_dim, itemsize)

    while tiles.stages > 1 and needs(tiles) > 0.8 * shared_bytes:
        tiles = tiles._replace(stages=tiles.stages - 1)
    while tiles.keys > 16 and needs(tiles) > 0.8 * shared_bytes:
        tiles = tiles._replace(keys=tiles.keys // 2)
    return tiles


def takes_sdpa(rows: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether a whole prompt of `rows` rows, nothing of it cached, goes through cuDNN."""
    fits = dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 128
    return fits and rows >= SDPA_ROWS and rows % SDPA_STEP == 0


def _pipeline(tiles: DecodeTiles | PrefillTiles, head_dim: int, itemsize: int) -> int:
    """Bytes of the key and value tiles in flight."""
    return tiles.stages * 2 * tiles.keys * width_of(head_dim) * itemsize

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
    #: Measured on an H200 (docs/bench-log.md), beside three: 13% less time at 64 x 4k, 27% at
    #: 8 x 32k, 8% at 64 x 1k; 7% more at 1 x 4k.
    stages: int = 4
    #: Three, for which three stages have room, took 11% more time at 64 x 1k and 4k.
    programs_per_sm: int = 2
    registers: int = 0  # of a thread at most; 0 = as many as it takes
    least: int = 2  # tiles of a piece, so that short steps are not cut to crumbs
    whole: int = 9  # quarters of a program's fair share, up to which a sequence is not cut
    #: Steps of so many sequences have their pieces put together by a kernel of its own: for few,
    #: that takes less time than a fence and an atomic; for many, the launch would cost every layer.
    apart: int = 8
    turns: bool = False  # programs take several items in turn; False: the card deals out programs
    early: bool = True  # the plan is read while the kernel ahead still runs


class PrefillTiles(NamedTuple):
    """Of the prefill kernel."""

    rows: int = 128  # query rows x heads of one group
    keys: int = 64
    warps: int = 8
    stages: int = 3  # with two nothing is on its way while a tile is worked off
    programs_per_sm: int = 1  # as many as fit
    least: int = 8  # tiles of keys of a piece, where few tiles of rows are cut into pieces


#: Rows of the padded product of a decode: the tensor cores' smallest.
DECODE_ROWS = 16
#: Steps of at most this many rows take the smaller prefill tile, so that a graph's mixed step of
#: 512 rows still fills the card.  Of 227 KiB two programs of it leave 1 KiB.
SMALL_PREFILL = 512
SMALL_TILES = PrefillTiles(rows=64, keys=64, warps=4, stages=3, programs_per_sm=2)
#: fp32 of the pieces of a cut sequence that are put together at a time: 32 registers of a thread.
MERGED = 4096
#: What the card keeps of a multiprocessor's shared memory for each program on it.
RESERVED_BYTES = 1024
#: A whole prompt goes through cuDNN from so many rows on, if they are a multiple of the step: cuDNN
#: builds a plan for every length that it has not seen, and `rehearsal.py` has it see these.
#: Measured on an H200 (docs/bench-log.md): at 1,024 rows it is as fast as the own kernel, at 2,048
#: 13% faster and at 8,192 24%.  Padding prompts to such lengths lost: 700 rows took 42 us as 768
#: rows, and 20 in the own kernel.
SDPA_ROWS, SDPA_STEP = 2048, 1024


def width_of(head_dim: int) -> int:
    """head_dim as the kernels' tiles have it: a power of two, 16 at least."""
    return max(16, _power_of_two(head_dim))


def decode_tiles(group: int, head_dim: int, itemsize: int, shared_bytes: int) -> DecodeTiles:
    """The default for `group` heads on a KV head, made smaller until its programs fit."""
    tiles = DecodeTiles()
    if itemsize > 2:  # no tensor cores: the product's operands lie in registers
        tiles = tiles._replace(keys=16, registers=0, programs_per_sm=2)

    def too_large() -> bool:
        needed = decode_bytes(tiles, group, head_dim, itemsize)
        return not _fit(tiles.programs_per_sm, needed, shared_bytes)

    while tiles.keys > 16 and too_large():
        tiles = tiles._replace(keys=tiles.keys // 2)
    while tiles.programs_per_sm > 1 and too_large():
        tiles = tiles._replace(programs_per_sm=tiles.programs_per_sm - 1)
    while tiles.stages > 2 and too_large():
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles


def decode_rows(group: int) -> int:
    """Rows of the padded product of `group` heads."""
    return max(DECODE_ROWS, _power_of_two(group))


def decode_bytes(tiles: DecodeTiles, group: int, head_dim: int, itemsize: int) -> int:
    """Shared memory of a program: tiles in flight, the queries, a tile of weights; then pieces."""
    rows = decode_rows(group)
    ours = rows * (width_of(head_dim) + tiles.keys) * itemsize
    flight = (tiles.stages - 1) * _tile_bytes(tiles.keys, head_dim, itemsize)
    return max(flight + ours, 2 * 4 * MERGED + 4096)


def prefill_tiles(
    num_rows: int,
    group: int,
    head_dim: int,
    itemsize: int,
    shared_bytes: int,
    *,
    fixed: bool = False,
) -> PrefillTiles:
    """Tiles for a step of `num_rows` rows, whose `group` heads share a KV head.

    `fixed`: the same for any number of rows.
    """
    small = fixed or num_rows <= SMALL_PREFILL or itemsize > 2
    tiles = SMALL_TILES if small else PrefillTiles()
    if width_of(head_dim) > 128:  # registers are short: narrow tiles, and more threads to hold them
        tiles = tiles._replace(keys=32, warps=8, programs_per_sm=1)
    if itemsize > 2:
        tiles = tiles._replace(rows=16, keys=16)
    tiles = tiles._replace(rows=max(tiles.rows, _power_of_two(group)))

    def too_large() -> bool:
        needed = prefill_bytes(tiles, head_dim, itemsize)
        return not _fit(tiles.programs_per_sm, needed, shared_bytes)

    while tiles.programs_per_sm > 1 and too_large():
        tiles = tiles._replace(programs_per_sm=tiles.programs_per_sm - 1)
    while tiles.keys > 16 and too_large():
        tiles = tiles._replace(keys=tiles.keys // 2)
    while tiles.stages > 2 and too_large():
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles


def prefill_bytes(tiles: PrefillTiles, head_dim: int, itemsize: int) -> int:
    """Shared memory of a program: the queries, the tiles in flight, and a little for sums."""
    queries = tiles.rows * width_of(head_dim) * itemsize
    return queries + tiles.stages * _tile_bytes(tiles.keys, head_dim, itemsize) + 512


def fits_sdpa(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether cuDNN takes such heads."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 128


def sdpa_lengths(most: int) -> range:
    """Lengths of whole prompts, of up to `most` rows, that cuDNN takes."""
    return range(SDPA_ROWS, most + 1, SDPA_STEP)


def _fit(programs: int, needed: int, shared_bytes: int) -> bool:
    """Whether a multiprocessor holds so many, where one may take up to `shared_bytes`."""
    return programs * (needed + RESERVED_BYTES) <= shared_bytes + RESERVED_BYTES


def _tile_bytes(keys: int, head_dim: int, itemsize: int) -> int:
    """Bytes of a tile of keys and one of values."""
    return 2 * keys * width_of(head_dim) * itemsize


def _power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << (count - 1).bit_length()

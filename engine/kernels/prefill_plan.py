"""Which program of the prefill kernel takes which rows: a list of tiles, in device memory.

Goes in: row ranges and lengths.  Comes out: the tiles of every sequence that is the kernel's, one
after the other, and into how many pieces the keys of each may be cut: a step of few tiles would
leave most of the card idle while they walk through a long prefix.  Nothing is waited for, and room
and grids depend on the numbers of rows and sequences alone: a graph may be replayed with other
ranges.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_tiles import PrefillTiles, prefill_tiles, width_of
from engine.kernels.dependent import follow
from engine.kernels.launch import launch

#: Sequences that `_list` looks at together.
SCAN = 128


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A step's tiles, for every layer of the same window."""

    #: (most + 1, 2) int32: numbers of tiles and of pieces; then of each its sequence and first row.
    items: Tensor
    arrived: Tensor  # (P, kv_heads) int32: pieces of a tile that are there
    partial: Tensor  # (P, kv_heads, rows, width) fp32: a piece's share of the result
    weight: Tensor  # (P, kv_heads, rows) fp32: log2 of its sum of exponentials
    programs: int  # of a KV head
    tiles: PrefillTiles
    span: int  # rows of a tile
    window: int
    fixed: bool  # a row's bits depend on its sequence alone


@triton.jit(
    do_not_specialize=["num_seqs", "least", "most", "step", "room", "num_counters"],
    do_not_specialize_on_alignment=["seq_lens", "query_starts", "items", "arrived"],
)
def _list(
    seq_lens,
    query_starts,
    items,
    arrived,
    num_seqs,
    least,
    most,
    step,
    room,
    num_counters,
    SPAN: tl.constexpr,
    SINGLES: tl.constexpr,
    FIXED: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program.  Sequences that are all of their keys, of `least` to `most` rows and a multiple
    of `step`, are left out.

    With FIXED tiles begin at positions that are multiples of SPAN, before the first row if need be.
    Without, keys are cut so that there are up to `room` pieces of all tiles.
    """
    follow(PDL)
    lane = tl.arange(0, SCAN)
    count = num_seqs * 0
    for s in range(0, num_seqs, SCAN):
        seq = s + lane
        live = seq < num_seqs
        length = tl.load(seq_lens + seq, mask=live, other=0)
        start = tl.load(query_starts + seq, mask=live, other=0)
        rows = tl.load(query_starts + seq + 1, mask=live, other=0) - start
        whole = (rows == length) & (least <= rows) & (rows <= most) & (rows % step == 0)
        mine = (length > 0) & ~whole
        if not SINGLES:
            mine = mine & (rows > 1)
        lead = rows * 0
        if FIXED:
            lead = (length - rows) % SPAN
        tiles = tl.where(mine, tl.cdiv(lead + rows, SPAN), 0)
        at = count + tl.cumsum(tiles, 0) - tiles + 1
        for i in range(0, tl.max(tiles)):
            tl.store(items + (at + i) * 2, seq, mask=i < tiles)
            tl.store(items + (at + i) * 2 + 1, i * SPAN - lead, mask=i < tiles)
        count += tl.sum(tiles)
    tl.store(items, count)
    pieces = count * 0 + 1
    if not FIXED:
        pieces = tl.maximum(room // tl.maximum(count, 1), 1)
        for i in range(0, num_counters, SCAN):
            tl.store(arrived + i + lane, lane * 0, mask=i + lane < num_counters)
    tl.store(items + 1, pieces)


def plan_prefill(
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    num_rows: int,
    heads: int,
    kv: Tensor,
    window: int = 0,
    counts: list[int] | None = None,
    singles: bool = True,
    left_out: tuple[int, int, int] = (1, 0, 1),
    fixed: bool = False,
    tiles: PrefillTiles | None = None,
) -> PrefillPlan:
    """List a step's tiles.  Holds for every layer of the same window and shapes.

    seq_lens (S,) and query_starts (S + 1,) int32; sequences of length 0 and rows of no sequence are
    left out, those of one row without `singles`, and those that are all of their keys and have
    `left_out` (least, most, multiple of) rows.  `counts`: rows of each sequence, where the host
    knows them; where not, programs are as many as the card holds and take what there is.
    """
    kv_heads, num_seqs = kv.shape[3], seq_lens.shape[0]
    group = heads // kv_heads
    if tiles is None:
        shared = backend.shared_bytes(kv.device)
        tiles = prefill_tiles(num_rows, group, kv.shape[4], kv.element_size(), shared, fixed=fixed)
    span, pdl = tiles.rows // group, backend.dependent_launch(kv.device)
    room = num_rows // span + min(num_seqs, num_rows if singles else num_rows // 2)
    if fixed:
        room += num_seqs
    programs = at_once = max(1, tiles.programs_per_sm * backend.num_sms(kv.device) // kv_heads)
    if counts is not None:
        programs = sum(-(-n // span) + (fixed and n > 1) for n in counts if singles or n > 1)
        if 2 * programs <= at_once and not fixed:
            programs = at_once
    pieces = 0 if fixed else at_once
    sizes = [(room + 1) * 2, pieces * kv_heads]
    items, arrived = torch.split(
        torch.empty(sum(sizes), dtype=torch.int32, device=kv.device), sizes
    )
    sums, width = pieces * kv_heads * tiles.rows, width_of(kv.shape[4])
    partial, weight = torch.split(
        torch.empty(sums * (width + 1), dtype=torch.float32, device=kv.device), [sums * width, sums]
    )
    launch(
        _list,
        (1,),
        seq_lens,
        query_starts,
        items,
        arrived,
        num_seqs,
        *left_out,
        at_once,
        pieces * kv_heads,
        SPAN=span,
        SINGLES=singles,
        FIXED=fixed,
        SCAN=SCAN,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return PrefillPlan(
        items.view(-1, 2),
        arrived.view(pieces, kv_heads),
        partial.view(pieces, kv_heads, tiles.rows, width),
        weight.view(pieces, kv_heads, tiles.rows),
        max(1, programs),
        tiles,
        span,
        window,
        fixed,
    )

"""Which program of the decode kernel reads which keys: a step's tiles in equal shares.

Goes in: lengths, and row ranges where a step mixes.  Comes out: the sequences that have one row,
one after the other as segments, and how many tiles of keys each program takes of them, in device
memory.  Shares are equal whatever the lengths, so that one wave of programs ends together: a long
sequence is cut as often as it takes, and a share may hold several short ones.  Nothing is waited
for, and the number of programs does not depend on lengths: a graph may be replayed with others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_tiles import DecodeTiles, decode_tiles, width_of
from engine.kernels.dependent import follow

#: Sequences that `_cut` looks at together.
SCAN = 256
#: Words of a segment: sequence, row, keys, first tile.
SEGMENT_WORDS = 4
#: Words of the head: tiles in all, tiles of a share, sequences without a key.
HEAD_WORDS = 3


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A step's shares, for every layer of the same window.  P programs a KV head, S sequences."""

    head: Tensor  # (HEAD_WORDS,) int32
    segments: Tensor  # (S + 1, SEGMENT_WORDS) int32, those in use first, then one's first tile
    shares: Tensor  # (P, 2) int32: a share's first and last segment, where it has tiles
    empty: Tensor  # (S,) int32: rows that have no keys, and shall be zero
    arrived: Tensor  # (S, kv_heads) int32: pieces of a segment that are there
    partial: Tensor  # (P, 2, heads, width) fp32: a share's last and first piece of a cut segment
    weight: Tensor  # (P, 2, heads) fp32: log2 of the sum of exponentials
    tiles: DecodeTiles
    window: int

    @property
    def num_shares(self) -> int:
        return self.shares.shape[0]


@triton.jit
def plan_word(p):
    """A word of the plan, from L2: ahead of the wait nobody promises that what a multiprocessor
    still has in L1 is not the step before's."""
    return tl.load(p, cache_modifier=".cg")


@triton.jit
def first_key(length, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Start of the tile that holds the first visible key."""
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    return first


@triton.jit
def _length(seq_lens, query_starts, seq, live, MIXED: tl.constexpr):
    """Keys of each sequence; none where it has not just one row.  And its row."""
    length = tl.load(seq_lens + seq, mask=live, other=0)
    row = seq
    if MIXED:
        row = tl.load(query_starts + seq, mask=live, other=0)
        end = tl.load(query_starts + seq + 1, mask=live, other=0)
        length = tl.where(end - row == 1, length, 0)
    return length, row


@triton.jit(
    do_not_specialize=["num_seqs", "num_shares", "least"],
    do_not_specialize_on_alignment=[
        "seq_lens",
        "query_starts",
        "head",
        "segments",
        "shares",
        "empty",
        "arrived",
    ],
)
def _cut(
    seq_lens,
    query_starts,
    head,
    segments,
    shares,
    empty,
    arrived,
    num_seqs,
    num_shares,
    least,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MIXED: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program.  A share has `least` tiles or more, the last one excepted."""
    follow(PDL)
    lane = tl.arange(0, SCAN)
    sums = tl.zeros([SCAN], tl.int32)
    for s in range(0, num_seqs, SCAN):
        length, _ = _length(seq_lens, query_starts, s + lane, s + lane < num_seqs, MIXED)
        sums += tl.cdiv(length - first_key(length, WINDOW, TILE), TILE)
    all_tiles = tl.sum(sums)
    size = tl.maximum(tl.cdiv(all_tiles, num_shares), least)
    before = all_tiles * 0
    count = all_tiles * 0
    without = all_tiles * 0
    for s in range(0, num_seqs, SCAN):
        seq = s + lane
        live = seq < num_seqs
        length, row = _length(seq_lens, query_starts, seq, live, MIXED)
        tiles = tl.cdiv(length - first_key(length, WINDOW, TILE), TILE)
        used = tiles > 0
        place = count + tl.cumsum(used.to(tl.int32), 0) - 1
        end = before + tl.cumsum(tiles, 0)
        start = end - tiles
        at = segments + place * 4
        tl.store(at, seq, mask=used)
        tl.store(at + 1, row, mask=used)
        tl.store(at + 2, length, mask=used)
        tl.store(at + 3, start, mask=used)
        share = start // size
        for _ in range(0, tl.max(tl.where(used, (end - 1) // size - share + 1, 0))):
            begins = share * size
            ends = tl.minimum(begins + size, all_tiles)
            here = used & (begins < end)
            tl.store(shares + 2 * share, place, mask=here & (start <= begins))
            tl.store(shares + 2 * share + 1, place, mask=here & (ends <= end))
            share += 1
        if not MIXED:
            none = live & (tiles == 0)
            tl.store(empty + without + tl.cumsum(none.to(tl.int32), 0) - 1, row, mask=none)
            without += tl.sum(none.to(tl.int32))
        for h in range(0, KV_HEADS):
            tl.store(arrived + seq * KV_HEADS + h, lane * 0, mask=live)
        before += tl.sum(tiles)
        count += tl.sum(used.to(tl.int32))
    tl.store(segments + count * 4 + 3, all_tiles)
    tl.store(head, all_tiles)
    tl.store(head + 1, size)
    tl.store(head + 2, without)


def plan_decode(
    seq_lens: Tensor,
    query_starts: Tensor | None,
    *,
    heads: int,
    kv: Tensor,
    window: int = 0,
    tiles: DecodeTiles | None = None,
) -> DecodePlan:
    """Cut a step's keys into shares.  Holds for every layer of the same window and shapes.

    seq_lens (S,) int32, 0 = nothing to do.  query_starts (S + 1,) int32: sequences of other than
    one row are left out, and sequence s is row query_starts[s]; None: sequence s is row s.
    """
    kv_heads, head_dim, device = kv.shape[3], kv.shape[4], kv.device
    if tiles is None:
        shared = backend.shared_bytes(device)
        tiles = decode_tiles(heads // kv_heads, head_dim, kv.element_size(), shared)
    num_seqs = seq_lens.shape[0]
    num_shares = max(1, tiles.programs_per_sm * backend.num_sms(device) // kv_heads)
    sizes = [
        HEAD_WORDS,
        (num_seqs + 1) * SEGMENT_WORDS,
        num_shares * 2,
        num_seqs,
        num_seqs * kv_heads,
    ]
    words = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    head, segments, shares, empty, arrived = torch.split(words, sizes)
    width, pieces = width_of(head_dim), num_shares * 2 * heads
    sums = torch.empty(pieces * (width + 1), dtype=torch.float32, device=device)
    partial, weight = torch.split(sums, [pieces * width, pieces])
    pdl = backend.dependent_launch(device)
    _cut[(1,)](
        seq_lens,
        seq_lens if query_starts is None else query_starts,
        head,
        segments,
        shares,
        empty,
        arrived,
        num_seqs,
        num_shares,
        tiles.least,
        KV_HEADS=kv_heads,
        TILE=tiles.keys,
        WINDOW=window,
        MIXED=query_starts is not None,
        SCAN=SCAN,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return DecodePlan(
        head,
        segments.view(-1, SEGMENT_WORDS),
        shares.view(-1, 2),
        empty,
        arrived.view(-1, kv_heads),
        partial.view(num_shares, 2, heads, width),
        weight.view(num_shares, 2, heads),
        tiles,
        window,
    )

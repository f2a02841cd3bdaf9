"""Which program of the decode kernel reads which keys: a step's items, the longest first.

Goes in: lengths, and row ranges where a step mixes.  Comes out: a list of items in device memory.
An item is a sequence that has one row, or a piece of it: a sequence is cut only if it is much
longer than a program's fair share of the step, since pieces have to be put together again.  Nothing
is waited for, and the number of programs does not depend on lengths: a graph may be replayed with
others.
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
from engine.kernels.launch import launch

#: Sequences that `_cut` looks at together.
SCAN = 256
#: Words of an item: sequence, row (-1 = no item), first key, key behind its last, keys of the
#: sequence, place of the sequence's first piece, pieces of it, which of them this is.
ITEM_WORDS = 8
#: Words of a sequence: row, place of its first piece, pieces, tiles of a piece.
SEQUENCE_WORDS = 4


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A step's items, for every layer of the same window.  S sequences, P pieces at the most."""

    items: Tensor  # (S + P, ITEM_WORDS) int32
    sequences: Tensor  # (S, SEQUENCE_WORDS) int32
    arrived: (
        Tensor  # (P, kv_heads) int32: pieces of a sequence that are there, at its first's place
    )
    partial: Tensor  # (P, heads, width) fp32: a piece's share of the result
    weight: Tensor  # (P, heads) fp32: log2 of its sum of exponentials
    tiles: DecodeTiles
    window: int
    mixed: bool  # rows of other sequences stand between

    @property
    def apart(self) -> bool:
        """Pieces are put together by a kernel of its own."""
        return len(self.sequences) <= self.tiles.apart


@triton.jit
def plan_word(p):
    """A word of the plan, from L2: ahead of the wait nobody promises that what a multiprocessor
    still has in L1 is not the step before's."""
    return tl.load(p, cache_modifier=".cg")


@triton.jit
def _first_key(length, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Start of the tile that holds the first visible key."""
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    return first


@triton.jit
def _spans(
    seq_lens, query_starts, seq, live, WINDOW: tl.constexpr, TILE: tl.constexpr, MIXED: tl.constexpr
):
    """Keys, row and first key to read of each sequence; no keys where it has not just one row."""
    length = tl.load(seq_lens + seq, mask=live, other=0)
    row = seq
    if MIXED:
        row = tl.load(query_starts + seq, mask=live, other=0)
        end = tl.load(query_starts + seq + 1, mask=live, other=0)
        length = tl.where(end - row == 1, length, 0)
    return length, row, _first_key(length, WINDOW, TILE)


@triton.jit(
    do_not_specialize=["num_seqs", "num_items", "room", "least", "whole"],
    do_not_specialize_on_alignment=[
        "seq_lens", "query_starts", "items", "sequences", "arrived"
    ],
)  # fmt: skip
def _cut(
    seq_lens,
    query_starts,
    items,
    sequences,
    arrived,
    num_seqs,
    num_items,
    room,
    least,
    whole,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MIXED: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program.  `room` items are as many as run at once: a fair share is what each then has.

    A sequence of up to `whole` quarters of a fair share is one item; a longer one has pieces of a
    fair share or a little more, and of `least` tiles or more.
    """
    follow(PDL)
    lane = tl.arange(0, SCAN)
    sums = tl.zeros([SCAN], tl.int32)
    for s in range(0, num_seqs, SCAN):
        length, _, first = _spans(
            seq_lens, query_starts, s + lane, s + lane < num_seqs, WINDOW, TILE, MIXED
        )
        sums += tl.cdiv(length - first, TILE)
    total = tl.maximum(tl.sum(sums), 1)
    place = total * 0
    for s in range(0, num_seqs, SCAN):
        seq = s + lane
        live = seq < num_seqs
        length, row, first = _spans(seq_lens, query_starts, seq, live, WINDOW, TILE, MIXED)
        tiles = tl.cdiv(length - first, TILE)
        pieces = tl.minimum(tiles * room // total, tiles // least)
        pieces = tl.where(4 * tiles * room <= whole * total, 1, tl.maximum(pieces, 1))
        size = tl.cdiv(tiles, pieces)
        pieces = tl.cdiv(tiles, tl.maximum(size, 1))
        if not MIXED:  # rows without a key shall be zero
            pieces = tl.maximum(pieces, 1)
        several = tl.where(live & (pieces > 1), pieces, 0)
        at = sequences + seq * 4
        tl.store(at, row, mask=live)
        tl.store(at + 1, place + tl.cumsum(several, 0) - several, mask=live)
        tl.store(at + 2, pieces, mask=live)
        tl.store(at + 3, size, mask=live)
        place += tl.sum(several)
    tl.debug_barrier()
    used = total * 0
    for s in range(0, num_seqs, SCAN):
        seq = s + lane
        live = seq < num_seqs
        length, row, first = _spans(seq_lens, query_starts, seq, live, WINDOW, TILE, MIXED)
        pieces = tl.load(sequences + seq * 4 + 2, mask=live, other=0)
        size = tl.load(sequences + seq * 4 + 3, mask=live, other=0)
        start = tl.load(sequences + seq * 4 + 1, mask=live, other=0)
        at = lane * 0
        for j in range(0, num_seqs):
            other = tl.load(sequences + j * 4 + 3)
            ahead = (other > size) | ((other == size) & (j < seq))
            at += tl.where(ahead, tl.load(sequences + j * 4 + 2), 0)
        for i in range(0, tl.max(pieces)):
            begin = first + i * size * TILE
            item = items + (at + i) * 8
            here = i < pieces
            tl.store(item, seq, mask=here)
            tl.store(item + 1, row, mask=here)
            tl.store(item + 2, begin, mask=here)
            tl.store(item + 3, tl.minimum(begin + size * TILE, length), mask=here)
            tl.store(item + 4, length, mask=here)
            tl.store(item + 5, start, mask=here)
            tl.store(item + 6, pieces, mask=here)
            tl.store(item + 7, lane * 0 + i, mask=here)
        used += tl.sum(pieces)
    for i in range(used, num_items, SCAN):
        for word in tl.static_range(8):
            nothing = lane * 0 - (1 if word == 1 else 0)
            tl.store(items + (i + lane) * 8 + word, nothing, mask=i + lane < num_items)
    for i in range(0, room * KV_HEADS, SCAN):
        tl.store(arrived + i + lane, lane * 0, mask=i + lane < room * KV_HEADS)


def plan_decode(
    seq_lens: Tensor,
    query_starts: Tensor | None,
    *,
    heads: int,
    kv: Tensor,
    window: int = 0,
    tiles: DecodeTiles | None = None,
) -> DecodePlan:
    """List a step's items.  Holds for every layer of the same window and shapes.

    seq_lens (S,) int32, 0 = nothing to do.  query_starts (S + 1,) int32: sequences of other than
    one row are left out, and sequence s is row query_starts[s]; None: sequence s is row s.
    """
    kv_heads, head_dim, device = kv.shape[3], kv.shape[4], kv.device
    if tiles is None:
        shared = backend.shared_bytes(device)
        tiles = decode_tiles(heads // kv_heads, head_dim, kv.element_size(), shared)
    num_seqs = seq_lens.shape[0]
    room = max(1, tiles.programs_per_sm * backend.num_sms(device) // kv_heads)
    num_items = num_seqs + room
    sizes = [num_items * ITEM_WORDS, num_seqs * SEQUENCE_WORDS, room * kv_heads]
    words = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    items, sequences, arrived = torch.split(words, sizes)
    width, pieces = width_of(head_dim), room * heads
    sums = torch.empty(pieces * (width + 1), dtype=torch.float32, device=device)
    partial, weight = torch.split(sums, [pieces * width, pieces])
    pdl = backend.dependent_launch(device)
    launch(
        _cut,
        (1,),
        seq_lens,
        seq_lens if query_starts is None else query_starts,
        items,
        sequences,
        arrived,
        num_seqs,
        num_items,
        room,
        tiles.least,
        tiles.whole,
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
        items.view(-1, ITEM_WORDS),
        sequences.view(-1, SEQUENCE_WORDS),
        arrived.view(-1, kv_heads),
        partial.view(room, heads, width),
        weight.view(room, heads),
        tiles,
        window,
        query_starts is not None,
    )

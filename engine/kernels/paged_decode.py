"""Attention of rows that stand alone in their sequence: split-KV over the block-major arena.

Goes in: q, one layer's view of the arena, block tables, lengths.  Comes out: attention per row.
The keys of all sequences are cut into items of one length, so that a step of one long sequence
fills the card as well as a step of many.  Three kernels:

- `_cut`, once a step: lengths -> the item list, in device memory;
- `_decode`: one item and one KV head a program; the heads that share it are one padded product;
- `_merge`: the items of a sequence into its row.  A sequence of one item is not touched again.

Grids depend on the number of sequences alone, work is read from the device, nothing is waited for:
all three may be captured in a graph and replayed with other lengths.  No atomics: the same input
gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_tiles import DECODE_ROWS, DecodeTiles, decode_tiles, width_of
from engine.kernels.dependent import follow
from engine.kernels.paged_tile import accumulate, load_rows, places, score, score_factors

#: Sequences that `_cut` looks at together, and partial results that `_merge` does.
SCAN, MERGE = 256, 16


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A step's items, for every layer of the same window.  I items at most, S sequences."""

    items: Tensor  # (I,) int32: the sequence, -1 = no item
    first_items: Tensor  # (S + 1,) int32: sequence s has items [first[s], first[s + 1])
    chunk: Tensor  # (1,) int32: keys of an item, a multiple of tiles.keys
    partial: Tensor  # (I, heads, width) fp32
    weight: Tensor  # (I, heads) fp32: log2 of the sum of exponentials
    tiles: DecodeTiles
    window: int


@triton.jit
def _first_key(length, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Start of the tile that holds the first visible key."""
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    return first


@triton.jit
def _span(
    seq_lens, query_starts, seq, live, WINDOW: tl.constexpr, TILE: tl.constexpr, MIXED: tl.constexpr
):
    """Keys to read of each sequence; none where it has not just one row."""
    length = tl.load(seq_lens + seq, mask=live, other=0)
    if MIXED:
        begin = tl.load(query_starts + seq, mask=live, other=0)
        end = tl.load(query_starts + seq + 1, mask=live, other=0)
        length = tl.where(end - begin == 1, length, 0)
    return length - _first_key(length, WINDOW, TILE)


@triton.jit(
    do_not_specialize=["num_seqs", "num_items", "target"],
    do_not_specialize_on_alignment=["seq_lens", "query_starts"],
)
def _cut(
    seq_lens,
    query_starts,
    items,
    first_items,
    chunk_at,
    num_seqs,
    num_items,
    target,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MIXED: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program.  Items of `chunk` keys: at most target + num_seqs of them."""
    follow(PDL)
    lane = tl.arange(0, SCAN)
    sums = tl.zeros([SCAN], tl.int32)
    for s in range(0, num_seqs, SCAN):
        seq = s + lane
        sums += _span(seq_lens, query_starts, seq, seq < num_seqs, WINDOW, TILE, MIXED)
    chunk = tl.cdiv(tl.maximum(tl.cdiv(tl.sum(sums), target), 1), TILE) * TILE
    tl.store(chunk_at, chunk)
    tl.store(first_items, chunk * 0)
    used = chunk * 0
    for s in range(0, num_seqs, SCAN):
        seq = s + lane
        live = seq < num_seqs
        span = _span(seq_lens, query_starts, seq, live, WINDOW, TILE, MIXED)
        splits = (span + chunk - 1) // chunk
        ends = used + tl.cumsum(splits, 0)
        tl.store(first_items + seq + 1, ends, mask=live)
        for i in range(0, tl.max(splits)):
            tl.store(items + ends - splits + i, seq, mask=i < splits)
        used += tl.sum(splits)
    for i in range(used, num_items, SCAN):
        tl.store(items + i + lane, lane * 0 - 1, mask=i + lane < num_items)


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "query_starts"],
)
def _decode(
    q,
    kv,
    tables,
    seq_lens,
    query_starts,
    items,
    first_items,
    chunk_at,
    out,
    partial,
    weight,
    stride_q,
    stride_block,
    stride_side,
    stride_key,
    stride_table,
    scale,
    cap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One item (axis 1) of one KV head (axis 0), for the GROUP heads that share it."""
    follow(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    seq = tl.load(items + item)
    if seq < 0:
        return
    length = tl.load(seq_lens + seq)
    first_item = tl.load(first_items + seq)
    splits = tl.load(first_items + seq + 1) - first_item
    chunk = tl.load(chunk_at)
    begin = _first_key(length, WINDOW, TILE) + (item - first_item) * chunk
    end = tl.minimum(begin + chunk, length)
    row = seq
    if MIXED:
        row = tl.load(query_starts + seq)

    member = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head = kv_head * GROUP + member
    here = (member < GROUP)[:, None] & (column < DIM)[None, :]
    at = row.to(tl.int64) * stride_q + head[:, None] * DIM + column[None, :]
    queries = tl.load(q + at, mask=here, other=0.0)
    table = tables + seq.to(tl.int64) * stride_table
    keys_at = kv + kv_head * DIM
    values_at = keys_at + stride_side

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        live = key < end
        where = places(table, key, live, stride_block, stride_key, BLOCK, True)
        keys = load_rows(keys_at, where, live, DIM, WIDTH, True)
        scores = score(queries, keys, scale, cap, CAPPED)
        seen = live
        if WINDOW:
            seen = live & (key >= length - WINDOW)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        values = load_rows(values_at, where, live, DIM, WIDTH, True)
        acc, best, total = accumulate(acc, best, total, scores, values)

    acc = acc / total[:, None]
    if splits == 1:
        at = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + column[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)
    else:
        place = item.to(tl.int64) * HEADS + head
        tl.store(partial + place[:, None] * WIDTH + column[None, :], acc, mask=here)
        tl.store(weight + place, best + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize_on_alignment=["query_starts"])
def _merge(
    partial,
    weight,
    first_items,
    query_starts,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGE: tl.constexpr,
    MIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head (axis 0) of one sequence (axis 1).  Rows without a key become zero."""
    follow(PDL)
    head = tl.program_id(0)
    seq = tl.program_id(1)
    first = tl.load(first_items + seq)
    last = tl.load(first_items + seq + 1)
    if last - first == 1:
        return
    row = seq
    if MIXED:
        if last == first:
            return
        row = tl.load(query_starts + seq)
    column = tl.arange(0, WIDTH)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for start in range(first, last, MERGE):
        item = start + tl.arange(0, MERGE)
        live = item < last
        at = item.to(tl.int64) * HEADS + head
        scores = tl.load(weight + at, mask=live, other=float("-inf"))
        here = live[:, None] & (column < DIM)[None, :]
        parts = tl.load(partial + at[:, None] * WIDTH + column[None, :], mask=here, other=0.0)
        higher = tl.maximum(best, tl.max(scores, 0))
        share = tl.exp2(scores - higher)
        keep = tl.exp2(best - higher)
        total = total * keep + tl.sum(share, 0)
        acc = acc * keep + tl.sum(parts * share[:, None], 0)
        best = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)
    at = (row.to(tl.int64) * HEADS + head) * DIM + column
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=column < DIM)


def plan_decode(
    seq_lens: Tensor,
    query_starts: Tensor | None,
    *,
    heads: int,
    kv: Tensor,
    window: int = 0,
    tiles: DecodeTiles | None = None,
) -> DecodePlan:
    """Cut a step's keys into items.  Holds for every layer of the same window and shapes.

    seq_lens (S,) int32, 0 = nothing to do.  query_starts (S + 1,) int32: sequences of other than
    one row are left out, and sequence s is row query_starts[s]; None: sequence s is row s.
    """
    kv_heads, head_dim, device = kv.shape[3], kv.shape[4], kv.device
    if tiles is None:
        tiles = decode_tiles(head_dim, kv.element_size(), backend.shared_bytes(device))
    num_seqs = seq_lens.shape[0]
    target = max(1, -(-tiles.programs_per_sm * backend.num_sms(device) // kv_heads))
    num_items = target + num_seqs
    words = torch.empty(num_items + num_seqs + 2, dtype=torch.int32, device=device)
    items, first_items, chunk = torch.split(words, [num_items, num_seqs + 1, 1])
    width = width_of(head_dim)
    sums = torch.empty(num_items * heads * (width + 1), dtype=torch.float32, device=device)
    partial, weight = torch.split(sums, [num_items * heads * width, num_items * heads])
    pdl = backend.dependent_launch(device)
    _cut[(1,)](
        seq_lens,
        seq_lens if query_starts is None else query_starts,
        items,
        first_items,
        chunk,
        num_seqs,
        num_items,
        target,
        TILE=tiles.keys,
        WINDOW=window,
        MIXED=query_starts is not None,
        SCAN=SCAN,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return DecodePlan(
        items,
        first_items,
        chunk,
        partial.view(num_items, heads, width),
        weight.view(num_items, heads),
        tiles,
        window,
    )


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor | None,
    plan: DecodePlan,
    out: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Attention of the rows of `plan` over all their keys, into out (T, heads, head_dim).

    q (T, heads, head_dim), its rows at any stride; kv (num_blocks, 2, block_size, kv_heads,
    head_dim), one layer's view; block_tables (S, blocks) int32.  `query_starts` as for the plan.
    Scores are `softcap` * tanh(scale * q·k / softcap) if `softcap` is set.  Where the plan has no
    query_starts, the rows of sequences of length 0 become zero; otherwise other rows are left.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = kv.shape[2:4]
    tiles, group = plan.tiles, heads // kv_heads
    assert q.stride()[1:] == (head_dim, 1) and kv.stride()[3:] == (head_dim, 1)
    assert out.is_contiguous()
    starts = seq_lens if query_starts is None else query_starts
    mixed, pdl = query_starts is not None, backend.dependent_launch(q.device)
    factor, cap = score_factors(scale, softcap)
    width = width_of(head_dim)
    _decode[(kv_heads, plan.items.shape[0])](
        q,
        kv,
        block_tables,
        seq_lens,
        starts,
        plan.items,
        plan.first_items,
        plan.chunk,
        out,
        plan.partial,
        plan.weight,
        q.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        block_tables.stride(0),
        factor,
        cap,
        HEADS=heads,
        GROUP=group,
        DIM=head_dim,
        WIDTH=width,
        BLOCK=block_size,
        TILE=tiles.keys,
        ROWS=max(DECODE_ROWS, triton.next_power_of_2(group)),
        WINDOW=plan.window,
        CAPPED=softcap != 0.0,
        MIXED=mixed,
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=pdl,
    )
    _merge[(heads, seq_lens.shape[0])](
        plan.partial,
        plan.weight,
        plan.first_items,
        starts,
        out,
        HEADS=heads,
        DIM=head_dim,
        WIDTH=width,
        MERGE=MERGE,
        MIXED=mixed,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )

"""Causal attention of several rows a sequence, over cached keys and over their own.

Goes in: q of a step, one layer's view of the arena, block tables, lengths, row ranges.  Comes out:
attention per row.  A tile is a few rows of one sequence with all heads that share a KV head, so a
tile of K and V is read once for the group.  Which tile belongs to which sequence is worked out on
the device from the row ranges: the grid depends on the numbers of rows and sequences alone, and
may be captured in a graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_tiles import PrefillTiles, prefill_tiles, width_of
from engine.kernels.dependent import follow
from engine.kernels.paged_tile import accumulate, load_rows, places, score, score_factors

#: Sequences that a program looks at together when it seeks its own.
SCAN = 128


@triton.jit
def _owner(query_starts, num_seqs, tile, SPAN: tl.constexpr, SCAN: tl.constexpr):
    """The sequence of a tile.  Sequence s begins with tile query_starts[s] // SPAN + s."""
    lane = tl.arange(0, SCAN)
    begun = tl.zeros([SCAN], tl.int32)
    for s in range(0, num_seqs, SCAN):
        live = s + lane < num_seqs
        start = tl.load(query_starts + s + lane, mask=live, other=0)
        begun += (live & (start // SPAN + s + lane <= tile)).to(tl.int32)
    return tl.sum(begun) - 1


@triton.jit(
    do_not_specialize=["stride_table", "num_seqs"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "query_starts"],
)
def _prefill(
    q,
    kv,
    tables,
    seq_lens,
    query_starts,
    out,
    num_seqs,
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
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINGLES: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPAN rows (axis 1) x GROUP heads of one KV head (axis 0).  Late, heavy tiles come first."""
    follow(PDL)
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = _owner(query_starts, num_seqs, tile, SPAN, SCAN)
    start = tl.load(query_starts + seq)
    num_rows = tl.load(query_starts + seq + 1) - start
    length = tl.load(seq_lens + seq)
    first = (tile - start // SPAN - seq) * SPAN  # of this tile's rows in the sequence's
    if first >= num_rows:
        return
    if length == 0:
        return
    if num_rows == 1 and not SINGLES:
        return

    m = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head = kv_head * GROUP + m % GROUP
    local = first + m // GROUP
    mine = (m < SPAN * GROUP) & (local < num_rows)
    here = mine[:, None] & (column < DIM)[None, :]
    row = (start + local).to(tl.int64)
    at = row[:, None] * stride_q + (head * DIM)[:, None] + column[None, :]
    queries = tl.load(q + at, mask=here, other=0.0)
    base = length - num_rows  # position of the sequence's first row
    position = base + local
    end = base + tl.minimum(first + SPAN, num_rows)  # of what the last row sees
    table = tables + seq.to(tl.int64) * stride_table
    keys_at = kv + kv_head * DIM
    values_at = keys_at + stride_side

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if WINDOW:
        edge = tl.maximum(base + first + 1 - WINDOW, 0) // TILE * TILE
    else:
        edge = (base + first + 1) // TILE * TILE  # every row sees every key before it
        for n in range(0, edge, TILE):
            key = n + tl.arange(0, TILE)
            where = places(table, key, key >= 0, stride_block, stride_key, BLOCK, False)
            keys = load_rows(keys_at, where, key >= 0, DIM, WIDTH, False)
            scores = score(queries, keys, scale, cap, CAPPED)
            values = load_rows(values_at, where, key >= 0, DIM, WIDTH, False)
            acc, best, total = accumulate(acc, best, total, scores, values)
    # From 0, not from `edge`: triton widens and pipelines no load of a loop whose bounds come from
    # another loop (`_owner`).
    for n in range(0, end - edge, TILE):
        key = edge + n + tl.arange(0, TILE)
        live = key < end
        where = places(table, key, live, stride_block, stride_key, BLOCK, True)
        keys = load_rows(keys_at, where, live, DIM, WIDTH, True)
        scores = score(queries, keys, scale, cap, CAPPED)
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        values = load_rows(values_at, where, live, DIM, WIDTH, True)
        acc, best, total = accumulate(acc, best, total, scores, values)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows of no sequence see nothing
    at = (row * HEADS + head)[:, None] * DIM + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    singles: bool = True,
    tiles: PrefillTiles | None = None,
) -> None:
    """Causal attention of each sequence's rows over its keys, into out (T, heads, head_dim).

    q (T, heads, head_dim), its rows at any stride; kv (num_blocks, 2, block_size, kv_heads,
    head_dim), one layer's view, in which the rows' own K and V stand already; block_tables
    (S, blocks), seq_lens (S,) and query_starts (S + 1,) int32.  Sequences of length 0, rows of no
    sequence and, without `singles`, sequences of one row are left as they are.
    """
    num_rows, heads, head_dim = q.shape
    block_size, kv_heads = kv.shape[2:4]
    group, num_seqs = heads // kv_heads, seq_lens.shape[0]
    assert q.stride()[1:] == (head_dim, 1) and kv.stride()[3:] == (head_dim, 1)
    assert out.is_contiguous()
    if tiles is None:
        shared = backend.shared_bytes(q.device)
        tiles = prefill_tiles(num_rows, group, head_dim, kv.element_size(), shared)
    span, pdl = tiles.rows // group, backend.dependent_launch(q.device)
    factor, cap = score_factors(scale, softcap)
    _prefill[(kv_heads, num_rows // span + num_seqs)](
        q,
        kv,
        block_tables,
        seq_lens,
        query_starts,
        out,
        num_seqs,
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
        WIDTH=width_of(head_dim),
        BLOCK=block_size,
        TILE=tiles.keys,
        ROWS=tiles.rows,
        SPAN=span,
        WINDOW=window,
        CAPPED=softcap != 0.0,
        SINGLES=singles,
        SCAN=SCAN,
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=pdl,
    )

"""Attention whose bits for a row depend on that row's sequence alone.

Goes in and comes out: as `attention.paged_attention`.  Every product has one fixed shape: a tile
of QUERY_TILE rows against a tile of KEY_TILE keys, both aligned to absolute positions, so that a
row lies at the same place of the same tiles whether it comes alone, in a long chunk or beside
other sequences.  Softmax runs online over the key tiles in order.  All in fp32.  Knows no batch:
sequences and tiles are walked one after the other, which is slow, and right for tests and audits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.attention_meta import AttentionMeta

#: QUERY_TILE divides KEY_TILE, so all rows of a query tile end in the same key tile; every
#: block size (8 to 64) divides KEY_TILE.
QUERY_TILE = 16
KEY_TILE = 64


def fixed_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
) -> Tensor:
    """q (T, heads, head_dim) over kv (num_blocks, 2, block_size, kv_heads, head_dim) -> like q."""
    out = torch.empty_like(q)
    for s, length in enumerate(meta.seq_lens):
        start, end = meta.query_starts[s], meta.query_starts[s + 1]
        blocks = meta.block_tables[s, : -(-length // meta.block_size)]
        keys, values = (_key_tiles(kv[:, side], blocks, length) for side in (0, 1))
        position = length - (end - start)
        for tile in range(position // QUERY_TILE, (length - 1) // QUERY_TILE + 1):
            base = tile * QUERY_TILE
            first, last = max(base, position), min(base + QUERY_TILE, length)
            rows = slice(start + first - position, start + last - position)
            query = q.new_zeros(QUERY_TILE, *q.shape[1:], dtype=torch.float32)
            query[first - base : last - base] = q[rows]
            result = _attend_tile(query, keys, values, base, scale, window, softcap)
            out[rows] = result[first - base : last - base]
    return out


def _key_tiles(side: Tensor, blocks: Tensor, length: int) -> Tensor:
    """One side of one sequence as (tiles, kv_heads, KEY_TILE, head_dim) fp32, zero-padded."""
    kv_heads, head_dim = side.shape[2:]
    num_tiles = -(-length // KEY_TILE)
    padded = side.new_zeros(num_tiles * KEY_TILE, kv_heads, head_dim, dtype=torch.float32)
    padded[:length] = side.index_select(0, blocks).view(-1, kv_heads, head_dim)[:length]
    return padded.view(num_tiles, KEY_TILE, kv_heads, head_dim).transpose(1, 2).contiguous()


def _attend_tile(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    base: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Rows at positions base.. of query (QUERY_TILE, heads, head_dim) -> the same shape."""
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    device = query.device
    # (kv_heads, group * QUERY_TILE, head_dim): the group's heads as rows of one product
    flat = query.view(QUERY_TILE, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    flat = flat.reshape(kv_heads, -1, head_dim).contiguous()
    row = torch.arange(base, base + QUERY_TILE, device=device).repeat(heads // kv_heads)[:, None]
    best = flat.new_full((*flat.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(best)
    acc = torch.zeros_like(flat)
    first = max(0, base - window + 1) // KEY_TILE if window else 0
    for tile in range(first, base // KEY_TILE + 1):
        key = torch.arange(tile * KEY_TILE, (tile + 1) * KEY_TILE, device=device)
        hidden = key > row
        if window:
            hidden |= key <= row - window
        scores = torch.bmm(flat, keys[tile].transpose(1, 2)).mul_(scale)
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores.masked_fill_(hidden, -torch.inf)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        # A row may see nothing yet, where the tile lies before its window: nothing to subtract.
        shift = higher.masked_fill(higher == -torch.inf, 0.0)
        weight, keep = torch.exp(scores - shift), torch.exp(best - shift)
        total = total * keep + weight.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weight, values[tile])
        best = higher
    out = (acc / total).view(kv_heads, -1, QUERY_TILE, head_dim)
    return out.permute(2, 0, 1, 3).reshape(QUERY_TILE, heads, head_dim)

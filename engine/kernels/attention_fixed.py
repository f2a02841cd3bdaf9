"""Attention whose bits for a row depend on that row's sequence alone.

Goes in and comes out: as `attention.paged_attention`.  A tile of QUERY_TILE rows, aligned to
absolute positions, meets all keys up to the end of the key tile that holds them, KEY_TILE of them
each: every product has a shape that the tile's position alone decides, and a row lies at the same
place of it whether it comes alone, in a long chunk or beside other sequences.  All in fp32.  Knows
no batch: sequences and tiles are walked one after the other, which is slow, and right for tests and
audits.
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
        keys, values = _key_tiles(kv, blocks, length)
        position = length - (end - start)
        for tile in range(position // QUERY_TILE, (length - 1) // QUERY_TILE + 1):
            base = tile * QUERY_TILE
            first, last = max(base, position), min(base + QUERY_TILE, length)
            rows = slice(start + first - position, start + last - position)
            query = q.new_zeros(QUERY_TILE, *q.shape[1:], dtype=torch.float32)
            query[first - base : last - base] = q[rows]
            hidden = _hidden(meta, base, window, q)
            result = _attend_tile(query, keys, values, hidden, base, scale, window, softcap)
            out[rows] = result[first - base : last - base]
    return out


def _key_tiles(kv: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Both sides of one sequence as (2, tiles * KEY_TILE, kv_heads, head_dim) fp32, zero-padded."""
    block_size = kv.shape[2]
    num_blocks = -(-length // KEY_TILE) * KEY_TILE // block_size
    padded = kv.new_empty(2, num_blocks, *kv.shape[2:], dtype=torch.float32)
    padded[:, : len(blocks)] = kv.index_select(0, blocks).transpose(0, 1)
    sides = padded.flatten(1, 2)
    sides[:, length:] = 0.0
    return sides


def _seen(base: int, window: int) -> tuple[int, int]:
    """Where the key tiles begin and end that any row of the tile at `base` sees."""
    begin = max(0, base - window + 1) // KEY_TILE * KEY_TILE if window else 0
    return begin, (base // KEY_TILE + 1) * KEY_TILE


def _hidden(meta: AttentionMeta, base: int, window: int, q: Tensor) -> Tensor:
    """Which of the last keys each row may not see, (QUERY_TILE, keys) bool: once a step.

    Without a window, all rows see all keys ahead of the last tile.
    """
    name = ("hidden", base, window)
    if name not in meta.derived:
        begin, end = _seen(base, window)
        key = torch.arange(begin if window else end - KEY_TILE, end, device=q.device)
        row = torch.arange(base, base + QUERY_TILE, device=q.device)[:, None]
        later = key > row
        meta.derived[name] = later | (key <= row - window) if window else later
    hidden: Tensor = meta.derived[name]
    return hidden


def _attend_tile(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    base: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Rows at positions base.. of query (QUERY_TILE, heads, head_dim) -> the same shape.

    keys and values (keys, kv_heads, head_dim) reach at least to the end of the rows' key tile;
    `hidden` (QUERY_TILE, last keys) is True where a row may not see a key.
    """
    _, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    # (kv_heads, group * QUERY_TILE, head_dim): the group's heads as rows of one product
    flat = query.view(QUERY_TILE, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    flat = flat.reshape(kv_heads, -1, head_dim)
    begin, end = _seen(base, window)
    scores = torch.bmm(flat, keys[begin:end].permute(1, 2, 0)).mul_(scale)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores[:, :, -hidden.shape[1] :].view(kv_heads, -1, *hidden.shape).masked_fill_(
        hidden, -torch.inf
    )
    # Every row sees itself, those of nobody too: the highest score is a number.
    weight = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    out = torch.bmm(weight, values[begin:end].transpose(0, 1)) / weight.sum(-1, keepdim=True)
    out = out.view(kv_heads, -1, QUERY_TILE, head_dim)
    return out.permute(2, 0, 1, 3).reshape(QUERY_TILE, heads, head_dim)

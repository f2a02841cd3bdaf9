"""Paged attention over the block-major arena: one layer's K/V write, and causal attention.

Goes in: q, k and v of a step's rows, the layer's strided view of the arena, and an AttentionMeta.
Comes out: K and V in their slots, and attention per row.  A step may mix prefill chunks with
decode rows.  Knows no sequences, only rows, lengths and block tables.

On a card the Triton kernels of `attention_device.py` take it, elsewhere torch does.  What either
derives from the meta (masks, index lists, plans) is made once a step, kept in the meta and gone
with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import backend
from engine.kernels.attention_fixed import fixed_attention
from engine.kernels.attention_meta import AttentionMeta


@dataclass(frozen=True, slots=True)
class _Singles:
    """Sequences with one row, padded to the longest of the group."""

    rows: Tensor  # (D,)
    tables: Tensor  # (D * blocks,): blocks of the visible keys; padding repeats the last one
    mask: Tensor | None  # (D, 1, 1, keys) bool, True = visible


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several rows of one sequence."""

    start: int
    end: int
    table: Tensor  # (blocks,)
    keys: int
    mask: Tensor | None  # (rows, keys) bool, True = visible; None = plainly causal


def write_kv(k: Tensor, v: Tensor, kv: Tensor, meta: AttentionMeta) -> None:
    """Put k and v (T, kv_heads, head_dim) into kv (num_blocks, 2, block_size, kv_heads, head_dim).

    A block that this step opens without filling it is cleared first: attention reads whole blocks
    and masks what is not visible, but a NaN left by the block's last owner would survive a mask.
    """
    if "write" not in meta.derived:
        blocks = torch.div(meta.slot_mapping, meta.block_size, rounding_mode="floor")
        meta.derived["write"] = (blocks, meta.slot_mapping % meta.block_size, _opened(meta))
    blocks, offsets, opened = meta.derived["write"]
    if opened is not None:
        kv.index_fill_(0, opened, 0)
    kv[:, 0].index_put_((blocks, offsets), k)
    kv[:, 1].index_put_((blocks, offsets), v)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int,
    deterministic: bool,
    softcap: float = 0.0,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of q (T, heads, head_dim) over the keys in kv -> (T, heads, head_dim).

    Heads share KV heads in consecutive groups.  `window` counts visible positions, the row's own
    included; 0 = all.  `deterministic`: a row's bits do not depend on the batch or on chunking.
    `softcap`: scores are softcap * tanh(scale * q·k / softcap); 0 = as they are.
    `fresh`: the rows' own k and v, which spare a card the way through the arena for long prompts.
    """
    if backend.use_kernels(q):
        from engine.kernels.attention_device import device_attention

        return device_attention(
            q,
            kv,
            meta,
            scale=scale,
            window=window,
            softcap=softcap,
            deterministic=deterministic,
            fresh=fresh,
        )
    if deterministic:
        return fixed_attention(q, kv, meta, scale=scale, window=window, softcap=softcap)
    if window not in meta.derived:
        meta.derived[window] = _plan(meta, window)
    singles, chunks = meta.derived[window]
    out = torch.empty_like(q)
    for group in singles:
        out.index_copy_(0, group.rows, _attend_singles(q, kv, group, scale, softcap))
    for chunk in chunks:
        rows = slice(chunk.start, chunk.end)
        out[rows] = _attend_chunk(q[rows], kv, chunk, scale, softcap)
    return out


def _attend_singles(q: Tensor, kv: Tensor, group: _Singles, scale: float, softcap: float) -> Tensor:
    """One padded, masked product; the heads that share a KV head stand in as its query rows."""
    kv_heads, head_dim = kv.shape[3], kv.shape[4]
    num = group.rows.shape[0]
    keys, values = (
        kv[:, side].index_select(0, group.tables).view(num, -1, kv_heads, head_dim).transpose(1, 2)
        for side in (0, 1)
    )  # (D, kv_heads, keys, head_dim)
    query = q.index_select(0, group.rows).view(num, kv_heads, -1, head_dim)
    out = _attend(query, keys, values, group.mask, False, scale, softcap)
    return out.reshape(num, -1, head_dim)


def _attend_chunk(q: Tensor, kv: Tensor, chunk: _Chunk, scale: float, softcap: float) -> Tensor:
    """One product; KV heads are the batch, so a group shares its keys without a copy."""
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    keys, values = (
        kv[:, side]
        .index_select(0, chunk.table)
        .view(-1, kv_heads, head_dim)[: chunk.keys]
        .transpose(0, 1)
        .unsqueeze(1)
        .expand(-1, heads // kv_heads, -1, -1)
        for side in (0, 1)
    )  # (kv_heads, group, keys, head_dim)
    query = q.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    out = _attend(query, keys, values, chunk.mask, chunk.mask is None, scale, softcap)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float,
) -> Tensor:
    """SDPA, which knows no softcap; with one, the same in fp32 step by step."""
    if not softcap:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    scores = (query.float() @ keys.float().transpose(-1, -2)).mul_(scale / softcap)
    scores.tanh_().mul_(softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1) @ values.float()).to(query.dtype)


def _plan(meta: AttentionMeta, window: int) -> tuple[list[_Singles], list[_Chunk]]:
    counts = [b - a for a, b in zip(meta.query_starts, meta.query_starts[1:], strict=False)]
    alone = [s for s, count in enumerate(counts) if count == 1]
    groups = [_singles(meta, window, group) for group in _even_groups(meta, window, alone)]
    chunks = [_chunk(meta, window, s) for s, count in enumerate(counts) if count > 1]
    return groups, chunks


def _first_block(meta: AttentionMeta, window: int, position: int) -> int:
    """The block of the first key that the row at `position` sees."""
    return max(0, position - window + 1) // meta.block_size if window else 0


def _even_groups(meta: AttentionMeta, window: int, seqs: list[int]) -> Iterable[list[int]]:
    """Sequences to pad together: all, unless padding would more than double the keys read."""
    size = meta.block_size
    blocks = {
        s: (meta.seq_lens[s] - 1) // size - _first_block(meta, window, meta.seq_lens[s] - 1) + 1
        for s in seqs
    }
    if not seqs or max(blocks.values()) * len(seqs) <= 2 * sum(blocks.values()):
        return [seqs] if seqs else []
    by_size: dict[int, list[int]] = {}
    for s in seqs:
        by_size.setdefault(blocks[s].bit_length(), []).append(s)
    return by_size.values()


def _singles(meta: AttentionMeta, window: int, seqs: list[int]) -> _Singles:
    size, device = meta.block_size, meta.block_tables.device
    lens = [meta.seq_lens[s] for s in seqs]
    first = [_first_block(meta, window, n - 1) for n in lens]
    last = [(n - 1) // size for n in lens]
    num_blocks = max(b - a for a, b in zip(first, last, strict=True)) + 1
    host = torch.tensor([[meta.query_starts[s] for s in seqs], seqs, first, last, lens])
    rows, index, first_block, last_block, length = host.to(device).unsqueeze(-1)  # each (D, 1)
    columns = first_block + torch.arange(num_blocks, device=device)
    tables = meta.block_tables[index, columns.minimum(last_block)]  # (D, blocks)
    position = first_block * size + torch.arange(num_blocks * size, device=device)
    visible = position < length
    if window:
        visible &= position >= length - window
    even = all(n == lens[0] and n % size == 0 for n in lens) and not window
    return _Singles(rows.squeeze(1), tables.flatten(), None if even else visible[:, None, None])


def _chunk(meta: AttentionMeta, window: int, seq: int) -> _Chunk:
    start, end, length = meta.query_starts[seq], meta.query_starts[seq + 1], meta.seq_lens[seq]
    position = length - (end - start)  # of the first row
    first = _first_block(meta, window, position)
    table = meta.block_tables[seq, first : (length - 1) // meta.block_size + 1]
    keys = length - first * meta.block_size
    if position == 0 and (not window or length <= window):
        return _Chunk(start, end, table, keys, None)
    row = torch.arange(position, length, device=table.device).unsqueeze(1)
    key = torch.arange(first * meta.block_size, length, device=table.device)
    visible = key <= row
    if window:
        visible &= key > row - window
    return _Chunk(start, end, table, keys, visible)


def _opened(meta: AttentionMeta) -> Tensor | None:
    """Blocks whose first row is written in this step and whose last is not, or None."""
    found = []
    for s, length in enumerate(meta.seq_lens):
        position = length - (meta.query_starts[s + 1] - meta.query_starts[s])
        last = (length - 1) // meta.block_size
        if last * meta.block_size >= position and length % meta.block_size:
            found.append((s, last))
    if not found:
        return None
    seqs, columns = torch.tensor(found, device=meta.block_tables.device).unbind(1)
    return meta.block_tables[seqs, columns].long()

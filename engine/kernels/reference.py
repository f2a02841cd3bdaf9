"""The kernels' specification in its simplest form: loops over sequences and rows, all in fp32.

Goes in and comes out: as the ops of `attention.py` and `lora.py`.  Every other implementation is
tested against this one; the engine never calls it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.lora_meta import LoraMeta


def reference_write_kv(k: Tensor, v: Tensor, kv: Tensor, meta: AttentionMeta) -> None:
    """Row t of k and v goes to block slot // block_size at offset slot % block_size."""
    for t, slot in enumerate(meta.slot_mapping.tolist()):
        block, offset = divmod(slot, meta.block_size)
        kv[block, 0, offset] = k[t]
        kv[block, 1, offset] = v[t]


def reference_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(scale * q Kᵀ) V, row by row and head by head, over positions (p - window, p].

    With `softcap`, scores are softcap * tanh(score / softcap).
    """
    out = torch.empty_like(q)
    group = q.shape[1] // kv.shape[3]
    for s, length in enumerate(meta.seq_lens):
        start, end = meta.query_starts[s], meta.query_starts[s + 1]
        for t in range(start, end):
            position = length - (end - t)
            first = max(0, position - window + 1) if window else 0
            places = [divmod(p, meta.block_size) for p in range(first, position + 1)]
            blocks = [int(meta.block_tables[s, column]) for column, _ in places]
            offsets = [offset for _, offset in places]
            for head in range(q.shape[1]):
                keys = kv[blocks, 0, offsets, head // group].float()
                values = kv[blocks, 1, offsets, head // group].float()
                scores = scale * (keys @ q[t, head].float())
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(scores, dim=0)
                out[t, head] = (weights @ values).to(q.dtype)
    return out


def reference_lora(
    y: Tensor,
    x: Tensor,
    *,
    layer: int,
    modules: Sequence[str],
    splits: Sequence[int],
    meta: LoraMeta,
) -> None:
    """y[row, module] += scaling * (x[row] Aᵀ) B, row by row; what has no pair stays as it is."""
    for segment in meta.segments:
        for t in range(segment.start, segment.end):
            for i, module in enumerate(modules):
                pair = meta.slots[segment.slot].get((layer, module))
                if pair is None:
                    continue
                columns = slice(sum(splits[:i]), sum(splits[: i + 1]))
                a, b = torch.cat(pair.a).float(), torch.cat(pair.b).float()
                h = pair.scaling * (a @ x[t].float())  # (rank,)
                y[t, columns] = (y[t, columns].float() + h @ b).to(y.dtype)

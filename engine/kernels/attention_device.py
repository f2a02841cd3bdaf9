"""Paged attention on a card: which rows go to which kernel.

Goes in and comes out: as `attention.paged_attention`.  Rows that stand alone in their sequence go
to the decode kernel, chunks to the prefill kernel, long prompts with nothing cached to cuDNN.  The
kernels find their rows on the device; what the host knows of the step only saves launches.  A step
whose host tuples are empty (a graph's) launches whatever its rows may turn out to need.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_tiles import takes_sdpa
from engine.kernels.paged_decode import DecodePlan, decode_attention, plan_decode
from engine.kernels.paged_prefill import prefill_attention

#: Plainly causal attention of one whole prompt, fastest first.
_SDPA = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@dataclass(frozen=True, slots=True)
class _Routes:
    """A step's rows by kernel, for the layers of one window."""

    decode: DecodePlan | None
    seq_lens: Tensor  # (S,) int32
    query_starts: Tensor | None  # (S + 1,) int32; None: sequence s is row s
    chunk_lens: Tensor | None  # (S,) int32, 0 where the prefill kernel has nothing to do
    prompts: tuple[tuple[int, int], ...]  # row ranges for SDPA


def device_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q (T, heads, head_dim) over the keys in kv -> (T, heads, head_dim).

    `fresh`: k and v (T, kv_heads, head_dim) of this step's rows, for prompts that need no others.
    """
    key = ("routes", window)
    if key not in meta.derived:
        whole = fresh is not None and not softcap
        meta.derived[key] = _routes(q, kv, meta, window, whole)
    routes: _Routes = meta.derived[key]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if routes.decode is not None:
        decode_attention(
            q,
            kv,
            meta.block_tables,
            routes.seq_lens,
            routes.query_starts,
            routes.decode,
            out,
            scale=scale,
            softcap=softcap,
        )
    if routes.chunk_lens is not None and routes.query_starts is not None:
        prefill_attention(
            q,
            kv,
            meta.block_tables,
            routes.chunk_lens,
            routes.query_starts,
            out,
            scale=scale,
            window=window,
            softcap=softcap,
            singles=False,
        )
    if fresh is not None:
        for start, end in routes.prompts:
            k, v = (part[start:end] for part in fresh)
            out[start:end] = whole_prompt(q[start:end], k, v, scale)
    return out


def whole_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q (T, heads, head_dim) over k and v (T, kv_heads, head_dim)."""
    query, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    with sdpa_kernel(_SDPA, set_priority=True):
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return out.squeeze(0).transpose(0, 1)


def _routes(q: Tensor, kv: Tensor, meta: AttentionMeta, window: int, whole: bool) -> _Routes:
    seq_lens, query_starts = _on_device(meta, q.device)
    counts = [end - start for start, end in pairwise(meta.query_starts)]
    known = len(counts) > 0
    single = meta.single_rows or (known and max(counts) == 1)
    prompts = _prompts(q, meta, counts, window) if whole and not single else {}
    chunk_lens = None
    if not single and (not known or any(c > 1 and s not in prompts for s, c in enumerate(counts))):
        chunk_lens = seq_lens
        if prompts:
            left = [0 if s in prompts else n for s, n in enumerate(meta.seq_lens)]
            chunk_lens = torch.tensor(left, dtype=torch.int32, device=q.device)
    starts = None if single else query_starts
    plan = None
    if single or not known or 1 in counts:
        plan = plan_decode(seq_lens, starts, heads=q.shape[1], kv=kv, window=window)
    return _Routes(plan, seq_lens, starts, chunk_lens, tuple(prompts.values()))


def _prompts(
    q: Tensor, meta: AttentionMeta, counts: list[int], window: int
) -> dict[int, tuple[int, int]]:
    """Sequence -> its rows, where the rows are all its keys and SDPA is the faster way."""
    return {
        s: (meta.query_starts[s], meta.query_starts[s + 1])
        for s, (count, length) in enumerate(zip(counts, meta.seq_lens, strict=True))
        if count == length
        and (not window or length <= window)
        and takes_sdpa(count, q.shape[2], q.dtype)
    }


def _on_device(meta: AttentionMeta, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths and row ranges: the step's own tensors, or made from the host's tuples."""
    lens, starts = meta.seq_lens_device, meta.query_starts_device
    if "device" not in meta.derived:
        if lens is None:
            lens = torch.tensor(meta.seq_lens, dtype=torch.int32, device=device)
        if starts is None:
            host = meta.query_starts or tuple(range(lens.shape[0] + 1))
            starts = torch.tensor(host, dtype=torch.int32, device=device)
        meta.derived["device"] = (lens, starts)
    found: tuple[Tensor, Tensor] = meta.derived["device"]
    return found

"""Paged attention on a card: which rows go to which kernel.

Goes in and comes out: as `attention.paged_attention`.  Rows that stand alone in their sequence go
to the decode kernel, chunks to the prefill kernel, long prompts with nothing cached to cuDNN.  The
kernels find their rows on the device; what the host knows of the step only saves launches.  A step
whose host tuples are empty (a graph's) launches whatever its rows may turn out to need.

In deterministic mode there is one way: every row goes through the prefill kernel in its fixed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_tiles import SDPA_ROWS, SDPA_STEP, fits_sdpa
from engine.kernels.decode_plan import DecodePlan, plan_decode
from engine.kernels.paged_decode import decode_attention, may_run_beside
from engine.kernels.paged_prefill import prefill_attention
from engine.kernels.prefill_plan import PrefillPlan, plan_prefill

#: Plainly causal attention of one whole prompt, fastest first.
_SDPA = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
#: More rows than any prompt has.
_ANY_ROWS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class _Routes:
    """A step's rows by kernel, for the layers of one window."""

    decode: DecodePlan | None
    prefill: PrefillPlan | None
    prompts: tuple[tuple[int, int], ...]  # row ranges for SDPA
    settled: bool  # a layer has run with these


def device_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
    deterministic: bool = False,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q (T, heads, head_dim) over the keys in kv -> (T, heads, head_dim).

    `deterministic`: a row's bits depend on its own keys alone.  `fresh`: k and v (T, kv_heads,
    head_dim) of this step's rows, for prompts that need no others.
    """
    key = ("routes", window)
    routes: _Routes | None = meta.derived.get(key)
    if routes is None:
        if deterministic:
            routes = _one_way(q, kv, meta, window)
        else:
            whole = fresh is not None and not softcap and fits_sdpa(q.shape[2], q.dtype)
            routes = _routes(q, kv, meta, window, whole)
        meta.derived[key] = replace(routes, settled=True)
    if fresh is not None and routes.prompts == ((0, q.shape[0]),):
        return whole_prompt(q, *fresh, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lens, starts = _on_device(meta, q.device)
    # Prompts first: the decode rows' kernel then runs beside theirs.
    both = False
    if routes.prefill is not None and routes.decode is not None:
        both = may_run_beside(routes.decode, kv)
    if routes.prefill is not None:
        prefill_attention(
            q,
            kv,
            meta.block_tables,
            lens,
            starts,
            routes.prefill,
            out,
            settled=routes.settled,
            followed=both,
            scale=scale,
            softcap=softcap,
        )
    if routes.decode is not None:
        decode_attention(
            q,
            kv,
            meta.block_tables,
            routes.decode,
            out,
            settled=routes.settled,
            beside=both,
            scale=scale,
            softcap=softcap,
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


def _one_way(q: Tensor, kv: Tensor, meta: AttentionMeta, window: int) -> _Routes:
    """Every row, alone in its sequence or not, through one form of one kernel."""
    lens, starts = _on_device(meta, q.device)
    counts = [end - start for start, end in pairwise(meta.query_starts)]
    plan = plan_prefill(
        lens,
        starts,
        num_rows=q.shape[0],
        heads=q.shape[1],
        kv=kv,
        window=window,
        counts=counts or None,
        fixed=True,
    )
    return _Routes(None, plan, (), settled=False)


def _routes(q: Tensor, kv: Tensor, meta: AttentionMeta, window: int, whole: bool) -> _Routes:
    lens, starts = _on_device(meta, q.device)
    heads = q.shape[1]
    counts = [end - start for start, end in pairwise(meta.query_starts)]
    known = len(counts) > 0
    single = meta.single_rows or (known and max(counts) == 1)
    # Host and device leave out the same sequences by the same rule: nothing has to be sent.
    least, most = (SDPA_ROWS, window or _ANY_ROWS) if whole and known else (1, 0)
    prompts = {
        s: rows
        for s, rows in enumerate(pairwise(meta.query_starts))
        if least <= counts[s] == meta.seq_lens[s] <= most and counts[s] % SDPA_STEP == 0
    }
    chunks = [n for s, n in enumerate(counts) if n > 1 and s not in prompts]
    decode = prefill = None
    if single or not known or 1 in counts:
        decode = plan_decode(lens, None if single else starts, heads=heads, kv=kv, window=window)
    if not single and (not known or chunks):
        prefill = plan_prefill(
            lens,
            starts,
            num_rows=q.shape[0],
            heads=heads,
            kv=kv,
            window=window,
            counts=chunks if known else None,
            singles=False,
            left_out=(least, most, SDPA_STEP),
        )
    return _Routes(decode, prefill, tuple(prompts.values()), settled=False)


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

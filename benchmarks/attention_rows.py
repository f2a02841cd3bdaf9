"""The fused row kernels of a layer beside the torch ops that each stands for."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention_rig import (
    BLOCK,
    DIM,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Cache,
    Report,
    dependent_launch,
    relative,
    seconds_of,
)
from torch import Tensor

from engine.kernels import elementwise, fused, fused_heads


def run(report: Report, cache: Cache) -> None:
    """Each op at three numbers of rows, three ways."""
    for op in ("norm", "rotate", "gate"):
        for rows in (1, 64, 2048):
            for way in ("triton", "plain", "torch"):
                report.line(
                    f"{op} {rows}",
                    way,
                    lambda o=op, r=rows, w=way: rows_case(cache, o, r, w),
                )


def rows_case(cache: Cache, op: str, rows: int, way: str) -> dict[str, float]:
    """One fused op beside the torch ops that it stands for; `way`: triton, plain or torch."""
    make = {"norm": norm_calls, "rotate": rotate_calls, "gate": gate_calls}[op]
    ours, torchs = make(cache, rows)
    error = max(relative(a, b) for a, b in zip(ours[0](True), torchs[0](True), strict=True))
    calls = torchs if way == "torch" else ours
    with dependent_launch(way == "triton"):
        return {"us": seconds_of([lambda c=c: c(False) for c in calls * 4]) * 1e6, "error": error}


Calls = list[Callable[[bool], tuple[Tensor, ...]]]


def norm_calls(cache: Cache, rows: int) -> tuple[Calls, Calls]:
    """With `check`, the call works on copies: the sum is made in place."""
    weight = torch.randn(HIDDEN, device="cuda").bfloat16()

    def pair() -> tuple[Callable[[bool], tuple[Tensor, ...]], ...]:
        x, delta = (torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(2))

        def ours(check: bool) -> tuple[Tensor, ...]:
            total = x.clone() if check else x
            return fused.rms_norm(total, weight, 1e-5, delta), total

        def torchs(check: bool) -> tuple[Tensor, ...]:
            total = x + delta
            return elementwise.rms_norm(total, weight, 1e-5), total

        return ours, torchs

    return split_pairs([pair() for _ in range(8)])


def rotate_calls(cache: Cache, rows: int) -> tuple[Calls, Calls]:
    inv_freq = torch.rand(DIM // 2, device="cuda")
    angles = elementwise.angles(
        torch.arange(rows, device="cuda"), inv_freq, 1.0, deterministic=False
    )
    slots = torch.randperm(cache.arena.shape[0] * BLOCK, device="cuda")[:rows]
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]

    def pair(layer: int) -> tuple[Callable[[bool], tuple[Tensor, ...]], ...]:
        qkv = torch.randn(rows, sum(sizes), device="cuda").bfloat16()
        kv = cache.kv[layer]
        blocks, offsets = slots // BLOCK, slots % BLOCK

        def ours(check: bool) -> tuple[Tensor, ...]:
            work = qkv.clone() if check else qkv
            q, k, v = fused_heads.rotate_and_write(work, kv, slots, angles, heads=HEADS)
            return (q, k, v, kv[blocks, :, offsets].clone()) if check else (q, k, v)

        def torchs(check: bool) -> tuple[Tensor, ...]:
            parts = torch.split(qkv, sizes, dim=1)
            q, k, v = (part.unflatten(1, (-1, DIM)) for part in parts)
            q, k = elementwise.rotate(q, *angles), elementwise.rotate(k, *angles)
            kv[:, 0].index_put_((blocks, offsets), k)
            kv[:, 1].index_put_((blocks, offsets), v)
            return (q, k, v, kv[blocks, :, offsets].clone()) if check else (q, k, v)

        return ours, torchs

    return split_pairs([pair(i) for i in range(8)])


def gate_calls(cache: Cache, rows: int) -> tuple[Calls, Calls]:
    def pair() -> tuple[Callable[[bool], tuple[Tensor, ...]], ...]:
        gate_up = torch.randn(rows, 2 * FFN, device="cuda").bfloat16()

        def ours(check: bool) -> tuple[Tensor, ...]:
            return (fused.silu_mul(gate_up),)

        def torchs(check: bool) -> tuple[Tensor, ...]:
            gate, up = gate_up.chunk(2, dim=-1)
            return (F.silu(gate) * up,)

        return ours, torchs

    return split_pairs([pair() for _ in range(8)])


def split_pairs(
    pairs: list[tuple[Callable[[bool], tuple[Tensor, ...]], ...]],
) -> tuple[Calls, Calls]:
    return [ours for ours, _ in pairs], [torchs for _, torchs in pairs]

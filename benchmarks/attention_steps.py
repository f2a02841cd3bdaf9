"""Attention of whole steps: mixed ones, eager and as captured, and deterministic ones."""

import itertools
from collections.abc import Sequence

import torch
from attention_rig import (
    BLOCK,
    LAYERS,
    SCALE,
    Cache,
    Report,
    ints,
    plain,
    queries,
    relative,
    seconds_of,
)
from torch import Tensor

from engine.kernels.attention_device import device_attention
from engine.kernels.attention_meta import AttentionMeta

#: (keys, rows) of each sequence.
MIXED = {
    "64x1k + 512 after 1536": [(1024, 1)] * 64 + [(2048, 512)],
    "31x1k + 64 after 960": [(1024, 1)] * 31 + [(1024, 64)],
    "512 after 1536": [(2048, 512)],
}
FIXED = {
    "64x576": [(576, 1)] * 64,
    "1x576": [(576, 1)],
    "1x4k": [(4096, 1)],
    "2048": [(2048, 2048)],
    "64x1k + 512 after 1536": MIXED["64x1k + 512 after 1536"],
}
Sequences = Sequence[tuple[int, int]]


def mixed(report: Report, cache: Cache) -> None:
    for case, sequences in MIXED.items():
        for graph in (False, True):
            report.line(
                f"mixed {case}",
                "as captured, 64 sequences" if graph else "as eager",
                lambda s=sequences, g=graph: _step(cache, s, graph=g),
            )


def fixed(report: Report, cache: Cache) -> None:
    for case, sequences in FIXED.items():
        for way in (False, True):
            report.line(
                f"fixed {case}",
                "deterministic" if way else "usual",
                lambda s=sequences, w=way: _step(cache, s, deterministic=w),
            )


def _step(
    cache: Cache, sequences: Sequences, *, graph: bool = False, deterministic: bool = False
) -> dict[str, float]:
    """With `graph` the host tells nothing of the step, and padding stands behind its sequences."""
    lens = [keys for keys, _ in sequences]
    starts = list(itertools.accumulate((rows for _, rows in sequences), initial=0))
    padding = max(0, 65 - len(lens)) if graph else 0
    tables = torch.nn.functional.pad(cache.tables(lens), (0, 0, 0, padding))
    device_lens = ints([*lens, *[0] * padding])
    device_starts = ints([*starts, *[starts[-1]] * padding])
    qs = queries(starts[-1])

    def step() -> list[Tensor]:
        meta = AttentionMeta(
            () if graph else tuple(starts),
            () if graph else tuple(lens),
            torch.empty(0),
            tables,
            BLOCK,
            seq_lens_device=device_lens,
            query_starts_device=device_starts,
        )
        return [
            device_attention(
                qs[i % len(qs)],
                cache.kv[i],
                meta,
                scale=SCALE,
                window=0,
                deterministic=deterministic,
            )
            for i in range(LAYERS)
        ]

    got, picked, want = step()[1], [], []
    for s in sorted({0, len(lens) - 1}):
        last = starts[s + 1]
        first = max(starts[s], last - 200)
        picked.append(got[first:last])
        want.append(plain(qs[1][first:last], *cache.read(1, tables[s], lens[s])))
    error = relative(torch.cat(picked), torch.cat(want))
    return {"us": seconds_of([step]) / LAYERS * 1e6, "error": error}

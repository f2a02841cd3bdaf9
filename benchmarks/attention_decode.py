"""The decode kernel: alone, layer after layer, and between the projections of a step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention_rig import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SCALE,
    Cache,
    Report,
    dependent_launch,
    ints,
    plain,
    queries,
    relative,
    seconds_of,
)
from torch import Tensor

from engine.kernels import elementwise, fused_heads
from engine.kernels.attention_tiles import DecodeTiles
from engine.kernels.decode_plan import DecodePlan, plan_decode
from engine.kernels.paged_decode import decode_attention

CASES: dict[str, list[int]] = {
    "64x576": [576] * 64,
    "64x~600": [300 + 600 * i // 63 for i in range(64)],
    "64x1k": [1024] * 64,
    "64x4k": [4096] * 64,
    "16x4k": [4096] * 16,
    "1x576": [576],
    "1x4k": [4096],
    "1x32k": [32768],
    "8x32k": [32768] * 8,
    "63x512+16k": [512] * 63 + [16384],
}
#: The order is that of interest: what the time no longer allows is at the end.
VARIANTS: dict[str, DecodeTiles | None] = {
    "default": None,  # 64 keys, 4 warps, 4 stages, cut for 2 programs a multiprocessor
    "whole 5": DecodeTiles(whole=5),
    "whole 7": DecodeTiles(whole=7),
    "128 keys, 8 warps, 1 a SM": DecodeTiles(128, 8, 3, 1, least=1),
    "128 keys, 8 warps, 1 a SM, whole 5": DecodeTiles(128, 8, 3, 1, least=1, whole=5),
    "3 stages": DecodeTiles(stages=3),
    "3 a SM": DecodeTiles(stages=3, programs_per_sm=3),
    "3 a SM, whole 5": DecodeTiles(stages=3, programs_per_sm=3, whole=5),
    "in turns": DecodeTiles(turns=True),
    "merged within": DecodeTiles(apart=0),
    "merged apart": DecodeTiles(apart=1024),
    "not early": DecodeTiles(early=False),
    "least 1": DecodeTiles(least=1),
    "least 4": DecodeTiles(least=4),
}
CHAIN_CASES = ("64x576", "64x~600", "1x576", "1x32k", "64x1k")
CHAIN_VARIANTS = ("default", "whole 5", "3 stages", "not early", "128 keys, 8 warps, 1 a SM")


def alone(report: Report, cache: Cache) -> None:
    for name, tiles in VARIANTS.items():
        for case, lens in CASES.items():
            report.line(f"decode {case}", name, lambda n=lens, t=tiles: _alone(cache, n, t))
    for case in ("64x576", "1x576"):
        with dependent_launch(False):
            report.line(
                f"decode {case}",
                "default, no dependent launch",
                lambda n=CASES[case]: _alone(cache, n, None),
            )


def _alone(cache: Cache, lens: list[int], tiles: DecodeTiles | None) -> dict[str, float]:
    tables, device_lens, qs = cache.tables(lens), ints(lens), queries(len(lens))
    outs = [torch.empty_like(qs[0], memory_format=torch.contiguous_format) for _ in range(LAYERS)]

    def step() -> None:
        plan = plan_decode(device_lens, None, heads=HEADS, kv=cache.kv[0], tiles=tiles)
        for i in range(LAYERS):
            _attend(cache, i, qs[i % len(qs)], tables, plan, outs[i])

    step()
    picked = sorted({0, len(lens) // 2, len(lens) - 1})
    want = [plain(qs[1][s : s + 1], *cache.read(1, tables[s], lens[s])) for s in picked]
    error = relative(outs[1][picked], torch.cat(want))
    seconds = seconds_of([step]) / LAYERS
    return _figures(lens, seconds) | {"error": error}


def _attend(
    cache: Cache, layer: int, q: Tensor, tables: Tensor, plan: DecodePlan, out: Tensor
) -> Tensor:
    decode_attention(
        q,
        cache.kv[layer],
        tables,
        plan,
        out,
        settled=layer > 0,
        scale=SCALE,
    )
    return out


def _figures(lens: list[int], seconds: float) -> dict[str, float]:
    size = sum(lens) * 2 * KV_HEADS * DIM * 2
    return {"us": seconds * 1e6, "tb_per_s": size / seconds / 1e12}


def in_a_chain(report: Report, cache: Cache) -> None:
    """The same chain is timed without attention in the same run: the difference is `us`."""
    chain = _Chain(cache)
    for name in CHAIN_VARIANTS:
        for case in CHAIN_CASES:
            report.line(
                f"chain {case}", name, lambda c=case, n=name: chain.measure(CASES[c], VARIANTS[n])
            )


class _Chain:
    """Projections around the attention of each layer, with weights that do not stay in L2."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        width = (HEADS + 2 * KV_HEADS) * DIM
        self._qkv = [self._weight(width) for _ in range(LAYERS)]
        self._o = [self._weight(HIDDEN) for _ in range(LAYERS)]
        self._without: dict[int, float] = {}

    def measure(self, lens: list[int], tiles: DecodeTiles | None) -> dict[str, float]:
        rows = len(lens)
        if rows not in self._without:
            self._without[rows] = seconds_of([self._step(lens, tiles, False)]) / LAYERS
        seconds = seconds_of([self._step(lens, tiles, True)]) / LAYERS
        return _figures(lens, seconds - self._without[rows]) | {"layer_us": seconds * 1e6}

    def _step(
        self, lens: list[int], tiles: DecodeTiles | None, attend: bool
    ) -> Callable[[], object]:
        rows, cache = len(lens), self._cache
        tables, device_lens = cache.tables(lens), ints(lens)
        last = torch.tensor([n - 1 for n in lens], device="cuda")
        blocks = tables.gather(1, (last // 16)[:, None]).squeeze(1).long()
        slots, x = blocks * 16 + last % 16, torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        inv_freq = torch.rand(DIM // 2, device="cuda")
        angles = elementwise.angles(last, inv_freq, 1.0, deterministic=False)

        def step() -> Tensor:
            plan, y = None, x
            for i in range(LAYERS):
                q, _, _ = fused_heads.rotate_and_write(
                    F.linear(x, self._qkv[i]), cache.kv[i], slots, angles, heads=HEADS
                )
                out = q
                if attend:
                    if plan is None:
                        plan = plan_decode(
                            device_lens, None, heads=HEADS, kv=cache.kv[0], tiles=tiles
                        )
                    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
                    out = _attend(cache, i, q, tables, plan, out)
                y = F.linear(out.flatten(1) if attend else x, self._o[i])
            return y

        return step

    @staticmethod
    def _weight(width: int) -> Tensor:
        return (torch.randn(width, HIDDEN, device="cuda") * HIDDEN**-0.5).bfloat16()

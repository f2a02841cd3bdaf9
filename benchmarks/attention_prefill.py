"""Prefill attention: the own kernel and its tiles, torch's ways, and what cuDNN's plans cost."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from attention_rig import (
    BLOCK,
    DIM,
    HEADS,
    KV_HEADS,
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from engine.kernels.attention_tiles import PrefillTiles
from engine.kernels.paged_prefill import prefill_attention
from engine.kernels.prefill_plan import plan_prefill

VARIANTS: dict[str, PrefillTiles | None] = {
    "default": None,  # 128 x 64, 8 warps, 3 stages; up to 512 rows 64 x 64, 4 warps, 2 a SM
    "64 x 64, 4 warps, 2 a SM": PrefillTiles(64, 64, 4, 3, 2),
    "64 x 64, 4 warps, 2 a SM, least 4": PrefillTiles(64, 64, 4, 3, 2, 4),
    "64 x 64, 4 warps, 2 a SM, not cut": PrefillTiles(64, 64, 4, 3, 2, 1 << 20),
    "128 x 64, 8 warps": PrefillTiles(128, 64, 8, 3),
    "128 x 64, 8 warps, 4 stages": PrefillTiles(128, 64, 8, 4),
    "128 x 128, 8 warps": PrefillTiles(128, 128, 8, 3),
    "64 x 32, 4 warps, 4 stages, 2 a SM": PrefillTiles(64, 32, 4, 4, 2),
}
WHOLE = (256, 512, 700, 1024, 2048, 4096, 8192)
#: (rows, tokens before them)
CHUNKS = (
    (16, 4096),
    (192, 4096),
    (256, 1536),
    (512, 1536),
    (512, 4096),
    (2048, 2048),
    (2048, 6144),
)
LAYERS = 8  # of the graph that is timed
#: New lengths, as prompts come.
LENGTHS = (513, 640, 777, 1024, 1100, 1536, 2000, 2048)

Call = Callable[[int], Tensor]


def ways(report: Report, cache: Cache) -> None:
    for rows in WHOLE:
        for name in ("cudnn", "flash"):
            report.line(f"prefill {rows}", name, lambda r=rows, n=name: _whole(r, n))
    for name, tiles in VARIANTS.items():
        for rows, context in ((r, 0) for r in WHOLE):
            report.line(
                f"prefill {rows}", name, lambda r=rows, c=context, t=tiles: _own(cache, r, c, t)
            )
        for rows, context in CHUNKS:
            case = f"prefill {rows} after {context}"
            report.line(case, name, lambda r=rows, c=context, t=tiles: _own(cache, r, c, t))
    for rows, context in CHUNKS[3:]:
        for name, way in (("gathered, flash", _flash), ("gathered, cudnn twice", _cudnn_twice)):
            report.line(
                f"prefill {rows} after {context}",
                name,
                lambda r=rows, c=context, w=way: _gathered(cache, r, c, w),
            )


def plans(report: Report) -> None:
    """Milliseconds on the host's clock, the device's work included: first, second, third prompt."""
    for rows in LENGTHS:
        report.line(f"plan {rows}", "cudnn", lambda r=rows: _plan(r))


def _plan(rows: int) -> dict[str, float]:
    [q] = queries(rows, 1)
    k, v = (torch.randn(rows, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(2))
    call = _sdpa([q], k, v, "cudnn", 0)
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return dict(zip(("first_ms", "second_ms", "third_ms"), times, strict=True))


def _own(cache: Cache, rows: int, context: int, tiles: PrefillTiles | None) -> dict[str, float]:
    length = context + rows
    tables, lens, starts = cache.tables([length]), ints([length]), ints([0, rows])
    qs = queries(rows)

    def step() -> list[Tensor]:
        plan = plan_prefill(
            lens, starts, num_rows=rows, heads=HEADS, kv=cache.kv[0], counts=[rows], tiles=tiles
        )
        outs = []
        for i in range(LAYERS):
            q = qs[i % len(qs)]
            outs.append(torch.empty(q.shape, dtype=q.dtype, device=q.device))
            prefill_attention(q, cache.kv[i], tables, lens, starts, plan, outs[i], scale=SCALE)
        return outs

    error = _error(step()[1], qs[1], *cache.read(1, tables[0], length))
    return _rates(rows, context, seconds_of([step]) / LAYERS, error)


def _whole(rows: int, name: str) -> dict[str, float]:
    """Torch's own ways, of a prompt whose k and v lie side by side with q."""
    qs = queries(rows)
    k, v = (torch.randn(rows, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(2))
    calls = [_sdpa([q], k, v, name, 0) for q in qs * 2]
    error = _error(calls[1](), qs[1], k, v)
    return _rates(rows, 0, seconds_of(calls), error)


def _sdpa(
    qs: Sequence[Tensor], k: Tensor, v: Tensor, name: str, layer: int
) -> Callable[[], Tensor]:
    kind = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]

    def call() -> Tensor:
        parts = [part.transpose(0, 1).unsqueeze(0) for part in (qs[layer], k, v)]
        with sdpa_kernel([kind]):
            out = F.scaled_dot_product_attention(
                *parts, is_causal=True, scale=SCALE, enable_gqa=True
            )
        return out.squeeze(0).transpose(0, 1)

    return call


Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def _gathered(cache: Cache, rows: int, context: int, way: Way) -> dict[str, float]:
    """K and V of the whole sequence are copied together first; the copy is part of the time."""
    length = context + rows
    tables, qs = cache.tables([length]), queries(rows)
    blocks = tables[0, : -(-length // BLOCK)].long()

    def call(layer: int) -> Tensor:
        k, v = (
            cache.kv[layer][:, side].index_select(0, blocks).flatten(0, 1)[:length]
            for side in (0, 1)
        )
        return way(qs[layer % len(qs)], k, v)

    error = _error(call(1), qs[1], *cache.read(1, tables[0], length))
    seconds = seconds_of([lambda i=i: call(i) for i in range(LAYERS)])
    return _rates(rows, context, seconds, error)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = [part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v)]
    parts = [part.transpose(0, 1).unsqueeze(0) for part in (q, *wide)]
    mask = causal_lower_right(q.shape[0], k.shape[0])
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=SCALE)
    return out.squeeze(0).transpose(0, 1)


def _cudnn_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The prefix without a mask, the rows' own keys causally, put together by their weights."""
    context = k.shape[0] - q.shape[0]
    query = q.transpose(0, 1).unsqueeze(0)
    outs, weights = [], []
    for part, causal in ((slice(context), False), (slice(context, None), True)):
        keys, values = (side[part].transpose(0, 1).unsqueeze(0) for side in (k, v))
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, causal, False, scale=SCALE
        )
        outs.append(found[0])
        weights.append(found[1].reshape(1, HEADS, -1, 1))
    share = torch.sigmoid(weights[0] - weights[1]).to(q.dtype)
    return torch.lerp(outs[1], outs[0], share).squeeze(0).transpose(0, 1)


def _error(got: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    checked = min(len(q), 200)
    return relative(got[-checked:], plain(q[-checked:], k, v))


def _rates(rows: int, context: int, seconds: float, error: float) -> dict[str, float]:
    operations = 4 * HEADS * DIM * (rows * context + rows * (rows + 1) / 2)
    return {"us": seconds * 1e6, "tflop_per_s": operations / seconds / 1e12, "error": error}

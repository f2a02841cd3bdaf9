"""Time of the attention kernels and of the fused row kernels, against torch, on one card.

    python benchmarks/kernels_attention.py [--only decode,prefill,mixed,rows] [--seconds 55]

One JSON line a case and variant.  Shape: Llama-3-8B in bf16, blocks of 16 tokens of all 32 layers,
scattered at random.  Every variant is checked first (`error`: norm of the difference from plain
fp32 attention over norm of the result); then a CUDA graph of one call a layer is replayed, so that
no two calls in a row read the same bytes, and the median is taken.  `us` is one layer's, the merge
of split keys included.  A variant that fails prints its error and the others go on; the exit code
is 1 if any did.  Variants that the time no longer allows print `left_out`.
"""

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kernels import backend, elementwise, fused
from engine.kernels.attention_device import device_attention
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_tiles import DecodeTiles, PrefillTiles, decode_tiles
from engine.kernels.paged_decode import decode_attention, plan_decode
from engine.kernels.paged_prefill import prefill_attention

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 32, 32, 8, 128, 16
HIDDEN, FFN = 4096, 14336
SCALE = DIM**-0.5
REPLAYS = 9

DECODES: dict[str, list[int]] = {
    "64x1k": [1024] * 64,
    "64x4k": [4096] * 64,
    "16x4k": [4096] * 16,
    "1x32k": [32768],
    "1x576": [576],
    "63x512+16k": [512] * 63 + [16384],
}
#: Those that the other variants are tried on.
TUNED = ("64x1k", "64x4k", "1x32k")
DECODE_VARIANTS = {
    "default": None,
    "64 keys, 16 programs": DecodeTiles(64, 4, 3, 16),
    "64 keys, 4 programs": DecodeTiles(64, 4, 3, 4),
    "64 keys, 5 stages": DecodeTiles(64, 4, 5, 8),
    "128 keys": DecodeTiles(128, 4, 3, 8),
    "128 keys, 8 warps": DecodeTiles(128, 8, 3, 8),
    "32 keys, 2 warps": DecodeTiles(32, 2, 4, 16),
}
PREFILL_VARIANTS = {
    "default": None,
    "128 x 128, 8 warps, 2 stages": PrefillTiles(128, 128, 8, 2),
    "128 x 64, 8 warps, 3 stages": PrefillTiles(128, 64, 8, 3),
    "64 x 64, 4 warps, 3 stages": PrefillTiles(64, 64, 4, 3),
}


class Report:
    """Prints lines, survives failures, and knows when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.failed = False

    def line(self, case: str, variant: str, measure: Callable[[], dict[str, float]]) -> None:
        found: dict[str, object] = {"case": case, "variant": variant}
        if time.monotonic() > self.end:
            found["left_out"] = True
        else:
            try:
                found |= {key: float(f"{value:.5g}") for key, value in measure().items()}
            except Exception as error:  # one variant's failure must not cost the others' numbers
                self.failed = True
                found["failed"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(found), flush=True)


def seconds_of(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one of `calls`, which are made one after the other in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:]) / len(calls)


def relative(got: Tensor, want: Tensor) -> float:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error <= 1e-2:
        raise ValueError(f"relative error {error}")
    return error


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last rows of a sequence, (rows, heads, dim), over all its keys in fp32."""
    rows, keys = q.shape[0], k.shape[0]
    k, v = (part.float().repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q.float(), k) * SCALE
    row = torch.arange(keys - rows, keys, device=q.device)
    hidden = torch.arange(keys, device=q.device) > row[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, v)


class Cache:
    """An arena of random K and V, and tables of scattered blocks for any step."""

    def __init__(self, num_blocks: int) -> None:
        self.arena = torch.empty(
            num_blocks, LAYERS, 2, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda"
        )
        for part in self.arena.split(1024):
            part.normal_()
        self.kv = [self.arena[:, layer] for layer in range(LAYERS)]

    def tables(self, lens: Sequence[int]) -> Tensor:
        counts = [-(-n // BLOCK) for n in lens]
        order = torch.randperm(self.arena.shape[0], dtype=torch.int32)
        tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        start = 0
        for table, count in zip(tables, counts, strict=True):
            table[:count] = order[start : start + count]
            start += count
        return tables.cuda()

    def read(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        blocks = self.kv[layer][table[: -(-length // BLOCK)].long()]
        keys, values = (blocks[:, side].flatten(0, 1)[:length] for side in (0, 1))
        return keys, values


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def queries(rows: int, count: int = 4) -> list[Tensor]:
    """q as the model has it: the first columns of the fused projection."""
    width = (HEADS + 2 * KV_HEADS) * DIM
    made = [torch.randn(rows, width, device="cuda").bfloat16() for _ in range(count)]
    return [one[:, : HEADS * DIM].unflatten(1, (HEADS, DIM)) for one in made]


def decode_case(cache: Cache, lens: list[int], tiles: DecodeTiles | None) -> dict[str, float]:
    tables, device_lens = cache.tables(lens), ints(lens)
    qs = queries(len(lens))
    if tiles is None:
        tiles = decode_tiles(DIM, 2, backend.shared_bytes(torch.device("cuda", 0)))

    def layer(i: int, plan: object = None) -> Tensor:
        q, kv = qs[i % len(qs)], cache.kv[i]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if i == 0 or "plan" not in kept:
            kept["plan"] = plan_decode(device_lens, None, heads=HEADS, kv=kv, tiles=tiles)
        decode_attention(q, kv, tables, device_lens, None, kept["plan"], out, scale=SCALE)
        return out

    kept: dict[str, object] = {}
    got = layer(1)
    picked = sorted({0, len(lens) // 2, len(lens) - 1})
    want = [plain(qs[1][s : s + 1], *cache.read(1, tables[s], lens[s])) for s in picked]
    error = relative(got[picked], torch.cat(want))
    seconds = seconds_of([lambda i=i: layer(i) for i in range(LAYERS)])
    size = sum(lens) * 2 * KV_HEADS * DIM * 2
    return {"us": seconds * 1e6, "tb_per_s": size / seconds / 1e12, "error": error}


def prefill_case(
    cache: Cache, rows: int, context: int, tiles: PrefillTiles | None
) -> dict[str, float]:
    length = context + rows
    tables, lens, starts = cache.tables([length]), ints([length]), ints([0, rows])
    qs = queries(rows)

    def layer(i: int) -> Tensor:
        q = qs[i % len(qs)]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        prefill_attention(q, cache.kv[i], tables, lens, starts, out, scale=SCALE, tiles=tiles)
        return out

    keys, values = cache.read(1, tables[0], length)
    checked = min(rows, 200)
    error = relative(layer(1)[-checked:], plain(qs[1][-checked:], keys, values))
    return rates(rows, context, seconds_of([lambda i=i: layer(i) for i in range(8)]), error)


def rates(rows: int, context: int, seconds: float, error: float) -> dict[str, float]:
    operations = 4 * HEADS * DIM * (rows * context + rows * (rows + 1) / 2)
    return {"us": seconds * 1e6, "tflop_per_s": operations / seconds / 1e12, "error": error}


def torch_prefill(rows: int, name: str) -> dict[str, float]:
    """Torch's own ways, of a prompt whose k and v lie side by side with q."""
    qs = queries(rows)
    k, v = (torch.randn(rows, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(2))
    call = torch_varlen(rows, k, v) if name == "varlen" else torch_sdpa(name, k, v)
    checked = min(rows, 200)
    error = relative(call(qs[1])[-checked:], plain(qs[1][-checked:], k, v))
    return rates(rows, 0, seconds_of([lambda q=q: call(q) for q in qs * 2]), error)


def torch_sdpa(name: str, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    kind = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]

    def call(q: Tensor) -> Tensor:
        parts = [part.transpose(0, 1).unsqueeze(0) for part in (q, k, v)]
        with sdpa_kernel([kind]):
            out = F.scaled_dot_product_attention(
                *parts, is_causal=True, scale=SCALE, enable_gqa=True
            )
        return out.squeeze(0).transpose(0, 1)

    return call


def torch_varlen(rows: int, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    starts = ints([0, rows])
    wide = [part.repeat_interleave(HEADS // KV_HEADS, 1).contiguous() for part in (k, v)]

    def call(q: Tensor) -> Tensor:
        out = varlen_attn(q.contiguous(), *wide, starts, starts, rows, rows, **causal)
        return out if isinstance(out, Tensor) else out[0]

    return call


def mixed_case(cache: Cache, graph: bool) -> dict[str, float]:
    """64 decodes at 1k beside a chunk of 512 rows after 1,536 cached tokens, as a step has them."""
    lens = [1024] * 64 + [2048]
    starts = (*range(65), 64 + 512)
    tables, rows = cache.tables(lens), starts[-1]
    qs = queries(rows)

    def step() -> list[Tensor]:
        meta = AttentionMeta(
            () if graph else starts,
            () if graph else tuple(lens),
            torch.empty(0),
            tables,
            BLOCK,
            seq_lens_device=device_lens,
            query_starts_device=device_starts,
        )
        return [
            device_attention(qs[i % len(qs)], cache.kv[i], meta, scale=SCALE, window=0)
            for i in range(LAYERS)
        ]

    device_lens, device_starts = ints(lens), ints(starts)
    got = step()[1]
    want = [
        plain(qs[1][starts[s] : starts[s + 1]], *cache.read(1, tables[s], lens[s]))
        for s in (0, 63, 64)
    ]
    picked = torch.cat((got[:1], got[63:64], got[64:]))
    error = relative(picked, torch.cat(want))
    return {"us": seconds_of([step]) / LAYERS * 1e6, "error": error}


@contextmanager
def dependent_launch(on: bool) -> Iterator[None]:
    kept = backend.dependent_launch
    backend.dependent_launch = lambda device: on  # type: ignore[assignment]
    try:
        yield
    finally:
        backend.dependent_launch = kept


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
            q, k, v = fused.rotate_and_write(work, kv, slots, angles, heads=HEADS)
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


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="decode,prefill,mixed,rows")
    parser.add_argument("--seconds", type=float, default=55.0)
    arguments = parser.parse_args()
    report, only = Report(arguments.seconds), arguments.only.split(",")
    torch.manual_seed(0)
    small = Cache(4608)
    if "decode" in only:
        cache = Cache(64 * 4096 // BLOCK)
        for name, tiles in DECODE_VARIANTS.items():
            for case, lens in DECODES.items():
                if tiles is not None and case not in TUNED:
                    continue
                report.line(
                    f"decode {case}", name, lambda n=lens, t=tiles: decode_case(cache, n, t)
                )
        for case in ("64x1k", "1x576"):
            with dependent_launch(False):
                report.line(
                    f"decode {case}",
                    "default, no dependent launch",
                    lambda n=DECODES[case]: decode_case(cache, n, None),
                )
        del cache
        torch.cuda.empty_cache()
    if "prefill" in only:
        for rows in (512, 2048, 8192):
            for name in ("cudnn", "flash", "varlen"):
                report.line(f"prefill {rows}", name, lambda r=rows, n=name: torch_prefill(r, n))
        for name, tiles in PREFILL_VARIANTS.items():
            for rows, context in ((512, 0), (2048, 0), (8192, 0), (512, 4096), (16, 4096)):
                case = f"prefill {rows}" + (f" after {context}" if context else "")
                report.line(
                    case, name, lambda r=rows, c=context, t=tiles: prefill_case(small, r, c, t)
                )
    if "mixed" in only:
        for graph in (False, True):
            variant = "as captured" if graph else "as eager"
            report.line("mixed 64x1k + 512", variant, lambda g=graph: mixed_case(small, g))
    if "rows" in only:
        for op in ("norm", "rotate", "gate"):
            for rows in (1, 64, 2048):
                for way in ("triton", "plain", "torch"):
                    report.line(
                        f"{op} {rows}",
                        way,
                        lambda o=op, r=rows, w=way: rows_case(small, o, r, w),
                    )
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())

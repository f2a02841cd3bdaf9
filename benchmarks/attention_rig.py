"""What the kernel benchmarks share: an arena of a large model's shape, timed graphs, a report.

Shape: Llama-3-8B in bf16, blocks of 16 tokens of all 32 layers, scattered at random.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import checkout  # noqa: F401
import torch
from torch import Tensor

from engine.kernels import backend

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 32, 32, 8, 128, 16
HIDDEN, FFN = 4096, 14336
SCALE = DIM**-0.5
REPLAYS = 9


class Report:
    """Prints lines, survives failures, knows when the time is over, and what was fastest."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.failed = False
        self._best: dict[str, tuple[float, dict[str, object]]] = {}

    def line(self, case: str, variant: str, measure: Callable[[], dict[str, float]]) -> None:
        """Measure and print; `measure` gives microseconds as `us`, or nothing comparable."""
        found: dict[str, object] = {"case": case, "variant": variant}
        if time.monotonic() > self.end:
            found["left_out"] = True
        else:
            try:
                values = measure()
                found |= {key: float(f"{value:.5g}") for key, value in values.items()}
                kept = self._best.get(case)
                if "us" in values and (kept is None or values["us"] < kept[0]):
                    self._best[case] = values["us"], found
            except Exception as error:  # one variant's failure must not cost the others' numbers
                self.failed = True
                found["failed"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(found), flush=True)

    def best(self) -> None:
        """The fastest variant of each case once more."""
        for _, found in self._best.values():
            print(json.dumps({"best of": found["case"], **found}), flush=True)


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


@contextmanager
def dependent_launch(on: bool) -> Iterator[None]:
    kept = backend.dependent_launch
    backend.dependent_launch = lambda device: on  # type: ignore[assignment]
    try:
        yield
    finally:
        backend.dependent_launch = kept

"""A small step of an encoder on a card: launched kernel by kernel, and as a CUDA graph.

    python benchmarks/encoder_steps.py [--shape bge-large] [--steps 1x64,1x256,2x256,...]
                                       [--sum-norm 8388608,0] [--rounds 30]

Random weights of a shape of `pooling.py`, in bf16, base rows.  `2x256` are two inputs of 256
tokens.  One JSON line for each step, milliseconds, medians of --rounds:
  unpadded_ms  a call of `embed` whose step is launched kernel by kernel, as it is without graphs
  padded_ms    the same padded to its rung, launched kernel by kernel
  graph_ms     the same as a graph
  card_ms      of which the graph alone, by events around --rounds replays one after the other
and one for each start: seconds, graphs, bytes that torch holds for them.  --sum-norm: numbers from
which on a sum and its norm are one launch of ours (`engine/models/encoder.py`).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import torch
from pooling import SHAPES, VOCAB, write_model

from engine.models import encoder
from engine.pooling.backbone import PackedEncoder
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine

Line = dict[str, object]
STEPS = "1x64,1x256,2x256,25x20,120x4,1x512,3x256,4x256"
WARM_UP = 3


def median_ms(act: Callable[[], object], rounds: int) -> float:
    for _ in range(WARM_UP):
        act()
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(took), 3)


def note(seen: dict[str, float], stage: str, _: float) -> None:
    seen[stage] = time.perf_counter()


def lines(options: argparse.Namespace, folder: Path) -> Iterator[Line]:
    for numbers in map(int, options.sum_norm.split(",")):
        encoder.FUSED_NUMBERS = numbers
        told = {"sum_norm": numbers}
        before, reserved = time.perf_counter(), torch.cuda.memory_reserved()
        config = PoolingConfig(model=str(folder), device="cuda", graph_tokens=1024)
        seen: dict[str, float] = {}
        with PoolingEngine(config, progress=partial(note, seen)) as engine:
            backbone = engine.core.machine.backbone
            assert isinstance(backbone, PackedEncoder) and backbone.graphs is not None
            info = engine.info
            yield {
                "case": "start",
                **told,
                "start_s": round(time.perf_counter() - before, 2),
                "graphs_s": round(seen["graphs"] - seen["memory"], 2),
                "graphs": backbone.graphs.num_graphs,
                "graphs_planned_mb": info.graph_bytes >> 20,
                "reserved_mb": (torch.cuda.memory_reserved() - reserved) >> 20,
                "weights_and_adapters_mb": (info.weight_bytes + info.adapter_bytes) >> 20,
            }
            for step in options.steps.split(","):
                yield {"case": "step", **told, **of_step(engine, backbone, step, options.rounds)}
        torch.cuda.empty_cache()


def of_step(engine: PoolingEngine, backbone: PackedEncoder, step: str, rounds: int) -> Line:
    count, length = map(int, step.split("x"))
    random = np.random.default_rng(1)
    inputs = [random.integers(5, VOCAB, length).tolist() for _ in range(count)]

    def embed() -> None:
        engine.embed(inputs)

    graphs, backbone.graphs = backbone.graphs, None
    assert graphs is not None
    unpadded = median_ms(embed, rounds)
    backbone.graphs = graphs
    graphs.use_graphs = False
    padded = median_ms(embed, rounds)
    graphs.use_graphs, before = True, graphs.num_replays
    replayed = median_ms(embed, rounds)
    assert graphs.num_replays == before + rounds + WARM_UP, "a step without a graph"
    rung = graphs._ladder.find(count * length, count)
    assert rung is not None
    graph, events = graphs._graphs[rung, None], [torch.cuda.Event(enable_timing=True) for _ in "12"]
    events[0].record()
    for _ in range(rounds):
        graph.replay()
    events[1].record()
    events[1].synchronize()
    return {
        "inputs": step,
        "rows": rung.rows,
        "seqs": rung.seqs,
        "unpadded_ms": unpadded,
        "padded_ms": padded,
        "graph_ms": replayed,
        "card_ms": round(events[0].elapsed_time(events[1]) / rounds, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="bge-large")
    parser.add_argument("--steps", default=STEPS, help="inputs x tokens of each")
    parser.add_argument("--sum-norm", default=str(encoder.FUSED_NUMBERS))
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no card: there are no graphs elsewhere", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model", SHAPES[options.shape], scores=False)
        for line in lines(options, folder):
            line = {"benchmark": "encoder_steps", "shape": options.shape, **line}
            print(json.dumps(line), flush=True)
            print(*(f"{name} {value}" for name, value in line.items()), sep="  ", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A small step of an encoder on a card: launched kernel by kernel, and as a CUDA graph.

    python benchmarks/encoder_steps.py [--shape bge-large] [--steps 1x64,1x256,2x256,...]
                                       [--graph-tokens 1024] [--rounds 30]

Random weights of a shape of `pooling.py`, in bf16, base rows.  `2x256` are two inputs of 256
tokens.  One JSON line for each step, milliseconds, medians of --rounds:
  unpadded_ms  a call of `embed` whose step is launched kernel by kernel, as it is without graphs
  padded_ms    the same padded to its rung, launched kernel by kernel
  graph_ms     the same as a graph
  card_ms      of which the graph alone, by events around --rounds replays one after the other
and one for the start: seconds, graphs, and what they take of the card.
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


def note(seen: dict[str, tuple[float, int]], stage: str, _: float) -> None:
    """When it was last told, and the card's free bytes then."""
    seen[stage] = time.perf_counter(), torch.cuda.mem_get_info()[0]


def lines(options: argparse.Namespace, folder: Path) -> Iterator[Line]:
    config = PoolingConfig(model=str(folder), device="cuda", graph_tokens=options.graph_tokens)
    seen: dict[str, tuple[float, int]] = {}
    began = time.perf_counter()
    with PoolingEngine(config, progress=partial(note, seen)) as engine:
        backbone, info = engine.core.machine.backbone, engine.info
        assert isinstance(backbone, PackedEncoder) and backbone.graphs is not None
        (ahead, free), (behind, left) = seen["memory"], seen["graphs"]
        yield {
            "case": "start",
            "start_s": round(time.perf_counter() - began, 2),
            "graphs_s": round(behind - ahead, 2),
            "graphs": backbone.graphs.num_graphs,
            "graphs_mb": (free - left - info.adapter_bytes) >> 20,
            "graphs_planned_mb": info.graph_bytes >> 20,
        }
        for step in options.steps.split(","):
            yield {"case": "step", **of_step(engine, backbone, step, options.rounds)}


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
    parser.add_argument("--graph-tokens", type=int, default=1024)
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

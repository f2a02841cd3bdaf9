"""Pauses of a generator's streams while an embedder on the same card is kept busy.

    python benchmarks/beside.py --model DIR [--shape bge-large] [--rows 16384,4096,1024]
                                [--share 1,0.5,0.2,0.1] [--graphs 1] [--streams 64]
                                [--seconds 3] [--stand-in]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  The embedder has random weights of a shape of `pooling.py`, a process of its
own, as each model of a daemon has, and inputs of 256 tokens without an end.  First the streams
decode alone, then beside it, once with each number of --rows, which is what one of its steps may
hold, and each --share, which is its part of the card's time (`models.beside_generators`): below 1
it gives way all the while, also while it is measured alone.  With --graphs 0 its small steps are
launched kernel by kernel then, and not replayed from CUDA graphs as it does by itself.
--stand-in: in the generator's place are the products of its decode steps alone (`stand_in.py`),
which start in seconds.  One JSON line each: the streams' pauses in milliseconds, the embedder's
tokens a second beside them (and, `alone`, without them), and `p99_over_alone` against its bar.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import checkout  # noqa: F401
import numpy as np
import torch
from offline import OfflineDriver
from pooling import SHAPES, VOCAB, write_model
from random_model import ensure_model
from report import table
from stand_in import StandIn
from streams import Line, bars_of
from workloads import Sizes, Workloads

from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.pooling.engine import PoolingEngine

LENGTH, AT_ONCE = 256, 256
#: Of a small share: so that it tells how fast it is every half second all the same.
AT_ONCE_SLOWLY = 32
#: Times all inputs: kernels are compiled, and it has learned how fast the card is.
WARM_UP = 3
P99_BAR = 1.3


def embed_on(folder: Path, rows: int, share: float, graphs: bool, device: str) -> None:
    """In a process of its own: say `ready`, then each half second how many tokens there were, and
    of how many milliseconds and rows its steps were."""
    from engine.pooling.config import PoolingConfig
    from engine.pooling.engine import PoolingEngine

    config = PoolingConfig(
        model=str(folder),
        device="cuda" if device == "cuda" else "cpu",
        max_num_seqs=1024,
        max_batch_tokens=rows,
    )
    random = np.random.default_rng(1)
    inputs = [random.integers(5, VOCAB, LENGTH).tolist() for _ in range(AT_ONCE)]
    with PoolingEngine(config) as engine:
        for _ in range(WARM_UP):
            engine.embed(inputs)
        if share < 1.0:
            engine.give_way(share)
            inputs = inputs[:AT_ONCE_SLOWLY]
            engine.embed(inputs)
            engine.core.machine.backbone.graphs.use_graphs = graphs
        print("ready", flush=True)
        while True:
            before, tokens, (steps, busy) = time.monotonic(), 0, _steps(engine)
            while time.monotonic() - before < 0.5:
                engine.embed(inputs)
                tokens += LENGTH * len(inputs)
            seconds = time.monotonic() - before
            count, took = (
                now - was for now, was in zip(_steps(engine), (steps, busy), strict=True)
            )
            print(tokens / seconds, 1e3 * took / count, tokens / count, flush=True)


def _steps(engine: "PoolingEngine") -> tuple[int, float]:
    """How many there were, and their seconds."""
    stats = engine.core.stats
    return stats.steps, stats.base_steps.seconds.total


class Embedder:
    """The other process, which tells its tokens a second, and its steps' milliseconds and rows."""

    def __init__(self, folder: Path, rows: int, share: float, graphs: int, device: str) -> None:
        words = ["--embed-on", str(folder), "--rows", str(rows), "--device", device]
        words += ["--share", str(share), "--graphs", str(graphs)]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--model", "-", *words],
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready":
            raise RuntimeError("the embedder did not start: see above")

    def rates(self, count: int) -> list[float]:
        """Means of the next `count` that it tells."""
        told = [[float(word) for word in self._line().split()] for _ in range(count)]
        return [sum(column) / count for column in zip(*told, strict=True)]

    def close(self) -> list[float]:
        """The last that it told."""
        self._process.terminate()
        assert self._process.stdout is not None
        lines = self._process.stdout.read().splitlines(keepends=True)
        told = [line for line in lines if line.endswith("\n")]
        self._process.wait()
        return [float(word) for word in told[-1].split()] if told else [0.0, 0.0, 0.0]

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def lines(options: argparse.Namespace, scratch: Path) -> Iterator[Line]:
    folder = write_model(scratch / "embedder", SHAPES[options.shape], scores=False)
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    started = stood_in(options) if options.stand_in else generator(options, scratch)
    with started as steady:
        alone = steady()
        yield {**alone, "case": "alone"}
        quiet = alone["itl_p99_ms"]
        assert isinstance(quiet, float)
        shares = [float(share) for share in options.share.split(",")]
        sizes_of, wishes = options.rows.split(","), options.graphs.split(",")
        for rows, share, graphs in product(map(int, sizes_of), shares, map(int, wishes)):
            embedder = Embedder(folder, rows, share, graphs, device)
            undisturbed, *_ = embedder.rates(2)
            told = steady()
            beside, step_ms, step_rows = embedder.close()
            p99 = told["itl_p99_ms"]
            assert isinstance(p99, float)
            yield {
                **told,
                "case": "beside",
                "rows": rows,
                "share": share,
                "graphs": graphs,
                "embedder_alone_tokens_per_s": round(undisturbed),
                "embedder_tokens_per_s": round(beside),
                "embedder_step_ms": round(step_ms, 2),
                "embedder_step_rows": round(step_rows),
                "p99_over_alone": round(p99 / quiet, 3),
                "bars": bars_of(p99_over_alone=(p99 / quiet, P99_BAR)),
            }


@contextmanager
def generator(options: argparse.Namespace, scratch: Path) -> Iterator[Callable[[], Line]]:
    """Streams of an engine; a call says how they did for --seconds."""
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        gpu_memory_utilization=0.6,
        max_num_seqs=options.streams,
        max_model_len=4096,
        slots=1,
        max_rank=16,
        ram_cache=1 << 30,
    )
    (scratch / "adapters").mkdir()
    driver = OfflineDriver(config, scratch / "adapters")
    try:
        sizes = Sizes(
            prompt=512,
            tokens=128,
            room=config.max_model_len,
            slots=1,
            seconds=options.seconds,
            every=0.05,
            streams=options.streams,
            rate=1.0,
        )
        workloads = Workloads(driver, sizes)

        def steady() -> Line:
            [told] = workloads.steady(options.streams, 0)
            return told

        yield steady
    finally:
        driver.close()


@contextmanager
def stood_in(options: argparse.Namespace) -> Iterator[Callable[[], Line]]:
    """The same of products alone."""
    streams = StandIn(options.streams)
    yield lambda: {"stand_in": True, **streams.steady(options.seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="bge-large")
    parser.add_argument("--rows", default="16384,4096,1024", help="of a step of the embedder")
    parser.add_argument("--share", default="1", help="of the card's time, for the embedder")
    parser.add_argument("--graphs", default="1", help="0: it replays none while it gives way")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--stand-in", action="store_true", help="products in a generator's place")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--embed-on", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.embed_on is not None:
        rows, share, graphs = int(options.rows), float(options.share), options.graphs == "1"
        embed_on(options.embed_on, rows, share, graphs, options.device)
        return 0
    if not options.stand_in:
        ensure_model(options.model)
    shown = []
    with tempfile.TemporaryDirectory() as scratch:
        for line in lines(options, Path(scratch)):
            line = {"benchmark": "beside", "mode": "offline", "shape": options.shape, **line}
            print(json.dumps(line), flush=True)
            shown.append(line)
    print(table(shown), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

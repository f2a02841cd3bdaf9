"""Products with weights on one card: our tiles beside cuBLAS, alone and in the chain of a step.

    python benchmarks/gemm.py [--seconds 110] [--rows 1,64,16,32,2,80,96,128]
                              [--workers 12] [--brief]

Llama-3-8B's shapes in bf16, CUDA graphs, the median of the replays; weights rotate among so many
copies that nothing is found in the L2 cache.  Prints JSON lines, four kinds:

- `alone`: one product again and again, a tile or torch; `tbps` counts the weight's bytes;
- `chain`: all products of a decode step (32 layers and the head) with the norms and the gate of the
  engine between them and a norm in place of the attention: each kernel waits for the one before.
  `products` says who makes them: torch, the engine's table, the best tiles alone, or the best of
  the chain, which begins with those and takes what makes the chain shorter; `pdl` False is without
  programmatic dependent launch.  This is the number that counts.
- `fixed`: the tile of deterministic mode and its rivals, decode rows and a prompt;
- `rule`: the best of the chain as a line of RULES in engine/kernels/gemm_tiles.py.

--brief leaves out the other rows of a class, deterministic tiles, and chains without dependent
launch: a class then takes some 50 seconds.

A tile that fails or is wrong prints its error and the others go on; the exit code is 1 if any did.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import backend, gemm_tiles
from engine.kernels.gemm_tiles import Rule, Tile

LAYERS, HIDDEN, FFN, VOCAB, QKV = 32, 4096, 14336, 128256, 6144
REPLAYS, ALONE_BYTES, SMS = 9, 400 << 20, 132
#: The share of the time that is kept for the chain.
CHAIN_SHARE = 0.45
#: Rows that a class of the table stands for, and the others that it takes.
CLASSES = {1: (), 64: (48,), 16: (4, 8), 32: (24,), 2: (), 80: (72,), 96: (88,), 128: (112,)}


#: FIXED and FIXED_PROGRAMS, and what might take their place.
FIXED_RIVALS = (
    (gemm_tiles.FIXED, gemm_tiles.FIXED_PROGRAMS),
    (gemm_tiles.FIXED, 132),
    (Tile("dot", 64, 128, 64, warps=8), 132),
    (Tile("dot", 128, 128, 64, warps=8), 132),
    (Tile("dot", 64, 256, 64, warps=8), 132),
)


class Shape(NamedTuple):
    d_out: int
    d_in: int
    most_out: int  # of its rule
    most_in: int
    out: torch.dtype = torch.bfloat16


_ANY = 1 << 30
SHAPES = {
    "o": Shape(HIDDEN, HIDDEN, 4096, 8192),
    "qkv": Shape(QKV, HIDDEN, 8192, 8192),
    "gate_up": Shape(2 * FFN, HIDDEN, 65536, 8192),
    "head": Shape(VOCAB, HIDDEN, _ANY, 8192, torch.float32),
    "down": Shape(HIDDEN, FFN, _ANY, _ANY),
}
#: (name of a shape -> who makes it)
Choice = dict[str, Tile | None]


# ---------------------------------------------------------------- candidates
#: (outputs, step, warps) by class: what lost by more than a tenth on an H200 is no longer tried.
FEW_SIZES = {
    1: ((4, 4096, 4), (4, 4096, 8), (2, 4096, 2), (8, 4096, 8)),
    2: ((4, 4096, 8), (2, 4096, 4), (8, 4096, 16)),
}
FEW_SIZES_WIDE = {1: ((2, 16384, 8), (1, 16384, 4), (4, 16384, 16)), 2: ((2, 16384, 16),)}
MANY_SIZES = ((64, 128, 4), (128, 64, 4), (128, 128, 8), (256, 64, 8))
#: Of more than 64 rows: as many outputs as leave room for several steps beside them.
TALL_SIZES = (
    *((64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8)),
    (256, 64, 8),
)


def filling(rows: int, outputs: int, step: int, per_sm: int) -> int:
    """Stages for so many programs on a multiprocessor."""
    stage = (rows + outputs) * step * 2
    return max(2, min(8, (220 << 10) // per_sm // stage))


def candidates(rows: int, shape: Shape) -> Iterator[Tile]:
    few = FEW_SIZES if shape.d_in <= 8192 else FEW_SIZES_WIDE
    for outputs, step, warps in few.get(rows, ()):
        yield Tile("vector", rows, outputs, step, warps=warps)
    if rows > 1:
        kept = table(rows, shape)
        if kept is not None:
            yield kept
        yield from streams(max(16, rows), shape)
        yield from dots(max(16, 1 << (rows - 1).bit_length()), shape)


def streams(rows: int, shape: Shape) -> Iterator[Tile]:
    """With memory for as many programs as there are, and for one more: the next kernel's."""
    for outputs, step, warps in TALL_SIZES if rows > 64 else MANY_SIZES:
        tiles = -(-shape.d_out // outputs)
        if outputs == 256 and (rows < 32 or rows > 64 > tiles):
            continue
        usual = (1, 2, 3, 4, 8) if outputs == 128 else (1, 2, 4, 8)
        splits = [n for n in usual if 90 <= tiles * n <= 400 and n <= shape.d_in // 512]
        for n in splits[: 1 if step == 128 and outputs == 128 else 2] or [1]:
            per_sm = min(3, -(-tiles * n // SMS))
            for more in (0, 1):
                stages = filling(rows, outputs, step, per_sm + more)
                yield Tile("stream", rows, outputs, step, n, warps, stages)


def dots(rows: int, shape: Shape) -> Iterator[Tile]:
    for outputs, step, warps in MANY_SIZES[:2]:
        tiles = -(-shape.d_out // outputs)
        even = [n for n in (1, 2, 4) if 90 <= tiles * n <= 400 and shape.d_in // step % n == 0]
        for n in even[:1] or [1]:
            stages = filling(rows, outputs, step, min(3, -(-tiles * n // SMS)))
            yield Tile("dot", rows, outputs, step, n, warps, stages, tma=True)


def near(tile: Tile | None) -> Iterator[Tile]:
    """What may suit the chain better than the product alone."""
    if tile is not None and tile.form != "vector":
        if tile.form == "dot":
            yield tile._replace(tma=not tile.tma)
        yield tile._replace(stages=max(2, tile.stages - 1))
        yield tile._replace(stages=tile.stages + 1)


# ---------------------------------------------------------------- compiling, in other processes
def compile_one(tile: Tile, d_in: int, out: torch.dtype, pdl: bool) -> None:
    """One launch over a few outputs: the kernel is then in triton's cache on disk."""
    from engine.kernels.gemm_device import product

    set_pdl(pdl)
    x = torch.zeros(tile.rows, d_in, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(256, d_in, device="cuda", dtype=torch.bfloat16)
    product(x, weight, None, tile, out=torch.empty(tile.rows, 256, device="cuda", dtype=out))
    torch.cuda.synchronize()


class Compiler:
    """Compiles ahead; what does not compile fails again, and loudly, where it is timed."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context) if workers else None
        self._known: set[tuple[object, ...]] = set()
        self._running: list[Future[None]] = []

    def ask(self, tiles: Iterable[Tile | None], shape: Shape, *, pdl: bool = True) -> None:
        for tile in tiles:
            key = (tile, shape.d_in, shape.out, pdl)
            if tile is not None and self._pool is not None and key not in self._known:
                self._known.add(key)
                self._running.append(self._pool.submit(compile_one, *key))

    def wait(self) -> None:
        for future in self._running:
            future.exception()
        self._running.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_dependent_launch = backend.dependent_launch


def set_pdl(on: bool) -> None:
    backend.dependent_launch = _dependent_launch if on else lambda device: False  # type: ignore


# ---------------------------------------------------------------- what is timed
def make(x: Tensor, weight: Tensor, tile: Tile | None, out: Tensor | None = None) -> Tensor:
    from engine.kernels.gemm_device import product

    if tile is not None:
        return product(x, weight, None, tile, out=out)
    y = F.linear(x, weight)
    return y if out is None else out.copy_(y)


def timed(sweep: Callable[[], object]) -> float:
    """Milliseconds of one replay of the captured sweep, the median."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        sweep()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sweep()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


class Weights:
    """Those of a whole model; a product alone goes through the layers'."""

    def __init__(self) -> None:
        def random(*shape: int) -> Tensor:
            return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)

        self.of = {
            name: [random(shape.d_out, shape.d_in) for _ in range(2 if name == "head" else LAYERS)]
            for name, shape in SHAPES.items()
        }
        self.norms = [random(HIDDEN) + 1 for _ in range(2 * LAYERS + 1)]
        self.logits = torch.zeros(2048, VOCAB, device="cuda")

    def some(self, name: str) -> list[Tensor]:
        """Copies of one weight, several times the L2 cache."""
        copies = self.of[name]
        return copies[: max(2, -(-ALONE_BYTES // (copies[0].numel() * 2)))]

    @property
    def num_bytes(self) -> int:
        return sum(2 * w.numel() * (1 if n == "head" else LAYERS) for n, (w, *_) in self.of.items())


def chain(weights: Weights, x: Tensor, choice: Choice) -> None:
    """The products of a decode step, each behind a small kernel that reads what came before."""
    from engine.kernels import fused

    of, delta = weights.of, None
    for layer in range(LAYERS):
        normed = fused.rms_norm(x, weights.norms[2 * layer], 1e-5, delta)
        qkv = make(normed, of["qkv"][layer], choice["qkv"])
        mixed = fused.rms_norm(qkv[:, :HIDDEN], weights.norms[-1], 1e-5)
        delta = make(mixed, of["o"][layer], choice["o"])
        normed = fused.rms_norm(x, weights.norms[2 * layer + 1], 1e-5, delta)
        gate_up = make(normed, of["gate_up"][layer], choice["gate_up"])
        delta = make(fused.silu_mul(gate_up), of["down"][layer], choice["down"])
    normed = fused.rms_norm(x, weights.norms[-1], 1e-5, delta)
    make(normed, of["head"][0], choice["head"], weights.logits[: len(x)])


class Bench:
    def __init__(self, seconds: float, workers: int, *, brief: bool = False) -> None:
        self.start, self.seconds, self.brief = time.monotonic(), seconds, brief
        self.failed = False
        self.compiler = Compiler(workers)
        self.weights = Weights()
        self.found: dict[tuple[int, str], dict[Tile | None, float]] = {}

    def left(self, share: float = 1.0) -> bool:
        return time.monotonic() - self.start < share * self.seconds

    def say(self, kind: str, run: Callable[[], dict[str, object]], **about: object) -> float:
        """Print one line of `about` and what `run` finds; its milliseconds, or infinity."""
        line: dict[str, object] = {"kind": kind, **about}
        try:
            line |= run()
        except Exception as error:
            self.failed = True
            line["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(line), flush=True)
        ms = line.get("ms", float("inf"))
        assert isinstance(ms, float)
        return ms

    def alone(self, name: str, rows: int, tile: Tile | None) -> float:
        shape, copies = SHAPES[name], self.weights.some(name)

        def run() -> dict[str, object]:
            x = torch.randn(rows, shape.d_in, device="cuda").bfloat16()
            out = torch.full((rows, shape.d_out), torch.nan, device="cuda", dtype=shape.out)
            make(x, copies[-1], tile, out)
            want = F.linear(x, copies[-1]).float()
            error = float((out.float() - want).norm() / want.norm())
            if not error < 0.01:
                raise ValueError(f"wrong by {error:.3g}")
            ms = timed(lambda: [make(x, w, tile, out) for w in copies]) / len(copies)
            tbps = copies[0].numel() * 2 / ms / 1e9
            return {"ms": round(ms, 5), "tbps": round(tbps, 3), "error": float(f"{error:.2g}")}

        return self.say("alone", run, shape=name, rows=rows, tile=spelled(tile))

    def chained(self, rows: int, choice: Choice, products: str, *, pdl: bool = True) -> float:
        def run() -> dict[str, object]:
            set_pdl(pdl)
            x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
            ms = timed(lambda: chain(self.weights, x, choice))
            return {"ms": round(ms, 4), "tbps": round(self.weights.num_bytes / ms / 1e9, 3)}

        try:
            return self.say("chain", run, rows=rows, products=products, pdl=pdl)
        finally:
            set_pdl(True)

    def run(self, classes: list[int]) -> None:
        for rows in classes:
            for shape in SHAPES.values():
                tiles = [*candidates(rows, shape), table(rows, shape)]
                self.compiler.ask(tiles, shape)
        self.compiler.wait()
        seconds = round(time.monotonic() - self.start, 1)
        print(json.dumps({"kind": "compiled", "seconds": seconds}), flush=True)
        for rows in classes:
            for name, shape in SHAPES.items():
                self.rivals(rows, name, shape)
        for rows in classes:
            self.best_chain(rows)
        if not self.brief:
            self.fixed()
        self.compiler.close()

    def rivals(self, rows: int, name: str, shape: Shape) -> None:
        """All candidates at the class's rows, the best three at its others."""
        share = 1 - CHAIN_SHARE / (2 if self.brief else 1)
        found: dict[Tile | None, float] = {None: self.alone(name, rows, None)}
        for tile in candidates(rows, shape):
            if tile not in found and self.left(share):
                found[tile] = self.alone(name, rows, tile)
        self.found[rows, name] = found
        best = sorted((t for t in found if t is not None), key=lambda t: found[t])[:3]
        for other in CLASSES.get(rows, ()) if not self.brief else ():
            for tile in (None, *best):
                if self.left(share):
                    self.alone(name, other, tile)
        self.compiler.ask((t for tile in best[:1] for t in near(tile)), shape)
        if not self.brief:
            self.compiler.ask([*best[:1], table(rows, shape)], shape, pdl=False)

    def best_chain(self, rows: int) -> None:
        """The chain by torch, by the table and by the best; then what is better in the chain."""
        self.compiler.wait()
        torchs: Choice = dict.fromkeys(SHAPES)
        tables: Choice = {name: table(rows, shape) for name, shape in SHAPES.items()}
        ranked = {name: sorted(f, key=lambda t: f[t]) for name, f in self._of(rows).items()}
        best: Choice = {name: tiles[0] for name, tiles in ranked.items()}
        least = float("inf")
        for products, choice in (("torch", torchs), ("table", tables), ("alone", best)):
            least = self.chained(rows, choice, products)
            if not self.brief:
                self.chained(rows, choice, products, pdl=False)
        for name in SHAPES:
            for tile in (None, *ranked[name][1:5], *near(best[name])):
                if tile == best[name] or not self.left():
                    continue
                ms = self.chained(rows, best | {name: tile}, f"{name}: {spelled(tile)}")
                if ms < 0.998 * least:
                    least, best[name] = ms, tile
        for pdl in (True,) if self.brief else (True, False):
            self.chained(rows, best, "best", pdl=pdl)
        for name, shape in SHAPES.items():
            rule = Rule(rows, shape.most_out, shape.most_in, best[name])
            print(json.dumps({"kind": "rule", "shape": name, "rule": written(rule)}), flush=True)

    def _of(self, rows: int) -> dict[str, dict[Tile | None, float]]:
        return {name: self.found[rows, name] for name in SHAPES}

    def fixed(self) -> None:
        for rows in (1, 64, 2048):
            for name in SHAPES:
                if rows <= 64 or name != "head":
                    self.fixed_one(rows, name)

    def fixed_one(self, rows: int, name: str) -> None:
        from engine.kernels.gemm import linear

        shape, copies = SHAPES[name], self.weights.some(name)
        x = torch.randn(rows, shape.d_in, device="cuda").bfloat16()
        out = torch.empty(rows, shape.d_out, device="cuda", dtype=shape.out)

        def run() -> dict[str, object]:
            torchs = timed(lambda: [make(x, w, None, out) for w in copies])
            ours = timed(lambda: [linear(x, w, None, deterministic=True, out=out) for w in copies])
            times = {"ms": ours / len(copies), "torch_ms": torchs / len(copies)}
            return {name: round(ms, 5) for name, ms in times.items()}

        for tile, programs in FIXED_RIVALS if self.left(1.3) else ():
            gemm_tiles.FIXED, gemm_tiles.FIXED_PROGRAMS = tile, programs
            self.say("fixed", run, shape=name, rows=rows, programs=programs, tile=spelled(tile))
        gemm_tiles.FIXED, gemm_tiles.FIXED_PROGRAMS = FIXED_RIVALS[0]


def table(rows: int, shape: Shape) -> Tile | None:
    return gemm_tiles.pick(rows, shape.d_out, shape.d_in, 2)


def spelled(tile: Tile | None) -> str:
    return "torch" if tile is None else " ".join(f"{k}={v}" for k, v in tile._asdict().items())


def written(rule: Rule) -> str:
    """As Python."""
    sizes = ["_ANY" if n == _ANY else str(n) for n in rule[:3]]
    defaults = Tile._field_defaults
    if rule.tile is None:
        return f"Rule({', '.join(sizes)}, None),"
    fields = rule.tile._asdict()
    words = [repr(fields.pop(name)).replace("'", '"') for name in Tile._fields[:4]]
    words += [f"{k}={v}" for k, v in fields.items() if v != defaults[k]]
    return f"Rule({', '.join(sizes)}, Tile({', '.join(words)})),"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--rows", default=",".join(map(str, CLASSES)))
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--brief", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(about | {"triton": triton.__version__}), flush=True)
    bench = Bench(options.seconds, options.workers, brief=options.brief)
    gemm_tiles.OWN = True  # `table` is what the engine would take with its switch on
    bench.run([int(rows) for rows in options.rows.split(",")])
    sys.exit(bench.failed)


if __name__ == "__main__":
    main()

"""What adapters add to a decode step's products: LoRA's launches where they stand, on one card.

    python benchmarks/lora_chain.py [--only SUBSTRING] [--seconds 100] [--workers 12]
                                    [--rivals one,two,gated]

Llama-3-8B's shape in bf16: 32 layers of the engine's projections with the engine's norms and gate
between them, a norm in place of the attention, in a CUDA graph; the median of the replays.  The
adapters lie as in `lora_kernels.py`, each layer's its own.  Prints JSON lines:

- `base`: the chain without adapters;
- `two`: shrink ahead of each product and expand behind it (`tiles.JOINED` False);
- `one`: both in one launch beside the product (True).  `added_ms` is over the base;
- for prompts, `gated`: what gate and up are given is the gate's to add, and `two`: it is not.

`tiles` says whether the engine's choice is taken or a rival.  So many `replays` were made with
another x each; the bits were those of two launches outside a graph, or the line says `failed`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import checkout  # noqa: F401
import torch
from lora_cases import DIMS, LAYERS, LAYOUT, MIX, R16, ROOM, Case, shared
from lora_cases import picked_by_engine as picked
from lora_compile import Compiler
from lora_fleet import Fleet, placed
from torch import Tensor

from engine.kernels import fused, gemm_tiles
from engine.kernels import tiles as choices
from engine.kernels.elementwise import silu_mul
from engine.kernels.lora import lora_begin, lora_gates
from engine.kernels.lora_meta import LoraMeta, group_shapes
from engine.kernels.tiles import ExpandTile, GateTile, ShrinkTile, Tiles
from engine.memory.arena import Arena
from engine.models import layers
from engine.models.layers import Build, LoraLinear

HIDDEN = DIMS[0][0]
TIMED, CHECKED = 25, 100
#: A prompt's chain takes ten times as long.
CHECKED_PROMPT = 20

S, E = ShrinkTile, ExpandTile


def _solo(shrink: ShrinkTile, expand: ExpandTile) -> Tiles:
    return Tiles("rival", shrink, expand, choices.SOLO_ROWS)


def _vec(s: tuple[int, int, int], e: tuple[int, int, int], *, wide: bool = False) -> Tiles:
    shrink = S("vec", 1, s[0], s[1], s[1], warps=s[2])
    expand = E("vec", 1, e[0], e[1], warps=e[2], all_ranks=wide)
    return Tiles("rival", shrink, expand)


_S16 = S("dot", 16, 16, 256, 512, step=512)
_E16 = E("dot", 16, 16, 256, all_ranks=False)
SOLO = (
    _solo(_S16._replace(chunk=512), _E16),
    _solo(_S16._replace(wide_chunk=1024, step=1024), _E16),
    _solo(_S16, _E16._replace(columns=128)),
    _solo(_S16, E("dot", 64, 16, 64, all_ranks=False)),
    _solo(S("dot", 64, 16, 256, 512, step=256, side=4), E("dot", 64, 16, 64, all_ranks=False)),
    _solo(S("dot", 32, 16, 256, 512, step=512), E("dot", 32, 16, 128, all_ranks=False)),
)
_M16 = S("both", 16, 16, 512, 512, step=512)
MIXED = (
    Tiles("rival", _M16, E("dot", 16, 16, 256, all_ranks=False)),
    Tiles("rival", _M16._replace(step=256, chunk=256), E("both", 16, 16, 256, all_ranks=False)),
    Tiles("rival", S("dot", 16, 16, 256, 512, step=512), E("dot", 16, 16, 256, all_ranks=False)),
)
ALONE = (
    _vec((8, 1024, 2), (16, 512, 2)),
    _vec((8, 2048, 4), (16, 1024, 4)),
    _vec((8, 512, 1), (16, 256, 1)),
    _vec((16, 1024, 4), (16, 1024, 4)),
    _vec((8, 4096, 4), (16, 1024, 4)),
    _vec((4, 4096, 4), (16, 1024, 4)),
    _vec((8, 4096, 4), (16, 512, 4)),
)
WIDE = (
    _vec((8, 4096, 4), (32, 512, 4), wide=True),
    _vec((8, 2048, 4), (32, 512, 4), wide=True),
    _vec((8, 4096, 4), (64, 256, 4), wide=True),
    _vec((8, 4096, 4), (32, 256, 4), wide=True),
    _vec((8, 4096, 4), (16, 512, 4), wide=True),
    _vec((8, 1024, 4), (64, 256, 4), wide=True),
    _vec((8, 4096, 4), (64, 512, 8), wide=True),
    _vec((8, 4096, 4), (16, 1024, 4), wide=True),
    _vec((16, 2048, 8), (32, 1024, 8), wide=True),
)


def _prompt(shrink: ShrinkTile, expand: ExpandTile) -> Tiles:
    return Tiles("rival", shrink, expand, 1 << 30)


_SP = S("dot", 64, 16, 1024, 2048, step=128, side=4, stages=3)
_EP = E("dot", 32, 16, 256, runs=4, late=True, all_ranks=False)
PROMPT = (
    _prompt(_SP, _EP),
    _prompt(_SP, _EP._replace(runs=1)),
    _prompt(_SP, _EP._replace(columns=128)),
    _prompt(_SP, E("dot", 16, 16, 512, runs=2, late=True, all_ranks=False)),
    _prompt(_SP, E("dot", 64, 16, 128, runs=4, late=True, all_ranks=False)),
    _prompt(_SP._replace(rows=128, warps=8), _EP),
)
_SW = S("dot", 64, 64, 1024, 2048, step=64, side=2, stages=4)
PROMPT_WIDE = (
    _prompt(_SW, E("dot", 64, 64, 128, runs=2, late=True)),
    _prompt(_SW, E("dot", 64, 32, 128, runs=2, late=True)),
    _prompt(_SW, E("dot", 32, 64, 128, runs=2, late=True)),
    _prompt(_SW, E("dot", 64, 64, 64, runs=4, late=True)),
    _prompt(_SW._replace(step=128, stages=3), E("dot", 64, 64, 128, warps=8, runs=2, late=True)),
    _prompt(_SW._replace(rows=128, warps=8), E("dot", 128, 64, 128, warps=8, late=True)),
)
GATES = tuple(GateTile(*sizes) for sizes in ((256, 2, 4), (128, 1, 4), (64, 4, 4), (256, 2, 8)))
GATES_WIDE = tuple(GateTile(*sizes) for sizes in ((128, 1, 4), (64, 4, 4), (128, 2, 8)))


class Sort(NamedTuple):
    case: Case
    rivals: tuple[Tiles, ...]
    gates: tuple[GateTile, ...] = ()


SORTS = tuple(
    Sort(Case(name, slots, ranks, (), ()), rivals, *gates)
    for name, slots, ranks, rivals, *gates in (
        ("prompt T=2048 k=1", shared(2048, 1), R16, PROMPT, GATES),
        ("prompt T=2048 k=1 rank 64", (3,) * 2048, MIX, PROMPT_WIDE, GATES_WIDE),
        ("prompt T=4096 k=8", shared(4096, 8), R16, PROMPT[:2], ()),
        ("T=64 k=1", shared(64, 1), R16, SOLO),
        ("T=64 k=8", shared(64, 8), R16, MIXED),
        ("T=64 k=64", shared(64, 64), R16, ALONE),
        ("T=64 k=64 ranks 8-64", shared(64, 64), MIX, WIDE),
        ("T=1 k=1", shared(1, 1), R16, ALONE[:1]),
        ("T=16 k=16", shared(16, 16), R16, ALONE[:1]),
    )
)


# ---------------------------------------------------------------- compiling, in other processes
def compile_product(rows: int, d_out: int, d_in: int) -> None:
    from engine.kernels.gemm_device import product

    tile = gemm_tiles.pick(rows, d_out, d_in, 2)
    if tile is not None:
        for closely in (False, True):
            x = torch.zeros(rows, d_in, device="cuda", dtype=torch.bfloat16)
            weight = torch.zeros(256, d_in, device="cuda", dtype=torch.bfloat16)
            product(x, weight, None, tile, closely=closely)
        torch.cuda.synchronize()


# ---------------------------------------------------------------- what is timed
class Chain:
    """The projections of all layers, with random weights."""

    def __init__(self, room: int = ROOM) -> None:
        build = Build(torch.device("cuda"), torch.bfloat16, deterministic=False, room=room)
        self.layers = [
            {
                group: LoraLinear(group, layer, shape.d_in, shape.widths, build, bias=False)
                for group, shape in group_shapes(LAYOUT).items()
            }
            for layer in range(LAYERS)
        ]
        for layer in self.layers:
            for projection in layer.values():
                projection.weight.data.normal_(0, 0.02)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def __call__(self, x: Tensor, lora: LoraMeta | None) -> Tensor:
        """x (T, hidden) is summed up in place; what is normed in the end."""
        if lora is not None:
            lora_begin(lora)
        delta = None
        for layer in self.layers:
            place = layer["qkv"].place_for(x, lora)
            qkv = layer["qkv"](fused.rms_norm(x, self.norm, 1e-5, delta, out=place), lora)
            mixed = fused.rms_norm(qkv[:, :HIDDEN], self.norm, 1e-5)
            place = layer["gate_up"].place_for(x, lora)
            normed = fused.rms_norm(x, self.norm, 1e-5, layer["o"](mixed, lora), out=place)
            place = layer["down"].place_for(x, lora)
            delta = layer["down"](layer["gate_up"].gated(normed, lora, silu_mul, place), lora)
        return fused.rms_norm(x, self.norm, 1e-5, delta)


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    return graph, out


def is_prompt(case: Case) -> bool:
    return len(case.slots) > choices.PREFILL_ROWS


def _checked(case: Case) -> int:
    return CHECKED_PROMPT if is_prompt(case) else CHECKED


class Bench:
    def __init__(self, seconds: float, workers: int, kinds: list[str]) -> None:
        self.seconds, self.failed, self.kinds = seconds, False, kinds
        self.compiler = Compiler(workers)
        self.chain = Chain()

    def run(self, sorts: list[Sort]) -> None:
        start = time.monotonic()
        for case, rivals, _ in sorts:
            halves = ("shrink", "expand") if is_prompt(case) else ("shrink", "expand", "joined")
            for tiles in (picked(case), *rivals):
                self.compiler.ask((kernel, tiles) for kernel in halves)
            self.compiler.call(
                (compile_product, len(case.slots), sum(shape.widths), shape.d_in)
                for shape in group_shapes(LAYOUT).values()
            )
        blocks = max(sum(placed(rank).num_blocks for rank in sort.case.ranks) for sort in sorts)
        arena = Arena(
            None,  # type: ignore[arg-type]  # asked for cached keys and values alone
            LAYOUT,
            block_size=16,
            num_blocks=blocks,
            device=torch.device("cuda"),
        )
        arena.bytes.view(-1).view(torch.bfloat16).normal_(0, 0.02)
        every = (*choices.ALL, *(tiles for sort in sorts for tiles in sort.rivals))
        fleets = {r: Fleet(arena, r, every) for r in {sort.case.ranks for sort in sorts}}
        self.compiler.wait()
        print(json.dumps({"kind": "compiled", "seconds": round(time.monotonic() - start, 1)}))
        end = time.monotonic() + self.seconds
        gemm_tiles.LEADING = ("vector", "dot", "stream")  # all that might
        bases: dict[int, float] = {}
        for turn in (self.engines, self.rivals):  # what decides comes first
            for sort in sorts:
                if time.monotonic() < end:
                    turn(sort, fleets[sort.case.ranks], bases)
        self.compiler.close()

    def engines(self, sort: Sort, fleet: Fleet, bases: dict[int, float]) -> None:
        case, rows = sort.case, len(sort.case.slots)
        if rows not in bases:
            bases[rows] = self.say(case, "base", None, None, 0.0)
        for kind in ("two", "gated") if is_prompt(case) else ("two", "one"):
            self.say(case, kind, fleet, picked(case), bases[rows])

    def rivals(self, sort: Sort, fleet: Fleet, bases: dict[int, float]) -> None:
        case, base = sort.case, bases[len(sort.case.slots)]
        for gate in sort.gates:
            mine, choices.GATE = choices.GATE, gate
            self.say(case, "gated", fleet, picked(case), base)
            choices.GATE = mine
        for tiles in sort.rivals:
            for kind in ("two", "gated") if is_prompt(case) else ("one", "two"):
                if kind in self.kinds:
                    self.say(case, kind, fleet, tiles, base)

    def say(
        self,
        case: Case,
        kind: str,
        fleet: Fleet | None,
        tiles: Tiles | None,
        base: float,
    ) -> float:
        line: dict[str, object] = {"case": case.name, "kind": kind}
        ms = float("inf")
        choices.JOINED = kind == "one"
        layers.lora_gates = lora_gates if kind == "gated" else lambda meta: False
        try:
            ms = self.measure(case, fleet, tiles)
            line |= {"ms": round(ms, 4)}
            if tiles is not None:
                line |= {"added_ms": round(ms - base, 4), "replays": _checked(case)}
        except Exception as error:  # the others go on
            self.failed = True
            line["failed"] = f"{type(error).__name__}: {error}"[:300]
        if tiles is not None:
            line["tiles"] = tiles.name
            if kind == "gated":
                line["gate"] = " ".join(f"{k}={v}" for k, v in choices.GATE._asdict().items())
            line["shrink"] = " ".join(f"{k}={v}" for k, v in tiles.shrink._asdict().items())
            line["expand"] = " ".join(f"{k}={v}" for k, v in tiles.expand._asdict().items())
        print(json.dumps(line), flush=True)
        return ms

    def measure(self, case: Case, fleet: Fleet | None, tiles: Tiles | None) -> float:
        """Milliseconds; ValueError if a replay's bits are not those of two launches."""
        rows, meta = len(case.slots), None
        if fleet is not None and tiles is not None:
            plan = fleet.plan(case, tiles)
            plan.derived.clear()  # the gate's tile may be another one
            meta = LoraMeta(device=plan)
        x = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16).normal_()
        graph, out = captured(lambda: self.chain(x, meta))
        if fleet is not None and tiles is not None:
            for turn in range(_checked(case)):
                first = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
                out.fill_(torch.nan)
                x.copy_(first)
                graph.replay()
                if not out.isfinite().all():
                    raise ValueError("what came out is not finite")
                if turn % 10 == 0 and not torch.equal(out, self._in_two(first, meta)):
                    raise ValueError(f"replay {turn} gave other bits than two launches")
        times = []
        for _ in range(TIMED + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[3:])

    def _in_two(self, x: Tensor, meta: LoraMeta | None) -> Tensor:
        joined, gates = choices.JOINED, layers.lora_gates
        choices.JOINED, layers.lora_gates = False, lambda meta: False
        try:
            return self.chain(x, meta)
        finally:
            choices.JOINED, layers.lora_gates = joined, gates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--rivals", default="one,two,gated", help="how rivals are launched")
    options = parser.parse_args()
    torch.manual_seed(0)
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(about | {"triton": triton.__version__}), flush=True)
    bench = Bench(options.seconds, options.workers, options.rivals.split(","))
    bench.run([sort for sort in SORTS if options.only in sort.case.name])
    sys.exit(bench.failed)


if __name__ == "__main__":
    main()

"""Time of the LoRA correction of one step, on one card: 32 layers of 4 groups, 8 launches a layer.

    python benchmarks/lora_kernels.py [--only SUBSTRING] [--seconds 95] [--workers 12]
                                      [--peer vllm [--peer-rank 64]]

Llama-3-8B's shape in bf16, 64 slots whose blocks lie scattered in one arena, a CUDA graph of all
layers (each with adapters of its own, so that nothing is found in the L2 cache), the median of the
replays.  Prints JSON lines, by kind:

- `engine`: what `tiles.pick` takes, and the same with programmatic dependent launch off;
- `shrink`: rival shrink tiles, shrink alone;
- `expand`: rival expand tiles behind the best of those, both kernels; `best` is the quickest pair;
- `peer`, with `--peer` and in place of the rivals: the kernels of vLLM, as installed, on the same
  weights, rows and buffers, as `lora_peers.py` says: its grid for all slots, and the one for the
  step's own adapters.  `times_engine` is its ms over those of `engine`.

`floor_ms` is the time that the card's copy bandwidth needs for the bytes that have to move: the
distinct adapters' own rows, and for prompts x once and y twice; `ratio` is ms over it.  `error` is
the norm of the difference from fp32 over the norm of the correction, over all groups of one layer.
A variant that fails prints its error and the others go on; the exit code is 1 if any did.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from lora_cases import (
    CASES,
    LAYERS,
    LAYOUT,
    MAX_ROWS,
    SLOTS,
    Case,
    picked_by_engine,
    rival,
)
from lora_compile import Compiler
from lora_fleet import Fleet, Operands, placed
from lora_peers import RANKS, Stacks, Unusable, Vllm, compile_peer, load, padded

from engine.kernels.lora import lora_apply_cuda
from engine.kernels.lora_meta import LoraDevicePlan, group_shapes
from engine.kernels.tiles import ShrinkTile, Tiles
from engine.layout import GROUPS
from engine.memory.arena import Arena

REPLAYS, WARM = 15, 2
#: Times that `timed` runs a sweep.
SWEEPS = 1 + WARM + REPLAYS


# ---------------------------------------------------------------- timing
def timed(sweep: Callable[[], None]) -> float:
    """Milliseconds of one replay of the captured sweep, the median."""
    sweep()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sweep()
    times = []
    for _ in range(WARM + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[WARM:])


def sweep_of(kernels: str, operands: Operands, plan: LoraDevicePlan) -> Callable[[], None]:
    from engine.kernels.lora_shrink import shrink

    def both() -> None:
        for layer in range(LAYERS):
            for group in GROUPS:
                lora_apply_cuda(operands.y[group], operands.x[group], layer, group, plan)

    def alone() -> None:
        for layer in range(LAYERS):
            for group in GROUPS:
                shrink(operands.x[group], layer, group, plan)

    return both if kernels == "both" else alone


class Beside:
    """A peer's kernels on the fleets' weights, of which it keeps copies in its own form."""

    def __init__(self, vllm: Vllm, rank: int) -> None:
        """`rank`: the least `max_lora_rank`, as where a server also has adapters of that rank."""
        self.vllm = vllm
        self.rank = rank
        self._stacks: dict[tuple[int, ...], Stacks] = {}

    def max_rank(self, case: Case) -> int:
        return padded(max(*case.ranks, self.rank))

    def of(self, fleet: Fleet, case: Case) -> Stacks:
        """Kept to the end: vLLM keeps the addresses that it has seen."""
        if fleet.ranks not in self._stacks:
            shapes = group_shapes(LAYOUT)
            stacks = Stacks(
                self.vllm,
                shapes,
                **{"layers": LAYERS, "slots": SLOTS, "max_rank": self.max_rank(case)},
                **{"max_rows": MAX_ROWS, "dtype": torch.bfloat16, "device": fleet.arena.device},
            )
            for slot in range(SLOTS):
                for layer in range(LAYERS):
                    for group in shapes:
                        stacks.put(slot, layer, group, fleet.pairs(slot, layer, group))
            self._stacks[fleet.ranks] = stacks
        return self._stacks[fleet.ranks]

    def measure(
        self, case: Case, fleet: Fleet, operands: Operands, engine_ms: float, *, specialized: bool
    ) -> dict[str, object]:
        """The figures of a line; raises ValueError where what is computed is not the correction."""
        stacks = self.of(fleet, case)
        slots = torch.tensor(case.slots, dtype=torch.int32, device=fleet.arena.device)
        stacks.begin(slots, specialized=specialized)
        error = operands.error_of(stacks.apply)
        if not error < 0.01:
            raise ValueError(f"wrong by {error:.3g} of the correction")

        def sweep() -> None:
            for layer in range(LAYERS):
                for group in GROUPS:
                    stacks.apply(operands.y[group], operands.x[group], layer, group)

        # Fresh: what many sweeps have added up grows until bf16 no longer sees one more.
        start = {group: y.normal_().clone() for group, y in operands.y.items()}
        sweep()
        once = operands.moved(start)
        ms = timed(sweep)
        # Work that a graph left out would not be in the time.
        share = operands.moved(start) / once / (1 + SWEEPS)
        if not 0.9 < share < 1.1:
            raise ValueError(f"the replays did {share:.3g} of the work")
        line: dict[str, object] = {"ms": round(ms, 4), "floor_ms": round(case.floor_ms, 4)}
        line |= {"ratio": round(ms / case.floor_ms, 3), "error": float(f"{error:.3g}")}
        if engine_ms < float("inf"):  # it was timed
            line |= {"engine_ms": round(engine_ms, 4), "times_engine": round(ms / engine_ms, 2)}
        return line


class Bench:
    def __init__(self, seconds: float, workers: int, beside: Beside | None = None) -> None:
        self.end = time.monotonic() + seconds
        self.failed = False
        self.compiler = Compiler(workers)
        self.beside = beside

    def measure(
        self,
        case: Case,
        kind: str,
        fleet: Fleet,
        operands: Operands,
        tiles: Tiles,
        *,
        kernels: str = "both",
        pdl: bool = True,
    ) -> float:
        """Print one line; the milliseconds, infinite if there is no time left or it failed."""
        line: dict[str, object] = {"case": case.name, "kind": kind}
        ms = float("inf")
        if time.monotonic() > self.end:
            line["left_out"] = True
        else:
            try:
                plan = fleet.plan(case, tiles, pdl=pdl)
                error = operands.error(plan)
                if not error < 0.01:
                    raise ValueError(f"wrong by {error:.3g} of the correction")
                ms = timed(sweep_of(kernels, operands, plan))
                line |= {"ms": round(ms, 4), "floor_ms": round(case.floor_ms, 4)}
                if kernels == "both":
                    line["ratio"] = round(ms / case.floor_ms, 3)
                line |= {"error": float(f"{error:.3g}"), "pdl": pdl}
                grid = plan.kind
                line |= {"shrink_items": grid.shrink_items, "expand_items": grid.expand_items}
            except Exception as error:
                self.failed = True
                line["failed"] = f"{type(error).__name__}: {error}"[:400]
        line["tiles"] = tiles.name
        line["shrink"] = " ".join(f"{k}={v}" for k, v in tiles.shrink._asdict().items())
        if kernels == "both":
            line["expand"] = " ".join(f"{k}={v}" for k, v in tiles.expand._asdict().items())
        print(json.dumps(line), flush=True)
        return ms

    def measure_peer(
        self, case: Case, fleet: Fleet, operands: Operands, engine_ms: float, beside: Beside
    ) -> None:
        """Print two lines."""
        for specialized in (False, True):
            line: dict[str, object] = {"case": case.name, "kind": "peer", "peer": "vllm"}
            line |= {"version": beside.vllm.version, "max_lora_rank": beside.max_rank(case)}
            line["specialize_active_lora"] = specialized
            if time.monotonic() > self.end:
                line["left_out"] = True
            else:
                try:
                    line |= beside.measure(
                        case, fleet, operands, engine_ms, specialized=specialized
                    )
                except Exception as error:
                    self.failed = True
                    line["failed"] = f"{type(error).__name__}: {error}"[:400]
            print(json.dumps(line), flush=True)

    def run(self, cases: list[Case]) -> None:
        picked = {case: picked_by_engine(case) for case in cases}
        for tiles in picked.values():
            self.compiler.ask((kernel, tiles) for kernel in ("shrink", "expand"))
        # A rival shrink tile is checked with the case's first expand tile behind it.
        for case in cases:
            firsts = [rival(case, shrink, case.expands[0]) for shrink in case.shrinks]
            self.compiler.ask((kernel, t) for t in firsts for kernel in ("shrink", "expand"))
        if self.beside is not None:
            self.compiler.call(
                (compile_peer, self.beside.max_rank(case), len(case.slots), group)
                for case in cases
                for group in GROUPS
            )
        blocks = max(sum(placed(rank).num_blocks for rank in case.ranks) for case in cases)
        arena = Arena(
            None,  # type: ignore[arg-type]  # asked for cached keys and values alone
            LAYOUT,
            block_size=16,
            num_blocks=blocks,
            device=torch.device("cuda"),
        )
        arena.bytes.view(-1).view(torch.bfloat16).normal_(0, 0.05)
        fleets = {ranks: Fleet(arena, ranks) for ranks in {case.ranks for case in cases}}
        self.compiler.wait()
        best: dict[Case, ShrinkTile] = {}
        for case in cases:
            fleet = fleets[case.ranks]
            operands = Operands(fleet, case)
            engine_ms, _ = (
                self.measure(case, "engine", fleet, operands, picked[case], pdl=pdl)
                for pdl in (True, False)
            )
            if self.beside is not None:
                self.measure_peer(case, fleet, operands, engine_ms, self.beside)
            found = {
                shrink: self.measure(
                    case,
                    "shrink",
                    fleet,
                    operands,
                    rival(case, shrink, case.expands[0]),
                    kernels="shrink",
                )
                for shrink in case.shrinks
            }
            if not found:
                continue
            best[case] = min(found, key=lambda shrink: found[shrink])
            # compiled while the next case is timed
            self.compiler.ask(("expand", rival(case, best[case], e)) for e in case.expands)
            del operands
        self.compiler.wait()
        for case in best:
            fleet = fleets[case.ranks]
            operands = Operands(fleet, case)
            pairs = {
                expand: self.measure(
                    case, "expand", fleet, operands, rival(case, best[case], expand)
                )
                for expand in case.expands
            }
            quickest = min(pairs, key=lambda expand: pairs[expand])
            if pairs[quickest] == float("inf"):
                continue
            print(
                json.dumps(
                    {
                        "case": case.name,
                        "kind": "best",
                        "ms": round(pairs[quickest], 4),
                        "floor_ms": round(case.floor_ms, 4),
                        "ratio": round(pairs[quickest] / case.floor_ms, 3),
                        "shrink": str(best[case]),
                        "expand": str(quickest),
                    }
                ),
                flush=True,
            )
            del operands
        self.compiler.close()


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[Case]]:
    """The options and the cases; whatever cannot be done ends it here, in a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases with this in their names, as in T=64")
    parser.add_argument("--seconds", type=float, default=95, help="nothing is begun later")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead")
    parser.add_argument(
        "--peer",
        choices=("vllm",),
        help="time its kernels too, in place of rival tiles; the package must be installed",
    )
    parser.add_argument(
        "--peer-rank",
        type=int,
        choices=RANKS,
        default=1,
        metavar="RANK",
        help="the peer's max_lora_rank, where a case's adapters need no more: one of "
        + ", ".join(map(str, RANKS)),
    )
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name; try: --only T=64")
    if options.peer:
        cases = [replace(case, shrinks=(), expands=()) for case in cases]
        try:
            options.peer = load()
        except Unusable as error:
            parser.exit(2, f"{error}\n")
    return options, cases


def main() -> None:
    options, cases = parse()
    if not torch.cuda.is_available():
        sys.exit("kernels are timed on a CUDA device, and torch sees none; try: nvidia-smi")
    torch.manual_seed(0)
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    about["triton"] = triton.__version__
    beside = None
    if options.peer:
        beside = Beside(options.peer, options.peer_rank)
        about |= {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    print(json.dumps(about), flush=True)
    bench = Bench(options.seconds, options.workers, beside)
    bench.run(cases)
    sys.exit(bench.failed)


if __name__ == "__main__":
    main()

"""Time of the LoRA correction of one step, on one card: 32 layers of 4 groups, 8 launches a layer.

    python benchmarks/lora_kernels.py [--only SUBSTRING] [--seconds 95] [--workers 12]

Llama-3-8B's shape in bf16, 64 slots whose blocks lie scattered in one arena, a CUDA graph of all
layers (each with adapters of its own, so that nothing is found in the L2 cache), the median of the
replays.  Prints JSON lines, three kinds a case:

- `engine`: what `tiles.pick` takes, and the same with programmatic dependent launch off;
- `shrink`: rival shrink tiles, shrink alone;
- `expand`: rival expand tiles behind the best of those, both kernels; `best` is the quickest pair.

`floor_ms` is the time that the card's copy bandwidth needs for the bytes that have to move: the
distinct adapters' own rows, and for prompts x once and y twice; `ratio` is ms over it.  `error` is
the norm of the difference from fp32 over the norm of the correction, over all groups of one layer.
A variant that fails prints its error and the others go on; the exit code is 1 if any did.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from lora_cases import (
    CASES,
    CHOICES,
    LAYERS,
    LAYOUT,
    MAX_RANK,
    MAX_ROWS,
    ROOM,
    SLOTS,
    Case,
    picked_by_engine,
    rival,
)
from lora_compile import Compiler
from torch import Tensor

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.kernels import tiles as choices
from engine.kernels.lora import lora_apply_cuda
from engine.kernels.lora_meta import LoraDevicePlan, group_shapes
from engine.kernels.tiles import ShrinkTile, Tiles
from engine.layout import GROUPS, MODULES, Placement, place
from engine.memory.arena import Arena
from engine.messages import PackedManifest, PackedModule

REPLAYS, CHECKED_LAYER = 15, 5


# ---------------------------------------------------------------- the fleet
@lru_cache
def placed(rank: int) -> Placement:
    """An adapter of one rank in every module of every layer."""
    modules = (PackedModule(i, m, rank, 0.5) for i in range(LAYERS) for m in MODULES)
    return place(tuple(modules), LAYOUT)


class Fleet:
    """64 adapters of the given ranks in `arena`, one planner, and x and y of every group."""

    def __init__(
        self, arena: Arena, ranks: tuple[int, ...], tiles: tuple[Tiles, ...] = CHOICES
    ) -> None:
        self.arena = arena
        self.ranks = ranks
        device = arena.device
        self.slots = DeviceSlots(LAYOUT, num_slots=SLOTS, max_rank=MAX_RANK, device=device)
        free = torch.randperm(arena.num_blocks).tolist()
        self.placed = []
        for slot, rank in enumerate(ranks):
            placement = placed(rank)
            modules = tuple(
                PackedModule(m.layer, m.module, m.rank, m.scaling) for m in placement.modules
            )
            blocks = [free.pop() for _ in range(placement.num_blocks)]
            manifest = PackedManifest(
                rev=str(slot),
                path="",
                layout=LAYOUT.id,
                num_blocks=len(blocks),
                true_bytes=placement.true_bytes,
                max_rank=rank,
                changes_kv=True,
                modules=modules,
            )
            self.slots.put(slot, manifest, blocks)
            pairs = {(m.layer, m.module): m for m in placement.modules}
            self.placed.append((pairs, blocks))
        self.tiles: Tiles = choices.ALONE
        self.planner = DevicePlanner(
            arena,
            self.slots,
            max_rows=MAX_ROWS,
            max_seqs=SLOTS,
            max_rank=MAX_RANK,
            choose=lambda shape: self.tiles,
            choices=tiles,
            room=ROOM,
        )

    def plan(
        self, case: Case, tiles: Tiles, *, pdl: bool = True, guests: bool = False
    ) -> LoraDevicePlan:
        """`guests`: of a prompt, for the products of a chain that has ROOM."""
        self.tiles, choices.AUGMENTED = tiles, guests
        meta = self.planner.send(case.runs, len(case.slots))
        assert meta.device is not None
        if pdl or not meta.device.store.pdl:
            return meta.device
        return replace(meta.device, store=replace(meta.device.store, pdl=False))

    def exact(self, case: Case, x: Tensor, group: str) -> Tensor:
        """The correction of one layer in fp32."""
        shape = group_shapes(LAYOUT)[group]
        out = torch.zeros(len(case.slots), sum(shape.widths), device=x.device)
        for start, rows, slot in case.runs.T.tolist():
            pairs, blocks = self.placed[slot]
            column = 0
            for module, width in zip(GROUPS[group], shape.widths, strict=True):
                m = pairs[CHECKED_LAYER, module]
                a, b = (torch.cat(self.arena.pieces(run, blocks)).float() for run in (m.a, m.b))
                h = x[start : start + rows].float() @ a.T * m.scaling
                out[start : start + rows, column : column + width] = h @ b
                column += width
        return out


class Operands:
    """x and y of a case, and what y should become in the checked layer."""

    def __init__(self, fleet: Fleet, case: Case) -> None:
        rows, shapes = len(case.slots), group_shapes(LAYOUT)
        device = fleet.arena.device
        self.x = {g: torch.randn(rows, s.d_in, device=device).bfloat16() for g, s in shapes.items()}
        self.y = {
            g: torch.randn(rows, sum(s.widths), device=device).bfloat16() for g, s in shapes.items()
        }
        self.exact = {g: fleet.exact(case, self.x[g], g) for g in shapes}

    def error(self, plan: LoraDevicePlan) -> float:
        """Relative to the correction, the rounding of y included."""
        worst = 0.0
        for group, exact in self.exact.items():
            plan.store.h.fill_(torch.nan)
            y = torch.zeros_like(self.y[group])
            lora_apply_cuda(y, self.x[group], CHECKED_LAYER, group, plan)
            worst = max(worst, float((y.float() - exact).norm() / exact.norm()))
        return worst if worst == worst else float("inf")


# ---------------------------------------------------------------- timing
def timed(sweep: Callable[[], None]) -> float:
    """Milliseconds of one replay of the captured sweep, the median."""
    sweep()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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


class Bench:
    def __init__(self, seconds: float, workers: int) -> None:
        self.end = time.monotonic() + seconds
        self.failed = False
        self.compiler = Compiler(workers)

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

    def run(self, cases: list[Case]) -> None:
        picked = {case: picked_by_engine(case) for case in cases}
        for tiles in picked.values():
            self.compiler.ask((kernel, tiles) for kernel in ("shrink", "expand"))
        # A rival shrink tile is checked with the case's first expand tile behind it.
        for case in cases:
            firsts = [rival(case, shrink, case.expands[0]) for shrink in case.shrinks]
            self.compiler.ask((kernel, t) for t in firsts for kernel in ("shrink", "expand"))
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
            for pdl in (True, False):
                self.measure(case, "engine", fleet, operands, picked[case], pdl=pdl)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(about | {"triton": triton.__version__}), flush=True)
    bench = Bench(options.seconds, options.workers)
    bench.run([case for case in CASES if options.only in case.name])
    sys.exit(bench.failed)


if __name__ == "__main__":
    main()

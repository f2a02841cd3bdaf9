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
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots, most_blocks
from engine.kernels import tiles as choices
from engine.kernels.lora import lora_apply_cuda
from engine.kernels.lora_meta import LoraClass, LoraDevicePlan, LoraStore, group_shapes
from engine.kernels.tiles import ExpandTile, Shape, ShrinkTile, Tiles
from engine.layout import GROUPS, MODULES, BlockLayout, Placement, Shapes, place
from engine.memory.arena import Arena
from engine.messages import PackedManifest, PackedModule

LAYERS, SLOTS, MAX_RANK, MAX_ROWS = 32, 64, 512, 4096
#: Columns for guests behind the weights of a chain that has any.
ROOM = 64
HIDDEN, KV, FFN = 4096, 1024, 14336
DIMS = (
    *((HIDDEN, HIDDEN), (HIDDEN, KV), (HIDDEN, KV), (HIDDEN, HIDDEN)),
    *((HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN)),
)
LAYOUT = BlockLayout(Shapes(LAYERS, DIMS), "bfloat16", 2 << 20)
BANDWIDTH = 4.27e12  # of a copy, measured on an H200
REPLAYS, CHECKED_LAYER = 15, 5


@dataclass(frozen=True)
class Case:
    name: str
    slots: tuple[int, ...]  # of each row, in row order
    ranks: tuple[int, ...]  # of each slot
    shrinks: tuple[ShrinkTile, ...]
    expands: tuple[ExpandTile, ...]

    @property
    def runs(self) -> np.ndarray:
        """(3, n): first rows, rows, slots."""
        slots = np.array(self.slots)
        edges = np.flatnonzero(np.append(True, slots[1:] != slots[:-1]))
        return np.stack((edges, np.diff(np.append(edges, len(slots))), slots[edges]))

    @property
    def floor_ms(self) -> float:
        active = sum(self.ranks[slot] for slot in set(self.slots))
        moved = active * sum(a + b for a, b in DIMS) * 2 * LAYERS
        if len(self.slots) > choices.PREFILL_ROWS:
            rows = sum(g.d_in + 2 * sum(g.widths) for g in group_shapes(LAYOUT).values())
            moved += len(self.slots) * rows * 2 * LAYERS
        return 1e3 * moved / BANDWIDTH


def _vec(rows: int, *sizes: tuple[int, int, int]) -> tuple[ShrinkTile, ...]:
    return tuple(ShrinkTile("vec", rows, r, chunk, chunk, warps=w) for r, chunk, w in sizes)


def _few(
    rows: int, *sizes: tuple[int, int, int], all_ranks: bool = False
) -> tuple[ExpandTile, ...]:
    return tuple(
        ExpandTile("vec", rows, r, columns, warps=w, all_ranks=all_ranks) for r, columns, w in sizes
    )


ALONE_S = _vec(
    *(1, (8, 2048, 4), (8, 1024, 2), (8, 512, 1), (8, 1024, 1), (4, 1024, 1), (16, 1024, 4)),
    *((16, 512, 1), (8, 2048, 2), (4, 2048, 2)),
)
ALONE_E = _few(
    1, (16, 512, 2), (16, 1024, 4), (16, 256, 1), (16, 1024, 2), (16, 2048, 8), (16, 512, 1)
)
WIDE_E = _few(
    *(1, (32, 512, 4), (16, 512, 2), (16, 1024, 4), (16, 256, 1), (8, 512, 1), (8, 1024, 2)),
    *((16, 2048, 8), (8, 2048, 4), (32, 512, 8)),
    all_ranks=True,
)
FEW_S = _vec(4, (8, 2048, 4), (8, 1024, 4), (16, 1024, 4), (8, 1024, 2), (4, 2048, 4))
FEW_E = _few(4, (16, 512, 2), (16, 256, 2), (16, 512, 4), (16, 256, 1))
MIXED_S = (
    ShrinkTile("both", 16, 16, 512, 1024, step=256),
    ShrinkTile("both", 16, 16, 512, 512, step=512),
    ShrinkTile("dot", 16, 16, 512, 1024, step=1024),
    ShrinkTile("dot", 16, 16, 256, 512, step=512),
    ShrinkTile("dot", 16, 16, 512, 1024, step=128, side=4, stages=3),
)
MIXED_E = (
    ExpandTile("both", 16, 16, 256, all_ranks=False),
    ExpandTile("both", 16, 16, 512, all_ranks=False),
    ExpandTile("dot", 16, 16, 256, all_ranks=False),
    ExpandTile("dot", 16, 16, 128, warps=2, all_ranks=False),
)
SOLO_S = (
    ShrinkTile("dot", 16, 16, 256, 512, step=512),
    ShrinkTile("dot", 16, 16, 512, 1024, step=1024),
    ShrinkTile("both", 16, 16, 512, 1024, step=256),
    ShrinkTile("dot", 32, 16, 256, 512, step=512),
    ShrinkTile("dot", 64, 16, 256, 512, step=256, side=4),
    ShrinkTile("dot", 64, 16, 512, 1024, step=128, side=4, stages=3),
)
SOLO_E = (
    ExpandTile("dot", 16, 16, 256, all_ranks=False),
    ExpandTile("dot", 16, 16, 128, warps=2, all_ranks=False),
    ExpandTile("dot", 32, 16, 128, all_ranks=False),
    ExpandTile("dot", 64, 16, 128, all_ranks=False),
    ExpandTile("dot", 64, 16, 64, all_ranks=False),
)
PREFILL_S = (
    ShrinkTile("dot", 64, 16, 1024, 2048, step=64, side=4, stages=4),
    ShrinkTile("dot", 64, 16, 1024, 2048, step=128, side=4, stages=3),
    ShrinkTile("dot", 128, 16, 1024, 2048, step=64, side=4, warps=8, stages=4),
    ShrinkTile("dot", 64, 16, 2048, 4096, step=64, side=4, stages=5),
    ShrinkTile("dot", 32, 16, 2048, 4096, step=128, side=4, stages=4),
)
PREFILL_E = (
    ExpandTile("dot", 32, 16, 256, runs=4, late=True, all_ranks=False),
    ExpandTile("dot", 32, 16, 256, runs=1, late=True, all_ranks=False),
    ExpandTile("dot", 32, 16, 256, runs=4, all_ranks=False),
    ExpandTile("dot", 16, 16, 512, runs=2, late=True, all_ranks=False),
    ExpandTile("dot", 64, 16, 128, runs=4, late=True, all_ranks=False),
    ExpandTile("dot", 64, 16, 256, runs=2, warps=8, late=True, all_ranks=False),
)

R16, R8 = (16,) * SLOTS, (8,) * SLOTS
MIX = tuple((8, 16, 32, 64)[slot % 4] for slot in range(SLOTS))


def shared(rows: int, adapters: int, chunk: int = 0) -> tuple[int, ...]:
    """Slots of rows that adapters use in turn, and of a prompt's chunk on the first of them."""
    return tuple(sorted([row % adapters for row in range(rows)] + [0] * chunk))


CASES = (
    Case("T=1 k=1", shared(1, 1), R16, ALONE_S, ALONE_E),
    Case("T=16 k=16", shared(16, 16), R16, ALONE_S[:3], ALONE_E[:3]),
    Case("T=64 k=1", shared(64, 1), R16, SOLO_S, SOLO_E),
    Case("T=64 k=8", shared(64, 8), R16, MIXED_S, MIXED_E),
    Case("T=64 k=32", shared(64, 32), R16, FEW_S, FEW_E),
    Case("T=64 k=64", shared(64, 64), R16, ALONE_S + FEW_S[:1], ALONE_E + FEW_E[:1]),
    Case("T=64 k=64 ranks 8-64", shared(64, 64), MIX, ALONE_S, WIDE_E),
    Case("T=64 k=32 rank 8", shared(64, 32), R8, FEW_S[:3], FEW_E[:3]),
    Case("mixed T=64+128 k=8", shared(64, 8, 128), R16, MIXED_S + SOLO_S[4:], MIXED_E + SOLO_E[2:]),
    Case("mixed T=64+128 k=64", shared(64, 64, 128), R16, MIXED_S, MIXED_E),
    Case("mixed T=512 k=1", shared(512, 1), R16, SOLO_S + PREFILL_S[:1], SOLO_E + PREFILL_E[:2]),
    Case("prefill T=2048 k=1", shared(2048, 1), R16, PREFILL_S, PREFILL_E),
    Case("prefill T=4096 k=8", shared(4096, 8), R16, PREFILL_S[:3], PREFILL_E),
    Case("prefill T=2048 k=1 rank 64", (3,) * 2048, MIX, (), ()),  # as the engine does it
)
CHOICES = (
    *choices.ALL,
    *(
        Tiles("rival", s, e, MAX_ROWS if len(case.slots) > choices.PREFILL_ROWS else 1024)
        for case in CASES
        for s in case.shrinks
        for e in case.expands
    ),
)


def rival(case: Case, shrink: ShrinkTile, expand: ExpandTile) -> Tiles:
    most = 1 << 30 if len(case.slots) > choices.PREFILL_ROWS else choices.PREFILL_ROWS
    return Tiles("rival", shrink, expand, most)


# ---------------------------------------------------------------- compiling, in other processes
@lru_cache
def _empty_store() -> LoraStore:
    """The numbers of the real one, over next to nothing: kernels are compiled for numbers."""
    blocks_at = LAYERS * len(MODULES) * 8
    words = -(-(blocks_at + most_blocks(LAYOUT, MAX_RANK)) // 8) * 8
    nothing = torch.zeros(64, device="cuda")
    return LoraStore(
        arena=nothing.bfloat16(),
        table=torch.zeros(1, words, dtype=torch.int32, device="cuda"),
        h=nothing,
        groups=group_shapes(LAYOUT),
        block=LAYOUT.block_bytes // 2,
        blocks_at=blocks_at,
        max_rank=MAX_RANK,
        max_rows=MAX_ROWS,
        pdl=True,
    )


def compile_one(kernel: str, tiles: Tiles, group: str) -> None:
    """Launch the kernel on one item of padding: it is then in triton's cache on disk."""
    from engine.kernels.lora_expand import expand
    from engine.kernels.lora_joint import begin, joined
    from engine.kernels.lora_shrink import shrink

    store = _empty_store()
    items = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    plan = LoraDevicePlan(store, LoraClass(tiles, 1, 1), items, items)
    shape = store.groups[group]
    x = torch.zeros(1, shape.d_in, device="cuda").bfloat16()
    y = torch.zeros(1, sum(shape.widths), device="cuda").bfloat16()
    if kernel == "shrink":
        shrink(x, 0, group, plan)
    elif kernel == "expand":
        expand(y, 0, group, plan)
    else:
        begin(store)
        joined(y, x, 0, group, plan)
    torch.cuda.synchronize()


class Compiler:
    """Compiles ahead; a kernel that does not compile fails again, and loudly, where it is timed."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context) if workers else None
        self._known: set[tuple[object, ...]] = set()
        self._running: list[Future[None]] = []

    def ask(self, wanted: Iterable[tuple[str, Tiles]]) -> None:
        for kernel, tiles in wanted:
            for group in GROUPS:
                d_in = group_shapes(LAYOUT)[group].d_in
                key: tuple[object, ...] = {
                    "shrink": (tiles.shrink,),
                    "expand": (tiles.expand, tiles.shrink.splits(d_in)),
                    "joined": (tiles.shrink, tiles.expand),
                }[kernel]
                key = (kernel, group, tiles.most_rows, *key)
                if self._pool is not None and key not in self._known:
                    self._known.add(key)
                    self._running.append(self._pool.submit(compile_one, kernel, tiles, group))

    def call(self, jobs: Iterable[tuple[Callable[..., None], *tuple[object, ...]]]) -> None:
        """Functions with their arguments, which compile something else."""
        for job in jobs:
            if self._pool is not None and job not in self._known:
                self._known.add(job)
                self._running.append(self._pool.submit(*job))

    def wait(self) -> None:
        for future in self._running:
            future.exception()
        self._running.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


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


def picked_by_engine(case: Case) -> Tiles:
    runs = case.runs
    longest, ranks = int(runs[1].max()), [case.ranks[slot] for slot in case.slots]
    return choices.pick(Shape(len(case.slots), runs.shape[1], longest, max(ranks)))


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

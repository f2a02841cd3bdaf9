"""Graphs that are replayed in turns, round by round, and the plans that they read."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace

import checkout  # noqa: F401
import torch
from lora_cases import LAYERS, Case
from lora_fleet import Fleet, Operands
from torch import Tensor

from engine.kernels.lora import lora_apply_cuda
from engine.kernels.lora_meta import LoraDevicePlan
from engine.kernels.tiles import Tiles
from engine.layout import GROUPS

ROUNDS = 21
#: What captured graphs read, until their part has ended.
KEPT: list[Tensor] = []


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


class Turns:
    """Captured graphs that are replayed in turns."""

    def __init__(self) -> None:
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.failed = False

    def add(self, name: str, make: Callable[[], torch.cuda.CUDAGraph], **about: object) -> None:
        try:
            self.graphs[name] = make()
        except Exception as error:
            self.failed = True
            say(kind="failed", rival=name, error=f"{type(error).__name__}: {error}"[:400], **about)

    def times(self, rounds: int = ROUNDS) -> dict[str, list[float]]:
        """Milliseconds of each, by round; the first two are thrown away."""
        found: dict[str, list[float]] = {name: [] for name in self.graphs}
        for turn in range(rounds + 2):
            marks = []
            for name, graph in self.graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                marks.append((name, start, end))
            torch.cuda.synchronize()
            if turn >= 2:
                for name, start, end in marks:
                    found[name].append(start.elapsed_time(end))
        return found

    def pairs(self, base: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
        """As `times`, with the base ahead of each; and the medians of what each took more."""
        found = {name: [] for name in self.graphs}  # type: dict[str, list[float]]
        more = {name: [] for name in self.graphs}  # type: dict[str, list[float]]
        only, all_of_them = Turns(), self.graphs
        for name in all_of_them:
            only.graphs = {base: all_of_them[base], name: all_of_them[name]}
            times = only.times(rounds)
            found[name] = times[name]
            more[name] = [a - b for a, b in zip(times[name], times[base], strict=True)]
        return found, {name: statistics.median(m) for name, m in more.items()}


def added(times: dict[str, list[float]], name: str, base: str) -> float:
    """The median of what `name` took more than `base` in the same round."""
    return statistics.median(a - b for a, b in zip(times[name], times[base], strict=True))


def own_plan(fleet: Fleet, case: Case, tiles: Tiles, *, guests: bool = False) -> LoraDevicePlan:
    """A plan whose items the next plan leaves alone."""
    plan = fleet.plan(case, tiles, guests=guests)
    plan = replace(plan, shrink=plan.shrink.clone(), expand=plan.expand.clone(), derived={})
    KEPT.extend((plan.shrink, plan.expand))
    return plan


def padded(plan: LoraDevicePlan, shrink_items: int, expand_items: int) -> LoraDevicePlan:
    """The same with items of no rows behind, as a graph's grid has them."""
    kind = replace(plan.kind, shrink_items=shrink_items, expand_items=expand_items)
    parts = []
    for items, count in ((plan.shrink, shrink_items), (plan.expand, expand_items)):
        part = torch.zeros(count, items.shape[1], dtype=items.dtype, device=items.device)
        part[: len(items)] = items
        parts.append(part)
    KEPT.extend(parts)
    return replace(plan, kind=kind, shrink=parts[0], expand=parts[1], derived={})


def checked(operands: Operands, plan: LoraDevicePlan) -> LoraDevicePlan:
    error = operands.error(plan)
    if not error < 0.01:
        raise ValueError(f"wrong by {error:.3g} of the correction")
    return plan


def sweep(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def both_launches(operands: Operands, plan: LoraDevicePlan) -> Callable[[], None]:
    def run() -> None:
        for layer in range(LAYERS):
            for group in GROUPS:
                lora_apply_cuda(operands.y[group], operands.x[group], layer, group, plan)

    return run

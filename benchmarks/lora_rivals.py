"""Rivals of what adapters cost, timed in turns on one card: mixed ranks, prompts, rank 8 beside 64.

    python benchmarks/lora_rivals.py [--only alone,few,kernels,prompt,chain,beside] [--seconds 110]
                                     [--workers 14]

Llama-3-8B's shape in bf16, adapters as in `lora_kernels.py`.  Every rival is checked against torch
in fp32 and captured; then all of a part are replayed one after the other, round by round, so that
a card that grows warm slows all of them alike; medians.  Prints JSON lines:

- `alone`: LoRA alone, two launches a module, 64 rows of 64 adapters; `ratio` to the bytes' floor;
- `few`: the same of steps whose adapters share rows;
- `kernels`: the kernels of a prompt of 2,048 rows, one by one, microseconds;
- `prompt`: such a prompt on one adapter, 8 layers of a chain as in `lora_chain.py`, times 4; each
  in pairs with the base.  `shrink` and `shrink and expand ...` leave the rest out: where the time
  goes.  `with_47.9` is the ratio that `added_ms` would make of the engine's 47.9 ms;
- `chain`: what 64 adapters add to a step's products, in one launch a module, or in two;
- `beside`: 32 adapters of rank 8 among 32 of rank 64, and either alone.  `marginal` is what the
  rank-8 ones add, over what they take alone, `to_floor` the same over their bytes; bar 1.10.

A rival that fails says so, and the others go on; the exit code is 1 if any did.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import checkout  # noqa: F401
import torch
from lora_cases import (
    BANDWIDTH,
    LAYERS,
    LAYOUT,
    MIX,
    R16,
    ROOM,
    SLOTS,
    Case,
    picked_by_engine,
    shared,
)
from lora_chain import Chain, captured, compile_product
from lora_compile import Compiler, empty_store
from lora_fleet import CHECKED_LAYER, Fleet, Operands, placed
from torch import Tensor

from engine.kernels import elementwise, fused, gemm_tiles
from engine.kernels import tiles as choices
from engine.kernels.elementwise import silu_mul
from engine.kernels.lora import lora_apply_cuda, lora_gates
from engine.kernels.lora_expand import expand
from engine.kernels.lora_gate import gated
from engine.kernels.lora_meta import LoraDevicePlan, LoraMeta, group_shapes
from engine.kernels.lora_shrink import shrink
from engine.kernels.tiles import GateTile, Tiles
from engine.layout import GROUPS, ROOMY_GROUPS
from engine.memory.arena import Arena
from engine.models import layers

SHAPES = group_shapes(LAYOUT)
HIDDEN = SHAPES["qkv"].d_in
#: Layers of a prompt's chain, which stand for all.
FEW_LAYERS = 8
ROUNDS = 21

BESIDE = tuple((64, 8)[slot % 2] for slot in range(SLOTS))
MIXED = Case("T=64 k=64 ranks 8-64", shared(64, 64), MIX, (), ())
SAME = Case("T=64 k=64 rank 16", shared(64, 64), R16, (), ())
PROMPT = Case("prompt T=2048 k=1", shared(2048, 1), R16, (), ())
PROMPT_64 = Case("prompt T=2048 k=1 rank 64", (3,) * 2048, MIX, (), ())
HIGH = Case("32 of rank 64", tuple(range(0, 64, 2)), BESIDE, (), ())
LOW = Case("32 of rank 8", tuple(range(1, 64, 2)), BESIDE, (), ())
BOTH = Case("32 of rank 64 and 32 of rank 8", tuple(range(64)), BESIDE, (), ())


def wide(chunk: int = 2048, warps: int = 4, columns: int = 1024, *, streamed: bool = True) -> Tiles:
    """`ALONE_WIDE` with some other sizes."""
    tiles = choices.ALONE_WIDE
    return Tiles(
        "rival",
        tiles.shrink._replace(chunk=chunk, wide_chunk=chunk, warps=warps, streamed=streamed),
        tiles.expand._replace(warps=warps, columns=columns, streamed=streamed),
    )


def streams(tiles: Tiles, streamed: bool) -> Tiles:
    """The tiles, whose weights leave L2 first or do not."""
    return tiles._replace(
        name="rival",
        shrink=tiles.shrink._replace(streamed=streamed),
        expand=tiles.expand._replace(streamed=streamed),
    )


RIVALS = {
    "two bodies": wide(streamed=False),
    "two bodies, chunks of 4096": wide(4096, streamed=False),
    "chunks of 4096": wide(4096),
    "2 warps": wide(1024, 2, 512),
    "chunks of 512 by 1 warp": wide()._replace(
        shrink=choices.ALONE_WIDE.shrink._replace(chunk=512, wide_chunk=512, warps=1)
    ),
}
NARROW = choices.ALONE
RIVALS_16 = {
    "two bodies": streams(NARROW, False),
    "chunks of 512 by 1 warp": NARROW._replace(
        name="rival", shrink=NARROW.shrink._replace(chunk=512, wide_chunk=512, warps=1)
    ),
}
CHAINED = ("two bodies", "chunks of 4096")
#: Steps whose adapters have several rows, or whose items take either form.
FEW = (
    Case("T=64 k=32", shared(64, 32), R16, (), ()),
    Case("T=64 k=32 ranks 8-64", shared(64, 32), MIX, (), ()),
    Case("T=64 k=8", shared(64, 8), R16, (), ()),
)


def few_rivals(case: Case) -> dict[str, Tiles]:
    """Of the tiles that are picked: weights that leave L2 first or not, and other sizes."""
    tiles = picked_by_engine(case)
    streamed = streams(tiles, True)
    rivals = {"streamed": streamed, "not streamed": streams(tiles, False)}
    if tiles.shrink.form == "vec":
        rivals |= {
            f"chunks of {chunk}, columns of {columns}": streamed._replace(
                shrink=streamed.shrink._replace(chunk=chunk, wide_chunk=chunk),
                expand=streamed.expand._replace(columns=columns),
            )
            for chunk, columns in ((1024, 1024), (1024, 512), (2048, 512))
        }
    return rivals


PE, PS = choices.PREFILL.expand, choices.PREFILL.shrink
_ANY = choices.PREFILL.most_rows
GATES = {
    "gate 128 x 1 on 4": GateTile(128, 1, 4),
    "gate 256 x 1 on 8": GateTile(256, 1, 8),
    "gate 128 x 1 on 8": GateTile(128, 1, 8),
    "gate 64 x 1 on 4": GateTile(64, 1, 4),
    "gate 128 x 2 on 4": GateTile(128, 2, 4),
}
IN_CHAIN = ("gate 128 x 1 on 4", "gate 256 x 1 on 8")
EXPANDS = {
    "256 x 1": PE._replace(runs=1),
    "256 x 1 early": PE._replace(runs=1, late=False),
    "128 x 1 early": PE._replace(columns=128, runs=1, late=False),
    "256 x 4 early": PE._replace(late=False),
}
SHRINKS = {
    "1024 by 128": PS._replace(step=128, stages=3),
    "512 by 64": PS._replace(chunk=512, wide_chunk=1024),
}
GATES_64 = {"gate 128 x 1 on 4": GateTile(128, 1, 4), "gate 128 x 1 on 8": GateTile(128, 1, 8)}


def prompt_tiles(**changes: object) -> Tiles:
    return choices.PREFILL._replace(name="rival", **changes)  # type: ignore[arg-type]


EVERY = (
    *choices.ALL,
    *RIVALS.values(),
    *RIVALS_16.values(),
    *(tiles for case in FEW for tiles in few_rivals(case).values()),
    *(prompt_tiles(expand=e) for e in EXPANDS.values()),
    *(prompt_tiles(shrink=s) for s in SHRINKS.values()),
)


#: What captured graphs read, until their part has ended.
KEPT: list[Tensor] = []


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def compile_gate(gate: GateTile, tiles: Tiles) -> None:
    from engine.kernels.lora_meta import LoraClass

    choices.GATE = gate
    items = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    plan = LoraDevicePlan(empty_store(), LoraClass(tiles, 1, 1, rest_items=0), items, items)
    gated(
        torch.zeros(1, sum(SHAPES["gate_up"].widths), device="cuda").bfloat16(), 0, plan, gelu=False
    )
    torch.cuda.synchronize()


def compile_guests(tiles: Tiles, columns: int, group: str) -> None:
    from engine.kernels.lora_augment import augment
    from engine.kernels.lora_meta import LoraClass

    items = torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    plan = LoraDevicePlan(
        empty_store(), LoraClass(tiles, 1, 1, guests=1, columns=columns), items, items
    )
    shape = SHAPES[group]
    more = ROOM * len(shape.widths)
    x = torch.zeros(2, shape.d_in + more, device="cuda").bfloat16()[:, : shape.d_in]
    weight = torch.zeros(sum(shape.widths), shape.d_in + more, device="cuda").bfloat16()
    shrink(x, 0, group, plan)
    augment(x, weight, 0, group, plan)
    torch.cuda.synchronize()


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


def sweep(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def described(tiles: Tiles) -> dict[str, str]:
    def words(tile: object) -> str:
        return " ".join(f"{k}={v}" for k, v in tile._asdict().items())  # type: ignore[attr-defined]

    return {"shrink": words(tiles.shrink), "expand": words(tiles.expand)}


# ---------------------------------------------------------------- LoRA alone
def both_launches(operands: Operands, plan: LoraDevicePlan) -> Callable[[], None]:
    def run() -> None:
        for layer in range(LAYERS):
            for group in GROUPS:
                lora_apply_cuda(operands.y[group], operands.x[group], layer, group, plan)

    return run


def first_launches(operands: Operands, plan: LoraDevicePlan) -> Callable[[], None]:
    def run() -> None:
        for layer in range(LAYERS):
            for group in GROUPS:
                shrink(operands.x[group], layer, group, plan)

    return run


def checked(operands: Operands, plan: LoraDevicePlan) -> LoraDevicePlan:
    error = operands.error(plan)
    if not error < 0.01:
        raise ValueError(f"wrong by {error:.3g} of the correction")
    return plan


def few(fleets: dict[tuple[int, ...], Fleet]) -> bool:
    failed = False
    for case in FEW:
        failed |= _alone(fleets[case.ranks], case, few_rivals(case), None)
    return failed


def alone(fleets: dict[tuple[int, ...], Fleet]) -> bool:
    failed = _alone(fleets[MIXED.ranks], MIXED, RIVALS, 1.2)
    return _alone(fleets[SAME.ranks], SAME, RIVALS_16, 1.25) or failed


def _alone(fleet: Fleet, case: Case, rivals: dict[str, Tiles], bar: float | None) -> bool:
    turns, operands = Turns(), Operands(fleet, case)

    def make(tiles: Tiles, launches: Callable[..., Callable[[], None]]) -> torch.cuda.CUDAGraph:
        return sweep(launches(operands, checked(operands, own_plan(fleet, case, tiles))))

    picked = {"engine": picked_by_engine(case)} | rivals
    for name, tiles in picked.items():
        turns.add(name, lambda t=tiles: make(t, both_launches), case=case.name)
    only = {f"{name}: shrink alone": tiles for name, tiles in picked.items()}
    for name, tiles in only.items():
        turns.add(name, lambda t=tiles: make(t, first_launches), case=case.name)
    for name, times in turns.times().items():
        ms, both = statistics.median(times), picked.get(name)
        say(
            **{"kind": "alone", "case": case.name, "rival": name, "ms": round(ms, 4)},
            **{"floor_ms": round(case.floor_ms, 4), "bar": bar},
            **{"ratio": round(ms / case.floor_ms, 3) if both else None},
            **(described(both) if both else {}),
        )
    return turns.failed


# ---------------------------------------------------------------- rank 8 beside rank 64
def beside(fleets: dict[tuple[int, ...], Fleet], chain: Chain | None) -> bool:
    failed = False
    sorts = {"engine": None, "two bodies": RIVALS["two bodies"]}
    for name, tiles in sorts.items():
        turns, joined = Turns(), Turns()
        for case in (HIGH, LOW, BOTH):
            mine = picked_by_engine(case) if tiles is None or case is LOW else tiles
            _add_beside(turns, joined, fleets[BESIDE], case, mine, chain)
        _say_marginal("alone, two launches", name, turns.times(), None)
        if chain is not None:
            _say_marginal("added to products, one launch", name, joined.times(), "base of ")
        failed |= turns.failed or joined.failed
    return failed


def _add_beside(
    turns: Turns, joined: Turns, fleet: Fleet, case: Case, tiles: Tiles, chain: Chain | None
) -> None:
    operands, rows = Operands(fleet, case), len(case.slots)

    def make() -> torch.cuda.CUDAGraph:
        KEPT.extend((*operands.x.values(), *operands.y.values()))
        plan = checked(operands, own_plan(fleet, case, tiles))
        return sweep(both_launches(operands, plan))

    turns.add(case.name, make, part="beside")
    if chain is not None:
        joined.add(f"base of {rows}", lambda: chain_graph(chain, rows, None, joined=True))
        plan = own_plan(fleet, case, tiles)
        joined.add(case.name, lambda: chain_graph(chain, rows, plan, joined=True))


def _say_marginal(how: str, name: str, times: dict[str, list[float]], base: str | None) -> None:
    if not all(case.name in times for case in (HIGH, LOW, BOTH)):
        return
    ms = {}
    for case in (HIGH, LOW, BOTH):
        if base is None:
            ms[case] = statistics.median(times[case.name])
        else:
            ms[case] = added(times, case.name, f"{base}{len(case.slots)}")
    more, low = ms[BOTH] - ms[HIGH], ms[LOW]
    say(
        **{"kind": "beside", "how": how, "rival": name},
        **{"rank_64_ms": round(ms[HIGH], 4), "rank_8_ms": round(ms[LOW], 4)},
        **{"both_ms": round(ms[BOTH], 4), "rank_8_beside_ms": round(more, 4)},
        **{"rank_8_floor_ms": round(LOW.floor_ms, 4), "rank_64_floor_ms": round(HIGH.floor_ms, 4)},
        **{"marginal": round(more / low, 3) if low else None, "bar": 1.1},
        **{"to_floor": round(more / LOW.floor_ms, 3)},
        **{"both_to_floor": round(ms[BOTH] / BOTH.floor_ms, 3)},
    )


# ---------------------------------------------------------------- beside products
def chain_graph(
    chain: Chain, rows: int, plan: LoraDevicePlan | None, *, joined: bool
) -> torch.cuda.CUDAGraph:
    choices.JOINED = joined
    meta = None if plan is None else LoraMeta(device=plan)
    x = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16).normal_()
    KEPT.append(x)
    graph, out = captured(lambda: chain(x, meta))
    KEPT.append(out)
    if plan is not None:
        first = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        for _ in range(3):
            out.fill_(torch.nan)
            x.copy_(first)
            graph.replay()
            choices.JOINED = False
            other = chain(first.clone(), meta)
            choices.JOINED = joined
            off = float((out.float() - other.float()).norm() / other.float().norm())
            if not off < 0.02:
                raise ValueError(f"the chain's end is off by {off:.3g} from that of two launches")
            if off > 0:
                say(kind="other bits", rows=rows, joined=joined, off=off)
    return graph


def chained(fleets: dict[tuple[int, ...], Fleet], chain: Chain) -> bool:
    turns, fleet = Turns(), fleets[MIXED.ranks]
    turns.add("base", lambda: chain_graph(chain, 64, None, joined=True))
    sorts = {"engine": picked_by_engine(MIXED)} | {name: RIVALS[name] for name in CHAINED}
    for name, tiles in sorts.items():
        for how in ("one", "two"):
            turns.add(
                f"{name}: {how}",
                lambda t=tiles, h=how: chain_graph(
                    chain, 64, own_plan(fleet, MIXED, t), joined=h == "one"
                ),
            )
    rows = len(MIXED.slots)
    turns.add(
        "engine, padded as a graph's grid is: one",
        lambda: chain_graph(
            chain,
            rows,
            padded(own_plan(fleet, MIXED, sorts["engine"]), 8 * rows, rows),
            joined=True,
        ),
    )
    for name, tiles in {
        "": picked_by_engine(SAME),
        ", two bodies": RIVALS_16["two bodies"],
    }.items():
        turns.add(
            f"rank 16{name}: one",
            lambda t=tiles: chain_graph(chain, 64, own_plan(fleets[R16], SAME, t), joined=True),
        )
    times = turns.times()
    for name in times:
        more = added(times, name, "base") if "base" in times else None
        floor = (SAME if name.startswith("rank 16") else MIXED).floor_ms
        say(
            **{"kind": "chain", "rival": name, "ms": round(statistics.median(times[name]), 4)},
            **{"added_ms": None if more is None else round(more, 4)},
            **{"to_floor": None if more is None else round(more / floor, 3)},
        )
    return turns.failed


# ---------------------------------------------------------------- prompts
class PromptChain(Chain):
    """Some layers of a chain, with parts of the adapters' work left out."""

    def __init__(self, room: int = ROOM) -> None:
        super().__init__(room)
        self.layers = self.layers[:FEW_LAYERS]

    @torch.no_grad()
    def partly(self, x: Tensor, plan: LoraDevicePlan, parts: str) -> Tensor:
        """With shrink of all groups; expand, if asked, of all but gate and up."""
        delta = None
        for number, layer in enumerate(self.layers):

            def times(group: str, rows: Tensor) -> Tensor:
                shrink(rows, number, group, plan)  # noqa: B023
                y = layer[group](rows, None)  # noqa: B023
                if group != "gate_up" and parts == "expand":
                    expand(y, number, group, plan)  # noqa: B023
                return y

            normed = fused.rms_norm(x, self.norm, 1e-5, delta)
            mixed = fused.rms_norm(times("qkv", normed)[:, :HIDDEN], self.norm, 1e-5)
            normed = fused.rms_norm(x, self.norm, 1e-5, times("o", mixed))
            delta = times("down", silu_mul(times("gate_up", normed), deterministic=False))
        return fused.rms_norm(x, self.norm, 1e-5, delta)


def check_gate(operands: Operands, plan: LoraDevicePlan) -> None:
    """Against torch in fp32, the base's y being random."""
    x, y, exact = (part["gate_up"] for part in (operands.x, operands.y, operands.exact))
    plan.store.h.fill_(torch.nan)
    shrink(x, CHECKED_LAYER, "gate_up", plan)
    got = gated(y, CHECKED_LAYER, plan, gelu=False)
    want = elementwise.silu_mul((y.float() + exact).bfloat16().float(), deterministic=True)
    error = float((got.float() - want).norm() / want.norm())
    if not error < 0.005:
        raise ValueError(f"wrong by {error:.3g}")


def check_guests(
    chain: Chain, operands: Operands, plan: LoraDevicePlan, usual: LoraDevicePlan
) -> None:
    """Each product against torch in fp32: no further from it than expand behind the product is."""
    for group in ROOMY_GROUPS:
        linear, x = chain.layers[CHECKED_LAYER][group], operands.x[group]
        want = x.float() @ linear.weight.float().T + operands.exact[group]
        errors = []
        for each in (plan, usual):
            meta = LoraMeta(device=each)
            each.store.h.fill_(torch.nan)
            place = linear.place_for(x, meta)
            got = linear(x if place is None else place.copy_(x), meta)
            errors.append(float((got.float() - want).norm() / want.norm()))
        say(kind="guests", group=group, error=errors[0], error_without=errors[1])
        if not errors[0] < 1.02 * errors[1]:
            raise ValueError(f"{group} is wrong by {errors[0]:.3g}, without guests {errors[1]:.3g}")


def prompts(fleets: dict[tuple[int, ...], Fleet]) -> bool:
    chain = PromptChain()
    failed = False
    for case, gates in ((PROMPT, {name: GATES[name] for name in IN_CHAIN}), (PROMPT_64, GATES_64)):
        failed |= _prompt(chain, fleets[case.ranks], case, gates)
    return failed


def _prompt(chain: PromptChain, fleet: Fleet, case: Case, gates: dict[str, GateTile]) -> bool:
    rows, turns, narrow = len(case.slots), Turns(), case is PROMPT
    operands = Operands(fleet, case)
    picked = picked_by_engine(case)
    x0 = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    outs: dict[str, Tensor] = {}

    def graph_of(name: str, run: Callable[[Tensor], Tensor]) -> torch.cuda.CUDAGraph:
        x = x0.clone()
        KEPT.append(x)
        graph, out = captured(lambda: run(x))
        KEPT.append(out)
        x.copy_(x0)
        graph.replay()
        torch.cuda.synchronize()
        if not out.isfinite().all():
            raise ValueError("what came out is not finite")
        outs[name] = out.float()
        return graph

    def guests() -> torch.cuda.CUDAGraph:
        plan = own_plan(fleet, case, picked, guests=True)
        check_guests(chain, operands, plan, own_plan(fleet, case, picked))
        graph = graph_of("guests", lambda x: chain(x, LoraMeta(device=plan)))
        off = float((outs["guests"] - outs["two"]).norm() / outs["two"].norm())
        say(kind="guests", case=case.name, off=off, columns=plan.kind.columns)
        if not off < 0.05:  # y is rounded once, not twice, in each of 24 products
            raise ValueError(f"the chain's end is off by {off:.3g}")
        return graph

    def full(name: str, tiles: Tiles, gate: GateTile | None) -> torch.cuda.CUDAGraph:
        plan, mine = checked(operands, own_plan(fleet, case, tiles)), choices.GATE
        layers.lora_gates = lora_gates if gate else lambda meta: False
        choices.GATE = gate or mine
        try:
            if gate:
                check_gate(operands, plan)
            graph = graph_of(name, lambda x: chain(x, LoraMeta(device=plan)))
        finally:
            choices.GATE, layers.lora_gates = mine, lora_gates
        if "two" in outs:
            off = float((outs[name] - outs["two"]).norm() / outs["two"].norm())
            if not off < 0.02:
                raise ValueError(f"the chain's end is off by {off:.3g}")
        return graph

    choices.JOINED = False
    about = {"case": case.name}
    turns.add("base", lambda: graph_of("base", lambda x: chain(x, None)), **about)
    turns.add("two", lambda: full("two", picked, None), **about)
    turns.add("guests", guests, **about)
    if narrow:
        bare = PromptChain(0)
        turns.add("base without room", lambda: graph_of("", lambda x: bare(x, None)), **about)
    for name, gate in gates.items():
        turns.add(name, lambda n=name, g=gate: full(n, picked, g), **about)
    if narrow:
        plan = own_plan(fleet, case, picked)
        turns.add("shrink", lambda: graph_of("", lambda x: chain.partly(x, plan, "")), **about)
        turns.add(
            "shrink and expand but of gate and up",
            lambda: graph_of("", lambda x: chain.partly(x, plan, "expand")),
            **about,
        )
        for name in ("256 x 1", "256 x 1 early"):
            tiles, gate = prompt_tiles(expand=EXPANDS[name]), GATES[IN_CHAIN[0]]
            turns.add(f"expand {name}", lambda n=name, t=tiles, g=gate: full(n, t, g), **about)
    times, more_of = turns.pairs("base", 11)
    scale = LAYERS / FEW_LAYERS
    for name in times:
        more = scale * more_of[name]
        say(
            **{"kind": "prompt", "case": case.name, "rival": name},
            **{"ms": round(scale * statistics.median(times[name]), 4)},
            **{"added_ms": round(more, 4), "floor_ms": round(case.floor_ms, 4)},
            **{"with_47.9": round(1 + more / 47.9, 4), "bar": 1.1},
        )
    return turns.failed


# ---------------------------------------------------------------- single kernels of a prompt
def kernels(fleets: dict[tuple[int, ...], Fleet]) -> bool:
    """Each kernel of a prompt by itself, on buffers that are larger together than L2."""
    case, turns = PROMPT, Turns()
    fleet = fleets[case.ranks]
    operands = [Operands(fleet, case) for _ in range(6)]
    moved: dict[str, int] = {}

    def add(name: str, size: int, run: Callable[[Operands, int], object]) -> None:
        def all_of_it() -> None:
            for layer in range(FEW_LAYERS):
                run(operands[layer % len(operands)], layer)

        moved[name] = 2 * size * len(case.slots)
        turns.add(name, lambda: sweep(all_of_it))

    def add_all(kernel: str, name: str, tiles: Tiles) -> None:
        plan = checked(operands[0], own_plan(fleet, case, tiles))
        for group, shape in SHAPES.items():
            if kernel == "shrink":
                run = lambda o, n, g=group: shrink(o.x[g], n, g, plan)  # noqa: E731
                add(f"shrink {group}{name}", shape.d_in, run)
            else:
                run = lambda o, n, g=group: expand(o.y[g], n, g, plan)  # noqa: E731
                add(f"expand {group}{name}", 2 * sum(shape.widths), run)

    def add_gate(name: str, gate: GateTile) -> None:
        plan, mine = own_plan(fleet, case, picked_by_engine(case)), choices.GATE
        choices.GATE = gate
        check_gate(operands[0], plan)
        gated(operands[0].y["gate_up"], 0, plan, gelu=False)  # the plan keeps the tile
        choices.GATE = mine
        add(name, 3 * width // 2, lambda o, n: gated(o.y["gate_up"], n, plan, gelu=False))

    width = sum(SHAPES["gate_up"].widths)
    add("silu_mul", 3 * width // 2, lambda o, n: fused.silu_mul(o.y["gate_up"]))
    jobs: list[tuple[str, Callable[[], None]]] = []
    jobs += [(name, lambda n=name, g=gate: add_gate(n, g)) for name, gate in GATES.items()]
    for kernel, rivals in (
        ("shrink", {"": choices.PREFILL} | _of(SHRINKS, "shrink")),
        ("expand", {"": choices.PREFILL} | _of(EXPANDS, "expand")),
    ):
        jobs += [(n, lambda k=kernel, m=n, t=t: add_all(k, m, t)) for n, t in rivals.items()]
    for name, job in jobs:
        try:
            job()
        except Exception as error:  # the others go on
            turns.failed = True
            say(kind="failed", rival=name, error=f"{type(error).__name__}: {error}"[:400])
    for name, times in turns.times().items():
        us = 1e3 * statistics.median(times) / FEW_LAYERS
        floor = round(1e6 * moved[name] / BANDWIDTH, 2)
        say(kind="kernels", rival=name, us=round(us, 2), floor_us=floor)
    return turns.failed


def _of(rivals: dict[str, Any], kernel: str) -> dict[str, Tiles]:
    return {f", {name}": prompt_tiles(**{kernel: tile}) for name, tile in rivals.items()}


# ---------------------------------------------------------------- all of it
def compile_ahead(compiler: Compiler, parts: list[str]) -> None:
    if "alone" in parts or "beside" in parts:
        mine = [picked_by_engine(c) for c in (MIXED, SAME, LOW)]
        mine += (
            [*RIVALS.values(), *RIVALS_16.values()] if "alone" in parts else [RIVALS["two bodies"]]
        )
        compiler.ask((kernel, t) for t in mine for kernel in ("expand", "shrink"))
    if "few" in parts:
        mine = [picked_by_engine(case) for case in FEW]
        mine += [tiles for case in FEW for tiles in few_rivals(case).values()]
        compiler.ask((kernel, t) for t in mine for kernel in ("expand", "shrink"))
    if "prompt" in parts or "kernels" in parts:
        tiles = picked_by_engine(PROMPT)
        compiler.ask((kernel, tiles) for kernel in ("expand", "shrink"))
    if "prompt" in parts or "kernels" in parts:
        high = picked_by_engine(PROMPT_64)
        compiler.ask((kernel, high) for kernel in ("expand", "shrink"))
        compiler.call(
            (compile_guests, tiles_, columns, group)
            for tiles_, columns in ((tiles, 16), (high, 64))
            for group in ROOMY_GROUPS
        )
        compiler.call((compile_gate, gate, tiles) for gate in GATES.values())
        compiler.call((compile_gate, gate, high) for gate in GATES_64.values())
        rivals = [prompt_tiles(expand=e) for e in EXPANDS.values()]
        rivals += [prompt_tiles(shrink=s) for s in SHRINKS.values()]
        compiler.ask((kernel, t) for t in rivals for kernel in ("expand", "shrink"))
        compiler.call((compile_gate, GATES[IN_CHAIN[0]], t) for t in rivals)
    if "chain" in parts or "beside" in parts:
        mine = [picked_by_engine(c) for c in (MIXED, SAME, LOW)] + [RIVALS[n] for n in CHAINED]
        mine.append(RIVALS_16["two bodies"])
        compiler.ask((kernel, t) for t in mine for kernel in ("joined", "expand", "shrink"))
        compiler.call(
            (compile_product, rows, sum(s.widths), s.d_in)
            for rows in (64, 32)
            for s in SHAPES.values()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="alone,few,kernels,prompt,chain,beside")
    parser.add_argument("--seconds", type=float, default=110, help="no part begins later")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    parts = options.only.split(",")
    torch.manual_seed(0)
    import triton

    start = time.monotonic()
    say(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
    )
    compiler = Compiler(options.workers)
    compile_ahead(compiler, parts)
    fleets_of = {case.ranks for case in (MIXED, SAME, BOTH)}
    blocks = max(sum(placed(rank).num_blocks for rank in ranks) for ranks in fleets_of)
    arena = Arena(
        None,  # type: ignore[arg-type]  # asked for cached keys and values alone
        LAYOUT,
        block_size=16,
        num_blocks=blocks,
        device=torch.device("cuda"),
    )
    arena.bytes.view(-1).view(torch.bfloat16).normal_(0, 0.02)
    fleets = {ranks: Fleet(arena, ranks, EVERY) for ranks in fleets_of}
    compiler.wait()
    compiler.close()
    say(kind="compiled", seconds=round(time.monotonic() - start, 1))
    gemm_tiles.LEADING = ("vector", "dot", "stream")
    chain = Chain() if "chain" in parts or "beside" in parts else None
    runs: dict[str, Callable[[], bool]] = {
        "alone": lambda: alone(fleets),
        "few": lambda: few(fleets),
        "kernels": lambda: kernels(fleets),
        "prompt": lambda: prompts(fleets),
        "chain": lambda: chain is not None and chained(fleets, chain),
        "beside": lambda: beside(fleets, chain),
    }
    failed = False
    for part, run in runs.items():
        if part not in parts:
            continue
        if time.monotonic() - start > options.seconds:
            say(kind="left out", part=part)
            continue
        try:
            failed |= run()
        except Exception as error:  # the other parts go on
            failed = True
            say(kind="failed", part=part, error=f"{type(error).__name__}: {error}"[:600])
        KEPT.clear()
        torch.cuda.synchronize()
        say(kind="part ended", part=part, seconds=round(time.monotonic() - start, 1))
    sys.exit(failed)


if __name__ == "__main__":
    main()

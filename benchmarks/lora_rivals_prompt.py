"""A prompt of 2,048 rows on one adapter: the parts `prompt` and `kernels` of `lora_rivals.py`."""

import statistics
from collections.abc import Callable
from typing import Any

import checkout  # noqa: F401
import torch
from lora_cases import BANDWIDTH, LAYERS, LAYOUT, MIX, R16, ROOM, Case, picked_by_engine, shared
from lora_chain import HIDDEN, Chain, captured
from lora_compile import Compiler, empty_store
from lora_fleet import CHECKED_LAYER, Fleet, Operands
from lora_turns import KEPT, Turns, checked, own_plan, say, sweep
from torch import Tensor

from engine.kernels import elementwise, fused
from engine.kernels import tiles as choices
from engine.kernels.elementwise import silu_mul
from engine.kernels.lora import lora_gates
from engine.kernels.lora_augment import augment
from engine.kernels.lora_expand import expand
from engine.kernels.lora_gate import gated
from engine.kernels.lora_meta import LoraClass, LoraDevicePlan, LoraMeta, group_shapes
from engine.kernels.lora_shrink import shrink
from engine.kernels.tiles import GateTile, Tiles
from engine.layout import ROOMY_GROUPS
from engine.models import layers

SHAPES = group_shapes(LAYOUT)
#: Layers of a prompt's chain, which stand for all.
FEW_LAYERS = 8
PROMPT = Case("prompt T=2048 k=1", shared(2048, 1), R16, (), ())
PROMPT_64 = Case("prompt T=2048 k=1 rank 64", (3,) * 2048, MIX, (), ())
PE, PS = choices.PREFILL.expand, choices.PREFILL.shrink
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


#: All that is tried here.
TILES = (
    *(prompt_tiles(expand=e) for e in EXPANDS.values()),
    *(prompt_tiles(shrink=s) for s in SHRINKS.values()),
)


def compile_gate(gate: GateTile, tiles: Tiles) -> None:
    choices.GATE = gate
    items = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    plan = LoraDevicePlan(empty_store(), LoraClass(tiles, 1, 1, rest_items=0), items, items)
    gated(
        torch.zeros(1, sum(SHAPES["gate_up"].widths), device="cuda").bfloat16(), 0, plan, gelu=False
    )
    torch.cuda.synchronize()


def compile_guests(tiles: Tiles, columns: int, group: str) -> None:
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


def compile_ahead(compiler: Compiler, parts: list[str]) -> None:
    if "prompt" not in parts and "kernels" not in parts:
        return
    low, high = picked_by_engine(PROMPT), picked_by_engine(PROMPT_64)
    compiler.ask((kernel, t) for t in (low, high, *TILES) for kernel in ("expand", "shrink"))
    compiler.call(
        (compile_guests, tiles, columns, group)
        for tiles, columns in ((low, 16), (high, 64))
        for group in ROOMY_GROUPS
    )
    compiler.call((compile_gate, gate, low) for gate in GATES.values())
    compiler.call((compile_gate, gate, high) for gate in GATES_64.values())
    compiler.call((compile_gate, GATES[IN_CHAIN[0]], tiles) for tiles in TILES)

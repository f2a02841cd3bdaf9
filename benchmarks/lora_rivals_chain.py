"""Adapters beside a step's products, and of low ranks beside high ones: the parts `chain` and
`beside` of `lora_rivals.py`."""

import statistics

import checkout  # noqa: F401
import torch
from lora_cases import LAYOUT, R16, SLOTS, Case, picked_by_engine
from lora_chain import HIDDEN, Chain, captured, compile_product
from lora_compile import Compiler
from lora_fleet import Fleet, Operands
from lora_rivals_alone import MIXED, RIVALS, RIVALS_16, SAME
from lora_turns import KEPT, Turns, added, both_launches, checked, own_plan, padded, say, sweep

from engine.kernels import tiles as choices
from engine.kernels.lora_meta import LoraDevicePlan, LoraMeta, group_shapes
from engine.kernels.tiles import Tiles

BESIDE = tuple((64, 8)[slot % 2] for slot in range(SLOTS))
HIGH = Case("32 of rank 64", tuple(range(0, 64, 2)), BESIDE, (), ())
LOW = Case("32 of rank 8", tuple(range(1, 64, 2)), BESIDE, (), ())
BOTH = Case("32 of rank 64 and 32 of rank 8", tuple(range(64)), BESIDE, (), ())
CHAINED = ("two bodies", "chunks of 4096")


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


def compile_ahead(compiler: Compiler, parts: list[str]) -> None:
    if "chain" not in parts and "beside" not in parts:
        return
    mine = [picked_by_engine(c) for c in (MIXED, SAME, LOW)] + [RIVALS[n] for n in CHAINED]
    mine.append(RIVALS_16["two bodies"])
    compiler.ask((kernel, t) for t in mine for kernel in ("joined", "expand", "shrink"))
    compiler.call(
        (compile_product, rows, sum(shape.widths), shape.d_in)
        for rows in (64, 32)
        for shape in group_shapes(LAYOUT).values()
    )

"""How a plan reads for people: pairs and small tables.

Goes in: a `Plan`.  Comes out: text on stdout.  Computes nothing but units.
"""

from collections.abc import Iterator, Sequence

from lorad.cli.options import Options
from lorad.cli.output import (
    UNKNOWN,
    Column,
    Table,
    human_bytes,
    plain,
    print_line,
    print_pairs,
)
from lorad.wire_plan import Plan, PlannedAdapter, PlannedModule, PlannedStep

ADAPTERS: Sequence[Column[PlannedAdapter]] = (
    Column("RANK", lambda a: str(a.rank), right=True),
    Column("COUNT", lambda a: str(a.count), right=True),
    Column("BYTES", lambda a: human_bytes(a.true_bytes), right=True),
    Column("BLOCKS", lambda a: str(a.num_blocks), right=True),
    Column("PACKED", lambda a: human_bytes(a.num_bytes), right=True),
    Column("RESIDENT", lambda a: str(a.resident), right=True),
    Column("FIT-BESIDE", lambda a: str(a.fit_beside), right=True),
    Column("FIT-ALONE", lambda a: str(a.fit_alone), right=True),
)
MODULES: Sequence[Column[tuple[PlannedAdapter, PlannedModule]]] = (
    Column("RANK", lambda m: str(m[0].rank), right=True),
    Column("MODULE", lambda m: m[1].module),
    Column("IN", lambda m: str(m[1].d_in), right=True),
    Column("OUT", lambda m: str(m[1].d_out), right=True),
    Column("BYTES", lambda m: human_bytes(m[1].num_bytes), right=True),
)


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


STEPS: Sequence[Column[PlannedStep]] = (
    Column("ADAPTERS", lambda s: str(s.adapters), right=True),
    Column("FLOOR-MS", lambda s: _ms(s.floor_ms), right=True),
    Column("TAX-FLOOR", lambda s: _ms(s.tax_floor_ms), right=True),
    Column("STEP-MS", lambda s: _ms(s.step_ms), right=True),
    Column("TAX-MS", lambda s: _ms(s.tax_ms), right=True),
    Column(
        "TAX%", lambda s: UNKNOWN if s.tax_percent is None else f"{s.tax_percent:.0f}", right=True
    ),
    Column("ALONE-FLOOR", lambda s: _ms(s.alone_floor_ms), right=True),
)


def show(plan: Plan, options: Options) -> None:
    """Print all of it."""
    print_pairs([*_model(plan), *_memory(plan), *_kv(plan), *_fit(plan)])
    print_line("")
    Table(ADAPTERS, options).print(plan.adapters)
    print_line("")
    Table(MODULES, options).print([(a, m) for a in plan.adapters for m in a.modules])
    if plan.steps:
        print_line("")
        asked = f"a decode step of {plan.kv.requests} requests at {plan.kv.tokens} tokens"
        bandwidth = plan.constants[0]
        print_line(f"{asked}, at {bandwidth.value / 1e12:.3g} TB/s ({bandwidth.source})")
        Table(STEPS, options).print(plan.steps)
    print_line("")
    print_pairs(list(_cost(plan)))
    print_line("")
    for constant in plan.constants:
        figure = f"{constant.name} = {constant.value:.4g} {constant.unit}"
        print_line(plain(f"{figure}  ({constant.source})"))


def _model(plan: Plan) -> Iterator[tuple[str, str]]:
    m = plan.model
    yield (
        "model",
        f"{m.family}, {m.layers} layers, hidden {m.hidden_size}, "
        f"{m.parameters / 1e9:.3g}e9 parameters, {m.dtype}",
    )
    yield "weights", human_bytes(m.weight_bytes)


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    a = plan.arena
    if a.memory_bytes:
        taken = f"{human_bytes(a.memory_bytes)}, of which lorad takes {a.utilization:g}"
        yield "card", f"{taken}; {human_bytes(a.working_bytes)} to work in, an estimate"
    source = {"daemon": "of the running daemon", "blocks": "as given", "memory": "estimated"}
    yield (
        "arena",
        f"{a.num_blocks} blocks of {human_bytes(a.block_bytes)}, {source[a.source]}: "
        f"{human_bytes(a.num_bytes)}, {a.num_tokens} tokens",
    )


def _kv(plan: Plan) -> Iterator[tuple[str, str]]:
    kv, block = plan.kv, plan.arena.block_bytes
    yield (
        "requests",
        f"{kv.requests} of {kv.tokens} tokens: {kv.num_blocks} blocks, "
        f"{human_bytes(kv.num_blocks * block)}",
    )
    if kv.shared_prompt:
        yield (
            "prompt",
            f"{kv.shared_prompt} tokens shared by {kv.tenants} tenants: {kv.copies} copies, "
            f"{kv.shared_blocks} blocks, {human_bytes(kv.shared_blocks * block)}",
        )


def _fit(plan: Plan) -> Iterator[tuple[str, str]]:
    fit, block = plan.fit, plan.arena.block_bytes
    size = f"{fit.adapter_blocks} blocks, {human_bytes(fit.adapter_blocks * block)}"
    yield "adapters", f"{fit.adapters} in {size}, {fit.slots} slots"
    if fit.fits:
        yield "fits", f"yes, {fit.free_blocks} blocks are left"
    else:
        missing = max(-fit.free_blocks, 0)
        yield (
            "fits",
            f"no, {missing} blocks are missing: {fit.resident} of {fit.adapters} are resident at "
            "once, the others come and go",
        )
    yield "beside", f"{fit.requests_beside} requests of that length with every adapter resident"


def _cost(plan: Plan) -> Iterator[tuple[str, str]]:
    c = plan.cost
    here, alone = human_bytes(c.here_bytes), human_bytes(c.alone_bytes)
    yield "an adapter here", f"{here}, its share of the weights in it"
    yield "in its own process", f"{alone}, {c.ratio:.3g} times as much"
    if c.processes_a_card is not None:
        cards = f", {c.cards_alone} cards for {c.adapters}" if c.cards_alone else ""
        yield "processes a card", f"{c.processes_a_card}{cards}"

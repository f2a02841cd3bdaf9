"""What fits on a card: a calculator over the engine's own layout of blocks.

Goes in: a model's spec, ranks with their counts, requests, and an arena of known or estimated size.
Comes out: a `Plan`.  Blocks are exact, since adapters are placed by the code that packs them; only
an arena from `--memory` is an estimate.  Asks no card and no daemon; what a step takes is
`capacity_speed`'s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from engine.client import ModelSpec, guests_bytes, guests_room
from engine.config import GIB
from engine.layout import (
    ENDS,
    FUSED_NAMES,
    GROUPS,
    MODULES,
    PAIRED_ENDS,
    BlockLayout,
    place,
    stream_order,
)
from engine.messages import PackedModule
from lorad.capacity_speed import WORKING_BYTES, Machine, constants_of, steps_of
from lorad.wire_plan import (
    Plan,
    PlannedAdapter,
    PlannedArena,
    PlannedCost,
    PlannedFit,
    PlannedKv,
    PlannedModel,
    PlannedModule,
    Source,
)

#: Words for several modules.
TARGETS: dict[str, tuple[str, ...]] = {
    "all": MODULES,
    "attention": (*GROUPS["qkv"], *GROUPS["o"]),
    "mlp": (*GROUPS["gate_up"], *GROUPS["down"]),
    **{name: GROUPS[group] for name, group in FUSED_NAMES.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be held at once.  `ranks` are (rank, how many), on `targets` of all layers."""

    ranks: tuple[tuple[int, int], ...]
    targets: tuple[str, ...] = MODULES
    requests: int = 64
    tokens: int = 1024
    shared_prompt: int = 0
    tenants: int = 0
    slots: int = 1024


def plan(
    spec: ModelSpec, layout: BlockLayout, arena: PlannedArena, wish: Wish, machine: Machine
) -> Plan:
    """The whole document.  AdapterInvalid if a row of an adapter exceeds a block."""
    model = model_of(spec, layout)
    kv = _kv(wish, arena.block_size)
    wanted = kv.num_blocks + kv.shared_blocks
    room = max(arena.num_blocks - max(wanted, arena.kv_floor_blocks), 0)
    adapters = tuple(_adapters(layout, wish, arena.num_blocks, room))
    fit = _fit(adapters, kv, arena, wish.slots)
    return Plan(
        model=model,
        arena=arena,
        adapters=adapters,
        kv=kv,
        fit=fit,
        steps=steps_of(spec, model, adapters, kv, machine),
        cost=_cost(model, adapters, kv, arena),
        constants=constants_of(arena, machine),
    )


def parse_ranks(text: str) -> tuple[tuple[int, int], ...]:
    """`16:100,64:20` or `16` as (rank, count); ValueError otherwise."""
    found = []
    for part in text.split(","):
        rank, colon, count = part.strip().partition(":")
        if not (rank.isdecimal() and (count.isdecimal() if colon else True)):
            raise ValueError(f"{part.strip()!r} is not RANK:COUNT, such as 16:100")
        found.append((int(rank), int(count or 1)))
    if not all(1 <= rank <= 4096 and 1 <= count <= 10**6 for rank, count in found):
        raise ValueError("a rank is 1 to 4096, a count 1 to 1,000,000")
    return tuple(found)


def parse_targets(text: str) -> tuple[str, ...]:
    """`all`, `attention`, `q_proj,v_proj` ... as modules, each once; ValueError otherwise."""
    found: dict[str, None] = {}
    for word in (w.strip() for w in text.split(",")):
        named = TARGETS.get(word) or ((word,) if word in (*MODULES, *PAIRED_ENDS) else ())
        if not named:
            known = ", ".join((*TARGETS, *MODULES, *PAIRED_ENDS))
            raise ValueError(f"no module is called {word!r}; known: {known}")
        found.update(dict.fromkeys(named))
    return tuple(found)


# ----------------------------------------------------------------- the parts
def model_of(spec: ModelSpec, layout: BlockLayout) -> PlannedModel:
    """Weights as the engine holds them, in the arena's dtype, shared tensors once."""
    parameters = sum(_parameters(spec))
    return PlannedModel(
        family=spec.model_type,
        layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        dtype=layout.dtype,
        parameters=parameters,
        weight_bytes=parameters * layout.itemsize,
        kv_token_bytes=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * layout.itemsize,
    )


def _parameters(spec: ModelSpec) -> Iterator[int]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = sum(d_in * d_out for d_in, d_out in spec.shapes.dims)
    layer += hidden * (4 if spec.post_norms else 2) + (2 * spec.head_dim if spec.qk_norm else 0)
    layer += (q + 2 * kv if spec.qkv_bias else 0) + (hidden if spec.o_bias else 0)
    layer += 2 * ffn + hidden if spec.mlp_bias else 0
    yield layer * spec.num_layers
    yield spec.vocab_size * hidden * (1 if spec.tied else 2) + hidden


def estimated_arena(
    spec: ModelSpec, layout: BlockLayout, block_size: int, memory: int, utilization: float
) -> PlannedArena:
    """What a card of `memory` bytes leaves.  ValueError where the weights alone are too much."""
    weights = model_of(spec, layout).weight_bytes
    working = WORKING_BYTES
    if layout.dtype == "bfloat16":  # a long prompt's adapters have room behind the weights
        working += guests_bytes(spec, guests_room(spec, memory))
    room = int(memory * utilization) - weights - working
    if room < 3 * layout.block_bytes:
        raise ValueError(
            f"{utilization:g} of {memory / GIB:.1f} GiB does not hold the weights "
            f"({weights / GIB:.1f} GiB) and {working / GIB:.1f} GiB to work in"
        )
    arena = known_arena(spec, layout, block_size, room // layout.block_bytes, "memory")
    return replace(arena, memory_bytes=memory, utilization=utilization, working_bytes=working)


def known_arena(
    spec: ModelSpec,
    layout: BlockLayout,
    block_size: int,
    num_blocks: int,
    source: Source,
    *,
    max_model_len: int = 0,
) -> PlannedArena:
    """An arena of so many blocks; `max_model_len` 0 is the model's own."""
    length = max_model_len or min(num_blocks * block_size, spec.default_length)
    return PlannedArena(
        source=source,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        block_size=block_size,
        num_bytes=num_blocks * layout.block_bytes,
        num_tokens=num_blocks * block_size,
        kv_floor_blocks=max(1, min(-(-length // block_size), num_blocks // 10)),
    )


def _adapters(
    layout: BlockLayout, wish: Wish, num_blocks: int, room: int
) -> Iterator[PlannedAdapter]:
    left, slots = room, wish.slots
    for rank, count in wish.ranks:
        placement = place(_packed(layout, wish.targets, rank), layout)
        each = placement.num_blocks
        resident = min(count, left // each, slots)
        left, slots = left - resident * each, slots - resident
        yield PlannedAdapter(
            rank=rank,
            count=count,
            true_bytes=placement.true_bytes,
            num_blocks=each,
            num_bytes=each * layout.block_bytes,
            modules=tuple(_modules(layout, wish.targets, rank)),
            fit_alone=num_blocks // each,
            fit_beside=room // each,
            resident=resident,
        )


def _packed(layout: BlockLayout, targets: Sequence[str], rank: int) -> tuple[PackedModule, ...]:
    layers = layout.shapes.num_layers
    inner = [
        PackedModule(layer, module, rank, 1.0)
        for layer in range(layers)
        for module in targets
        if module not in ENDS
    ]
    ends = [PackedModule(layers, module, rank, 1.0) for module in targets if module in ENDS]
    return stream_order([*inner, *ends])


def _modules(layout: BlockLayout, targets: Sequence[str], rank: int) -> Iterator[PlannedModule]:
    for module in targets:
        d_in, d_out = layout.shapes.of(module)
        layers = 1 if module in ENDS else layout.shapes.num_layers
        num_bytes = rank * (d_in + d_out) * layout.itemsize * layers
        yield PlannedModule(module=module, d_in=d_in, d_out=d_out, num_bytes=num_bytes)


def _kv(wish: Wish, block_size: int) -> PlannedKv:
    """A request has its own blocks but for the whole ones of the prompt that it shares."""
    shared = min(wish.shared_prompt, wish.tokens) // block_size if wish.tenants else 0
    own = -(-wish.tokens // block_size) - shared
    # adapters that touch no layer leave the base's keys and values as they are
    apart = any(module != "lm_head" for module in wish.targets)
    copies = (wish.tenants if apart else 1) if shared else 0
    return PlannedKv(
        requests=wish.requests,
        tokens=wish.tokens,
        request_blocks=own,
        num_blocks=own * wish.requests,
        shared_prompt=wish.shared_prompt,
        tenants=wish.tenants,
        copies=copies,
        shared_blocks=copies * shared,
    )


def _fit(
    adapters: Sequence[PlannedAdapter], kv: PlannedKv, arena: PlannedArena, slots: int
) -> PlannedFit:
    count = sum(a.count for a in adapters)
    blocks = sum(a.count * a.num_blocks for a in adapters)
    kv_blocks = kv.num_blocks + kv.shared_blocks
    free = arena.num_blocks - blocks - max(kv_blocks, arena.kv_floor_blocks)
    beside = max(arena.num_blocks - blocks - kv.shared_blocks, 0) // max(kv.request_blocks, 1)
    return PlannedFit(
        fits=free >= 0 and count <= slots,
        kv_blocks=kv_blocks,
        adapter_blocks=blocks,
        free_blocks=free,
        slots=slots,
        adapters=count,
        resident=sum(a.resident for a in adapters),
        requests_beside=beside,
    )


def _cost(
    model: PlannedModel, adapters: Sequence[PlannedAdapter], kv: PlannedKv, arena: PlannedArena
) -> PlannedCost:
    """A process alone has the adapter merged in, which costs no byte, and its share of the KV."""
    count = sum(a.count for a in adapters)
    packed = sum(a.count * a.num_bytes for a in adapters)
    alone = model.weight_bytes + arena.working_bytes
    here = (packed + alone) // count
    share = (kv.num_blocks + kv.shared_blocks) * arena.block_bytes // count
    usable = int(arena.memory_bytes * arena.utilization)
    processes = usable // (alone + share) if usable else None
    return PlannedCost(
        adapters=count,
        here_bytes=here,
        alone_bytes=alone,
        ratio=alone / here,
        processes_a_card=processes,
        cards_alone=-(-count // processes) if processes else None,
    )

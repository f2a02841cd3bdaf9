"""What a decode step takes: bytes that must be read over the bandwidth, and what was measured.

Goes in: planned adapters and KV, and a `Machine`.  Comes out: steps with their floor, and, for the
machine that was measured, what this engine is expected to take.  A floor is physics: every weight,
every cached key and value, and every distinct adapter's rows are read once.  What comes on top is
taken from docs/bench-log.md, each figure with its place there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from engine.client import ModelSpec
from engine.config import GIB
from lorad.wire_plan import (
    Constant,
    PlannedAdapter,
    PlannedArena,
    PlannedKv,
    PlannedModel,
    PlannedStep,
)

_LOG = "docs/bench-log.md"
#: Bytes a second of an H200's memory, read and written by a copy.
H200_BANDWIDTH = 4.27e12
#: What a step of the base takes besides reading its KV, over its weights' floor, by its batch:
#: 4.12, 4.76 and 5.82 ms less 0.02, 0.28 and 1.13 of KV over 3.52, for Llama-3-8B's shape with 576
#: tokens a sequence.  Attention itself is not charged: whole sequences are read at 4.4 TB/s.
OVER_WEIGHTS: tuple[tuple[int, float], ...] = ((1, 1.17), (16, 1.27), (64, 1.33))
#: Beside their bytes adapters cost each product of the base so much: 0.29, 0.43 and 1.52 ms of 1, 8
#: and 64 adapters at 64 rows less 0.02, 0.16 and 1.26 of bytes is 0.27 every time, over the
#: products of 32 layers.
SECONDS_A_PRODUCT = 0.27e-3 / 128
PRODUCTS_A_LAYER = 4
#: What is neither weights nor arena: 0.9 of an H200's 139.8 GiB, less 15.0 GiB of weights and 109.3
#: of arena, with `max_num_seqs` 64 and `max_batch_tokens` 2,048.  Room for guests is not in it.
WORKING_BYTES = int(1.6 * GIB)
#: How many distinct adapters of a step are looked at, as far as there are requests and adapters.
ACTIVE = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class Machine:
    """`bandwidth` in bytes a second.  `measured`: figures of docs/bench-log.md may be applied."""

    bandwidth: float
    measured: bool = True


def steps_of(
    spec: ModelSpec,
    model: PlannedModel,
    adapters: Sequence[PlannedAdapter],
    kv: PlannedKv,
    machine: Machine,
) -> tuple[PlannedStep, ...]:
    """Steps of all requests at their full length, without adapters and with more and more."""
    if not kv.requests:
        return ()
    weights = model.weight_bytes
    if not spec.tied:  # of the embedding only the rows of a step's tokens are read
        weights -= spec.vocab_size * spec.hidden_size * (model.weight_bytes // model.parameters)
    read = kv.requests * _kv_bytes(spec, model, kv.tokens)
    count = sum(a.count for a in adapters)
    each = sum(a.count * a.true_bytes for a in adapters) / count
    most = min(kv.requests, count)
    return tuple(
        _step(k, weights, read, k * each, kv.requests, spec.num_layers, machine)
        for k in sorted({0, *(k for k in ACTIVE if k <= most), most})
    )


def _step(
    k: int,
    weights: float,
    kv: float,
    rows: float,
    batch: int,
    layers: int,
    machine: Machine,
) -> PlannedStep:
    """`weights`, `kv` and `rows` are bytes that the step reads, the last of `k` adapters."""
    base, tax = (1e3 * size / machine.bandwidth for size in (weights + kv, rows))
    step = PlannedStep(
        adapters=k,
        floor_ms=base + tax,
        base_floor_ms=base,
        tax_floor_ms=tax,
        alone_floor_ms=1e3 * (max(k, 1) * weights + kv) / machine.bandwidth,
    )
    if not machine.measured:
        return step
    beside = 1e3 * SECONDS_A_PRODUCT * PRODUCTS_A_LAYER * layers if k else 0.0
    slower = 1e3 * weights / machine.bandwidth * (over_weights(batch) - 1)
    expected, added = base + slower, tax + beside
    return replace(
        step,
        base_ms=expected,
        tax_ms=added,
        step_ms=expected + added,
        tax_percent=100 * added / expected,
    )


def _kv_bytes(spec: ModelSpec, model: PlannedModel, tokens: int) -> float:
    """Of one sequence; a layer with a window reads no more than the window."""
    a_layer = model.kv_token_bytes / spec.num_layers
    windows = spec.sliding_windows or (0,) * spec.num_layers
    return sum(a_layer * min(tokens, window or tokens) for window in windows)


def over_weights(batch: int) -> float:
    """What was measured, with straight lines between."""
    before = OVER_WEIGHTS[0]
    for point in OVER_WEIGHTS:
        if batch <= point[0]:
            share = (batch - before[0]) / ((point[0] - before[0]) or 1)
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


def constants_of(arena: PlannedArena, machine: Machine) -> tuple[Constant, ...]:
    """The figures that went into a plan, each with its source."""
    given = machine.bandwidth != H200_BANDWIDTH
    found = [
        Constant(
            name="bandwidth",
            value=machine.bandwidth,
            unit="bytes/s",
            source="--bandwidth" if given else "one NVIDIA H200, a copy of its memory",
        )
    ]
    if machine.measured:
        found += [
            Constant(
                name=f"base step over its weights' floor, batch {batch}",
                value=ratio,
                unit="ratio",
                source=f"{_LOG}, 2026-11-30, the whole engine; adapters in one launch",
            )
            for batch, ratio in OVER_WEIGHTS
        ]
        found.append(
            Constant(
                name="adapters beside their bytes, a product",
                value=SECONDS_A_PRODUCT,
                unit="s",
                source=f"{_LOG}, 2026-11-30, adapters in one launch, lora_chain.py",
            )
        )
    if arena.source == "memory":
        found.append(
            Constant(
                name="working memory",
                value=arena.working_bytes,
                unit="bytes",
                source=f"{_LOG}, 2026-11-30, the whole engine: 0.9 less weights and arena",
            )
        )
    return tuple(found)

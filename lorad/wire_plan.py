"""The document of `loractl plan`: what fits on a card, what a step costs, and against what.

Sizes are bytes, times milliseconds.  Fields are only ever added within v1.  Knows no formula.
"""

from typing import Literal

from msgspec import Struct

PLAN_SCHEMA = "lorad/plan.v1"

#: Where the number of blocks comes from.
Source = Literal["daemon", "blocks", "memory"]


class PlannedModel(Struct, frozen=True, kw_only=True):
    """What config.json says."""

    family: str
    layers: int
    hidden_size: int
    dtype: str  # of the weights and of the arena
    parameters: int
    weight_bytes: int
    kv_token_bytes: int  # K and V of a token in all layers


class PlannedArena(Struct, frozen=True, kw_only=True):
    """The one memory that KV and adapters share."""

    source: Source
    num_blocks: int
    block_bytes: int
    block_size: int
    num_bytes: int
    num_tokens: int  # if it held nothing else
    kv_floor_blocks: int  # that adapters never take
    memory_bytes: int = 0  # of the card; 0 where the blocks are known
    utilization: float = 0.0
    working_bytes: int = 0  # steps, graphs, the driver, room for guests: all else


class PlannedModule(Struct, frozen=True, kw_only=True):
    """A projection, in all layers together."""

    module: str
    d_in: int
    d_out: int
    num_bytes: int  # of one adapter's A and B


class PlannedAdapter(Struct, frozen=True, kw_only=True):
    """Adapters of one rank."""

    rank: int
    count: int
    true_bytes: int  # rows alone, of one
    num_blocks: int  # of one, packed into whole blocks
    num_bytes: int  # the same in bytes
    modules: tuple[PlannedModule, ...]
    fit_alone: int  # in the whole arena
    fit_beside: int  # beside the KV that was asked for, and none of the others
    resident: int  # of the count, with those before it in the list


class PlannedKv(Struct, frozen=True, kw_only=True):
    """KV of running requests, and of prompts that tenants share."""

    requests: int
    tokens: int  # of each, prompt and answer
    request_blocks: int  # of one
    num_blocks: int  # of all requests
    shared_prompt: int  # tokens
    tenants: int
    copies: int  # an adapter's keys and values are its own; those of one that changes none are not
    shared_blocks: int  # of all copies; whole blocks alone are shared


class PlannedFit(Struct, frozen=True, kw_only=True):
    """Do all adapters stay beside all requests?"""

    fits: bool
    kv_blocks: int
    adapter_blocks: int
    free_blocks: int  # negative: missing
    slots: int
    adapters: int
    resident: int  # at once; the others come and go
    requests_beside: int  # of that length, with every adapter resident


class PlannedStep(Struct, frozen=True, kw_only=True):
    """A decode step of all requests in which `adapters` distinct ones take part."""

    adapters: int
    floor_ms: float  # bytes that must be read over the bandwidth
    base_floor_ms: float
    tax_floor_ms: float  # the adapters' share of it
    base_ms: float | None = None  # expected of this engine, from what was measured
    tax_ms: float | None = None
    step_ms: float | None = None
    tax_percent: float | None = None  # of base_ms
    alone_floor_ms: float = 0.0  # as many processes with a merged adapter each, on this one card


class PlannedCost(Struct, frozen=True, kw_only=True):
    """An adapter here against a process of its own that holds the base with it merged in."""

    adapters: int
    here_bytes: int  # of one: its blocks, and its share of weights and working memory
    alone_bytes: int  # of one: the weights and working memory
    ratio: float
    processes_a_card: int | None  # with a share of the KV each; None without the card's size
    cards_alone: int | None


class Constant(Struct, frozen=True, kw_only=True):
    """A figure that was measured, not computed, and where."""

    name: str
    value: float
    unit: str
    source: str


class Plan(Struct, frozen=True, kw_only=True):
    """`loractl plan --json`."""

    schema: str = PLAN_SCHEMA
    model: PlannedModel
    arena: PlannedArena
    adapters: tuple[PlannedAdapter, ...]
    kv: PlannedKv
    fit: PlannedFit
    steps: tuple[PlannedStep, ...]
    cost: PlannedCost
    constants: tuple[Constant, ...]

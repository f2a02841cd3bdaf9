"""How the engine stands, as it tells the daemon: a part of `engine/messages.py`.

Pictures of revisions, blocks, prefixes and steps, and all that explains one revision.  Frozen
msgspec Structs, torch-free and free of names.
"""

from typing import Literal

from msgspec import Struct


class RevisionStatus(Struct, frozen=True, kw_only=True):
    """One revision as the engine sees it.  Seconds are ages at the snapshot; None = never."""

    rev: str
    state: str  # a value of adapters.states.State
    slot: int | None = None
    pinned: bool = False
    priority: int = 50
    max_rank: int = 0
    gpu_bytes: int = 0  # whole blocks
    ram_bytes: int = 0
    num_blocks: int = 0
    leases: int = 0
    running: int = 0
    waiting: int = 0
    loads: int = 0
    evictions: int = 0
    thrashes: int = 0  # loads within thrash_window of making way
    idle_seconds: float | None = None
    loaded_seconds: float | None = None
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_lost_tokens: int = 0  # had been cached, and were evicted for room
    prefix_saved_seconds: float = 0.0  # of prefill
    generated_tokens: int = 0
    draft_tokens: int = 0  # that were guessed, and computed in case they follow
    accepted_tokens: int = 0  # of those, told
    pooled_tokens: int = 0  # of inputs of which vectors or scores are made, computed
    error: str = ""  # last load failure
    load_source: Literal["", "disk", "ram"] = ""  # of a load to the GPU that is under way
    load_seconds: float = 0.0  # since it began
    arrived_bytes: int | None = None  # of a read from the disk that is under way
    drain_cause: str = ""
    drain_seconds: float | None = None  # since it takes no new requests
    drain_left_seconds: float | None = None  # until what runs is aborted; None: it is not


class PoolStatus(Struct, frozen=True, kw_only=True):
    """Blocks of the one arena by use; they add up to `total`."""

    total: int
    free: int
    kv_active: int
    kv_cached: int
    adapter_active: int
    adapter_idle: int
    block_bytes: int
    block_size: int  # tokens


class PrefixStatus(Struct, frozen=True, kw_only=True):
    """The prefix cache since the start, all revisions together, those that are gone included.

    Distances are blocks filed between a block's last use and its next, counted by powers of two:
    the first number is 0, the n-th after it 2**(n - 1) to 2**n - 1.
    """

    query_tokens: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0  # had been cached, and were evicted for room
    saved_seconds: float = 0.0  # of prefill
    found_blocks: tuple[int, ...] = ()  # by distance
    lost_blocks: tuple[int, ...] = ()  # by distance
    reuse_distances: int = 0  # the sum of all these distances
    evicted_blocks: int = 0  # that made way


class HistogramStatus(Struct, frozen=True):
    """Of an `engine.histogram.Histogram`."""

    counts: tuple[int, ...] = ()
    total: float = 0.0


class StepsStatus(Struct, frozen=True, kw_only=True):
    """Steps since the start, of those with an adapter in them or of those without.

    Bounds are SECONDS, TOKENS, ADAPTERS and BYTES of `engine.histogram`.
    """

    seconds: HistogramStatus = HistogramStatus()
    batch_tokens: HistogramStatus = HistogramStatus()
    adapters: HistogramStatus = HistogramStatus()
    lora_bytes: HistogramStatus = HistogramStatus()  # of the adapters' weights, each once


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """One consistent picture, taken between two steps."""

    step: int
    running: int
    waiting: int
    pool: PoolStatus
    slots_total: int
    slots_used: int
    ram_used_bytes: int
    ram_limit_bytes: int
    revisions: tuple[RevisionStatus, ...]
    base: RevisionStatus  # rev "" : traffic on the base model itself
    prefix: PrefixStatus = PrefixStatus()
    generated_tokens: int = 0
    prompt_tokens: int = 0
    pooled_tokens: int = 0  # of those, of inputs of which vectors or scores are made
    preemptions: int = 0
    late_masks: int = 0  # draws of guided sequences that waited a step for their masks
    forward_passes: int = 0
    thrashes: int = 0
    pid: int = 0  # whose counters these are
    base_steps: StepsStatus = StepsStatus()
    lora_steps: StepsStatus = StepsStatus()
    share: float = 1.0  # of the device's time, that an engine which pools keeps to


class Holder(Struct, frozen=True, kw_only=True):
    """A revision whose blocks nobody can have now: it runs, is pinned, or is waited for."""

    rev: str
    blocks: int
    running: int = 0
    pinned: bool = False
    draining: bool = False
    tokens_left: int = 0  # of its longest running request, at most


class RoomStatus(Struct, frozen=True, kw_only=True):
    """Who holds the blocks of the arena, as one revision finds it: all but its own."""

    total: int
    free: int
    kv_active: int
    kv_cached: int
    kv_floor: int
    idle: int  # of adapters that would make way
    num_idle: int
    free_slots: int
    reserved_for: str = ""  # a revision that starves
    holders: tuple[Holder, ...] = ()  # the largest
    num_holders: int = 0


class CostInputs(Struct, frozen=True, kw_only=True):
    """What decides when a revision makes way: expected use x seconds to bring back / bytes."""

    policy: str
    pinned: bool
    priority: int
    uses: float  # requests; each counts half after `recency.HALF_LIFE_SECONDS`
    uses_a_second: float
    reuse_chance: float  # of one use at least, within a minute
    return_seconds: float  # if it left now
    blocks: int
    num_bytes: int
    saved: float  # seconds of loading that a byte saves in a second by its being here
    place: int = 0  # among those that could make way, 1 = the next; 0 = it could not
    victims: int = 0
    loads: int = 0
    evictions: int = 0
    thrashes: int = 0
    held_seconds: float = 0.0  # others make way before it, for so long


class Explanation(Struct, frozen=True, kw_only=True):
    """All that decides whether a revision is served now.  Seconds are ages, or expected."""

    rev: str
    state: str
    state_seconds: float
    removing: bool
    in_ram: bool
    reading: bool  # loading from the store, and not from host memory
    running: int
    waiting: int
    queue_turn: int = 0  # of its first request; 0 = none waits
    queue_turns: int = 0  # who takes turns: adapters of a tenant and priority, with requests queued
    wanted_seconds: float | None = None
    blocked_seconds: float | None = None  # it found no room
    starve_after: float
    starving: bool = False  # room is reserved for it
    victim: str = ""  # the revision that drains for it
    victim_tokens: int = 0
    hopeless: str = ""  # why it can never have room
    load_seconds: float = 0.0  # from where it is, with nothing in the way
    eta_seconds: float | None = None  # it is on its way
    drain_cause: str = ""
    drain_for: str = ""
    drain_seconds: float | None = None  # until what runs is aborted
    tokens_left: int = 0  # of its longest running request, at most
    room: RoomStatus
    cost: CostInputs
    error: str = ""

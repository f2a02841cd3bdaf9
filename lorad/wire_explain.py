"""What `GET /admin/v1/adapters/{name}/explain` answers: why an adapter is served or not.

Torch-free.  Sizes are bytes, times are seconds.  Fields are only ever added within v1.
"""

from msgspec import Struct

EXPLAIN_SCHEMA = "lorad/explain.v1"


class Holder(Struct, frozen=True, kw_only=True):
    """An adapter whose room nobody can have now: it runs, is pinned, or is waited for."""

    name: str
    num_bytes: int
    running: int = 0
    pinned: bool = False
    draining: bool = False
    tokens_left: int = 0  # of its longest running request, at most


class ExplainedRoom(Struct, frozen=True, kw_only=True):
    """The arena, as the explained adapter finds it."""

    total_bytes: int
    free_bytes: int
    kv_active_bytes: int
    kv_cached_bytes: int
    kv_floor_bytes: int
    idle_bytes: int  # of adapters that would make way
    idle_adapters: int
    free_slots: int
    reserved_for: str | None = None  # one that starves
    holders: tuple[Holder, ...] = ()  # the largest
    more_holders: int = 0


class ExplainedCost(Struct, frozen=True, kw_only=True):
    """What decides when it makes way: expected use x seconds to bring back / bytes."""

    policy: str
    pinned: bool
    priority: int
    uses: float  # requests; each counts half after five minutes
    uses_a_minute: float
    reuse_chance: float  # of one use at least, within a minute
    return_seconds: float  # if it left the GPU now
    num_bytes: int
    saved_seconds: float  # of loading, an hour and GiB, by its being on the GPU
    place: int | None = None  # among those that could make way, 1 = the next
    victims: int = 0
    loads: int = 0
    evictions: int = 0
    thrashes: int = 0
    held_seconds: float = 0.0  # others make way before it, for so long


class Explained(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/adapters/{name}/explain`."""

    schema: str = EXPLAIN_SCHEMA
    name: str
    rev: str | None
    state: str
    tier: str  # gpu ram disk remote, or -
    served: bool  # a request now starts as soon as a step has room for it
    why: str
    next: str
    next_seconds: float | None = None  # None: it hangs on others
    hint: str = ""
    reason: str | None = None  # E_...
    running: int = 0
    waiting: int = 0
    queue_turn: int | None = None  # of its first request, 1 = next
    queue_turns: int = 0
    load_seconds: float | None = None  # from where it is, as measured, with nothing in the way
    room: ExplainedRoom | None = None  # None: the engine does not know it
    cost: ExplainedCost | None = None
    replica: str = ""  # of several engines the one that all of this is said of

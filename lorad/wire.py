"""Every JSON body of the admin API, as msgspec Structs: what `loractl`, the TUI and tests share.

Torch-free, SQLAlchemy-free.  Times are RFC 3339 strings in UTC, sizes are bytes, ages are seconds.
Fields are only ever added within v1.  The OpenAI bodies of the inference socket are in
`wire_openai.py`.
"""

from typing import Literal

from msgspec import Struct, field

#: `schema` of each JSON document that `-o json` prints; bumped only when a field changes meaning.
ADAPTERS_SCHEMA = "lorad/adapters.v1"
SLOTS_SCHEMA = "lorad/slots.v1"
STATUS_SCHEMA = "lorad/status.v1"
EVENTS_SCHEMA = "lorad/events.v1"
EXPLAIN_SCHEMA = "lorad/explain.v1"
GC_SCHEMA = "lorad/gc.v1"


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Inside `{"error": ...}` on every route of both sockets."""

    message: str
    type: str
    param: str | None = None
    code: str
    details: dict[str, str] = {}  # reason = E_..., hint = the next command


class ErrorEnvelope(Struct, frozen=True):
    error: ErrorBody


# ----------------------------------------------------------------- what is shown
class Revision(Struct, frozen=True, kw_only=True):
    """One immutable content, as `loractl show` prints it."""

    rev: str
    rank: int  # the largest of its modules
    ranks: dict[str, int]  # module -> largest rank
    alpha: float | None  # null for MLX's, whose number is not divided by the rank
    rslora: bool
    targets: tuple[str, ...]
    num_layers: int  # layers that carry tensors
    dtype: str
    file_bytes: int
    packed_bytes: int  # whole blocks
    num_blocks: int
    changes_kv: bool
    keeps_kv: bool = True  # False: the model pools, and there are no prefixes to keep
    kinds: tuple[str, ...] = ()  # of MLX, aLoRA, DoRA, bias, head, embedding, rows, classifier
    scalings: tuple[float, ...] = ()  # what products are multiplied by, each number once
    alora_tokens: tuple[int, ...] = ()  # of an activated LoRA: those that it is invoked by
    warnings: tuple[str, ...] = ()
    created_at: str = ""


class Adapter(Struct, frozen=True, kw_only=True):
    """One name.  Live numbers are the engine's, summed over the name's serving revision."""

    name: str
    tenant: str | None
    model: str
    state: str
    pinned: bool
    priority: int
    rev: str | None  # serving
    candidate_rev: str | None
    rank: int | None
    num_bytes: int | None  # packed
    source: str
    labels: dict[str, str]
    reason: str | None  # E_... when quarantined, or of the candidate that failed
    reason_message: str | None
    created_at: str
    last_used_at: str | None
    slot: int | None = None
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
    draft_tokens: int = 0  # with models.speculation: tokens that were guessed
    accepted_tokens: int = 0  # of those, right ones
    targets: tuple[str, ...] = ()
    display_name: str | None = None  # the original text of an illegal folder name, escaped
    replicas: tuple[str, ...] = ()  # of a model with several engines: those that it is resident on


class AdapterDetail(Struct, frozen=True, kw_only=True):
    """`loractl show NAME`."""

    schema: str = ADAPTERS_SCHEMA
    adapter: Adapter
    serving: Revision | None
    candidate: Revision | None
    history: tuple[str, ...] = ()  # earlier revisions, newest first
    pooling: "PoolingPicture | None" = None  # of the model, where it pools
    events: tuple["EventItem", ...] = ()


class AdapterPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/adapters`; `cursor` is None on the last page."""

    schema: str = ADAPTERS_SCHEMA
    items: tuple[Adapter, ...]
    total: int
    cursor: str | None = None


class SlotPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/slots`: resident or loading, in slot order."""

    schema: str = SLOTS_SCHEMA
    items: tuple[Adapter, ...]
    slots_total: int
    slots_used: int


class PoolPicture(Struct, frozen=True, kw_only=True):
    """Blocks of the arena by use."""

    total: int = 0
    free: int = 0
    kv_active: int = 0
    kv_cached: int = 0
    adapter_active: int = 0
    adapter_idle: int = 0
    block_bytes: int = 0
    block_size: int = 0  # tokens; 0: no KV, or the sum of models whose blocks differ


class PrefixPicture(Struct, frozen=True, kw_only=True):
    """The prefix cache since the engine's start.  A distance is how many blocks were filed between
    a block's last use and its next: counts are of 0, 1, 2-3, 4-7 and so on."""

    query_tokens: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0  # had been cached, and were evicted for room
    saved_seconds: float = 0.0  # of prefill
    found_blocks: tuple[int, ...] = ()  # by distance
    lost_blocks: tuple[int, ...] = ()  # by distance


class PoolingPicture(Struct, frozen=True, kw_only=True):
    """How a pooling model makes its vectors and scores, as its engine does it."""

    kinds: tuple[str, ...]  # cls last mean mean_sqrt_length weighted_mean max, side by side
    origin: str  # which file said so, or the configuration
    width: int  # numbers of a vector
    normalizes: bool
    labels: tuple[str, ...] = ()  # of the base's own classifier
    score_tokens: tuple[int, ...] = ()  # of a base that scores by words: for a text, and against it
    asks: str = ""  # whose form a pair of texts is put into; "" = the tokenizer's own


class Status(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/status`."""

    schema: str = STATUS_SCHEMA
    version: str
    instance_id: str  # new at every daemon start
    pid: int
    state: str  # starting loading_base ready draining engine_restarting engine_stalled stopped
    reason: str
    uptime_seconds: float
    base: str
    model: str
    device: str
    device_name: str
    dtype: str
    max_model_len: int
    inference_socket: str
    admin_socket: str
    inbox: str | None
    state_dir: str
    store_dir: str = ""
    adapters: dict[str, int]  # state -> how many
    slots_total: int
    slots_used: int
    pinned: int
    running: int
    waiting: int
    ram_used_bytes: int
    ram_limit_bytes: int
    pool: PoolPicture
    prefix: PrefixPicture = PrefixPicture()
    generated_tokens: int
    prompt_tokens: int
    forward_passes: int
    preemptions: int
    thrashes: int = 0  # loads within thrash_window of an eviction, since the engine's start
    engine_pid: int | None = None
    drained: tuple[str, ...] = ()  # adapters that an operator took out of service
    engine_restarts: int = 0
    tasks: tuple[str, ...] = ()  # generate, or of embed classify rerank
    pooling: PoolingPicture | None = None  # of an engine that pools, once it is there
    models: "tuple[ModelStatus, ...]" = ()  # each of them, in the order of the configuration


class ModelStatus(Struct, frozen=True, kw_only=True):
    """One [[models]] entry and its engine.  What Status says of base, model and device is of the
    first; its numbers are of all of them together."""

    name: str
    base: str
    state: str  # starting loading_base ready engine_restarting engine_stalled stopped
    reason: str = ""  # why it is not ready
    tasks: tuple[str, ...] = ()
    device: str = ""
    device_name: str = ""
    dtype: str = ""
    max_model_len: int = 0
    num_adapters: int = 0  # names that serve
    slots_total: int = 0
    slots_used: int = 0
    running: int = 0
    waiting: int = 0
    ram_used_bytes: int = 0
    ram_limit_bytes: int = 0
    pool: PoolPicture | None = None  # None: its engine is not there
    prefix: PrefixPicture = PrefixPicture()
    generated_tokens: int = 0
    prompt_tokens: int = 0
    forward_passes: int = 0
    engine_pid: int | None = None
    engine_restarts: int = 0
    pooling: PoolingPicture | None = None
    #: Of the device's time, while one that generates is at work there; 1: it keeps to none.
    device_share: float = 1.0
    replicas: "tuple[ReplicaStatus, ...]" = ()  # () for a model with one engine


class ReplicaStatus(Struct, frozen=True, kw_only=True):
    """One of several engines of a model, whose ModelStatus has the sums."""

    name: str  # its number
    state: str
    reason: str = ""  # why it is not ready
    device_name: str = ""
    slots_total: int = 0
    slots_used: int = 0
    running: int = 0
    waiting: int = 0
    pool: PoolPicture | None = None  # None: its engine is not there
    engine_pid: int | None = None
    engine_restarts: int = 0


class EventItem(Struct, frozen=True, kw_only=True):
    """One line of `loractl events`; `id` rises within an instance."""

    id: int
    time: str
    level: Literal["info", "warn", "error"] = "info"
    type: str  # adapter.added adapter.rejected slot.load slot.evict pin.set drain.start gap ...
    name: str = ""
    rev: str = ""
    cause: str = ""
    message: str = ""
    details: dict[str, str] = {}


class EventPage(Struct, frozen=True, kw_only=True):
    schema: str = EVENTS_SCHEMA
    items: tuple[EventItem, ...]
    instance_id: str


# ----------------------------------------------------------------- what is asked
class Names(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of load, evict, pin, unpin, verify.  Names are not in paths: `/` needs no escaping."""

    names: tuple[str, ...] = ()
    all: bool = False  # evict, verify
    full: bool = False  # verify: the packed file against its source, too
    wait: bool = True
    timeout_s: float = 60.0
    tier: Literal["gpu", "ram"] = "gpu"  # load
    pin: bool = False  # load
    no_load: bool = False  # pin
    to: Literal["ram", "disk"] = "ram"  # evict
    drain_timeout_s: float = 30.0  # evict
    now: bool = False  # evict: abort running requests
    force: bool = False  # evict: even if pinned
    dry_run: bool = False


class ItemResult(Struct, frozen=True, kw_only=True):
    """What became of one name; `code` "" is success."""

    name: str
    ok: bool
    state: str = ""
    rev: str = ""
    code: str = ""
    message: str = ""
    hint: str = ""
    details: dict[str, str] = {}
    operation: str = ""  # what goes on: `loractl op show ID`


class VerifyFinding(Struct, frozen=True, kw_only=True):
    """Something that is not as the stored file says; `layer` None: no one layer's."""

    what: Literal["effect", "resident", "packed", "stored"]
    layer: int | None = None
    module: str = ""
    message: str = ""


class Verification(Struct, frozen=True, kw_only=True):
    """What was compared of one name, and what differs.  Errors are over the largest output."""

    name: str
    ok: bool
    rev: str = ""
    code: str = ""
    message: str = ""
    hint: str = ""
    modules: int = 0
    worst_error: float = 0.0
    worst_module: str = ""
    tolerance: float = 0.0
    bytes_checked: int = 0
    bytes_different: int = 0
    findings: tuple[VerifyFinding, ...] = ()


class Verifications(Struct, frozen=True, kw_only=True):
    schema: str = "lorad/verifications.v1"
    items: tuple[Verification, ...]


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


class Results(Struct, frozen=True, kw_only=True):
    schema: str = "lorad/results.v1"
    items: tuple[ItemResult, ...]
    skipped: tuple[str, ...] = ()  # names that `all` left alone, as they are pinned


class GcAsk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /admin/v1/gc`."""

    dry_run: bool = False


GarbageKind = Literal["revision", "unknown", "packed", "leftover"]


class GarbageItem(Struct, frozen=True, kw_only=True):
    """Something in the store that nobody needs, and why; `rev` of a leftover is its file's name."""

    kind: GarbageKind
    rev: str
    layout: str = ""  # of a packed file
    num_bytes: int
    why: str


class Garbage(Struct, frozen=True, kw_only=True):
    """What was removed, or with `dry_run` would be; `used_bytes` are the store's now."""

    schema: str = GC_SCHEMA
    items: tuple[GarbageItem, ...]
    num_bytes: int
    dry_run: bool
    used_bytes: int
    budget_bytes: int = 0  # 0: what the disk holds


class UploadStart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/uploads` opens a staging folder; `PUT uploads/{id}/files/{file}` fills it."""

    name: str
    replace: bool = False
    pin: bool = False
    load: bool = False
    priority: int | None = None
    labels: dict[str, str] = {}
    dry_run: bool = False
    source: str = "upload"
    model: str = ""  # the base that it is for; "" = the one that it fits


class UploadOpen(Struct, frozen=True, kw_only=True):
    upload_id: str
    max_bytes: int
    files: tuple[str, ...] = ()  # the names that the daemon reads; it takes no others


class UploadCommit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/uploads/{id}/commit`."""

    wait: bool = True
    timeout_s: float = 60.0


class Added(Struct, frozen=True, kw_only=True):
    """Answer to a commit."""

    schema: str = "lorad/added.v1"
    name: str
    rev: str
    state: str
    unchanged: bool = False  # the same content was serving already
    replaced_rev: str | None = None
    warnings: tuple[str, ...] = ()
    dry_run: bool = False


class AdapterPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /admin/v1/adapters/{name}`; None leaves a field alone, a None label removes it."""

    priority: int | None = None
    pinned: bool | None = None
    labels: dict[str, str | None] = field(default_factory=dict)


class Removed(Struct, frozen=True, kw_only=True):
    """Answer to `DELETE /admin/v1/adapters/{name}?keep_files=`."""

    schema: str = "lorad/removed.v1"
    name: str
    rev: str | None


class Version(Struct, frozen=True, kw_only=True):
    """`GET /version` on both sockets."""

    version: str
    api: str = "v1"
    model: str = ""  # the first of `models`
    base: str = ""
    models: tuple[str, ...] = ()

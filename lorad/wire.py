"""Bodies of the admin API about adapters, as msgspec Structs: what `loractl`, TUI and tests share.

Torch-free, SQLAlchemy-free.  Times are RFC 3339 strings in UTC, sizes are bytes, ages are seconds.
Fields are only ever added within v1.  The OpenAI bodies of the inference socket are in
`wire_openai.py`.
"""

from typing import Literal

from msgspec import Struct, field

from lorad.wire_status import PoolingPicture

#: `schema` of each JSON document that `-o json` prints; bumped only when a field changes meaning.
ADAPTERS_SCHEMA = "lorad/adapters.v1"
SLOTS_SCHEMA = "lorad/slots.v1"
EVENTS_SCHEMA = "lorad/events.v1"
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
    kinds: tuple[
        str, ...
    ] = ()  # of MLX, aLoRA, DoRA, bias, head, embedding, rows, classifier, tokenizer
    scalings: tuple[float, ...] = ()  # what products are multiplied by, each number once
    alora_tokens: tuple[int, ...] = ()  # of an activated LoRA: those that it is invoked by
    num_tokens: int = 0  # of a vocabulary of its own; 0 = the base's
    own_tokenizer: bool = False
    extra_tokens: int = 0  # of these, ids behind the base's
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
    own_tokenizer: bool = False  # these two are of what it serves
    extra_tokens: int = 0  # ids behind the base's
    display_name: str | None = None  # the original text of an illegal folder name, escaped
    replicas: tuple[str, ...] = ()  # of a model with several engines: those that it is resident on


class AdapterDetail(Struct, frozen=True, kw_only=True):
    """`loractl show NAME`."""

    schema: str = ADAPTERS_SCHEMA
    adapter: Adapter
    serving: Revision | None
    candidate: Revision | None
    history: tuple[str, ...] = ()  # earlier revisions, newest first
    pooling: PoolingPicture | None = None  # of the model, where it pools
    events: tuple["EventItem", ...] = ()
    inbox_nested: str = ""  # its folder in the inbox holds another adapter's: that, and what to do


class AdapterPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/adapters`; `cursor` is None on the last page.  `inbox_waits`, on the first:
    names whose folders in the inbox could not be taken yet, which are no rows; each one's own route
    says why.  `inbox_nested`: names whose folders hold another adapter's, which is not served."""

    schema: str = ADAPTERS_SCHEMA
    items: tuple[Adapter, ...]
    total: int
    cursor: str | None = None
    inbox_waits: tuple[str, ...] = ()
    inbox_nested: tuple[str, ...] = ()


class SlotPage(Struct, frozen=True, kw_only=True):
    """`GET /admin/v1/slots`: resident or loading, in slot order."""

    schema: str = SLOTS_SCHEMA
    items: tuple[Adapter, ...]
    slots_total: int
    slots_used: int


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
    replica: str = ""  # of several engines of a model, the one that it happened on


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

    what: Literal["effect", "resident", "packed", "stored", "tokenizer"]
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
    also: tuple[str, ...] = ()  # rows, classifier, tokenizer: compared by their bytes alone
    findings: tuple[VerifyFinding, ...] = ()


class Verifications(Struct, frozen=True, kw_only=True):
    schema: str = "lorad/verifications.v1"
    items: tuple[Verification, ...]


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
    num_bytes: int = 0  # that it takes on the GPU; 0: it is not there, or nobody asked for that
    load_seconds: float | None = None  # of bringing it there; None: it was there before


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

"""Bodies of `GET /admin/v1/stream`: all that a dashboard shows, whole at first, then what changed.

The stream is server-sent events of three names.  `board` is a `Board`: the first message, and again
after a gap.  `delta` is a `Delta` to the board as it is by then.  `event` is a `wire.EventItem`.
The id of a message is `instance-number` of the newest event that it comes after, so `Last-Event-ID`
resumes the events; who connects gets the board whole in any case.  Rates and percentiles are of the
last `WINDOW_SECONDS`.  None is "nothing was measured", never zero.

Ages (`uptime_seconds`, `idle_seconds`, `loaded_seconds`, `age_seconds`, `load_seconds`,
`ago_seconds`, `seconds` of a drain) grow by themselves: a row that differs in nothing else is not
sent again, and its reader adds the time since it came.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from lorad.wire import EventItem
from lorad.wire_status import Status

STREAM_SCHEMA = "lorad/stream.v1"
#: Of all "recent" figures below.
WINDOW_SECONDS = 60
#: Churn is told as this many counts, oldest first, each of so many seconds.
CHURN_BUCKETS, CHURN_BUCKET_SECONDS = 60, 10
#: Rows of requests on a board, those that run longest first; `num_requests` counts all.
MAX_REQUESTS = 500


class Spread(Struct, frozen=True, kw_only=True):
    """Percentiles in seconds over the window, and of how many."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Load(Struct, frozen=True, kw_only=True):
    """What is asked of the daemon, and how fast it answers, over the window."""

    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0  # generated
    prompt_tokens_per_second: float = 0.0  # computed: without cached ones
    pooled_tokens_per_second: float = 0.0  # of those, of inputs for vectors and scores
    refused_per_second: float = 0.0
    first_token: Spread = Spread()
    inter_token: Spread = Spread()
    queue: Spread = Spread()
    query_tokens: int = 0  # of prompts that were looked up in the prefix cache
    hit_tokens: int = 0
    tokens_history: tuple[float, ...] = ()  # generated a second, one number a second, oldest first


class Machine(Struct, frozen=True, kw_only=True):
    """The GPU and the host.  Busy shares are 0 to 1; those of processes are of one core."""

    gpu_busy: float | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    daemon_cpu: float = 0.0
    daemon_rss_bytes: int = 0
    engine_cpu: float = 0.0
    engine_rss_bytes: int = 0
    host_used_bytes: int = 0
    host_total_bytes: int = 0


class Slot(Struct, frozen=True, kw_only=True):
    """One name that is resident, loading or draining; a replaced revision is `name@digest`.

    A row that is loading has `load_source` and `load_fraction`; the figures of `wire.Adapter` that
    have the same name mean the same.
    """

    name: str
    rev: str
    slot: int | None
    state: str
    pinned: bool
    priority: int
    rank: int | None
    gpu_bytes: int
    ram_bytes: int = 0
    tenant: str | None = None
    model: str = ""  # of several models, whose it is
    replicas: tuple[str, ...] = ()  # of several engines of its model, those that it is on
    running: int = 0
    waiting: int = 0
    tokens_per_second: float = 0.0  # generated, or of inputs for vectors and scores
    query_tokens: int = 0  # over the window
    hit_tokens: int = 0
    life_query_tokens: int = 0
    life_hit_tokens: int = 0
    life_lost_tokens: int = 0
    saved_seconds: float = 0.0
    hits_history: tuple[int | None, ...] = ()  # percent, each of 5 s, oldest first; None: not asked
    draft_tokens: int = 0  # over the window: guessed ahead, with models.speculation
    accepted_tokens: int = 0  # of those, right ones
    tokens_per_draw: float | None = None  # over the window; 1.0 without right guesses
    life_draft_tokens: int = 0
    life_accepted_tokens: int = 0
    loads: int = 0
    evictions: int = 0
    thrashes: int = 0
    idle_seconds: float | None = None
    load_source: Literal["", "disk", "ram"] = ""
    load_fraction: float | None = None  # None: not known
    load_seconds: float = 0.0  # since it was asked for
    load_bytes_per_second: float | None = None


class Loaded(Struct, frozen=True, kw_only=True):
    """A load that ended lately: what the loads in flight may expect."""

    name: str
    source: Literal["disk", "ram"]
    num_bytes: int
    seconds: float
    ago_seconds: float


class Drain(Struct, frozen=True, kw_only=True):
    """Something that runs down: a replaced or evicted revision, a name or (name "") the daemon."""

    name: str
    rev: str = ""
    next_rev: str = ""  # what replaces it
    cause: str = ""
    running: int = 0
    begun_with: int = 0  # requests; progress is what has gone of them
    seconds: float = 0.0
    limit_seconds: float | None = None  # what is left then is aborted
    held: bool = False  # by an operator: it lasts until `loractl resume`


class Churn(Struct, frozen=True, kw_only=True):
    """Loads and evictions of the last ten minutes."""

    loads: tuple[int, ...] = ()  # CHURN_BUCKETS counts
    evictions: tuple[int, ...] = ()
    thrashes: int = 0
    reasons: dict[str, int] = {}  # of evictions
    top: tuple[tuple[str, int], ...] = ()  # names by loads, the most first
    load_bytes: int = 0
    recent: tuple[Loaded, ...] = ()  # the newest first


class RequestRow(Struct, frozen=True, kw_only=True):
    """One request that has not ended."""

    id: str
    adapter: str  # "" is the base model itself
    model: str = ""  # of several models, whose it is
    replica: str = ""  # of several engines of its model, the one that has it
    rev: str
    state: Literal["queued", "running"]
    endpoint: str
    age_seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int | None
    tokens_per_second: float
    priority: int
    tenant: str
    client: str  # uid 1000, key ab12cd34


class TenantRow(Struct, frozen=True, kw_only=True):
    """One tenant; 0 is no limit."""

    name: str
    running: int = 0  # requests
    waiting: int = 0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    refused_per_minute: float = 0.0
    rpm: int = 0
    tpm: int = 0
    queue: int = 0
    weight: float = 1.0
    max_priority: int = 100
    adapters: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # ids
    last_used_at: str | None = None


class Check(Struct, frozen=True, kw_only=True):
    """Something that is as it should be, or is not."""

    name: str
    level: Literal["ok", "warn", "error"]
    message: str
    hint: str = ""


class Health(Struct, frozen=True, kw_only=True):
    """What an operator looks at when something is wrong.  Changes seldom."""

    checks: tuple[Check, ...] = ()
    reload_error: str = ""  # of the last reload that was refused
    reloaded_at: str | None = None


class Board(Struct, frozen=True, kw_only=True):
    """Everything at one moment.  Keys of the maps say which row is meant from delta to delta."""

    schema: str = STREAM_SCHEMA
    sequence: int  # of this stream, from 1; a delta's is one more than that before it
    time: str
    interval_seconds: float
    status: Status
    load: Load = Load()
    machine: Machine = Machine()
    churn: Churn = Churn()
    health: Health = Health()
    slots: dict[str, Slot] = {}  # by name
    drains: dict[str, Drain] = {}  # by name
    requests: dict[str, RequestRow] = {}  # by id
    num_requests: int = 0
    tenants: dict[str, TenantRow] = {}  # by name
    events: tuple[EventItem, ...] = ()  # the newest, oldest first


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What differs from the board before it.  A part that is absent is as it was; in a map, rows
    that are there are new or changed as a whole, and keys in `gone` are no more."""

    sequence: int
    time: str
    status: Status | UnsetType = UNSET
    load: Load | UnsetType = UNSET
    machine: Machine | UnsetType = UNSET
    churn: Churn | UnsetType = UNSET
    health: Health | UnsetType = UNSET
    slots: dict[str, Slot] = {}
    drains: dict[str, Drain] = {}
    requests: dict[str, RequestRow] = {}
    num_requests: int | UnsetType = UNSET
    tenants: dict[str, TenantRow] = {}
    gone: dict[str, tuple[str, ...]] = field(default_factory=dict)  # map -> keys

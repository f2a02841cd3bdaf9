"""What `GET /admin/v1/status` and `/version` answer: the daemon, its models and their pools.

Torch-free.  Sizes are bytes, ages are seconds.  Fields are only ever added within v1.
"""

from msgspec import Struct

STATUS_SCHEMA = "lorad/status.v1"


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


class DraftPicture(Struct, frozen=True, kw_only=True):
    """With models.speculation: tokens that were guessed ahead since the engine's start, and those
    of them that were right.  `lora`: of all adapters that the engine knows."""

    kind: str  # ngram draft
    longest: int  # tokens of one guess
    base_draft_tokens: int = 0
    base_accepted_tokens: int = 0
    lora_draft_tokens: int = 0
    lora_accepted_tokens: int = 0


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
    extra_vocab: int = 0  # token ids behind the base's that adapters may bring rows for
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
    fingerprint: str = ""  # of the base's config.json and the sizes of its weights' files
    state: str  # starting loading_base ready engine_restarting engine_stalled stopped
    reason: str = ""  # why it is not ready
    tasks: tuple[str, ...] = ()
    device: str = ""
    device_name: str = ""
    dtype: str = ""
    max_model_len: int = 0
    extra_vocab: int = 0
    most_extra_tokens: int = 0  # of that, what the adapter with most ids of its own takes
    own_tokenizers: int = 0  # names that serve with one
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
    drafts: DraftPicture | None = None  # None: nothing is guessed
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


class Version(Struct, frozen=True, kw_only=True):
    """`GET /version` on both sockets."""

    version: str
    api: str = "v1"
    model: str = ""  # the first of `models`
    base: str = ""
    models: tuple[str, ...] = ()

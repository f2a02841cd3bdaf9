"""What the daemon and the engine say to each other: commands in, events out.

Frozen msgspec Structs, encoded as msgpack frames (`framing.py`); how the engine stands is told in
those of `status_messages.py`, and what a verification found in those of `verify_messages.py`.
Every command with a `command_id` gets exactly one `Answer`; every `Submit` gets deltas of which
exactly one, the last, carries a `finish_reason`; every `PoolRequest` one `Pooled`.

Torch-free and free of names: adapters appear as revisions, text as token ids.
"""

from typing import Literal

from msgspec import Struct

from engine.pooling_messages import AbortPool, GiveWay, Pooled, PoolingInfo, PoolRequest
from engine.status_messages import EngineSnapshot, Explanation
from engine.verify_messages import VerifyReport, VerifyRevision

#: What a base is served for; `pool` is to make vectors or scores.
Purpose = Literal["generate", "pool", "both"]
FinishReason = Literal["stop", "length", "abort", "error"]
Tier = Literal["gpu", "ram", "disk"]


# ----------------------------------------------------------------- shared values
class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn.  `temperature` 0 is greedy.  Ranges are checked by the daemon."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None  # alternatives beside the chosen token; 0 = the chosen one alone
    prompt_logprobs: int | None = None  # the same for prompt tokens (echo); disables cached prefix
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None  # no others are drawn, end tokens included
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False
    #: The longest draft of tokens ahead that it may have, where there are any; None = the engine's.
    draft_tokens: int | None = None
    #: What the answer must follow, as `engine/grammar.py` makes it; "" = nothing.
    grammar: str = ""


class PackedModule(Struct, frozen=True):
    """One LoRA pair; `module` is a name such as `q_proj`, scaling is alpha/r or alpha/sqrt(r).
    Those of `layout.ENDS` are in the layer behind the last one.

    What the module becomes, with b the base's own bias:
    `gain * (W x + scaling * (B A x + bias)) + b`; without `bias` it is 0, without `gain` 1.
    """

    layer: int
    module: str
    rank: int
    scaling: float
    bias: bool = False  # lora_bias: one number an output
    gain: bool = False  # DoRA: magnitude over norm, one number an output
    #: Rows that replace the base's: `rank` of them, for these ids, ascending, or () for all up to
    #: `rank`, which is the base's or more.
    tokens: tuple[int, ...] = ()

    @property
    def replaces(self) -> bool:
        """It has no pair, but rows of its own."""
        return self.module.endswith(".rows")

    @property
    def b_rows(self) -> int:
        """Rows as wide as the module's output: B's, the bias, the gain in two halves."""
        return 0 if self.replaces else self.rank + self.bias + 2 * self.gain


class PackedManifest(Struct, frozen=True, kw_only=True):
    """All that the engine knows of a revision: where its packed file lies and what is in it.

    `modules` are in stream order (layer, then order of `layout.MODULE_ID`); row offsets are
    not stored, both sides compute them with `layout.place`.
    """

    rev: str
    path: str  # packed-<layout>.bin: exactly num_blocks * block_bytes bytes, for each rank
    layout: str  # `layout.stream_id`
    num_blocks: int  # of one rank's arena
    true_bytes: int  # rank * (d_in + d_out) * itemsize, summed: what padding is measured against
    max_rank: int
    changes_kv: bool  # False: its KV equals the base's, and the base's prefix cache is shared
    modules: tuple[PackedModule, ...]
    #: aLoRA: it acts from the last place in a prompt on where these ids begin; () = everywhere.
    alora_tokens: tuple[int, ...] = ()
    num_tokens: int = 0  # ids that its requests may hold and draw; 0 = as the base's
    tokenizer: str = ""  # its own tokenizer.json; "" = the base's


class TokenLogprobs(Struct, frozen=True, gc=False):
    """`top` holds (token id, logprob), best first; the chosen token is in `token`/`logprob`."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# ----------------------------------------------------------------- commands
class Submit(Struct, frozen=True, kw_only=True, tag="submit"):
    """Run one sequence, on the base if `rev` is None.  Leases `rev` until its last delta."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    rev: str | None = None
    priority: int = 50
    cache_salt: str = ""
    deadline_seconds: float | None = None  # from receipt; then it ends deadline_exceeded
    #: An aLoRA whose tokens the prompt lacks: "" = refused, "base" = the base model answers.
    alora_fallback: Literal["", "base"] = ""
    tenant: str = ""  # who shares the engine with whom: tenants take turns, then their adapters do
    weight: float = 1.0  # above 0; of two that always wait, 2.0 is served twice the tokens of 1.0


class Abort(Struct, frozen=True, tag="abort"):
    """End a sequence within two steps.  Unknown ids are ignored: it may have finished meanwhile."""

    request_id: str


class AddRevision(Struct, frozen=True, kw_only=True, tag="add_revision"):
    """Make a packed revision known (tier `disk`).  Repeating it is harmless."""

    command_id: int
    manifest: PackedManifest
    priority: int = 50
    pinned: bool = False


class RemoveRevision(Struct, frozen=True, tag="remove_revision"):
    """Take no more leases; answered when the last one has ended and everything of it is gone."""

    command_id: int
    rev: str


class Load(Struct, frozen=True, kw_only=True, tag="load"):
    """Bring a revision to `tier`; answered when it is there, or with no_room / load_failed."""

    command_id: int
    rev: str
    tier: Literal["gpu", "ram"] = "gpu"


class Evict(Struct, frozen=True, kw_only=True, tag="evict"):
    """Drain, leave the slot.  `abort_running` ends its requests now; a pinned one needs `force`."""

    command_id: int
    rev: str
    to: Literal["ram", "disk"] = "ram"
    drain_timeout: float = 30.0  # seconds; past it running requests are aborted
    abort_running: bool = False
    force: bool = False


class SetRevision(Struct, frozen=True, kw_only=True, tag="set_revision"):
    """Change pin and priority of a revision (already the maximum over its names)."""

    command_id: int
    rev: str
    pinned: bool
    priority: int


class GetSnapshot(Struct, frozen=True, tag="get_snapshot"):
    """Answered by `Answer.snapshot`."""

    command_id: int


class Explain(Struct, frozen=True, tag="explain"):
    """Answered by `Answer.explanation`, or with model_not_found."""

    command_id: int
    rev: str


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """End the process.  Running sequences finish with reason "abort" first."""

    command_id: int


Command = (
    Submit
    | Abort
    | PoolRequest
    | AbortPool
    | GiveWay
    | AddRevision
    | RemoveRevision
    | Load
    | Evict
    | SetRevision
    | VerifyRevision
    | GetSnapshot
    | Explain
    | Shutdown
)


# ----------------------------------------------------------------- events
class EngineInfo(Struct, frozen=True, kw_only=True):
    """What the engine became after `auto` was resolved; sent once, inside EngineReady."""

    device: str
    device_name: str
    dtype: str
    layout: str
    base: str = ""  # `BaseFiles.id`: gains are computed for these weights
    block_bytes: int
    block_size: int
    draft_block_bytes: int = 0  # of these, a draft model's; 0 = there is none
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    mixed_tokens: int = 0
    #: Of one rank, as `layout.Shapes` has them: they decide how many blocks an adapter takes.
    num_layers: int
    module_dims: tuple[tuple[int, int], ...]
    num_ids: int
    vocab_size: int
    extra_vocab: int = 0  # token ids behind these that adapters may bring rows for
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    draft_weight_bytes: int = 0
    arena_bytes: int
    ram_cache_bytes: int
    pid: int
    device_uuid: str = ""  # as NVML calls it; "" on a CPU
    card_bytes: int = 0  # of the whole card, told by an engine that pools alone; 0 on a CPU
    tensor_parallel: int = 1  # ranks; bytes are those of the first one's device
    #: Of an engine that pools.
    pooling: PoolingInfo | None = None
    generates: bool = True  # else it pools alone, mostly with blocks of no tokens

    @property
    def packed_block_bytes(self) -> int:
        """Of a packed file, for each block that it takes of an arena: it has every rank's."""
        return self.block_bytes * self.tensor_parallel

    @property
    def purpose(self) -> "Purpose":
        """What its adapters may be for."""
        if not self.generates:
            return "pool"
        return "generate" if self.pooling is None else "both"


class Starting(Struct, frozen=True, tag="starting"):
    """Progress of the start: a phase word and 0..1."""

    phase: str
    fraction: float


class EngineReady(Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent twice a second; `stalled_seconds` is how long the step loop has been inside one step.

    `starts_per_second`: how fast queued sequences begin while more are ready than fit; 0.0: all
    fit, or it is too early to say.
    """

    step: int
    stalled_seconds: float
    starts_per_second: float = 0.0


class Answer(Struct, frozen=True, kw_only=True, tag="answer"):
    """The one answer to a command; `code` "" is success, else an EngineError code."""

    command_id: int
    code: str = ""
    message: str = ""
    reason: str = ""
    snapshot: EngineSnapshot | None = None
    report: VerifyReport | None = None
    explanation: Explanation | None = None


class SequenceDelta(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta", gc=False):
    """New tokens of one sequence.  The first delta of a sequence carries `cached_tokens`.

    It and what it holds can form no cycle, so the collector need not count thousands a second.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # first entry None: nothing precedes it
    cached_tokens: int | None = None
    queued_seconds: float | None = None  # with the first delta: until its first rows were chosen
    finish_reason: FinishReason | None = None
    code: str = ""  # with "error" (and "abort" by the engine): an EngineError code
    message: str = ""


class AdapterEvent(Struct, frozen=True, kw_only=True, tag="adapter"):
    """A transition of adapters/states.py and its cause; `seconds`: how long the one before took."""

    rev: str
    before: str
    after: str
    cause: str  # request, load, pin, lru, cost, manual, replace, remove, drain, error, damaged
    slot: int | None = None
    seconds: float = 0.0
    num_bytes: int = 0
    message: str = ""
    away_seconds: float | None = None  # thrash: it is back on the GPU so soon after it made way
    #: With the transition that ends a load to the GPU: where it was when it was asked for, and how
    #: long it took from there.
    source: Literal["", "disk", "ram"] = ""
    load_seconds: float = 0.0


class StepFrame(Struct, frozen=True, kw_only=True, tag="frame"):
    """All that one step has to say, in one message."""

    step: int
    deltas: tuple[SequenceDelta, ...] = ()
    adapters: tuple[AdapterEvent, ...] = ()
    answers: tuple[Answer, ...] = ()
    pooled: tuple[Pooled, ...] = ()

    @property
    def silent(self) -> bool:
        """There is nothing to say."""
        return not (self.deltas or self.adapters or self.answers or self.pooled)


class Fatal(Struct, frozen=True, tag="fatal"):
    """Last words of a dying engine; the process ends after it."""

    code: str
    message: str
    hint: str = ""  # the next step, where its error knew one


Event = Starting | EngineReady | Heartbeat | StepFrame | Fatal

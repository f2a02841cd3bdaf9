"""What the registry hands out: frozen values, never database rows.

Times are seconds since the epoch (UTC), sizes bytes.  Nothing here knows SQL or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.adapters.states import State
from engine.errors import AdapterInvalid
from engine.layout import layout_of, place, stream_id
from engine.messages import EngineInfo, PackedManifest, PackedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRecord:
    """One packed file of a revision.  `path` is absolute, under the store."""

    layout: str
    path: str
    num_blocks: int
    true_bytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How a running engine's packed files are told and measured; `streams` are the two that a
    revision of it can have, one of them alone."""

    streams: tuple[str, str]
    block_bytes: int

    @classmethod
    def of(cls, info: EngineInfo, block_bytes: int) -> "Packing":
        """Those of `info`, whose blocks have `block_bytes`."""
        gained = PackedModule(0, "", 1, 1.0, gain=True)
        plain = stream_id(info.layout, info.base, ())
        return cls((plain, stream_id(info.layout, info.base, (gained,))), block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """Whose tokenizer a revision has: its files say it, beside those of the base."""

    num_tokens: int  # ids of a vocabulary of its own; 0 = the base's
    own_tokenizer: bool
    base_text: str  # for which base's files the two hold; "" = nobody has asked

    @property
    def told(self) -> str:
        """In words."""
        whose = "its own" if self.own_tokenizer else "the base's"
        return f"{whose} tokenizer" + (f", {self.num_tokens:,} tokens" if self.num_tokens else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionRecord:
    """One immutable content.  `rank` is the largest of its modules, `ranks` the largest of each."""

    rev: str
    rank: int
    ranks: Mapping[str, int]
    alpha: float
    rslora: bool
    targets: tuple[str, ...]
    num_layers: int  # that carry tensors
    dtype: str
    file_bytes: int
    changes_kv: bool
    modules: tuple[PackedModule, ...]  # in stream order
    alora_tokens: tuple[int, ...] = ()  # of an activated LoRA: those that it is invoked by
    num_tokens: int = 0  # these three: see TextFacts
    own_tokenizer: bool = False
    base_text: str = ""
    warnings: tuple[str, ...] = ()
    packed: Mapping[str, PackedRecord] = field(default_factory=dict)  # by layout
    created_at: float = 0.0

    @property
    def text(self) -> TextFacts:
        return TextFacts(
            num_tokens=self.num_tokens,
            own_tokenizer=self.own_tokenizer,
            base_text=self.base_text,
        )

    def stream(self, info: EngineInfo) -> str:
        """What its packed file for that engine is called by."""
        return stream_id(info.layout, info.base, self.modules)

    def packed_for(self, info: EngineInfo | None) -> PackedRecord | None:
        """Its packed file for that engine, if there is one."""
        return self.packed.get(self.stream(info)) if info is not None else None

    def num_blocks(self, info: EngineInfo) -> int:
        """What it takes of that engine's arena, whether or not it is packed for it yet."""
        packed = self.packed_for(info)
        return packed.num_blocks if packed is not None else blocks_of(self.modules, info)

    def packed_bytes(self, info: EngineInfo) -> int:
        """Of its packed file for that engine."""
        return self.num_blocks(info) * info.packed_block_bytes

    def packed_manifest(self, info: EngineInfo) -> PackedManifest | None:
        """What that engine needs to know of it; None until it is packed for it."""
        packed = self.packed_for(info)
        if packed is None:
            return None
        return PackedManifest(
            rev=self.rev,
            path=packed.path,
            layout=packed.layout,
            num_blocks=packed.num_blocks,
            true_bytes=packed.true_bytes,
            max_rank=self.rank,
            changes_kv=self.changes_kv,
            modules=self.modules,
            alora_tokens=self.alora_tokens,
            num_tokens=self.num_tokens,
        )


def blocks_of(modules: Sequence[PackedModule], info: EngineInfo) -> int:
    """Blocks that the packer will lay them over; 0 of what it will refuse, for rows wider than a
    block.  About 2 ms for 224 modules."""
    try:
        return place(modules, layout_of(info)).num_blocks
    except AdapterInvalid:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """One name.  `stored_state` is registered, quarantined or missing."""

    name: str
    tenant: str | None
    model: str
    stored_state: State
    pinned: bool
    priority: int
    labels: Mapping[str, str]
    source: str
    serving_rev: str | None
    candidate_rev: str | None
    reason: str | None  # E_... of the quarantine, or of the candidate that failed last
    reason_message: str | None
    display_name: str | None
    created_at: float
    last_used_at: float | None
    tombstone_digest: str | None = None  # content of this name that was removed and stays away


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A name with the revisions that it points to."""

    adapter: AdapterRecord
    revision: RevisionRecord | None  # serving
    candidate: RevisionRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What `register` did.  `unchanged`: this content was serving (or the candidate) already."""

    name: str
    rev: str
    created: bool  # the name is new
    unchanged: bool
    serving: bool  # False: it waits as the candidate
    replaced_rev: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What `remove` took away."""

    name: str
    serving_rev: str | None
    candidate_rev: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """Content of `name` from `source` that an operator removed; it stays away until it changes."""

    name: str
    source: str
    digest: str
    removed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One line of the history that survives a restart; `id` rises for ever."""

    id: int
    time: float
    level: str  # info warn error
    type: str
    name: str
    rev: str
    cause: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Who asked for what, and what came of it."""

    id: int
    time: float
    actor: str
    action: str
    name: str
    rev: str
    result: str  # ok, unchanged, or an error code
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUse:
    """A packed file, and when one of its names was used last, or it was packed."""

    rev: str
    layout: str
    used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """Something that was begun for somebody and may outlive its client, and the daemon.

    `wish` is JSON that its kind understands; no secret is ever in it.  `total_bytes` 0 is unknown.
    `code`, `reason`, `message` and `hint` say why it failed.
    """

    id: str
    kind: str
    target: str
    state: str  # queued running done failed cancelled
    done_bytes: int = 0
    total_bytes: int = 0
    wish: str = "{}"
    commit: str = ""
    staging: str = ""
    name: str = ""  # of the adapter, once it is known
    rev: str = ""
    code: str = ""
    reason: str = ""
    message: str = ""
    hint: str = ""
    actor: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def live(self) -> bool:
        """It has not ended."""
        return self.state in LIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One key of a tenant: its public id and the SHA-256 of the whole, in hex.  0 = never."""

    id: str
    digest: str = field(repr=False)
    created_at: float = 0.0
    expires_at: float = 0.0
    last_used_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """Who it is (`uids`, `keys`), and what it may.  `adapters` are globs; 0 is no limit of its own.

    `keys`: newest first.
    """

    name: str
    adapters: tuple[str, ...]
    base: bool = True
    uids: tuple[int, ...] = ()
    rpm: int = 0
    tokens_per_minute: int = 0
    queue: int = 0
    max_priority: int = 100
    weight: float = 1.0
    created_at: float = 0.0
    last_used_at: float = 0.0
    keys: tuple[KeyRecord, ...] = ()


#: States of an operation that has not ended.
LIVE = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """`total` counts every match; `cursor` is None on the last page."""

    items: tuple[AdapterRecord, ...]
    total: int
    cursor: str | None = None

"""EngineConfig: every setting of one engine, frozen, checked at birth.

`auto` values stay `auto` here; `process.py` resolves them into a new object once the device and
the model are known.  Torch-free.
"""

from typing import Literal

from msgspec import Struct

from engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
EvictionPolicy = Literal["cost", "lru", "fifo", "lfu"]
#: Kinds of drafts that are known elsewhere, and why there are none here.
NO_DRAFTS = {
    "eagle": "heads that draft are not served",
    "medusa": "heads that draft are not served",
    "mtp": "heads that draft are not served",
}
MOST_DRAFT_TOKENS = 8
MOST_EXTRA_VOCAB = 65536
#: GPUs of one host, at the most.
MOST_RANKS = 16
#: Of a card's memory so much may be in use at the most, whoever has it.
MOST_UTILIZATION = 0.98
#: How much of a packed file is held against its checksums when it is read: a block, or all of it.
VerifyOnLoad = Literal["off", "sample", "full"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class PoolsToo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine that keeps keys and values makes vectors and scores: see PoolingConfig, which
    has the same fields and their checks."""

    root: str  # the folder with modules.json, which may be above that of config.json
    alone: bool = False  # it generates nothing
    pooling: str = ""
    truncate: bool = False
    score_tokens: tuple[int, ...] = ()
    prefix_cache: str = "auto"
    chunked_prefill: str = "auto"


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine process.  Zero means `auto` for sizes.  Raises ConfigError."""

    model: str  # folder with config.json, *.safetensors
    device: Device = "auto"
    dtype: DTypeName = "auto"  # auto: fp32 on CPU, the checkpoint's own on CUDA
    block_size: int = 16  # tokens a block
    max_model_len: int = 0  # 0 = the model's max_position_embeddings
    max_num_seqs: int = 64
    max_batch_tokens: int = 0  # rows a step; 0 = 512 on CPU, 2048 on CUDA
    mixed_tokens: int = 0  # of these, while somebody decodes; 0 = 64 on CPU, 192 on CUDA
    pooled_tokens: int = 0  # of these, to be pooled; 0 = half as many as decode, 128 on CUDA
    graph_tokens: int = 512  # rows of the largest mixed step that replays a graph; 0 = none does
    gpu_memory_utilization: float = 0.9
    cpu_pool: int = 2 * GIB  # arena bytes on CPU
    num_blocks: int = 0  # overrides both of the above (tests, exact plans)
    slots: int = 1024
    max_rank: int = 512
    extra_vocab: int = 0  # token ids behind the base's that adapters may bring rows for
    ram_cache: int = 1 * GIB  # bytes of packed adapters in host memory
    kv_floor: int = 0  # bytes that adapters never take; 0 = a full-length sequence, at most 10%
    adapter_floor: int = 0  # bytes of the arena that KV never takes from adapters; 0 = none
    eviction: EvictionPolicy = "cost"
    starve_after: float = 2.0  # seconds
    thrash_window: float = 60.0  # seconds
    load_bytes_in_flight: int = 256 * MIB
    verify_on_load: VerifyOnLoad = "off"
    deterministic: bool = False
    speculation: str = "off"  # "ngram": drafts from a sequence's own tokens; "draft": a model's
    speculation_tokens: int = 4  # the longest draft
    draft_model: str = ""  # with "draft": the folder of a smaller model of the same vocabulary
    threads: int = 0  # CPU threads for torch; 0 = its default
    pools: PoolsToo | None = None  # None: it generates alone
    tensor_parallel: int = 1  # processes that share the model, one a GPU
    pipeline_parallel: int = 1  # nothing else is served
    fail_reads_slowly: float = 0.0  # fault injection: seconds slept in the RAM-tier reader

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be {rule}")

        need(bool(self.model), "model", "a folder")
        need(self.block_size in (8, 16, 32, 64), "block_size", "8, 16, 32 or 64")
        need(
            self.max_model_len == 0 or self.max_model_len >= 2,
            "max_model_len",
            "0 (the model's), or 2 or more: a token of prompt and one of the answer",
        )
        need(self.max_num_seqs >= 1, "max_num_seqs", "1 or more")
        need(self.max_batch_tokens >= 0, "max_batch_tokens", "0 (auto) or more")
        need(self.mixed_tokens >= 0, "mixed_tokens", "0 (auto) or more")
        need(self.pooled_tokens >= 0, "pooled_tokens", "0 (auto) or more")
        need(0 <= self.graph_tokens <= 1024, "graph_tokens", "0 (no mixed graphs) to 1024")
        share = 0.05 <= self.gpu_memory_utilization <= MOST_UTILIZATION
        need(share, "gpu_memory_utilization", f"0.05 to {MOST_UTILIZATION}")
        need(self.cpu_pool >= MIB, "cpu_pool", "1 MiB or more")
        need(self.num_blocks >= 0, "num_blocks", "0 (auto) or more")
        need(1 <= self.slots <= 65536, "slots", "1 to 65536")
        need(1 <= self.max_rank <= 4096, "max_rank", "1 to 4096")
        need(
            0 <= self.extra_vocab <= MOST_EXTRA_VOCAB,
            "extra_vocab",
            f"0 to {MOST_EXTRA_VOCAB} token ids",
        )
        need(self.ram_cache >= 0, "ram_cache", "0 or more bytes")
        need(self.kv_floor >= 0, "kv_floor", "0 (auto) or more bytes")
        need(self.adapter_floor >= 0, "adapter_floor", "0 or more bytes")
        need(self.starve_after > 0, "starve_after", "above 0 seconds")
        need(self.thrash_window > 0, "thrash_window", "above 0 seconds")
        need(self.load_bytes_in_flight > 0, "load_bytes_in_flight", "above 0 bytes")
        need(self.threads >= 0, "threads", "0 (auto) or more")
        self._check_speculation()
        self._check_ranks()
        if self.max_batch_tokens and self.max_batch_tokens < self.max_num_seqs:
            rows, seqs = self.max_batch_tokens, self.max_num_seqs
            raise ConfigError(
                f"max_batch_tokens = {rows} is below max_num_seqs = {seqs}",
                hint="each running sequence needs a row in every step",
            )

    def _check_ranks(self) -> None:
        if self.pipeline_parallel != 1:
            raise ConfigError(
                f"pipeline_parallel = {self.pipeline_parallel}: layers are not spread over GPUs: a "
                "stage would wait for the others in every token, and adapters gain nothing from it",
                hint="set tensor_parallel, which shares every layer among the GPUs of one host",
            )
        ranks = self.tensor_parallel
        if not 1 <= ranks <= MOST_RANKS:
            raise ConfigError(f"tensor_parallel = {ranks}: must be 1 to {MOST_RANKS}")
        if ranks > 1 and self.deterministic:
            raise ConfigError(
                f"tensor_parallel = {ranks}: not with deterministic: in what order GPUs add up "
                "their parts depends on how many rows a step has",
                hint="set tensor_parallel = 1, or deterministic = false",
            )
        if ranks > 1 and self.draft_model:
            raise ConfigError(
                f"tensor_parallel = {ranks}: not with draft_model: its KV lies in the model's "
                "blocks, and of those every GPU has a part",
                hint='set speculation = "ngram", which needs no model, or "off"',
            )
        if ranks > 1 and self.pools is not None:
            raise ConfigError(
                f"tensor_parallel = {ranks}: not for a model that makes vectors or scores too",
                hint="let one [[models]] entry generate on all GPUs, and another pool on one",
            )

    @property
    def purpose(self) -> Literal["generate", "pool", "both"]:
        """What its base is for."""
        if self.pools is None:
            return "generate"
        return "pool" if self.pools.alone else "both"

    @property
    def draft_tokens(self) -> int:
        """The longest draft; 0 = nobody has any."""
        return self.speculation_tokens if self.speculation != "off" else 0

    def _check_speculation(self) -> None:
        kind, tokens = self.speculation, self.speculation_tokens
        if kind not in ("off", "ngram", "draft"):
            why = NO_DRAFTS.get(kind.partition("-")[0].lower().rstrip("0123456789"))
            raise ConfigError(
                f"speculation = {kind!r}: {why or 'there is no such kind of drafts'}",
                hint='"ngram" drafts from the text itself, "draft" by draft_model; "off" is none',
            )
        if kind == "draft" and not self.draft_model:
            raise ConfigError(
                "speculation = 'draft': draft_model names no model that drafts",
                hint='set it to the folder of a smaller model of the same vocabulary, or "ngram"',
            )
        if kind != "draft" and self.draft_model:
            raise ConfigError(
                f"draft_model = {self.draft_model!r}: speculation = {kind!r} has no use for it",
                hint='set speculation = "draft", or leave draft_model out',
            )
        if not 1 <= tokens <= MOST_DRAFT_TOKENS:
            raise ConfigError(f"speculation_tokens = {tokens!r}: must be 1 to {MOST_DRAFT_TOKENS}")
        for name in ("max_batch_tokens", "mixed_tokens") if kind != "off" else ():
            if getattr(self, name) == 1:
                raise ConfigError(
                    f"{name} = 1 leaves no row for a draft beside the token itself",
                    hint='set 2 or more (0: chosen for the device), or speculation = "off"',
                )

"""The sections of lorad.toml: every key, its type and its default.

Goes in: nothing.  Comes out: frozen Structs, sizes in bytes, durations in seconds.  What may stand
beside what is `config.check`'s to say.
"""

from typing import Literal

from msgspec import Struct

from engine.config import GIB, KIB, MIB, Device, DTypeName, EvictionPolicy, VerifyOnLoad
from engine.pooling.config import Switch
from engine.pooling.fit import GENERATE
from engine.pooling.spec import PoolingKind
from lorad.config_values import AutoNumber, AutoShare, AutoSize, Seconds, Size


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: a key that is not a field never gets this far."""


class Model(_Section, frozen=True, kw_only=True):
    """One base model and the engine that serves it.  0 = auto."""

    base: str = ""  # a folder with config.json and *.safetensors
    name: str = ""  # how requests call it; "" = the folder's name
    tasks: tuple[str, ...] = ()  # () = what its files say it is for
    dtype: DTypeName = "auto"
    device: Device = "auto"
    replicas: int = 1  # engines of it, each on a GPU of its own
    block_size: int = 16
    max_model_len: AutoNumber = 0
    max_num_seqs: int = 64
    max_batch_tokens: AutoNumber = 0
    mixed_tokens: AutoNumber = 0
    pooled_tokens: AutoNumber = 0  # of these, inputs to be pooled, where a model does both
    graph_tokens: int = 512
    gpu_memory_utilization: float = 0.9
    cpu_pool: Size = 2 * GIB
    num_blocks: AutoNumber = 0
    threads: AutoNumber = 0
    tensor_parallel: int = 1  # GPUs that share every layer
    pipeline_parallel: int = 1  # above it is refused, with the reason
    deterministic: bool = False
    speculation: str = "off"  # or "ngram", "draft"; the engine says why no other
    speculation_tokens: int = 4
    draft_model: str = ""  # a folder as `base` is
    stall_after: Seconds = 10.0  # without a sign of life, requests are told engine_stalled
    replace_after: Seconds = 60.0  # and after so much more of it, the engine is replaced
    # Of a model that pools:
    truncate: bool = False  # longer inputs are cut, unless a request says otherwise
    pooling: Literal["auto", PoolingKind] = "auto"  # in place of what its files say
    prefix_cache: Switch = "auto"  # on is refused where it is not served, with the reason
    chunked_prefill: Switch = "auto"
    beside_generators: AutoShare = 0.0  # share of a device that one which generates is at work on
    # Of a decoder that scores pairs:
    score_words: tuple[str, ...] = ("yes", "no")  # whose shares of an answer are the score
    pair_template: str = "auto"  # or tokenizer, qwen3-reranker, or a Jinja file

    @property
    def pools(self) -> bool:
        """It makes vectors and scores, and generates nothing."""
        return bool(self.tasks) and GENERATE not in self.tasks

    @property
    def pools_too(self) -> bool:
        """It generates, and makes vectors or scores."""
        return GENERATE in self.tasks and len(set(self.tasks)) > 1


class Lora(_Section, frozen=True, kw_only=True):
    """The tiers of adapters."""

    slots: int = 1024
    max_rank: int = 512
    extra_vocab: int = 256  # token ids behind the base's that adapters may bring rows for
    ram_cache: Size = GIB
    kv_floor: AutoSize = 0
    adapter_floor: AutoSize = 0
    adapter_pool: Size = 256 * MIB  # a pooling model: bytes of adapters on the device
    pin_limit: AutoSize = 0  # bytes that pinned adapters may hold together
    eviction: EvictionPolicy = "cost"
    starve_after: Seconds = 2.0
    thrash_window: Seconds = 60.0
    verify_on_load: VerifyOnLoad = "sample"
    allowed_roots: tuple[str, ...] = ()  # besides the inbox: folders that an operator may name
    resolve: bool = False  # may a request's model be a reference, and be pulled for it?
    resolve_allow: tuple[str, ...] = ()  # which: hf:ORG/* and the like; none unless named
    resolve_every: Seconds = 600.0  # how long a reference without a commit means the same one


class Watch(_Section, frozen=True, kw_only=True):
    """The inbox.  `mode` off: no folder is watched."""

    dir: str = ""  # "" = <state>/inbox
    mode: Literal["auto", "inotify", "polling", "off"] = "auto"
    settle: Seconds = 2.0
    rescan: Seconds = 60.0
    on_delete: Literal["keep", "remove"] = "keep"
    max_adapter_bytes: Size = 4 * GIB


class Inference(_Section, frozen=True, kw_only=True):
    socket: str = ""  # "" = <runtime>/inference.sock
    mode: str = "0660"
    group: str = ""  # "" = lorad where it exists, as root
    auth: Literal["peer", "key", "peer+key"] = "peer"


class Admin(_Section, frozen=True, kw_only=True):
    socket: str = ""  # "" = <runtime>/admin.sock
    mode: str = "0660"
    group: str = ""  # "" = lorad-admin where it exists, as root
    allow_uids: tuple[int, ...] = (0,)  # the daemon's own is always allowed
    audit_log: Literal["journal", "registry", "both", "off"] = "both"


class Tcp(_Section, frozen=True, kw_only=True):
    enabled: bool = False
    bind: str = "127.0.0.1:8411"  # the inference routes
    api_keys_file: str = ""
    admin_bind: str = ""  # the admin routes; "" = on their socket alone
    admin_keys_file: str = ""
    allow_hosts: tuple[str, ...] = ("localhost",)


class Limits(_Section, frozen=True, kw_only=True):
    """What one request, one client and all of them together may take."""

    body: Size = 4 * MIB
    headers: Size = 16 * KIB
    request_receipt: Seconds = 20.0
    idle: Seconds = 75.0
    connections: int = 1024
    queue: int = 512
    queue_per_tenant: int = 128
    n: int = 16
    max_tokens: int = 8192
    stop: int = 16
    logit_bias: int = 1024
    json_depth: int = 64
    schema_bytes: Size = 64 * KIB
    inputs: int = 2048  # texts of one request for vectors or scores
    token_vectors: Size = 32 * MIB  # of one request: fp32 vectors of all tokens, in bytes
    stall_write: Seconds = 30.0
    deadline: Seconds = 600.0
    strict_params: bool = False  # refuse unknown parameters of a request instead of ignoring them


class Shutdown(_Section, frozen=True, kw_only=True):
    drain_timeout: Seconds = 30.0


class Metrics(_Section, frozen=True, kw_only=True):
    tcp: str = ""  # besides the admin socket
    beyond_loopback: bool = False
    adapter_labels: int = 200
    tenant_label: bool = False


class Otel(_Section, frozen=True, kw_only=True):
    """Traces of requests, with the extra `otel`.  Other variables of OTEL_* are its SDK's."""

    endpoint: str = ""  # of a collector that speaks OTLP over HTTP; "" = no traces
    sample: float = 1.0  # the share of requests, of those that are no part of a client's trace


class Pull(_Section, frozen=True, kw_only=True):
    """Fetching adapters, wherever from."""

    timeout: Seconds = 10.0
    plain_http: bool = False


class HuggingFace(_Section, frozen=True, kw_only=True):
    offline: bool = False
    token_file: str = ""
    endpoint: str = ""  # "" = HF_ENDPOINT, or huggingface.co
    cache_dir: str = ""  # "" = HF_HUB_CACHE, HF_HOME/hub, or <cache>/huggingface/hub


class S3(_Section, frozen=True, kw_only=True):
    """Credentials are boto3's own: environment, ~/.aws, the machine's role."""

    endpoint: str = ""  # "" = AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or Amazon's
    region: str = ""  # "" = AWS_REGION, ~/.aws/config
    unsigned: bool = False  # for public buckets


class StoreSection(_Section, frozen=True, kw_only=True):
    dir: str = ""  # "" = <data>/store
    budget: AutoSize = 0  # bytes of adapter files; 0 = what the disk holds


class RegistrySection(_Section, frozen=True, kw_only=True):
    dir: str = ""  # "" = <state>


class Log(_Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


SECTIONS: dict[str, type[_Section]] = {
    "lora": Lora,
    "watch": Watch,
    "inference": Inference,
    "admin": Admin,
    "tcp": Tcp,
    "limits": Limits,
    "shutdown": Shutdown,
    "metrics": Metrics,
    "otel": Otel,
    "pull": Pull,
    "hf": HuggingFace,
    "s3": S3,
    "store": StoreSection,
    "registry": RegistrySection,
    "log": Log,
}

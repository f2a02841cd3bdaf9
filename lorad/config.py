"""Settings: every key of lorad.toml, frozen and checked at birth.

    Settings
    ├── models      [[models]]   the base model and its engine
    ├── lora        [lora]       slots, tiers, eviction
    ├── watch       [watch]      the inbox
    ├── inference   [inference]  the socket for applications
    ├── admin       [admin]      the socket for operators
    ├── pull hf s3  [pull] ...   where adapters are fetched from
    ├── tcp limits shutdown metrics otel store registry log

Goes in: plain nested dicts, already merged (`config_sources`).  Comes out: frozen Structs, sizes in
bytes, durations in seconds, or BadConfig.  Reads no environment, and of files the model's alone.
`resolved` fills in what depends on them and on the machine's directories.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from engine.config import (
    GIB,
    KIB,
    MIB,
    Device,
    DTypeName,
    EngineConfig,
    EvictionPolicy,
    VerifyOnLoad,
)
from engine.errors import ConfigError
from engine.pooling.config import PoolingConfig, Switch
from engine.pooling.fit import GENERATE, usual_tasks
from engine.pooling.spec import PoolingKind
from lorad.config_network import check_metrics, check_tcp
from lorad.config_tasks import check_lora, check_tasks, of_pooling, ours, pools_too
from lorad.config_values import AutoSize, Seconds, Size, hints
from lorad.errors import BadConfig
from lorad.paths import Paths

ENDPOINT = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
#: A host has no more GPUs.
MOST_REPLICAS = 64
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")


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
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_batch_tokens: int = 0
    mixed_tokens: int = 0
    pooled_tokens: int = 0  # of these, inputs to be pooled, where a model does both
    graph_tokens: int = 512
    gpu_memory_utilization: float = 0.9
    cpu_pool: Size = 2 * GIB
    num_blocks: int = 0
    threads: int = 0
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
    beside_generators: float = 0.0  # share of a device that one which generates is at work on
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


class Settings(Struct, frozen=True, kw_only=True):
    """Everything that the daemon was told.  `origins`: dotted key -> where its value came from."""

    models: tuple[Model, ...] = ()
    lora: Lora = Lora()
    watch: Watch = Watch()
    inference: Inference = Inference()
    admin: Admin = Admin()
    tcp: Tcp = Tcp()
    limits: Limits = Limits()
    shutdown: Shutdown = Shutdown()
    metrics: Metrics = Metrics()
    otel: Otel = Otel()
    pull: Pull = Pull()
    hf: HuggingFace = HuggingFace()
    s3: S3 = S3()
    store: StoreSection = StoreSection()
    registry: RegistrySection = RegistrySection()
    log: Log = Log()
    origins: dict[str, str] = {}

    def process_config(self, index: int = 0) -> EngineConfig | PoolingConfig:
        """What the engine process of a model is told.  BadConfig if the engine refuses it."""
        pools = self.models[index].pools
        return self.pooling_config(index) if pools else self.engine_config(index)

    def pooling_config(self, index: int = 0) -> PoolingConfig:
        """The share of an engine that pools, under its names.  BadConfig if it refuses it."""
        told = model_key(index, "max_num_seqs") in self.origins
        try:
            return of_pooling(self.models[index], self.lora, many=told)
        except ConfigError as error:
            raise self.refused(error, index) from error

    def engine_config(self, index: int = 0) -> EngineConfig:
        """The engine's share, under the engine's names.  BadConfig if the engine refuses it."""
        m, lora = self.models[index], self.lora
        try:
            return EngineConfig(
                model=m.base,
                device=m.device,
                dtype=m.dtype,
                block_size=m.block_size,
                max_model_len=m.max_model_len,
                max_num_seqs=m.max_num_seqs,
                max_batch_tokens=m.max_batch_tokens,
                mixed_tokens=m.mixed_tokens,
                pooled_tokens=m.pooled_tokens,
                graph_tokens=m.graph_tokens,
                gpu_memory_utilization=m.gpu_memory_utilization,
                cpu_pool=m.cpu_pool,
                num_blocks=m.num_blocks,
                threads=m.threads,
                tensor_parallel=m.tensor_parallel,
                pipeline_parallel=m.pipeline_parallel,
                deterministic=m.deterministic,
                speculation=m.speculation,
                speculation_tokens=m.speculation_tokens,
                draft_model=m.draft_model,
                slots=lora.slots,
                max_rank=lora.max_rank,
                ram_cache=lora.ram_cache,
                kv_floor=lora.kv_floor,
                adapter_floor=lora.adapter_floor,
                eviction=lora.eviction,
                starve_after=lora.starve_after,
                verify_on_load=lora.verify_on_load,
                thrash_window=lora.thrash_window,
                pools=pools_too(m) if m.pools_too else None,
            )
        except ConfigError as error:
            raise self.refused(error, index) from error

    def refused(self, error: ConfigError, index: int = 0) -> BadConfig:
        """What a model's engine says of a setting, by its key here and where its value is from."""
        message = ours(error.message) if self.models[index].pools else error.message
        key, space, rest = message.partition(" ")
        if key not in hints(Lora) and key not in hints(Model):
            return BadConfig(f"{model_key(index, 'base')}: {message}", hint=error.hint)
        dotted = f"lora.{key}" if key in hints(Lora) else model_key(index, key)
        where = self.origins.get(dotted)
        told = f"{dotted}{space}{rest}" + (f" ({where})" if where else "")
        return BadConfig(told, hint=error.hint or f"lorad --print-config says where {key} is set")


def model_key(index: int, key: str) -> str:
    """How a key of one [[models]] is told and set: `models.base` is the first one's, and
    `models.1.base` that of the second."""
    return f"models.{index}.{key}" if index else f"models.{key}"


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


# ----------------------------------------------------------------- the whole
def check(settings: Settings) -> Settings:
    """Refuse what contradicts itself or belongs to a later version; raises BadConfig."""

    def need(ok: bool, key: str, rule: str, hint: str = "") -> None:
        if not ok:
            where = settings.origins.get(key)
            told = f"{key}: {rule}" + (f" ({where})" if where else "")
            raise BadConfig(told, hint=hint or f"lorad --print-config says where {key} is set")

    need(bool(settings.models), "models", "a daemon needs a [[models]]")
    for index in range(len(settings.models)):
        _check_model(settings, index, need)
    _check_together(settings, need)
    admin = settings.admin
    check_tcp(settings, need)
    check_metrics(settings.metrics, need)
    uids = all(0 <= uid < 1 << 32 for uid in admin.allow_uids)
    need(uids, "admin.allow_uids", "user ids: `id -u NAME` prints one")
    for key, mode in (("inference.mode", settings.inference.mode), ("admin.mode", admin.mode)):
        need(bool(re.fullmatch(r"0?[0-7]{3}", mode)), key, 'an octal mode such as "0660"')
        need(not int(mode, 8) & 0o002, key, "a socket that everybody may write to is refused")
    limits = settings.limits
    counts = ("connections", "queue", "queue_per_tenant", "n", "max_tokens", "json_depth", "inputs")
    for name in counts:
        need(getattr(limits, name) >= 1, f"limits.{name}", "1 or more")
    for name in ("body", "headers"):  # less, and the command that would mend it is refused too
        need(getattr(limits, name) >= 4 * KIB, f"limits.{name}", "4KiB or more")
    for name in ("request_receipt", "stall_write", "deadline"):
        need(getattr(limits, name) > 0, f"limits.{name}", "above 0 seconds")
    for name in ("stop", "logit_bias", "schema_bytes"):
        need(getattr(limits, name) >= 0, f"limits.{name}", "0 or more")
    need(settings.pull.timeout > 0, "pull.timeout", "above 0 seconds")
    for section in ("hf", "s3", "otel"):
        url, rule = getattr(settings, section).endpoint, "https://HOST, without user and query"
        need(not url or bool(ENDPOINT.fullmatch(url)), f"{section}.endpoint", rule)
    need(0 <= settings.otel.sample <= 1, "otel.sample", "from 0 (none) to 1 (all)")
    need(settings.watch.rescan > 0, "watch.rescan", "above 0 seconds")
    for pattern in settings.lora.resolve_allow:
        need(
            pattern.startswith(("hf:", "s3://")) and "@" not in pattern,
            "lora.resolve_allow",
            f"{pattern!r} is no pattern of references without commits",
            'write "hf:ORG/*", "hf:ORG/REPO" or "s3://BUCKET/*"',
        )
    for index in range(len(settings.models)):
        settings.process_config(index)
    return settings


def doubts(settings: Settings) -> tuple[str, ...]:
    """What is allowed and probably not meant; said at the start."""
    found = []
    if settings.lora.resolve and not settings.lora.resolve_allow:
        found.append("lora.resolve is on, but lora.resolve_allow is empty: no reference is allowed")
    if settings.tcp.enabled and not settings.tcp.api_keys_file:
        found.append("tcp.enabled without tcp.api_keys_file: every user of this machine may ask")
    return tuple(found)


def _check_model(settings: Settings, index: int, need: Callable[..., None]) -> None:
    """One [[models]] by itself."""
    model, base, name = settings.models[index], model_key(index, "base"), model_key(index, "name")
    need(bool(model.base), base, "a model needs a base: the folder of its files")
    folder = Path(model.base)
    known = any((folder / file).is_file() for file in ("config.json", "modules.json"))
    need(known, base, f"no config.json in {folder}", "give the folder of a Hugging Face model")
    need(bool(MODEL_NAME.fullmatch(model.name)), name, "letters, digits, dot, dash")
    same = [i for i, other in enumerate(settings.models[:index]) if other.name == model.name]
    need(
        not same,
        name,
        f"two models are called {model.name}",
        f'{name} = "another-name": requests ask for a model by it',
    )
    rule = f"1 to {MOST_REPLICAS}: engines of this model"
    need(1 <= model.replicas <= MOST_REPLICAS, model_key(index, "replicas"), rule)
    check_tasks(model, partial(model_key, index), settings.origins, need)


def _check_together(settings: Settings, need: Callable[..., None]) -> None:
    """What the models have of [lora]; of a card or of the host's memory, `checks.py` looks."""
    check_lora(settings.models, settings.lora, settings.origins, need)


def resolved(settings: Settings, paths: Paths) -> Settings:
    """Fill in the directories, and what a model is for by its files.  Without a runtime directory
    the sockets stay "" until `placed`."""
    replace = msgspec.structs.replace
    models = tuple(
        replace(
            m,
            base=base,
            name=m.name or Path(base).name,
            draft_model=str(Path(m.draft_model).expanduser().absolute()) if m.draft_model else "",
            tasks=m.tasks or (usual_tasks(Path(base)) if base else (GENERATE,)),
        )
        for m in settings.models
        for base in [str(Path(m.base).expanduser().absolute()) if m.base else ""]
    )
    settings = replace(
        settings,
        models=models,
        watch=replace(settings.watch, dir=settings.watch.dir or str(paths.state / "inbox")),
        hf=replace(settings.hf, cache_dir=settings.hf.cache_dir or str(paths.hub)),
        store=replace(settings.store, dir=settings.store.dir or str(paths.data / "store")),
        registry=replace(settings.registry, dir=settings.registry.dir or str(paths.state)),
    )
    return placed(settings, paths.runtime) if paths.runtime else settings


def placed(settings: Settings, runtime: Path) -> Settings:
    """Put the sockets that have no path of their own into `runtime`."""
    replace = msgspec.structs.replace
    inference, admin = settings.inference, settings.admin
    return replace(
        settings,
        inference=replace(inference, socket=inference.socket or str(runtime / "inference.sock")),
        admin=replace(admin, socket=admin.socket or str(runtime / "admin.sock")),
    )

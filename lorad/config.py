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
from ipaddress import IPv4Address, IPv6Address, ip_address
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
from lorad.config_tasks import check_tasks, of_pooling, ours
from lorad.config_values import AutoSize, Seconds, Size, hints
from lorad.errors import BadConfig
from lorad.paths import Paths

ENDPOINT = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
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
    block_size: int = 16
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_batch_tokens: int = 0
    mixed_tokens: int = 0
    graph_tokens: int = 512
    gpu_memory_utilization: float = 0.9
    cpu_pool: Size = 2 * GIB
    num_blocks: int = 0
    threads: int = 0
    deterministic: bool = False
    speculation: str = "off"  # or "ngram"; the engine says why no other
    speculation_tokens: int = 4
    stall_after: Seconds = 10.0  # without a sign of life, requests are told engine_stalled
    replace_after: Seconds = 60.0  # and after so much more of it, the engine is replaced
    # Of a pooling model:
    truncate: bool = False  # longer inputs are cut, unless a request says otherwise
    pooling: Literal["auto", PoolingKind] = "auto"  # in place of what its files say
    prefix_cache: Switch = "auto"  # on is refused where it is not served, with the reason
    chunked_prefill: Switch = "auto"
    # Of a decoder that scores pairs:
    score_words: tuple[str, ...] = ("yes", "no")  # whose shares of an answer are the score
    pair_template: str = "auto"  # or tokenizer, qwen3-reranker, or a Jinja file

    @property
    def pools(self) -> bool:
        """It makes vectors and scores, and generates nothing."""
        return bool(self.tasks) and GENERATE not in self.tasks


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

    @property
    def model(self) -> Model:
        return self.models[0]

    def process_config(self) -> EngineConfig | PoolingConfig:
        """What the engine process is told.  BadConfig if the engine refuses it."""
        return self.pooling_config() if self.model.pools else self.engine_config()

    def pooling_config(self) -> PoolingConfig:
        """The share of an engine that pools, under its names.  BadConfig if it refuses it."""
        try:
            return of_pooling(self.model, self.lora, self.origins)
        except ConfigError as error:
            raise self.refused(error) from error

    def engine_config(self) -> EngineConfig:
        """The engine's share, under the engine's names.  BadConfig if the engine refuses it."""
        m, lora = self.model, self.lora
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
                graph_tokens=m.graph_tokens,
                gpu_memory_utilization=m.gpu_memory_utilization,
                cpu_pool=m.cpu_pool,
                num_blocks=m.num_blocks,
                threads=m.threads,
                deterministic=m.deterministic,
                speculation=m.speculation,
                speculation_tokens=m.speculation_tokens,
                slots=lora.slots,
                max_rank=lora.max_rank,
                ram_cache=lora.ram_cache,
                kv_floor=lora.kv_floor,
                adapter_floor=lora.adapter_floor,
                eviction=lora.eviction,
                starve_after=lora.starve_after,
                verify_on_load=lora.verify_on_load,
                thrash_window=lora.thrash_window,
            )
        except ConfigError as error:
            raise self.refused(error) from error

    def refused(self, error: ConfigError) -> BadConfig:
        """What the engine says of a setting, by its key here and where its value is from."""
        message = ours(error.message) if self.model.pools else error.message
        key = message.partition(" ")[0]
        if key not in hints(Lora) and key not in hints(Model):
            return BadConfig(f"models.base: {message}", hint=error.hint)
        section = "lora" if key in hints(Lora) else "models"
        where = self.origins.get(f"{section}.{key}")
        told = f"{section}.{message}" + (f" ({where})" if where else "")
        return BadConfig(told, hint=error.hint)


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
            raise BadConfig(f"{key}: {rule}" + (f" ({where})" if where else ""), hint=hint)

    need(
        len(settings.models) == 1,
        "models",
        f"one model a daemon for now, and there are {len(settings.models)}",
        "keep one [[models]]; another model is another daemon, with folders and sockets of its own",
    )
    model, admin = settings.model, settings.admin
    need(bool(model.base), "models.base", "a model needs a base: the folder of its files")
    folder = Path(model.base)
    known = any((folder / name).is_file() for name in ("config.json", "modules.json"))
    need(known, "models.base", f"no config.json in {folder}")
    need(bool(MODEL_NAME.fullmatch(model.name)), "models.name", "letters, digits, dot, dash")
    check_tasks(model, settings.lora, settings.origins, need)
    _check_tcp(settings, need)
    _check_metrics(settings.metrics, need)
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
    settings.process_config()
    return settings


def doubts(settings: Settings) -> tuple[str, ...]:
    """What is allowed and probably not meant; said at the start."""
    found = []
    if settings.lora.resolve and not settings.lora.resolve_allow:
        found.append("lora.resolve is on, but lora.resolve_allow is empty: no reference is allowed")
    if settings.tcp.enabled and not settings.tcp.api_keys_file:
        found.append("tcp.enabled without tcp.api_keys_file: every user of this machine may ask")
    return tuple(found)


def _check_metrics(metrics: Metrics, need: Callable[..., None]) -> None:
    need(metrics.adapter_labels >= 0, "metrics.adapter_labels", "0 or more")
    if not metrics.tcp:
        return
    try:
        host, _ = split_address(metrics.tcp)
    except ValueError as error:
        need(False, "metrics.tcp", f'{error}, such as "127.0.0.1:9411"')
        return
    need(
        metrics.beyond_loopback or ip_address(host).is_loopback,
        "metrics.tcp",
        f"{host} can be reached from other machines, and nobody there is asked who they are",
        "metrics.beyond_loopback = true, if they may all read the names of your adapters",
    )


def _check_tcp(settings: Settings, need: Callable[..., None]) -> None:
    tcp = settings.tcp
    if not tcp.enabled:
        return
    beyond = not _address(tcp.bind, "tcp.bind", need).is_loopback
    need(
        not beyond or bool(tcp.api_keys_file) or settings.inference.auth == "key",
        "tcp.bind",
        f"{tcp.bind} can be reached from other machines, and there are no keys",
        'tcp.api_keys_file = "/etc/lorad/secrets/api-keys", or inference.auth = "key" for tenants',
    )
    if tcp.admin_bind:
        _address(tcp.admin_bind, "tcp.admin_bind", need)
        need(
            bool(tcp.admin_keys_file),
            "tcp.admin_bind",
            "over TCP everybody would be an operator: there are no keys",
            'tcp.admin_keys_file = "/etc/lorad/secrets/admin-keys"',
        )


def _address(address: str, key: str, need: Callable[..., None]) -> IPv4Address | IPv6Address:
    try:
        return ip_address(split_address(address)[0])
    except ValueError as error:
        need(False, key, f'{error}, such as "127.0.0.1:8411"')
        raise


def split_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:9411` or `[::1]:9411` as host and port; ValueError otherwise."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError("an IP address and a port")
    try:
        parsed = ip_address(bare)
    except ValueError:
        raise ValueError("an IP address and a port") from None
    if (parsed.version == 6) != (bare != host):
        raise ValueError("an IP address and a port, with brackets around IPv6")
    return bare, int(port)


def resolved(settings: Settings, paths: Paths) -> Settings:
    """Fill in the directories, and what a model is for by its files.  Without a runtime directory
    the sockets stay "" until `placed`."""
    replace = msgspec.structs.replace
    models = tuple(
        replace(
            m,
            base=base,
            name=m.name or Path(base).name,
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

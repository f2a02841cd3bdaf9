"""Settings: every key of lorad.toml, frozen and checked at birth.

    Settings
    ├── models      [[models]]   the base model and its engine
    ├── lora        [lora]       slots, tiers, eviction
    ├── watch       [watch]      the inbox
    ├── inference   [inference]  the socket for applications
    ├── admin       [admin]      the socket for operators
    ├── pull hf s3  [pull] ...   where adapters are fetched from
    ├── tcp limits shutdown metrics otel store registry log

Goes in: sections (`config_sections`), already merged (`config_sources`).  Comes out: the whole,
checked, or BadConfig.  Reads no environment, and of files the model's alone.
`resolved` fills in what depends on them and on the machine's directories.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.config import KIB, EngineConfig
from engine.errors import ConfigError
from engine.pooling.config import PoolingConfig
from engine.pooling.fit import GENERATE, usual_tasks
from lorad.config_network import check_metrics, check_tcp
from lorad.config_sections import (
    S3,
    Admin,
    HuggingFace,
    Inference,
    Limits,
    Log,
    Lora,
    Metrics,
    Model,
    Otel,
    Pull,
    RegistrySection,
    Shutdown,
    StoreSection,
    Tcp,
    Watch,
)
from lorad.config_tasks import check_lora, check_tasks, of_pooling, ours, pools_too
from lorad.config_values import hints
from lorad.errors import BadConfig
from lorad.paths import Paths

ENDPOINT = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
#: A host has no more GPUs.
MOST_REPLICAS = 64
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")


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
                extra_vocab=lora.extra_vocab,
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
    check_tcp(settings.tcp, settings.inference, need)
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
    need(known, base, f"no config.json in {folder}", _instead_of(folder))
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


def _instead_of(folder: Path) -> str:
    """What to give as a base instead of a folder that holds none."""
    if (folder / "adapter_config.json").is_file():
        return "that is an adapter: give its base here, and the adapter to loractl add"
    if not folder.exists():
        return "there is no such folder; a base is not fetched: download it, and give its folder"
    return "give the folder of a Hugging Face model"


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

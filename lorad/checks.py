"""Checks: what a start would refuse, found before it takes anything.

Goes in: Settings.  Comes out: what was looked at, or the StartError that a start would end with,
and so its exit status.  Of a device it asks no more than whether there is one, and of the registry
nothing; it makes no folder, and takes nothing that a daemon which runs might hold: `lorad --check`
may be asked beside it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from engine.client import EncoderSpec, check_fit
from engine.config import GIB
from engine.errors import ConfigError
from lorad import config, key_file
from lorad.api.server import check_tcp, check_unix
from lorad.base import check_base, check_files, drafts_in_doubt, spec_of
from lorad.config import Settings
from lorad.config_sections import Model
from lorad.errors import BadConfig, CannotBind, RegistryUnusable
from lorad.metrics.nvml import has_card
from lorad.tracing import tracing


def check_all(settings: Settings) -> None:
    """Everything, the tokenizer too.  Raises StartError."""
    check_base(settings)
    check_start(settings)


def check_start(settings: Settings) -> None:
    """What a start asks first.  Raises StartError."""
    check_files(settings)
    _check_fit(settings)
    key_file.of_settings(settings)
    tracing.check(settings.otel)
    _check_folders(settings)
    _check_sockets(settings)


def doubts(settings: Settings) -> tuple[str, ...]:
    """What is allowed and probably not meant, in the files of the models too; of settings that
    `check_start` found nothing against."""
    return (*config.doubts(settings), *drafts_in_doubt(settings))


def described(settings: Settings) -> tuple[str, ...]:
    """Of several models each, in a line: its name, what it is for, and its base."""
    if len(settings.models) == 1:
        return ()
    return tuple(f"{m.name}: {', '.join(m.tasks)}, {m.base}" for m in settings.models)


def _check_fit(settings: Settings) -> None:
    """Of a pooling model, `spec_of` has asked."""
    for index, model in enumerate(settings.models):
        spec = spec_of(settings, index)
        if model.pools or isinstance(spec, EncoderSpec):
            continue
        try:
            check_fit(settings.engine_config(index), spec)
        except ConfigError as error:
            raise settings.refused(error, index) from error
    _check_together(settings)


def _check_together(settings: Settings) -> None:
    """Of those that generate: shares of a card, and arenas in host memory.  Where there is no card
    `auto` is the CPU."""
    generate = [m for m in settings.models if not m.pools]
    on_card = [m for m in generate if m.device != "cpu"]
    if on_card and not has_card():
        on_card = [m for m in on_card if m.device == "cuda"]
    _check_shares(settings, on_card)
    _check_pools([m for m in generate if m not in on_card])


def _check_shares(settings: Settings, models: Sequence[Model]) -> None:
    shares = [m.gpu_memory_utilization for m in models]
    if len(shares) < 2 or sum(shares) <= 1.0:
        return
    key = "models.gpu_memory_utilization"
    where = settings.origins.get(key)
    words = " + ".join(f"{share:g}" for share in shares)
    raise BadConfig(
        f"{key}: {words} = {sum(shares):g} of one GPU" + (f" ({where})" if where else ""),
        hint='give each [[models]] its share, 1.0 together at the most; or device = "cpu"',
    )


def _check_pools(models: Sequence[Model]) -> None:
    """Arenas in host memory are taken whole at a start: together they have to fit."""
    pools = [m.cpu_pool for m in models for _ in range(m.replicas)]
    total = psutil.virtual_memory().total
    if len(pools) > 1 and sum(pools) > total:
        message = (
            f"{sum(pools) / GIB:.1f} GiB for {len(pools)} engines, and the machine has "
            f"{total / GIB:.1f}"
        )
        raise BadConfig(f"models.cpu_pool: {message}", hint="a smaller cpu_pool for each of them")


def _check_folders(settings: Settings) -> None:
    for key, text in (("registry.dir", settings.registry.dir), ("store.dir", settings.store.dir)):
        if (thing := _in_the_way(Path(text))) is not None:
            raise RegistryUnusable(
                f"{key}: {thing} is not a directory",
                hint="set another directory, or move that away",
            )
    watch = settings.watch
    if watch.mode != "off" and (thing := _in_the_way(Path(watch.dir))) is not None:
        raise BadConfig(
            f"watch.dir: cannot make {watch.dir}: {thing} is not a directory",
            hint="set another watch.dir, or move that away",
        )


def _check_sockets(settings: Settings) -> None:
    for face in (settings.inference, settings.admin):
        if not face.socket:
            continue  # in a fresh directory, which only a start makes
        path = Path(face.socket)
        if (thing := _in_the_way(path.parent)) is not None:
            raise CannotBind(
                f"cannot make {path.parent}: {thing} is not a directory",
                hint="set another socket, or move that away",
            )
        check_unix(path, face.group)
    tcp, addresses = settings.tcp, [settings.metrics.tcp]
    if tcp.enabled:
        addresses += [tcp.bind, tcp.admin_bind]
    for address in filter(None, addresses):
        check_tcp(address)


def _in_the_way(folder: Path) -> Path | None:
    """What is there and is no directory, where `folder` or one of its parents should be."""
    for place in (folder, *folder.parents):
        if os.path.lexists(place):
            return None if place.is_dir() else place
    return None

"""doctor: what is wrong with this machine, or will be, each with its next step.

Goes in: the configuration, the sockets, the machine.  Comes out: a line a check; exit 1 if one
failed.  Works without a daemon, and changes nothing.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorad import wire_status
from lorad.caller import ApiError, Unreachable
from lorad.cli.output import Column, Table, note, one_line, plain, print_document, print_line
from lorad.cli.session import Session, session
from lorad.doctor.finding import Finding, Findings, fail, ok, warn

if TYPE_CHECKING:
    from lorad.config import Settings
    from lorad.paths import Paths

FOUND: Sequence[Column[Finding]] = (
    Column("STATUS", lambda f: f.status),
    Column("CHECK", lambda f: f.check),
    Column("FOUND", lambda f: one_line(f.message)),
)


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("doctor")(doctor)


def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The daemon's, if named.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the hub.")] = False,
) -> None:
    """Look for what is wrong with this machine.

    Configuration, sockets, card, libraries, limits, disks, hub and unit.
    """
    s = session(context)
    items = tuple(_all(s, config, ask=not offline))
    failed = [f for f in items if f.status == "fail"]
    if s.options.machine:
        print_document(Findings(ok=not failed, items=items), s.options)
    elif s.options.output == "name":
        for item in items:
            print_line(plain(item.check))
    else:
        table = Table(FOUND, s.options, cut=False)
        table.widen(items)
        for number, item in enumerate(items):
            table.print([item], headings=number == 0)
            if item.fix:
                print_line(f"        try: {one_line(item.fix)}")
        warned = sum(f.status == "warn" for f in items)
        note(f"{len(items)} checks, {warned} warn, {len(failed)} fail", s.options)
    if failed:
        raise typer.Exit(1)


def _all(s: Session, config: Path | None, *, ask: bool) -> Iterator[Finding]:
    from lorad import config_sources, paths
    from lorad.cli.card import cards
    from lorad.doctor import disks, hub, machine, sockets
    from lorad.errors import BadConfig

    settings: Settings | None = None
    places = paths.find(os.environ)
    status = _status(s)
    told = warn if status else fail  # a daemon that runs may have read other files than we may
    try:
        settings, places = config_sources.load(config, os.environ)
        yield _configured(settings, told)
    except (BadConfig, OSError) as error:
        hint = getattr(error, "hint", "") or "loractl config path"
        yield told("configuration", str(error) or getattr(error, "message", ""), hint)
    yield from sockets.daemon(s.client)
    for name, path, group in _sockets(s, settings, status):
        yield from sockets.socket_file(name, path, group)
    if settings is not None:
        named = {"inference.group": settings.inference.group, "admin.group": settings.admin.group}
        yield from sockets.groups({key: group for key, group in named.items() if group})
    device = _used(status) if status else _device(settings) if settings else "auto"
    found, why = cards()
    yield from machine.card(found, why, device, running=status is not None)
    yield from machine.libraries(device, bool(found))
    yield from machine.inotify(*_inbox(places, settings, status))
    yield from _limits(settings, status, bool(found))
    yield from disks.folders(_folders(places, settings, status), ours=_ours(status))
    yield from disks.local_disk(_folders(places, settings, status)["state"])
    if settings is not None:
        yield from hub.hub(settings, ask=ask)
    drain = settings.shutdown.drain_timeout if settings else 30.0
    with suppress(RuntimeError):  # a uid without a home
        yield from disks.unit(Path.home(), places.system, drain)


def _status(s: Session) -> wire_status.Status | None:
    try:
        return s.client.status()
    except (Unreachable, ApiError):
        return None


def _configured(settings: "Settings", told: Callable[[str, str, str], Finding]) -> Finding:
    from lorad.base import check_base
    from lorad.errors import BadConfig

    try:
        check_base(settings)
    except BadConfig as error:
        return told("configuration", error.message, error.hint or "loractl config check")
    bases = [model.base for model in settings.models]
    word = "base" if len(bases) == 1 else "bases"
    return ok("configuration", f"valid, {word} {', '.join(bases)}")


def _used(status: wire_status.Status) -> str:
    """What the engines run on: a card, as soon as one of them does."""
    devices = [model.device for model in status.models] or [status.device]
    return "cuda" if "cuda" in devices else devices[0]


def _device(settings: "Settings") -> str:
    """What the models ask for: a card, as soon as one of them does."""
    devices = [model.device for model in settings.models]
    return next((device for device in ("cuda", "auto") if device in devices), devices[0])


def _sockets(
    s: Session, settings: "Settings | None", status: wire_status.Status | None
) -> Iterator[tuple[str, Path, str]]:
    """(name, path, configured group) of each, as the daemon says, else as it would be."""
    if status is not None:
        given = {"admin": status.admin_socket, "inference": status.inference_socket}
    elif settings is not None:
        given = {"admin": settings.admin.socket, "inference": settings.inference.socket}
    else:
        given = {"admin": s.client.host.removeprefix("unix://")}
    for name, path in given.items():
        if path and "://" not in path:
            yield name, Path(path), getattr(settings, name).group if settings else ""


def _inbox(
    places: "Paths", settings: "Settings | None", status: wire_status.Status | None
) -> tuple[Path | None, str]:
    mode = settings.watch.mode if settings else "auto"
    if status is not None:
        return (Path(status.inbox), mode) if status.inbox else (None, "off")
    return Path(settings.watch.dir) if settings else places.state / "inbox", mode


def _limits(
    settings: "Settings | None", status: wire_status.Status | None, has_card: bool
) -> Iterator[Finding]:
    from lorad.doctor import machine

    on_card = _used(status) == "cuda" if status else has_card
    cached = status.ram_limit_bytes if status else settings.lora.ram_cache if settings else 0
    connections = settings.limits.connections if settings else 0
    pid = status.pid if status else None
    yield from machine.limits(pid, cached if on_card else 0, connections)


def _folders(
    places: "Paths", settings: "Settings | None", status: wire_status.Status | None
) -> dict[str, Path]:
    state = Path(status.state_dir) if status else places.state
    found = {"state": Path(settings.registry.dir) if settings and not status else state}
    store = (status and status.store_dir) or (settings and settings.store.dir)
    if store:
        found["store"] = Path(store)
    found["cache"] = places.cache
    return found


def _ours(status: wire_status.Status | None) -> bool:
    """Does the daemon run as us?  Unknown is yes: it would."""
    if status is None:
        return True
    try:
        return os.stat(f"/proc/{status.pid}").st_uid == os.geteuid()
    except OSError:
        return False

"""Ground: what a daemon stands on before its event loop runs.

Goes in: settings, the machine's directories, the environment.  Comes out: the state lock, an open
and reconciled registry, the listening sockets, taken in that order and given back in reverse.  No
thread of ours runs yet but the registry's idle writer, so the umask around a bind disturbs nobody.
"""

import contextlib
import grp
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lorad import paths
from lorad.api.server import bind_tcp, bind_unix, unlink_unix
from lorad.config import Settings, placed
from lorad.errors import CannotBind, LoradError, RegistryUnusable
from lorad.registry.lock import state_lock
from lorad.registry.registry import Registry
from lorad.registry.store import Store
from lorad.systemd import activated_sockets


@dataclass(frozen=True, slots=True)
class Ground:
    """`settings` have every path filled in; `as_read` are what they were before."""

    settings: Settings
    as_read: Settings
    registry: Registry
    inference: socket.socket
    admin: socket.socket
    tcp: Mapping[str, socket.socket]  # face -> its listener, where that is wanted


@contextlib.contextmanager
def ground(settings: Settings, places: paths.Paths, env: Mapping[str, str]) -> Iterator[Ground]:
    """Raises LockHeld, RegistryUnusable or CannotBind."""
    as_read = settings
    with contextlib.ExitStack() as undo:
        state_dir = Path(settings.registry.dir)
        undo.enter_context(state_lock(state_dir))
        try:
            store = Store(Path(settings.store.dir), budget_bytes=settings.store.budget)
        except (OSError, LoradError) as error:
            raise RegistryUnusable(
                f"the store {settings.store.dir}: {error}",
                hint="check who may write there, or set another store.dir",
            ) from error
        registry = Registry.open(state_dir, store=store)
        undo.callback(registry.close)
        try:
            registry.reconcile().result()
        except LoradError as error:
            raise RegistryUnusable(error.message, hint=error.hint) from error
        passed = activated_sockets(env, ("inference", "admin"))
        settings = _as_passed(settings, passed)
        if not settings.inference.socket or not settings.admin.socket:
            runtime = paths.fresh_runtime()
            settings = placed(settings, runtime)
            print(f"lorad: XDG_RUNTIME_DIR is not set; the sockets are in {runtime}")
            print(f"  try: export LORAD_HOST=unix://{settings.admin.socket}", flush=True)
            undo.callback(_remove_empty, runtime)
        inference, admin = settings.inference, settings.admin
        listeners: list[socket.socket] = []
        for name, path, mode, group, usual in (
            ("inference", inference.socket, inference.mode, inference.group, "lorad"),
            ("admin", admin.socket, admin.mode, admin.group, "lorad-admin"),
        ):
            listener = passed.get(name)
            if listener is None:
                usual = usual if places.system else ""
                listener = _bind(Path(path), int(mode, 8), group or _existing(usual))
                undo.callback(unlink_unix, Path(path))
            undo.callback(listener.close)
            listeners.append(listener)
        tcp = {
            face: undo.enter_context(bind_tcp(address))
            for face, address in _addresses(settings).items()
        }
        yield Ground(settings, as_read, registry, listeners[0], listeners[1], tcp)


def _addresses(settings: Settings) -> dict[str, str]:
    """What is bound on TCP: nothing unless it is asked for."""
    tcp = settings.tcp
    wanted = {"metrics": settings.metrics.tcp}
    if tcp.enabled:
        wanted |= {"tcp": tcp.bind, "tcp-admin": tcp.admin_bind}
    return {face: address for face, address in wanted.items() if address}


def _as_passed(settings: Settings, passed: Mapping[str, socket.socket]) -> Settings:
    """A socket that was passed in is where its unit says, whatever is configured."""
    replace = msgspec.structs.replace
    for name, listener in passed.items():
        if isinstance(path := listener.getsockname(), str) and path:
            section = replace(getattr(settings, name), socket=path)
            settings = replace(settings, **{name: section})
    return settings


def _bind(path: Path, mode: int, group: str) -> socket.socket:
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotBind(
            f"cannot make {path.parent}: {error.strerror}",
            hint="make it for the daemon's user, or set another [inference] and [admin] socket",
        ) from error
    return bind_unix(path, mode, group)


def _existing(group: str) -> str:
    """A default group that the machine lacks, or that we may not give a file to, is none; one that
    was configured must exist."""
    try:
        found = grp.getgrnam(group) if group else None
    except KeyError:
        return ""
    ours = os.geteuid() == 0 or (found and found.gr_gid in (os.getegid(), *os.getgroups()))
    return found.gr_name if found and ours else ""


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()

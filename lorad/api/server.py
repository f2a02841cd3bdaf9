"""Sockets bound by ourselves, and an HTTP server on each that lives in the daemon's event loop.

Goes in: a path with mode and group, an ASGI app.  Comes out: a listening socket that nobody else
could use for an instant, and `HttpServer` with `start` and `stop`.  No signal handlers, no chmod
after the fact, no file unlinked that somebody answers on.  CannotBind says why a path is refused.
"""

import asyncio
import contextlib
import dataclasses
import errno
import grp
import os
import socket
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from lorad.api.protocol import ConnectionLimits, GuardedProtocol
from lorad.config_network import split_address
from lorad.errors import CannotBind, LockHeld, LoradError

#: sockaddr_un.sun_path less its NUL.
MAX_PATH_BYTES = 107
BACKLOG = 1024
#: Connections that are taken in at once, before others get their turn and a full house sheds some:
#: each holds a descriptor until then.
ACCEPTS = 8
#: Python 3.13 would remove the socket's file when it closes, also one that systemd passed in.
_KEEP_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


# ----------------------------------------------------------------- binding
def bind_unix(path: Path, mode: int, group: str = "") -> socket.socket:
    """A listening socket at `path`, `mode` from its first instant.  Call it before threads start.

    Raises CannotBind, or LockHeld when a live process answers there.
    """
    group_id = check_unix(path, group)
    _clear_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~(mode if group_id is None else mode & 0o700))
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise CannotBind(
            f"cannot bind {path}: {os.strerror(error.errno or 0)}",
            hint="check who may write to its directory, or set another socket",
        ) from None
    finally:
        os.umask(before)
    try:
        if group_id is not None:  # the group's bits come after the group
            os.chown(path, -1, group_id)
            os.chmod(path, mode)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        path.unlink(missing_ok=True)
        raise CannotBind(
            f"cannot give {path} to group {group}: {os.strerror(error.errno or 0)}",
            hint=f'add the daemon\'s user to {group}, or set group = ""',
        ) from None
    return listener


def check_unix(path: Path, group: str = "") -> int | None:
    """The group's id, None for "".  Raises the CannotBind of `bind_unix`, as far as it can be known
    without asking whether somebody answers there."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        size = len(os.fsencode(path))
        raise CannotBind(
            f"socket path of {size} bytes, {MAX_PATH_BYTES} are possible: {path}",
            hint="choose a shorter directory, for example under /run",
        )
    _is_socket(path)
    return _group_id(group, path)


def check_tcp(address: str) -> None:
    """Raises CannotBind for an address that is not one of this machine's; asks for no port."""
    host, _ = split_address(address)
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise CannotBind(
                f"cannot bind {address}: {os.strerror(error.errno or 0)}",
                hint="an address of this machine: ip addr lists them",
            ) from None


def bind_tcp(address: str) -> socket.socket:
    """A listening socket at `host:port`; the host is an IP address.  Raises CannotBind."""
    host, port = split_address(address)
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CannotBind(
            f"cannot bind {address}: {os.strerror(error.errno or 0)}",
            hint="another port, or ss -ltnp says who has this one",
        ) from None
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def unlink_unix(path: Path) -> None:
    """Remove the socket file of a server that has stopped; a successor's is left alone."""
    with contextlib.suppress(CannotBind, LockHeld):
        _clear_stale(path)


def _group_id(group: str, path: Path) -> int | None:
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise CannotBind(
            f"cannot bind {path}: no group {group}", hint=f"groupadd --system {group}"
        ) from None


def _clear_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on; refuse everything else that is there."""
    if not _is_socket(path):
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.setblocking(False)
    try:
        code = probe.connect_ex(str(path))
    finally:
        probe.close()
    if code == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
    elif code in (0, errno.EAGAIN, errno.EINPROGRESS):
        raise LockHeld(f"another process answers on {path}", hint="loractl status")
    elif code != errno.ENOENT:
        raise CannotBind(
            f"cannot tell whether {path} is in use: {os.strerror(code)}",
            hint="check who may write to it, or set another socket",
        )


def _is_socket(path: Path) -> bool:
    """Is one there?  False: nothing is; raises CannotBind for anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CannotBind(
            f"cannot bind {path}: {os.strerror(error.errno or 0)}",
            hint="check who may search its directory, or set another socket",
        ) from None
    if not stat.S_ISSOCK(mode):
        raise CannotBind(f"{path} exists and is not a socket", hint="move it out of the way")
    return True


# ----------------------------------------------------------------- serving
class HttpServer:
    """One app on one listening socket.  `idle_seconds`: how long a quiet connection is kept."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        receipt_seconds: float = 20.0,
        idle_seconds: float = 75.0,
        connections: int = 1024,
        header_bytes: int = 16 << 10,
        on_refused: Callable[[LoradError], None] = lambda error: None,
    ) -> None:
        limits = ConnectionLimits(receipt_seconds, connections, on_refused)
        self._protocol = type("Connection", (GuardedProtocol,), {"limits": limits})
        self._config = Config(
            app,
            http=self._protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # what clients send wrong is answered, not logged
            access_log=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=header_bytes,
            timeout_keep_alive=idle_seconds,  # type: ignore[arg-type]
        )
        self._config.load()
        self._listener = listener
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    def limit(
        self, *, receipt_seconds: float, idle_seconds: float, connections: int, header_bytes: int
    ) -> None:
        """Bound connections anew; those that are open keep their idle time and size of a head."""
        limits = self._protocol.limits  # type: ignore[attr-defined]
        self._protocol.limits = dataclasses.replace(  # type: ignore[attr-defined]
            limits, receipt_seconds=receipt_seconds, connections=connections
        )
        self._config.h11_max_incomplete_event_size = header_bytes
        self._config.timeout_keep_alive = idle_seconds  # type: ignore[assignment]

    async def start(self) -> None:
        """Accept from now on."""
        loop = asyncio.get_running_loop()
        if self._listener.family == socket.AF_UNIX:
            serve: Any = partial(loop.create_unix_server, **_KEEP_FILE)
        else:
            serve = loop.create_server
        self._server = await serve(
            self._connection, sock=self._listener, backlog=ACCEPTS, start_serving=True
        )
        self._listener.listen(BACKLOG)  # asyncio takes one number for both

    async def stop(self, grace: float = 5.0) -> None:
        """Accept no more; answers in progress get `grace` seconds, then they are cut off."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=grace)
        for connection in cast("list[GuardedProtocol]", list(self._state.connections)):
            connection.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        self._server = None

    def _connection(self) -> asyncio.Protocol:
        return self._protocol(self._config, self._state, {})  # type: ignore[no-any-return]

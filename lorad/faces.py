"""Faces: the HTTP servers, each an app on its listener, and the keys of those on TCP.

Goes in: the services, the ground's sockets, settings now and after a reload.  Comes out: servers
that run, and follow the settings.  Owns no request: each app finds what it needs in its `Deps`.
"""

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import ip_address

from starlette.applications import Starlette

from lorad import __version__, descriptors, key_file
from lorad.api.app import (
    admin_app,
    admin_tcp_app,
    inference_app,
    inference_tcp_app,
    limit,
    metrics_app,
)
from lorad.api.deps import Deps
from lorad.api.server import HttpServer
from lorad.api.tcp import TcpKeys
from lorad.api.uploads import Uploads
from lorad.assembly import Services
from lorad.config import Settings
from lorad.ground import Ground
from lorad.log_ring import LogRing
from lorad.service.ledger import Ledger
from lorad.wire_operate import Reloaded, RunningConfig


class Faces:
    """Raises BadConfig if a file of keys cannot be used."""

    def __init__(
        self,
        ground: Ground,
        services: Services,
        log: LogRing,
        reload: Callable[[], Awaitable[Reloaded]],
        config: Callable[[], RunningConfig],
    ) -> None:
        self._ground = ground
        self._keys, self._fresh = TcpKeys(), TcpKeys()
        self.read_keys(ground.settings)
        self._take_keys()
        self._deps = _deps(ground, services, log, reload, config)
        self._faces = self._make()
        for name, (_, server) in self._faces.items():
            services.metrics.sources.connections[name] = partial(getattr, server, "num_connections")

    async def start(self) -> None:
        for _, server in self._faces.values():
            await server.start()

    async def stop(self, seconds: float) -> None:
        """Streams have so long to send their last event."""
        for _, server in self._faces.values():
            await server.stop(seconds)

    def read_keys(self, settings: Settings) -> None:
        """Raises BadConfig; `apply` puts them into effect."""
        self._fresh = TcpKeys(*key_file.of_settings(settings))

    def apply(self, now: Settings) -> None:
        """Let what a reload changed be seen by the next request."""
        self._deps.settings = now
        self._deps.uploads.max_bytes = now.watch.max_adapter_bytes
        self._take_keys()
        limits = now.limits
        connections = descriptors.share(limits.connections, listeners=len(self._faces))
        for app, server in self._faces.values():
            limit(app, now)
            server.limit(
                receipt_seconds=limits.request_receipt,
                idle_seconds=limits.idle,
                connections=connections,
                header_bytes=limits.headers,
            )

    def _take_keys(self) -> None:
        """The apps hold `_keys`.  What listens does not change before a restart."""
        keys, fresh = self._keys, self._fresh
        keys.inference, keys.admin = fresh.inference, fresh.admin
        keys.open = all(_is_loopback(s) for f, s in self._ground.tcp.items() if f == "tcp")

    def _make(self) -> dict[str, tuple[Starlette, HttpServer]]:
        deps, keys, ground = self._deps, self._keys, self._ground
        apps = {
            "inference": (inference_app(deps), ground.inference),
            "admin": (admin_app(deps), ground.admin),
        }
        on_tcp = {
            "metrics": lambda: metrics_app(deps),
            "tcp": lambda: inference_tcp_app(deps, keys),
            "tcp-admin": lambda: admin_tcp_app(deps, keys),
        }
        for face, listener in ground.tcp.items():
            apps[face] = (on_tcp[face](), listener)
        connections = descriptors.share(deps.limits.connections, listeners=len(apps))
        return {
            face: (app, self._server(app, listener, connections))
            for face, (app, listener) in apps.items()
        }

    def _server(self, app: Starlette, listener: socket.socket, connections: int) -> HttpServer:
        limits = self._deps.limits
        return HttpServer(
            app,
            listener,
            receipt_seconds=limits.request_receipt,
            idle_seconds=limits.idle,
            connections=connections,
            header_bytes=limits.headers,
            on_refused=self._deps.note_refused,
        )


def _deps(
    ground: Ground,
    services: Services,
    log: LogRing,
    reload: Callable[[], Awaitable[Reloaded]],
    config: Callable[[], RunningConfig],
) -> Deps:
    return Deps(
        settings=ground.settings,
        requests=services.requests,
        pooling=services.pooling,
        adapters=services.adapters,
        verification=services.verification,
        explaining=services.explaining,
        housekeeping=services.housekeeping,
        ledger=Ledger(ground.registry, services.adapters),
        pulls=services.pulls,
        operations=services.operations,
        audit=services.audit,
        callers=services.callers,
        tenancy=services.tenancy,
        listing=services.snapshot,
        board=services.board,
        events=services.events,
        uploads=Uploads(
            services.adapters,
            max_bytes=ground.settings.watch.max_adapter_bytes,
            vet=services.names.check_free,
        ),
        folders=services.folders,
        metrics=services.metrics,
        http=services.metrics.sources.http,
        log=log,
        draining=services.draining,
        reload=reload,
        config=config,
        version=__version__,
        started=services.started,
    )


def _is_loopback(listener: socket.socket) -> bool:
    return ip_address(listener.getsockname()[0]).is_loopback

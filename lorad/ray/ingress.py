"""The ingress: lorad's gateway as a Serve deployment, in front of the replicas.

Goes in: HTTP from Serve's proxy.  Comes out: the routes of a daemon, for applications and for
operators, answered by whichever replica has what is asked for.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from lorad.api.tcp import TcpKeys
from lorad.config_sections import Tcp
from lorad.fleet.catalog import open_catalog
from lorad.fleet.gateway import Gateway
from lorad.key_file import read
from lorad.ray.homes import free
from lorad.ray.members import RayMembers
from lorad.ray.plan import settings_of, wish_of
from lorad.ray.wanted import Wanted

SEE_SECONDS = 5.0


class Ingress:
    """Serve makes it with a handle of the replicas and the arguments of the application."""

    async def __init__(self, replicas: Any, told: dict[str, Any]) -> None:  # type: ignore[misc]
        wish = wish_of(told)
        settings = settings_of(wish)
        members = RayMembers(replicas)
        members.start()
        self._home = next(free(Path(wish.homes), "ingress"))
        self._gateway = Gateway(
            members,
            open_catalog(wish.catalog, settings),
            self._home.path,
            settings=settings,
            keys=_keys(settings.tcp),
            several=True,  # how many there are Serve changes while they run
        )
        await self._gateway.start()
        ring = self._gateway.ring
        self._wanted = Wanted(ring.close, ring.reopen)
        self._watching = asyncio.create_task(self._wanted.run())
        await self._see_replicas()

    async def _see_replicas(self) -> None:
        """One that is started anew has them within moments, and gets no requests before.  At the
        first start they may load their base for minutes: that is answered with a 503."""
        until = time.monotonic() + SEE_SECONDS
        while await self.why_not_ready() and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def why_not_ready(self) -> str:
        """ "" when it takes requests.  For who deploys: Serve calls it running before it has seen a
        replica."""
        await self._gateway.look()
        return "" if self._gateway.listing.ready()[0] else self._gateway.listing.waiting()

    async def check_health(self) -> None:
        """Serve asks."""
        self._wanted.asked()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._gateway.app()

    async def __del__(self) -> None:
        if hasattr(self, "_watching"):
            self._watching.cancel()
        if hasattr(self, "_gateway"):
            await self._gateway.stop()
            self._home.release()


def _keys(tcp: Tcp) -> TcpKeys:
    """As of a daemon's own TCP: Serve's proxy is in front, and hands on what anybody sends it."""
    return TcpKeys(
        inference=read(tcp.api_keys_file, "tcp.api_keys_file"),
        admin=read(tcp.admin_keys_file, "tcp.admin_keys_file"),
    )

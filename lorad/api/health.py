"""Health routes and `/version`, open on both sockets.

`/livez` is the daemon's loop: that it answers is the answer.  `/readyz` (and `/health`) is the
engine's: 200 only while requests are taken, else 503 with the reason.  `/startupz` is 200 from the
first time that it was ready.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lorad import wire
from lorad.api.deps import deps_of
from lorad.api.respond import json
from lorad.errors import TABLE, LoradError


async def livez(request: Request) -> Response:
    return json({"status": "ok"})


async def readyz(request: Request) -> Response:
    ready, reason = deps_of(request).listing.ready()
    if ready:
        return json({"status": "ok"})
    raise LoradError(reason if reason in TABLE else "loading_base", f"not ready: {reason}")


async def startupz(request: Request) -> Response:
    if deps_of(request).link.info is not None:
        return json({"status": "ok"})
    raise LoradError("loading_base", "not started: the base model is still loading")


async def version(request: Request) -> Response:
    deps = deps_of(request)
    model = deps.settings.model  # its folder's name: where it lies is not for tenants to know
    return json(wire.Version(version=deps.version, model=model.name, base=Path(model.base).name))

"""`GET /metrics`: Prometheus text, or OpenMetrics where the `Accept` header asks for it.

Goes in: a scrape.  Comes out: what `Metrics` shows.  `OwnHost` keeps web pages away from a TCP
listener: a browser that was led to it by a name of its own, or that says where it comes from, is
refused.
"""

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lorad.api.deps import deps_of
from lorad.errors import LoradError


async def scrape(request: Request) -> Response:
    body, content_type = await deps_of(request).metrics.scrape(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})


class OwnHost:
    """`anywhere`: it may be called by any name, but not by a web page."""

    def __init__(self, app: ASGIApp, *, anywhere: bool) -> None:
        self._app, self._anywhere = app, anywhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            ours = self._anywhere or _is_loopback(headers.get("host", ""))
            if "origin" in headers or not ours:
                raise LoradError("permission_denied", "web pages may not read the metrics")
        await self._app(scope, receive, send)


def _is_loopback(host: str) -> bool:
    """`localhost` or an address of this machine's own network, with or without a port."""
    name = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
    try:
        return name.lower() == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False

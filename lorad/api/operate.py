"""Admin routes that operate the daemon: reload, drain, resume.

Goes in: requests of peers that the guard let in.  Comes out: what the daemon answers.
"""

from starlette.requests import Request
from starlette.responses import Response

from lorad.api.asked import body
from lorad.api.deps import deps_of
from lorad.api.respond import json
from lorad.wire_operate import DrainAsk


async def reload(request: Request) -> Response:
    """Read the configuration anew, as SIGHUP does."""
    return json(await deps_of(request).reload())


async def drain(request: Request) -> Response:
    """Take no new requests, of all or of one adapter; answers when nothing runs."""
    return json(await deps_of(request).draining.drain(await body(request, DrainAsk)))


async def resume(request: Request) -> Response:
    """Take them again."""
    return json(deps_of(request).draining.resume(await body(request, DrainAsk)))

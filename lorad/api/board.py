"""The live stream of the admin routes, and the board at one moment.

Goes in: requests of peers that the guard let in.  Comes out: what `lorad.board` paints.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import sse
from lorad.api.admin import last_seen
from lorad.api.asked import decimal
from lorad.api.deps import Deps, deps_of
from lorad.api.respond import json
from lorad.board.stream import LEAST_SECONDS, MOST_SECONDS


async def board(request: Request) -> Response:
    return json(await deps_of(request).board.once())


async def stream(request: Request) -> Response:
    """Server-sent events, of which nobody has to ask for the type; `interval` in seconds."""
    deps = deps_of(request)
    interval = decimal(request, "interval", 1.0, LEAST_SECONDS, MOST_SECONDS)
    after = last_seen(request, deps)
    return sse.EventStream(_follow(deps, interval, after), stall_seconds=deps.limits.stall_write)


async def _follow(deps: Deps, interval: float, after: int | None) -> AsyncGenerator[bytes, None]:
    async with (
        aclosing(deps.board.follow(interval, after)) as messages,
        aclosing(sse.with_pings(messages, deps.ping_seconds)) as told,
    ):
        async for message in told:
            if message is None:
                yield sse.PING
            else:
                yield sse.event(message.value, name=message.name, event_id=message.id)

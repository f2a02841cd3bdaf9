"""Admin routes that operate the daemon: config, reload, drain, resume, one request's end, logs.

Goes in: requests of peers that the guard let in.  Comes out: what the daemon answers.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import audit, sse
from lorad.api.admin import MAX_PAGE, last_seen
from lorad.api.asked import body, number
from lorad.api.deps import Deps, deps_of
from lorad.api.respond import json
from lorad.wire_operate import DrainAsk, HoldAsk, LogPage, RequestCancelled, Shed, ShedAsk

#: What the client of a cancelled request is told.
CANCELLED = "an operator cancelled this request"


async def reload(request: Request) -> Response:
    """Read the configuration anew, as SIGHUP does."""
    outcome = await deps_of(request).reload()
    audit.done(request, "reload", "", message=", ".join(outcome.changed))
    return json(outcome)


async def config(request: Request) -> Response:
    """The settings in effect, where each is from, and what waits for a restart."""
    return json(deps_of(request).config())


async def drain(request: Request) -> Response:
    """Take no new requests, of all or of one adapter; answers when nothing runs."""
    ask = await body(request, DrainAsk)
    outcome = await deps_of(request).draining.drain(ask)
    audit.done(request, "drain", ask.name or "")
    return json(outcome)


async def resume(request: Request) -> Response:
    """Take them again."""
    ask = await body(request, DrainAsk)
    outcome = deps_of(request).draining.resume(ask)
    audit.done(request, "resume", ask.name or "")
    return json(outcome)


async def hold(request: Request) -> Response:
    """Keep a revision to be had while its name moves on several daemons, one after another."""
    ask = await body(request, HoldAsk)
    outcome = deps_of(request).adapters.hold(ask)
    audit.done(request, "hold", ask.name, rev=",".join(rev[:12] for rev in outcome.revs))
    return json(outcome)


async def shed(request: Request) -> Response:
    """Send on who waits here and came by a gateway, down to a load that it says."""
    ask, deps = await body(request, ShedAsk), deps_of(request)
    await deps.listing.look()
    status = deps.listing.status()
    beyond = status.running + status.waiting - ask.load
    count = deps.requests.shed(beyond, {one.name: one.waiting for one in status.models})
    if count:
        audit.done(request, "shed", "", message=f"{count} requests")
    return json(Shed(requests=count))


async def cancel_request(request: Request) -> Response:
    """End one request with the error that a forced drain gives; its client gets to see it."""
    id = request.path_params["request_id"]
    ended, live, changed = deps_of(request).requests.cancel_one(id, "draining", CANCELLED)
    audit.done(request, "request.cancel", id, rev=ended.rev or "", message=live.name or "")
    outcome = RequestCancelled(
        id=id,
        adapter=live.name or "",
        rev=ended.rev or "",
        generated_tokens=ended.usage().completion,
        changed=changed,
    )
    return json(outcome)


async def logs(request: Request) -> Response:
    """The last lines of the log as JSON, or with `Accept: text/event-stream` all that follow."""
    deps = deps_of(request)
    if "text/event-stream" in request.headers.get("accept", ""):
        lines = _follow(deps, last_seen(request, deps))
        return sse.EventStream(lines, stall_seconds=deps.limits.stall_write)
    limit = number(request, "limit", 200, 1, MAX_PAGE)
    if "since" in request.query_params:
        items = deps.log.since(number(request, "since", 0, 0, 1 << 62), limit)
    else:
        items = deps.log.newest(limit)
    return json(LogPage(instance_id=deps.events.instance_id, items=items))


async def _follow(deps: Deps, after: int | None) -> AsyncGenerator[bytes, None]:
    """Ids are `instance-number`, as those of events."""
    instance = deps.events.instance_id
    async with aclosing(sse.with_pings(deps.log.follow(after), deps.ping_seconds)) as lines:
        async for line in lines:
            if line is None:
                yield sse.PING
            else:
                yield sse.event(line, event_id=f"{instance}-{line.id}")

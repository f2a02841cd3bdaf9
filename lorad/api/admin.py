"""Admin routes: operators' wishes and pictures, as `wire` Structs.

Goes in: requests of peers that the guard let in.  Comes out: what AdapterService and the listing
answer.  Decides nothing itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from lorad import wire
from lorad.api import audit, sse
from lorad.api.asked import body as _body
from lorad.api.asked import flag as _flag
from lorad.api.asked import number as _number
from lorad.api.asked import uid as _uid
from lorad.api.deps import Deps, deps_of
from lorad.api.respond import as_lorad_error, json
from lorad.api.uploads import FILES, Staging
from lorad.errors import LoradError

MAX_PAGE = 1000


# ----------------------------------------------------------------- pictures
async def status(request: Request) -> Response:
    listing = deps_of(request).listing
    await listing.look()
    return json(listing.status())


async def slots(request: Request) -> Response:
    listing = deps_of(request).listing
    await listing.look()
    return json(listing.slots())


async def list_adapters(request: Request) -> Response:
    query = request.query_params
    await deps_of(request).listing.look()
    page = await asyncio.to_thread(  # one by size reads every row: streams do not wait for it
        deps_of(request).listing.page,
        state=query.get("state"),
        tenant=query.get("tenant"),
        model=query.get("model"),
        q=query.get("q"),
        sort=query.get("sort", "name"),
        limit=_number(request, "limit", 100, 1, MAX_PAGE),
        cursor=query.get("cursor"),
    )
    return json(page)


# ----------------------------------------------------------------- wishes
async def adapter(request: Request) -> Response:
    """GET shows one adapter, PATCH changes it (and shows it), DELETE takes its name away."""
    deps, name = deps_of(request), request.path_params["name"]
    if request.method == "DELETE":
        keep = _flag(request, "keep_files")
        return json(await deps.adapters.remove(name, keep_files=keep))
    if request.method == "PATCH":
        await deps.adapters.patch(name, await _body(request, wire.AdapterPatch))
    await deps.listing.look()
    return json(deps.listing.detail(name))


async def explain(request: Request) -> Response:
    """GET says why an adapter is or is not served.  `acme/explain` may be an adapter's name, too:
    PATCH and DELETE are about that one, and so is GET with `?show=1`."""
    name = request.path_params["name"]
    if request.method in ("PATCH", "DELETE") or "show" in request.query_params:
        request.path_params["name"] = f"{name}/explain"
        return await adapter(request)
    return json(await deps_of(request).explaining.explain(name))


async def load(request: Request) -> Response:
    return await _wish(request, "load", deps_of(request).adapters.load)


async def evict(request: Request) -> Response:
    return await _wish(request, "evict", deps_of(request).adapters.evict)


async def pin(request: Request) -> Response:
    return await _wish(request, "pin", deps_of(request).adapters.pin)


async def unpin(request: Request) -> Response:
    return await _wish(request, "unpin", deps_of(request).adapters.unpin)


async def verify(request: Request) -> Response:
    wish = await _body(request, wire.Names)
    found = await deps_of(request).verification.verify(wish)
    for item in found.items:
        audit.done(request, "verify", item.name, rev=item.rev, message=item.message)
    return json(found)


async def gc(request: Request) -> Response:
    found = await deps_of(request).housekeeping.gc(await _body(request, wire.GcAsk))
    if not found.dry_run:
        what = f"{len(found.items)} pieces, {found.num_bytes} bytes"
        audit.done(request, "gc", "", message=what)
    return json(found)


async def _wish(
    request: Request, action: str, do: Callable[[wire.Names], Awaitable[wire.Results]]
) -> Response:
    """A wish goes on when its client leaves; the client can ask what became of it."""
    wish = await _body(request, wire.Names)
    results = await do(wish)
    if not wish.dry_run:
        audit.each(request, action, results.items)
    return json(results)


# ----------------------------------------------------------------- uploads
async def open_upload(request: Request) -> Response:
    deps = deps_of(request)
    start = await _body(request, wire.UploadStart)
    request.path_params["name"] = start.name  # for the audit, if it is refused; below as well
    upload = await deps.uploads.open(start, _uid(request))
    answer = wire.UploadOpen(
        upload_id=upload.id, max_bytes=deps.uploads.max_bytes, files=tuple(sorted(FILES))
    )
    return json(answer, status=201)


async def put_file(request: Request) -> Response:
    """The body is the file; `/files/{file}` is one of a few names, never a path."""
    path = request.path_params
    size = await deps_of(request).uploads.put(
        path["upload_id"], _uid(request), path["file"], request.stream()
    )
    return json({"file": path["file"], "num_bytes": size})


async def commit_upload(request: Request) -> Response:
    """Adding goes on when its client stops waiting; `loractl show` then says what came of it."""
    commit = await _body(request, wire.UploadCommit)
    upload = deps_of(request).uploads.take(request.path_params["upload_id"], _uid(request))
    return await added(request, commit, upload.start, upload.staging)


async def added(
    request: Request, commit: wire.UploadCommit, start: wire.UploadStart, staging: Staging
) -> Response:
    """What adding the folder came to, if that is known within the time."""
    deps = deps_of(request)
    request.path_params["name"] = start.name
    adding = deps.uploads.keep(
        deps.adapters.add(
            staging,
            start.name,
            source=start.source,
            model=start.model,
            replace=start.replace,
            pin=start.pin or None,
            priority=start.priority,
            labels=start.labels or None,
            load=start.load,
            dry_run=start.dry_run,
        )
    )
    await asyncio.wait({adding}, timeout=max(commit.timeout_s, 0.0) if commit.wait else 0.0)
    if adding.done():
        return json(adding.result())
    adding.add_done_callback(partial(_tell_of_failure, deps, start.name))
    if not commit.wait:
        return json(wire.Added(name=start.name, rev="", state="loading"), status=202)
    message = f"not added after {commit.timeout_s:g} s; it goes on"
    raise LoradError("deadline_exceeded", message, hint=f"loractl show {start.name}")


def _tell_of_failure(deps: Deps, name: str, adding: asyncio.Task[wire.Added]) -> None:
    """Nobody waits for the answer any more: `loractl show` and `loractl events` have it."""
    if not adding.cancelled() and isinstance(error := adding.exception(), Exception):
        told = as_lorad_error(error)
        deps.events.publish(
            "adapter.not_loaded", level="warn", name=name, cause=told.code, message=told.message
        )


async def drop_upload(request: Request) -> Response:
    await deps_of(request).uploads.drop(request.path_params["upload_id"], _uid(request))
    return Response(status_code=204)


# ----------------------------------------------------------------- events
async def events(request: Request) -> Response:
    """A page as JSON, or with `Accept: text/event-stream` all that follow."""
    deps = deps_of(request)
    limit = _number(request, "limit", 100, 1, MAX_PAGE)
    if "text/event-stream" in request.headers.get("accept", ""):
        return sse.EventStream(
            _follow(deps, last_seen(request, deps)),
            stall_seconds=deps.limits.stall_write,
        )
    if "since" in request.query_params:
        items, _ = deps.events.since(_number(request, "since", 0, 0, 1 << 62), limit)
    else:
        items = deps.events.newest(limit)
    return json(wire.EventPage(items=items, instance_id=deps.events.instance_id))


async def _follow(deps: Deps, after: int | None) -> AsyncGenerator[bytes, None]:
    """Event ids are `instance-number`, so that a reader notices a new daemon as a gap."""
    instance = deps.events.instance_id
    async with aclosing(sse.with_pings(deps.events.follow(after), deps.ping_seconds)) as items:
        async for item in items:
            if item is None:
                yield sse.PING
            else:
                event_id = "" if item.type == "gap" else f"{instance}-{item.id}"
                yield sse.event(item, name=item.type, event_id=event_id)


def last_seen(request: Request, deps: Deps) -> int | None:
    """None: from now on.  Another daemon's id: past every id of ours, which is a gap."""
    header = request.headers.get("last-event-id", "")
    if header:
        instance, _, number = header.rpartition("-")
        same = instance == deps.events.instance_id and number.isdecimal() and len(number) < 18
        return int(number) if same else 1 << 62
    if "since" in request.query_params:
        return _number(request, "since", 0, 0, 1 << 62)
    return None

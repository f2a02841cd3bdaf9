"""Routes of pulls and operations, on the admin socket.

Goes in: what to pull, an operation's id.  Comes out: the operation as it is, at once or when it has
ended.  Decides nothing itself.
"""

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import asked, audit
from lorad.api.deps import deps_of
from lorad.api.respond import json
from lorad.service.operations import MAX_WAIT_SECONDS, shown
from lorad.wire_operations import OperationPage, PullStart

MAX_PAGE = 1000


async def pull(request: Request) -> Response:
    """202 and the operation; by `dry_run` 200 and the plan."""
    pulls, start = deps_of(request).pulls, await asked.body(request, PullStart)
    if start.dry_run:
        return json(await pulls.plan(start))
    request.path_params["name"] = start.name  # for the audit, if it is refused
    uid = asked.uid(request)
    actor = "" if uid is None else f"uid {uid}"
    begun = await pulls.begin(start, actor=actor)
    audit.done(request, "pull", begun.name, message=f"operation {begun.id}")
    return json(shown(begun), status=202)


async def list_operations(request: Request) -> Response:
    """The newest first; `live=true` leaves out what has ended."""
    live = asked.flag(request, "live")
    limit = asked.number(request, "limit", 100, 1, MAX_PAGE)
    records = deps_of(request).operations.list(live=live, limit=limit)
    return json(OperationPage(items=tuple(map(shown, records))))


async def operation(request: Request) -> Response:
    """GET shows it, after up to `wait_ms` if it has not ended; DELETE cancels it."""
    operations, id = deps_of(request).operations, request.path_params["operation_id"]
    if request.method == "DELETE":
        ended = await operations.cancel(id)
        audit.done(request, "cancel", id, message=ended.target)
        return json(shown(ended))
    wait = asked.number(request, "wait_ms", 0, 0, int(MAX_WAIT_SECONDS * 1000))
    record = await operations.wait(id, wait / 1000) if wait else operations.get(id)
    return json(shown(record))

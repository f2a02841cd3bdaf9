"""Who did what through the sockets: rows for what the registry does not note by itself.

Goes in: requests as the guard let them in or refused them.  Comes out: notes for `Audit`, and a
page of what it has written.  Knows what the routes are called in the audit.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from lorad import wire
from lorad.api import asked
from lorad.api.deps import Deps, deps_of
from lorad.api.respond import json
from lorad.errors import LoradError
from lorad.registry.records import AuditRecord
from lorad.service.events import rfc3339
from lorad.service.tenants import Forbidden
from lorad.wire_tenants import AuditItem, AuditPage

MAX_PAGE = 10_000
_CHANGING = ("POST", "PUT", "PATCH", "DELETE")
#: (method, first word of the path behind /admin/v1) -> what it is called; else the word itself.
_ACTIONS = {
    ("DELETE", "adapters"): "remove",
    ("PATCH", "adapters"): "set",
    ("POST", "pulls"): "pull",
    ("DELETE", "operations"): "cancel",
    ("DELETE", "requests"): "request.cancel",
    ("POST", "tenants"): "tenant.added",
    ("PATCH", "tenants"): "tenant.set",
    ("DELETE", "tenants"): "tenant.removed",
    ("POST", "uploads"): "add",
    ("PUT", "uploads"): "add",
    ("DELETE", "uploads"): "add",
    ("POST", "load_lora_adapter"): "add",
    ("POST", "unload_lora_adapter"): "remove",
}
_NAMES = ("name", "tenant", "operation_id", "request_id", "upload_id")


def actor_of(scope: Scope) -> str:
    """`uid 1000 pid 7`, as the kernel saw them at connect; over TCP `tcp key NAME`."""
    if (name := scope.get("lorad_operator")) is not None:
        return f"tcp key {name}"
    peer = scope.get("lorad_peer")
    return "unknown peer" if peer is None else f"uid {peer.uid} pid {peer.pid}"


def done(request: Request, action: str, name: str, *, rev: str = "", message: str = "") -> None:
    """It was asked for, and done."""
    note, actor = deps_of(request).audit.note, actor_of(request.scope)
    note(actor, action, name, "ok", rev=rev, message=message)


def each(request: Request, action: str, items: Iterable[wire.ItemResult]) -> None:
    """What became of each name.  What the registry wrote, it has noted itself."""
    note, actor = deps_of(request).audit.note, actor_of(request.scope)
    noted = ("pin", "unpin")
    for item in items:
        if not item.ok:
            note(actor, action, item.name, item.code, rev=item.rev, message=item.message)
        elif action not in noted:
            note(actor, action, item.name, "ok", rev=item.rev)


def refused(deps: Deps, listener: str, scope: Scope, error: Exception) -> None:
    """For the guard: strangers, wrong keys, what is another tenant's, what an operator may not."""
    if isinstance(error, Forbidden):
        why = "not among what this tenant may use"
        deps.audit.note(error.who, "request", error.model, "forbidden", message=why)
        return
    if not isinstance(error, LoradError):
        return
    if listener != "admin":
        if error.code in ("permission_denied", "invalid_api_key"):
            note, path = deps.audit.note, scope["path"]
            note(actor_of(scope), "request", path, error.code, message=error.message)
    elif scope["method"] in _CHANGING or error.code == "permission_denied":
        action, name = _told(scope)
        note = deps.audit.note
        note(actor_of(scope), action, name, error.code, message=error.message)


async def page(request: Request) -> Response:
    """`seconds`: how far back; `actor`, `action`, `name` narrow it."""
    query = request.query_params
    seconds = asked.number(request, "seconds", 0, 0, 1 << 40)
    rows = deps_of(request).audit.page(
        asked.number(request, "limit", 100, 1, MAX_PAGE),
        seconds=seconds,
        actor=query.get("actor", ""),
        action=query.get("action", ""),
        name=query.get("name", ""),
    )
    return json(AuditPage(items=tuple(map(_shown, reversed(rows)))))


def _told(scope: Scope) -> tuple[str, str]:
    """What a refused request would have done, and to whom."""
    _, _, way = scope["path"].partition("/v1/")
    word = way.partition("/")[0] or "request"
    params = scope.get("path_params", {})
    name = next((str(params[key]) for key in _NAMES if key in params), "")
    if "tenant" in params:
        name = f"tenant:{name}"
        if way.endswith("/key"):
            return "tenant.key_rotated", name
    return _ACTIONS.get((scope["method"], word), word[:40]), name


def _shown(row: AuditRecord) -> AuditItem:
    return AuditItem(
        id=row.id,
        time=rfc3339(datetime.fromtimestamp(row.time, UTC)),
        actor=row.actor,
        action=row.action,
        name=row.name,
        rev=row.rev,
        result=row.result,
        message=row.message,
    )

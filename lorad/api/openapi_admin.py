"""What the admin routes take and give, for `GET /openapi.json` on the admin socket.

Goes in: nothing.  Comes out: one row a method and route; a test holds them against the routes.
"""

from collections.abc import Mapping

from engine.adapters.states import State
from lorad import (
    wire,
    wire_compat,
    wire_explain,
    wire_operate,
    wire_operations,
    wire_registry,
    wire_stream,
    wire_tenants,
)
from lorad.api.admin import MAX_PAGE
from lorad.api.audit import MAX_PAGE as MAX_AUDIT
from lorad.api.openapi import FLAG, HEALTH, SELF, TEXT, Binary, Operation, whole
from lorad.board.stream import LEAST_SECONDS, MOST_SECONDS
from lorad.registry.paging import SORTS
from lorad.service.operations import MAX_WAIT_SECONDS
from lorad.wire_status import Status

_PLACE = "/admin/v1"
_ADAPTER = f"{_PLACE}/adapters/{{name}}"
_UPLOAD = f"{_PLACE}/uploads/{{upload_id}}"
_TENANT = f"{_PLACE}/tenants/{{tenant}}"

_LIMIT = whole(1, MAX_PAGE)
_SINCE = {"since": whole(0, 1 << 62), "limit": _LIMIT}
_SECONDS = {"type": "number", "minimum": LEAST_SECONDS, "maximum": MOST_SECONDS}
_FILTERS = {
    "state": {"enum": sorted(State)},
    "tenant": TEXT,
    "model": TEXT,
    "q": TEXT,
    "sort": {"enum": [minus + word for word in SORTS for minus in ("", "-")]},
    "limit": _LIMIT,
    "cursor": TEXT,
}
_WHOSE = {"seconds": whole(0, 1 << 40), "limit": whole(1, MAX_AUDIT)}
_WHOSE |= {name: TEXT for name in ("actor", "action", "name")}
_KEEP = {"keep_files": FLAG}

#: (method, path) -> what it does.
ADMIN: Mapping[tuple[str, str], Operation] = {
    **HEALTH,
    **SELF,
    ("GET", "/metrics"): Operation("Prometheus or OpenMetrics", Binary("text/plain")),
    # ------------------------------------------------------------- pictures
    ("GET", f"{_PLACE}/status"): Operation("The daemon, its engine and its room", Status),
    ("GET", f"{_PLACE}/snapshot"): Operation("The same", Status),
    ("GET", f"{_PLACE}/slots"): Operation("Who is on the GPU", wire.SlotPage),
    ("GET", f"{_PLACE}/adapters"): Operation(
        "A page of adapters", wire.AdapterPage, query=_FILTERS
    ),
    ("GET", f"{_PLACE}/events"): Operation(
        "The newest events, or all that follow", wire.EventPage, chunk=wire.EventItem, query=_SINCE
    ),
    ("GET", f"{_PLACE}/board"): Operation("All that a dashboard shows", wire_stream.Board),
    ("GET", f"{_PLACE}/stream"): Operation(
        "The same, and what changes; events: board, delta, event",
        wire_stream.Board,
        chunk=wire_stream.Delta,
        query={"interval": _SECONDS, "since": _SINCE["since"]},
    ),
    ("GET", f"{_PLACE}/logs"): Operation(
        "The log's last lines, or all that follow",
        wire_operate.LogPage,
        chunk=wire_operate.LogLine,
        query=_SINCE,
    ),
    ("GET", f"{_PLACE}/audit"): Operation("Who did what", wire_tenants.AuditPage, query=_WHOSE),
    # ------------------------------------------------------------- one adapter
    ("GET", _ADAPTER): Operation("One adapter", wire.AdapterDetail),
    ("PATCH", _ADAPTER): Operation("Change it", wire.AdapterDetail, wire.AdapterPatch),
    ("DELETE", _ADAPTER): Operation("Take its name away", wire.Removed, query=_KEEP),
    ("GET", f"{_ADAPTER}/explain"): Operation(
        "Why it is served, or is not; with ?show=1 the adapter NAME/explain", wire_explain.Explained
    ),
    # An adapter may be called `acme/explain`.
    ("PATCH", f"{_ADAPTER}/explain"): Operation(
        "Change the adapter NAME/explain", wire.AdapterDetail, wire.AdapterPatch
    ),
    ("DELETE", f"{_ADAPTER}/explain"): Operation(
        "Take the name NAME/explain away", wire.Removed, query=_KEEP
    ),
    # ------------------------------------------------------------- wishes
    ("POST", f"{_PLACE}/load"): Operation("Onto the GPU", wire.Results, wire.Names),
    ("POST", f"{_PLACE}/evict"): Operation("Off the GPU", wire.Results, wire.Names),
    ("POST", f"{_PLACE}/pin"): Operation("To stay on the GPU", wire.Results, wire.Names),
    ("POST", f"{_PLACE}/unpin"): Operation("To stay no more", wire.Results, wire.Names),
    ("POST", f"{_PLACE}/verify"): Operation(
        "Hold adapters against their files", wire.Verifications, wire.Names
    ),
    ("POST", f"{_PLACE}/gc"): Operation("Remove what nobody needs", wire.Garbage, wire.GcAsk),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "Add and load a folder, as of vLLM", Binary("text/plain"), wire_compat.LoadAdapter
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "Take a name away, as of vLLM", Binary("text/plain"), wire_compat.UnloadAdapter
    ),
    # ------------------------------------------------------------- the daemon
    ("GET", f"{_PLACE}/config"): Operation(
        "The settings in effect, and where each is from", wire_operate.RunningConfig
    ),
    ("POST", f"{_PLACE}/reload"): Operation("Read the settings anew", wire_operate.Reloaded),
    ("POST", f"{_PLACE}/drain"): Operation(
        "Take no new requests", wire_operate.Drained, wire_operate.DrainAsk
    ),
    ("POST", f"{_PLACE}/resume"): Operation(
        "Take them again", wire_operate.Drained, wire_operate.DrainAsk
    ),
    ("POST", f"{_PLACE}/hold"): Operation(
        "Keep a name's revision to be had as name@digest", wire_operate.Held, wire_operate.HoldAsk
    ),
    ("POST", f"{_PLACE}/shed"): Operation(
        "Send on who waits here and came by a gateway", wire_operate.Shed, wire_operate.ShedAsk
    ),
    ("DELETE", f"{_PLACE}/requests/{{request_id}}"): Operation(
        "End one that runs or waits; its client gets an error", wire_operate.RequestCancelled
    ),
    ("GET", f"{_PLACE}/registry/check"): Operation(
        "Is the registry whole?", wire_registry.RegistryCheck
    ),
    ("GET", f"{_PLACE}/registry/backup"): Operation(
        "A copy of its database", Binary("application/vnd.sqlite3")
    ),
    ("GET", f"{_PLACE}/registry/export"): Operation("Its names", wire_registry.RegistryExport),
    ("POST", f"{_PLACE}/registry/import"): Operation(
        "Take names in", wire_registry.RegistryImported, wire_registry.RegistryImport
    ),
    # ------------------------------------------------------------- what comes from elsewhere
    ("POST", f"{_PLACE}/pulls"): Operation(
        "Pull an adapter; a dry run answers 200 and its plan",
        wire_operations.Operation,
        wire_operations.PullStart,
        status=202,
        otherwise={200: wire_operations.PullPlan},
    ),
    ("GET", f"{_PLACE}/operations"): Operation(
        "Operations, the newest first",
        wire_operations.OperationPage,
        query={"live": FLAG, "limit": _LIMIT},
    ),
    ("GET", f"{_PLACE}/operations/{{operation_id}}"): Operation(
        "One of them, after a while if it has not ended",
        wire_operations.Operation,
        query={"wait_ms": whole(0, int(MAX_WAIT_SECONDS * 1000))},
    ),
    ("DELETE", f"{_PLACE}/operations/{{operation_id}}"): Operation(
        "Cancel it", wire_operations.Operation
    ),
    ("POST", f"{_PLACE}/uploads"): Operation(
        "Open an upload", wire.UploadOpen, wire.UploadStart, status=201
    ),
    ("PUT", f"{_UPLOAD}/files/{{file}}"): Operation(
        "One file; the body is its bytes",
        dict[str, str | int],
        Binary("application/octet-stream"),
    ),
    ("POST", f"{_UPLOAD}/commit"): Operation(
        "Add what came; 202 where nobody waits for it",
        wire.Added,
        wire.UploadCommit,
        otherwise={202: wire.Added},
    ),
    ("DELETE", _UPLOAD): Operation("Give it up", None, status=204),
    # ------------------------------------------------------------- tenants
    ("GET", f"{_PLACE}/tenants"): Operation("Tenants", wire_tenants.TenantPage),
    ("POST", f"{_PLACE}/tenants"): Operation(
        "Add one; its key is in this answer alone",
        wire_tenants.TenantKey,
        wire_tenants.TenantStart,
        status=201,
    ),
    ("GET", _TENANT): Operation("One tenant", wire_tenants.Tenant),
    ("PATCH", _TENANT): Operation("Change it", wire_tenants.Tenant, wire_tenants.TenantPatch),
    ("DELETE", _TENANT): Operation("End it and its keys", wire_tenants.TenantGone),
    ("POST", f"{_TENANT}/key"): Operation("A new key", wire_tenants.TenantKey, wire_tenants.Rotate),
}

"""The two applications, each a table of routes behind its guard.

Goes in: `Deps`.  Comes out: `inference_app` for applications, `admin_app` for operators; nothing
that manages adapters exists on the first.  A route that is in no table is a 404 in our envelope.
"""

from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route as PlainRoute
from starlette.types import Receive, Scope, Send

from lorad.api import (
    admin,
    audit,
    board,
    compat,
    generate,
    health,
    identity,
    metrics,
    missing,
    models,
    openapi,
    openapi_admin,
    operate,
    operations,
    pooling,
    registry,
    tcp,
    tenants,
    tokens,
)
from lorad.api.deps import Deps
from lorad.api.guard import Bounds, Guard, admin_uids
from lorad.api.tcp import TcpKeys
from lorad.config import Settings


class Route(PlainRoute):
    """Its pattern is what a request of it is counted under."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["lorad_route"] = self.path
        await super().handle(scope, receive, send)


HEALTH = [
    Route("/livez", health.livez),
    Route("/readyz", health.readyz),
    Route("/health", health.readyz),
    Route("/startupz", health.startupz),
    Route("/version", health.version),
]

#: Of whom nobody asks who they are.
OPEN = frozenset(route.path for route in HEALTH)

INFERENCE = [
    *HEALTH,
    Route("/v1/models", models.list_models),
    Route("/v1/models/{id:path}", models.get_model),
    Route("/v1/chat/completions", generate.chat_completions, methods=["POST"]),
    Route("/v1/completions", generate.completions, methods=["POST"]),
    Route("/v1/embeddings", pooling.embeddings, methods=["POST"]),
    Route("/v1/rerank", pooling.rerank, methods=["POST"]),
    Route("/v2/rerank", pooling.rerank, methods=["POST"]),
    Route("/rerank", pooling.tei_rerank, methods=["POST"]),
    Route("/embed", pooling.tei_embed, methods=["POST"]),
    Route("/similarity", pooling.tei_similarity, methods=["POST"]),
    Route("/", pooling.tei_root, methods=["POST"]),
    Route("/v1/score", pooling.score, methods=["POST"]),
    Route("/classify", pooling.classify, methods=["POST"]),
    Route("/pooling", pooling.pooling, methods=["POST"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/openapi.json", openapi.describing(openapi.INFERENCE)),
]

_V1 = "/admin/v1"
_ADAPTER = ["GET", "PATCH", "DELETE"]
_FILES = "/uploads/{upload_id}/files/{file}"

ADMIN = [
    *HEALTH,
    Route("/openapi.json", openapi.describing(openapi_admin.ADMIN)),
    Route("/metrics", metrics.scrape),
    Route(f"{_V1}/status", admin.status),
    Route(f"{_V1}/snapshot", admin.status),
    Route(f"{_V1}/slots", admin.slots),
    Route(f"{_V1}/events", admin.events),
    Route(f"{_V1}/board", board.board),
    Route(f"{_V1}/stream", board.stream),
    Route(f"{_V1}/adapters", admin.list_adapters),
    Route(f"{_V1}/adapters/{{name:path}}/explain", admin.explain, methods=_ADAPTER),
    Route(f"{_V1}/adapters/{{name:path}}", admin.adapter, methods=_ADAPTER),
    Route(f"{_V1}/load", admin.load, methods=["POST"]),
    Route(f"{_V1}/evict", admin.evict, methods=["POST"]),
    Route(f"{_V1}/pin", admin.pin, methods=["POST"]),
    Route(f"{_V1}/unpin", admin.unpin, methods=["POST"]),
    Route(f"{_V1}/verify", admin.verify, methods=["POST"]),
    Route(f"{_V1}/gc", admin.gc, methods=["POST"]),
    Route(f"{_V1}/config", operate.config),
    Route(f"{_V1}/reload", operate.reload, methods=["POST"]),
    Route(f"{_V1}/logs", operate.logs),
    Route(f"{_V1}/drain", operate.drain, methods=["POST"]),
    Route(f"{_V1}/resume", operate.resume, methods=["POST"]),
    Route(f"{_V1}/hold", operate.hold, methods=["POST"]),
    Route(f"{_V1}/shed", operate.shed, methods=["POST"]),
    Route(f"{_V1}/requests/{{request_id}}", operate.cancel_request, methods=["DELETE"]),
    Route(f"{_V1}/registry/check", registry.check),
    Route(f"{_V1}/registry/backup", registry.backup),
    Route(f"{_V1}/registry/export", registry.export),
    Route(f"{_V1}/registry/import", registry.take_in, methods=["POST"]),
    Route(f"{_V1}/pulls", operations.pull, methods=["POST"]),
    Route(f"{_V1}/operations", operations.list_operations),
    Route(f"{_V1}/operations/{{operation_id}}", operations.operation, methods=["GET", "DELETE"]),
    Route(f"{_V1}/audit", audit.page),
    Route(f"{_V1}/tenants", tenants.tenants, methods=["GET", "POST"]),
    Route(f"{_V1}/tenants/{{tenant}}", tenants.tenant, methods=["GET", "PATCH", "DELETE"]),
    Route(f"{_V1}/tenants/{{tenant}}/key", tenants.rotate_key, methods=["POST"]),
    Route(f"{_V1}/uploads", admin.open_upload, methods=["POST"]),
    Route(f"{_V1}{_FILES}", admin.put_file, methods=["PUT"]),
    Route(f"{_V1}/uploads/{{upload_id}}/commit", admin.commit_upload, methods=["POST"]),
    Route(f"{_V1}/uploads/{{upload_id}}", admin.drop_upload, methods=["DELETE"]),
    Route("/v1/load_lora_adapter", compat.load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", compat.unload_lora_adapter, methods=["POST"]),
]


METRICS = [
    Route("/livez", health.livez),
    Route("/metrics", metrics.scrape),
]


def inference_app(deps: Deps) -> Starlette:
    """For `inference.sock`: whom the socket's mode lets in, and `inference.auth` knows."""
    limits = deps.limits
    bounds = Bounds(
        limits.body,
        limits.headers,
        limits.request_receipt,
        admit=partial(identity.admit, deps, deps.settings.inference.auth),
        open_paths=OPEN,
        on_refused=partial(audit.refused, deps, "inference"),
    )
    return _app(deps, INFERENCE, bounds)


def admin_app(deps: Deps) -> Starlette:
    """For `admin.sock`: root, the daemon's own user, and `admin.allow_uids`."""
    limits = deps.limits
    bounds = Bounds(
        limits.body,
        limits.headers,
        limits.request_receipt,
        uids=admin_uids(deps.settings.admin.allow_uids),
        open_paths=OPEN,
        admit=identity.act,
        on_refused=partial(audit.refused, deps, "admin"),
        streamed=_is_upload,
        listener="admin",
    )
    return _app(deps, ADMIN, bounds)


def inference_tcp_app(deps: Deps, keys: TcpKeys) -> Starlette:
    """For `tcp.bind`: who has a key, or on loopback and without tenants and keys, everybody."""
    limits = deps.limits
    bounds = Bounds(
        limits.body,
        limits.headers,
        limits.request_receipt,
        admit=partial(tcp.admit, deps, keys),
        open_paths=OPEN,
        on_refused=partial(audit.refused, deps, "inference"),
        listener="tcp",
    )
    return _app(deps, INFERENCE, bounds, Middleware(tcp.KnownHost, deps=deps))


def admin_tcp_app(deps: Deps, keys: TcpKeys) -> Starlette:
    """For `tcp.admin_bind`: who has an operator's key."""
    limits = deps.limits
    bounds = Bounds(
        limits.body,
        limits.headers,
        limits.request_receipt,
        admit=partial(tcp.admit_operator, keys),
        open_paths=OPEN,
        on_refused=partial(audit.refused, deps, "admin"),
        streamed=_is_upload,
        listener="tcp-admin",
    )
    return _app(deps, ADMIN, bounds, Middleware(tcp.KnownHost, deps=deps))


def metrics_app(deps: Deps) -> Starlette:
    """For `metrics.tcp`: whoever reaches it may read, and there is nothing else."""
    limits = deps.limits
    bounds = Bounds(limits.body, limits.headers, limits.request_receipt, listener="metrics")
    own = Middleware(metrics.OwnHost, anywhere=deps.settings.metrics.beyond_loopback)
    return _app(deps, METRICS, bounds, own)


def limit(app: Starlette, settings: Settings) -> None:
    """Let requests that come from now on be bounded by `settings`."""
    bounds: Bounds = app.state.bounds
    limits = settings.limits
    bounds.body_bytes, bounds.header_bytes = limits.body, limits.headers
    bounds.receipt_seconds = limits.request_receipt
    if bounds.uids is not None:
        bounds.uids = admin_uids(settings.admin.allow_uids)


def _app(deps: Deps, routes: list[Route], bounds: Bounds, *more: Middleware) -> Starlette:
    guard = Middleware(Guard, bounds=bounds, counts=deps.http, on_gone=deps.note_aborted)
    app = Starlette(
        routes=routes,
        middleware=[guard, *more],
        exception_handlers={HTTPException: missing.no_route},
    )
    app.router.redirect_slashes = False
    app.state.deps, app.state.bounds = deps, bounds
    return app


def _is_upload(scope: Scope) -> bool:
    """Files go to disk as they come, under their own limit of bytes."""
    path: str = scope["path"]
    return scope["method"] == "PUT" and path.startswith(f"{_V1}/uploads/")

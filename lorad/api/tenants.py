"""Routes of tenants and their keys, on the admin socket.

Goes in: what a tenant is and may.  Comes out: tenants; a new key once, in the answer to its making.
Decides nothing itself.
"""

from starlette.requests import Request
from starlette.responses import Response

from lorad.api import asked
from lorad.api.deps import deps_of
from lorad.api.respond import json
from lorad.wire_tenants import Rotate, TenantPatch, TenantStart

#: A key is for its owner, not for anybody's cache.
_UNSTORED = {"cache-control": "no-store"}


async def tenants(request: Request) -> Response:
    """GET lists them, POST adds one."""
    tenancy = deps_of(request).tenancy
    if request.method != "POST":
        return json(tenancy.list())
    start = await asked.body(request, TenantStart)
    return json(await tenancy.add(start), status=201, headers=_UNSTORED)


async def tenant(request: Request) -> Response:
    """GET shows it, PATCH changes it (and shows it), DELETE ends it and its keys."""
    tenancy, name = deps_of(request).tenancy, request.path_params["tenant"]
    if request.method == "DELETE":
        return json(await tenancy.remove(name))
    if request.method == "PATCH":
        return json(await tenancy.set(name, await asked.body(request, TenantPatch)))
    return json(tenancy.get(name))


async def rotate_key(request: Request) -> Response:
    """A new key; older ones end now, or after a while."""
    wish = await asked.body(request, Rotate)
    made = await deps_of(request).tenancy.rotate_key(request.path_params["tenant"], wish)
    return json(made, headers=_UNSTORED)

"""Who sends a request to the inference routes: the peer of its connection, or the key in its head.

Goes in: a scope and its headers, before a byte of the body was read.  Comes out: the `Caller` in
the scope, or invalid_api_key and permission_denied.  Knows no route.
"""

from dataclasses import replace

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from lorad.api.audit import actor_of
from lorad.api.deps import Deps
from lorad.registry.journal import act_as
from lorad.service.callers import Auth
from lorad.service.tenants import Caller

#: The revision that the model's name is to mean to this request: a gateway's word, so that all of
#: its daemons move at once.  As asking for name@revision, but for the name in the answer.
REV_HEADER = "x-lorad-rev"
#: A gateway's word that it sends this request to another daemon, should this one send it on.
MOVES_HEADER = "x-lorad-moves"


def admit(deps: Deps, auth: Auth, scope: Scope, headers: Headers) -> None:
    """For `Bounds.admit`, bound to one listener's way of knowing people."""
    peer = scope.get("lorad_peer")
    uid, pid = (None, None) if peer is None else (peer.uid, peer.pid)
    scope["lorad_caller"] = deps.callers.identify(uid, pid, key_of(headers), auth)


def act(scope: Scope, headers: Headers) -> None:
    """The same for the admin routes, whose uids the guard has checked: what the request does, and
    what it begins, is on its peer's word."""
    act_as(actor_of(scope))


def caller_of(request: Request) -> Caller:
    """Of a route that is not open to everybody."""
    caller: Caller = request.scope["lorad_caller"]
    rev = request.headers.get(REV_HEADER)
    return caller if rev is None else replace(caller, rev=rev)


def key_of(headers: Headers) -> str:
    """What is no bearer token is no key, and is refused as one where keys count."""
    given = headers.get("authorization", "").strip()
    scheme, _, token = given.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else given

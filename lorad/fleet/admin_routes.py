"""Operators' routes of a gateway: for each of a daemon's, what is done with it here.

Goes in: the daemon's table, and the decisions.  Comes out: the gateway's table.  Which of several
daemons answers, or all of them, or none, is decided by nobody but people: a route of the daemon's
without a decision does not exist here, and a test asks for it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from lorad.api.app import ADMIN, OPEN, Route
from lorad.errors import LoradError
from lorad.fleet import admin
from lorad.fleet.asking import V1

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Refused:
    """It makes no sense of several daemons; `instead` is the next step."""

    instead: str


#: "as there": the daemon's own handler, over what the gateway has in `Deps`; "elsewhere": the
#: gateway answers it for applications.
Decision = Handler | Refused | Literal["as there", "elsewhere"]

#: Words of routes that are each member's own, by any method, whatever follows -> the next step.
MEMBERS_OWN: Mapping[str, Refused] = {
    "audit": Refused("each member has its own: loractl -H MEMBER audit"),
    "config": Refused("each member has its own: loractl -H MEMBER config"),
    "gc": Refused("each member has a store of its own: loractl -H MEMBER gc"),
    "logs": Refused(
        "each member has its own: loractl -H MEMBER logs; loractl events has all members'"
    ),
    "registry": Refused("each member has its own; what all have is the catalog's table"),
    "reload": Refused("each member has its own settings: loractl -H MEMBER reload"),
    "tenants": Refused("they are of each member: loractl -H MEMBER tenant"),
    "hold": Refused("it is for gateways, at a member"),
    "shed": Refused("it is for gateways, at a member"),
}
_FOLDERS = Refused("folders of a member's machine are not the cluster's: loractl add DIR --load")

#: By the pattern of the daemon's route; those of MEMBERS_OWN beside them.
DECISIONS: Mapping[str, Decision] = {
    "/openapi.json": "elsewhere",
    "/metrics": admin.scrape,
    f"{V1}/status": "as there",
    f"{V1}/snapshot": "as there",
    f"{V1}/slots": "as there",
    f"{V1}/events": "as there",
    f"{V1}/board": "as there",
    f"{V1}/stream": "as there",
    f"{V1}/adapters": "as there",
    f"{V1}/adapters/{{name:path}}/explain": admin.explain,
    f"{V1}/adapters/{{name:path}}": admin.adapter,
    f"{V1}/load": "as there",
    f"{V1}/evict": "as there",
    f"{V1}/pin": "as there",
    f"{V1}/unpin": "as there",
    f"{V1}/verify": admin.verify,
    f"{V1}/drain": admin.drain,
    f"{V1}/resume": admin.resume,
    f"{V1}/requests/{{request_id}}": admin.cancel_request,
    f"{V1}/pulls": admin.pull,
    f"{V1}/operations": admin.list_operations,
    f"{V1}/operations/{{operation_id}}": admin.operation,
    f"{V1}/uploads": "as there",
    f"{V1}/uploads/{{upload_id}}/files/{{file}}": "as there",
    f"{V1}/uploads/{{upload_id}}/commit": "as there",
    f"{V1}/uploads/{{upload_id}}": "as there",
    "/v1/load_lora_adapter": _FOLDERS,
    "/v1/unload_lora_adapter": Refused("loractl rm NAME"),
}
#: What no daemon has.
OWN = [Route(f"{V1}/rollback", admin.rollback, methods=["POST"])]
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def undecided() -> list[str]:
    """Patterns of the daemon's that nobody has decided on.  Who asks how it is has answers of the
    gateway's own."""
    members = tuple(f"{V1}/{word}" for word in MEMBERS_OWN)
    known = {*DECISIONS, *OPEN}
    return [
        one.path
        for one in ADMIN
        if one.path not in known and not f"{one.path}/".startswith(tuple(f"{m}/" for m in members))
    ]


def routes(instead: Mapping[str, Handler]) -> list[Route]:
    """In the daemon's order; `instead`: handlers by the daemon's patterns, before what is decided
    on them."""
    found = []
    for one in ADMIN:
        what = instead.get(one.path) or DECISIONS.get(one.path)
        if what == "as there":
            what = one.endpoint
        if isinstance(what, Refused):
            what = _refusing(_word_of(one.path), what)
        if callable(what):
            found.append(Route(one.path, what, methods=methods_of(one)))
    own = [
        Route(f"{V1}/{word}{rest}", _refusing(word, refused), methods=_METHODS)
        for word, refused in MEMBERS_OWN.items()
        for rest in ("", "/{rest:path}")
    ]
    return [*OWN, *own, *found]


def methods_of(route: Route) -> list[str]:
    """Those that it was made with."""
    return sorted((route.methods or set()) - {"HEAD"})


def _word_of(path: str) -> str:
    return path.removeprefix(f"{V1}/").removeprefix("/v1/").partition("/")[0]


def _refusing(word: str, refused: Refused) -> Handler:
    async def refuse(request: Request) -> Response:
        raise LoradError("not_found", f"a gateway has no {word}", hint=refused.instead)

    return refuse

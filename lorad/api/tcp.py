"""The planes over TCP: keys instead of peers, and no web page that came by a name of its own.

Goes in: scopes and their headers.  Comes out: the `Caller` of an inference request, or why there is
none.  A reload puts other keys into `TcpKeys`.
"""

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lorad.api.audit import actor_of
from lorad.api.deps import Deps
from lorad.api.identity import key_of
from lorad.errors import LoradError
from lorad.key_file import NONE, Keys
from lorad.registry.journal import act_as
from lorad.service.callers import operator

_HOW = "authorization: Bearer KEY"


@dataclass(slots=True)
class TcpKeys:
    """Of the two planes; `open` lets requests without a key in, on loopback and without tenants."""

    inference: Keys = NONE
    admin: Keys = NONE
    open: bool = False


def admit(deps: Deps, keys: TcpKeys, scope: Scope, headers: Headers) -> None:
    """To the inference routes: a key of the file, or a tenant's."""
    key = key_of(headers)
    name = keys.inference.name_of(key)
    if name is not None:
        scope["lorad_caller"] = operator(deps.callers, f"tcp key {name}")
        return
    free = keys.open and not keys.inference and not deps.callers.names
    auth = deps.settings.inference.auth if free else "key"
    scope["lorad_caller"] = deps.callers.identify(None, None, key, auth)


def admit_operator(keys: TcpKeys, scope: Scope, headers: Headers) -> None:
    """To the admin routes: a key of their file, and nothing else."""
    name = keys.admin.name_of(key_of(headers))
    if name is None:
        raise LoradError("invalid_api_key", "an operator's key is needed here", hint=_HOW)
    scope["lorad_operator"] = name
    act_as(actor_of(scope))


class KnownHost:
    """Refuses what a browser sends that was led here by a name or a page that is not ours.

    An address cannot be made to mean another machine, so every address is ours; a name must be
    among `tcp.allow_hosts`, and so must be that of an `Origin`.
    """

    def __init__(self, app: ASGIApp, *, deps: Deps) -> None:
        self._app, self._deps = app, deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            names = self._deps.settings.tcp.allow_hosts
            if not _is_ours(f"//{headers.get('host', '')}", names):
                raise LoradError(
                    "permission_denied",
                    "this host is not known by the name that was asked for",
                    hint="tcp.allow_hosts in lorad.toml",
                )
            origin = headers.get("origin")
            if origin is not None and not _is_ours(origin, names, addresses=False):
                raise LoradError("permission_denied", "web pages of elsewhere may not ask this")
        await self._app(scope, receive, send)


def _is_ours(url: str, names: tuple[str, ...], *, addresses: bool = True) -> bool:
    try:
        host = (urlsplit(url).hostname or "").lower()
    except ValueError:
        return False
    if host in {name.lower() for name in names}:
        return True
    try:
        return ip_address(host) is not None and addresses
    except ValueError:
        return False

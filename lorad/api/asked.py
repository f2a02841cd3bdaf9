"""What a request asks for, beyond its path: a body, a number in its query, who sends it.

Goes in: a request that the guard let in.  Comes out: a checked value, or a 400 that names the
parameter.
"""

from typing import TypeVar

from starlette.requests import Request

from lorad.api.body import decode
from lorad.api.deps import deps_of
from lorad.errors import LoradError

T = TypeVar("T")


async def body(request: Request, kind: type[T]) -> T:
    return decode(await request.body() or b"{}", kind, max_depth=deps_of(request).limits.json_depth)


def uid(request: Request) -> int | None:
    peer = request.scope.get("lorad_peer")
    return peer.uid if peer is not None else None


def number(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise LoradError("invalid_value", f"{name} must be {low} to {high}", param=name)
    return int(text)

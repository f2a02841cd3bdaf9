"""What a request asks for, beyond its path: a body, a number in its query, who sends it.

Goes in: a request that the guard let in.  Comes out: a checked value, or a 400 that names the
parameter.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request

from lorad.api import params
from lorad.api.body import decode, fields
from lorad.api.deps import deps_of
from lorad.errors import LoradError

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

#: Bytes of a body from which on it is read beside the loop: 4 MB of ids, messages or unknown keys
#: held up everybody's stream for 0.15 to 0.3 s.
BESIDE = 1 << 16

_FLAGS = dict.fromkeys(("1", "true", "yes"), True) | dict.fromkeys(("0", "false", "no"), False)


async def body(request: Request, kind: type[T]) -> T:
    return decode(await request.body() or b"{}", kind, max_depth=deps_of(request).limits.json_depth)


async def checked(request: Request, kind: type[S], refused: Mapping[str, params.Refused]) -> S:
    """A body of the inference socket: what is `refused` and says something is a 400, and unknown
    keys are where the settings want that."""
    limits = deps_of(request).limits

    def read(raw: bytes) -> S:
        known = decode(raw, kind, max_depth=limits.json_depth)
        params.check(fields(raw), refused, frozenset(kind.__struct_fields__), limits.strict_params)
        return known

    return await read_with(request, read)


async def read_with(request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the body."""
    raw = await request.body()
    if len(raw) < BESIDE:
        return read(raw)
    return await deps_of(request).requests.threads.run(0, partial(read, raw))


def uid(request: Request) -> int | None:
    peer = request.scope.get("lorad_peer")
    return peer.uid if peer is not None else None


def decimal(request: Request, name: str, default: float, low: float, high: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise LoradError("invalid_value", f"{name} must be {low:g} to {high:g}", param=name)
    return value


def number(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise LoradError("invalid_value", f"{name} must be {low} to {high}", param=name)
    return int(text)


def flag(request: Request, name: str) -> bool:
    """Absent is no."""
    word = request.query_params.get(name, "false").lower()
    if word not in _FLAGS:
        raise LoradError("invalid_value", f"{name} must be true or false", param=name)
    return _FLAGS[word]

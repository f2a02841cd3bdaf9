"""Structs and errors → HTTP responses, the one envelope for every error of both sockets.

Goes in: a Struct, or any exception.  Comes out: a Starlette Response with the headers that tell a
client whether to try again.  A traceback never leaves the process: unknown exceptions are logged
here and answered `internal_error`.
"""

import logging
import math
import secrets

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import EngineError
from lorad.errors import LoradError, from_engine
from lorad.wire import ErrorBody, ErrorEnvelope

log = logging.getLogger("lorad.api")

_RETRY_SECONDS = 5.0
#: Statuses that Starlette raises by itself -> our code and sentence.
_ROUTING = {
    404: ("not_found", "there is no such route here"),
    405: ("method_not_allowed", "this route does not take that method"),
}


def json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A Struct as the body of an answer."""
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )


def as_lorad_error(error: Exception) -> LoradError:
    """Any exception as what a caller may be told."""
    if isinstance(error, LoradError):
        return error
    if isinstance(error, EngineError):
        return from_engine(error)
    if isinstance(error, HTTPException) and error.status_code in _ROUTING:
        return LoradError(*_ROUTING[error.status_code])
    log.error("request failed", exc_info=error)
    return LoradError("internal_error", "something went wrong inside lorad; its log says what")


def envelope(error: LoradError) -> ErrorEnvelope:
    """The body of an error; the hint travels in `details`, where every client can find it."""
    details = dict(error.details)
    if error.hint:
        details["hint"] = error.hint
    return ErrorEnvelope(
        ErrorBody(
            message=_inert(error.message),
            type=error.type,
            param=error.param,
            code=error.code,
            details=details,
        )
    )


def _inert(message: str) -> str:
    """It may quote what others wrote, and be shown in a terminal."""
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))


def error_headers(error: LoradError) -> dict[str, str]:
    """Whether, and when, the same request is worth another try."""
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or _RETRY_SECONDS)))
    if error.status in (408, 409, 429) or error.status >= 500:
        # The SDKs retry all of these unless told otherwise.
        headers["x-should-retry"] = "true" if error.retryable else "false"
    return headers


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def failure(error: Exception) -> Response:
    """The answer to a request that failed before its response began."""
    known = as_lorad_error(error)
    headers = error_headers(known)
    if isinstance(error, HTTPException) and error.headers:
        headers |= {name.lower(): value for name, value in error.headers.items()}
    return json(envelope(known), status=known.status, headers=headers)

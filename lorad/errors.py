"""The daemon's errors, and the one table that says what each code means to HTTP, shell and client.

    LoradError                       any code of TABLE: a request or command that failed
    StartError                       the daemon cannot start or go on; has its exit status
    ├── BadConfig           exit 2   a setting is unknown, malformed or contradicts another
    ├── CannotBind          exit 3   a socket path is taken, too long, or not writable
    ├── RegistryUnusable    exit 4   the registry cannot be opened, or is newer than this program
    ├── NoUsableDevice      exit 5   `device = "cuda"` without a card that works
    └── LockHeld            exit 6   another lorad owns the state directory

Goes in: a stable snake_case code.  Comes out: HTTP status, exit status of `loractl`, OpenAI error
type, and whether the same call may succeed later.  Engine errors join by their own `code` in
`from_engine`; nothing else in the project maps one world to the other.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import AdapterInvalid, EngineError


@dataclass(frozen=True, slots=True)
class Meaning:
    """One row of the table.  `retryable`: the same request may succeed later, unchanged."""

    status: int  # HTTP
    exit: int  # of loractl
    type: str  # OpenAI's error.type
    retryable: bool = False


_REQUEST, _RATE, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"

TABLE: Mapping[str, Meaning] = {
    # the caller's words
    "invalid_json": Meaning(400, 2, _REQUEST),
    "invalid_value": Meaning(400, 2, _REQUEST),
    "unsupported_parameter": Meaning(400, 2, _REQUEST),
    "context_length_exceeded": Meaning(400, 2, _REQUEST),
    "invocation_missing": Meaning(400, 2, _REQUEST),
    "invalid_config": Meaning(400, 2, _REQUEST),
    "model_unsupported": Meaning(400, 2, _REQUEST),
    # who, and what
    "invalid_api_key": Meaning(401, 5, "authentication_error"),
    "permission_denied": Meaning(403, 5, "permission_error"),
    "model_not_found": Meaning(404, 4, _REQUEST),
    "not_found": Meaning(404, 4, _REQUEST),
    "method_not_allowed": Meaning(405, 2, _REQUEST),
    # the envelope
    "request_timeout": Meaning(408, 7, _REQUEST, retryable=True),
    "payload_too_large": Meaning(413, 2, _REQUEST),
    "unsupported_media_type": Meaning(415, 2, _REQUEST),
    "headers_too_large": Meaning(431, 2, _REQUEST),
    # conflicts (admin)
    "conflict": Meaning(409, 6, _REQUEST),
    "pinned": Meaning(409, 6, _REQUEST),
    "in_use": Meaning(409, 6, _REQUEST),
    "name_taken": Meaning(409, 6, _REQUEST),
    "adapter_invalid": Meaning(422, 8, _REQUEST),
    "insufficient_storage": Meaning(507, 9, _SERVER),
    # where an adapter is fetched from
    "bad_reference": Meaning(400, 2, _REQUEST),
    "source_denied": Meaning(403, 5, "permission_error"),
    "source_not_found": Meaning(404, 4, _REQUEST),
    "source_too_big": Meaning(413, 2, _REQUEST),
    "source_corrupt": Meaning(502, 8, _SERVER),
    "source_unreachable": Meaning(503, 1, _SERVER, retryable=True),
    "source_busy": Meaning(503, 1, _SERVER, retryable=True),
    "source_offline": Meaning(503, 1, _SERVER),
    # load
    "queue_full": Meaning(429, 1, _RATE, retryable=True),
    "tenant_rate_limited": Meaning(429, 1, _RATE, retryable=True),
    # the server's own state
    "internal_error": Meaning(500, 1, _SERVER),
    "load_failed": Meaning(500, 1, _SERVER),
    "adapter_damaged": Meaning(500, 8, _SERVER),
    "loading_base": Meaning(503, 10, _SERVER, retryable=True),
    "engine_restarting": Meaning(503, 10, _SERVER, retryable=True),
    "engine_stalled": Meaning(503, 10, _SERVER, retryable=True),
    "draining": Meaning(503, 10, _SERVER, retryable=True),
    "registry_busy": Meaning(503, 1, _SERVER, retryable=True),
    "no_room": Meaning(503, 9, _SERVER),
    "deadline_exceeded": Meaning(504, 7, _SERVER),
}

#: Seconds that a client is asked to wait, for codes that are worth trying again.
RETRY_AFTER: Mapping[str, float] = {
    "queue_full": 1.0,
    "tenant_rate_limited": 1.0,
    "loading_base": 5.0,
    "engine_restarting": 5.0,
    "engine_stalled": 5.0,
    "draining": 5.0,
    "registry_busy": 1.0,
    "request_timeout": 1.0,
    "source_unreachable": 5.0,
    "source_busy": 30.0,
}


def meaning(code: str) -> Meaning:
    """The row of `code`; one that nobody entered is our fault: internal_error."""
    return TABLE.get(code, TABLE["internal_error"])


class LoradError(Exception):
    """Something that a caller is told in one line.

    `param` is the JSON path of the offending value, `details` carries e.g. `reason` = E_…, `hint`
    is the next step, `retry_after` seconds and `again`, is it worth trying again, are the
    code's unless given.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        details: Mapping[str, str] | None = None,
        hint: str = "",
        retry_after: float | None = None,
        again: bool | None = None,
    ) -> None:
        super().__init__(message)
        assert code in TABLE, f"error code {code!r} is missing from lorad.errors.TABLE"
        self.code = code
        self.message = message
        self.param = param
        self.details = dict(details or {})
        self.hint = hint
        self.again = again
        self.retry_after = RETRY_AFTER.get(code) if retry_after is None else retry_after

    @property
    def status(self) -> int:
        return TABLE[self.code].status

    @property
    def exit(self) -> int:
        return TABLE[self.code].exit

    @property
    def type(self) -> str:
        return TABLE[self.code].type

    def told_as(self, message: str, *, hint: str | None = None, **details: str) -> "LoradError":
        """The same in other words, with another next step unless `hint` is None, and more
        `details`."""
        return LoradError(
            self.code,
            message,
            param=self.param,
            details={**self.details, **details},
            hint=self.hint if hint is None else hint,
            retry_after=self.retry_after,
            again=self.again,
        )

    @property
    def advised(self) -> str:
        """Cause and next step in one line, for where there is one alone."""
        return f"{self.message}; {self.hint}" if self.hint else self.message

    @property
    def retryable(self) -> bool:
        return TABLE[self.code].retryable if self.again is None else self.again


def from_engine(error: EngineError) -> LoradError:
    """An engine's error as the daemon's; the reason of a refused adapter moves into `details`."""
    details = {"reason": error.reason} if isinstance(error, AdapterInvalid) else {}
    code = error.code if error.code in TABLE else "internal_error"
    return LoradError(code, error.message, hint=error.hint, details=details)


class StartError(Exception):
    """The daemon ends with `exit` after one line on stderr; `hint` is the next step."""

    exit = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def print(self, mark: str = "") -> None:
        """One line on stderr, and one with the next step; `mark` is the journal's priority."""
        print(f"{mark}lorad: error: {self.message}", file=sys.stderr)
        if self.hint:
            print(f"{mark}  try: {self.hint}", file=sys.stderr)


class BadConfig(StartError):
    exit = 2


class CannotBind(StartError):
    exit = 3


class RegistryUnusable(StartError):
    exit = 4


class NoUsableDevice(StartError):
    exit = 5


class LockHeld(StartError):
    exit = 6

"""What schemathesis is told about lorad; it loads this file by `SCHEMATHESIS_HOOKS`.

Goes in: calls that it is about to make, and their answers.  Comes out: calls that reach further
than a random name would, and checks of its own: one envelope for every error, and no 5xx but those
of the table.  `LORAD_FUZZ_MODELS` names what is served.
"""

import math
import os
import zlib
from typing import Any

import msgspec
import schemathesis

from lorad.errors import TABLE
from lorad.wire import ErrorBody, ErrorEnvelope

MODELS = os.environ.get("LORAD_FUZZ_MODELS", "").split()
CHECKS = ("one_envelope", "only_known_failures")
_FIELDS = set(ErrorBody.__struct_fields__)


# ----------------------------------------------------------------- calls that reach further
def _within(low: float, high: float) -> Any:
    def sane(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if not math.isfinite(value):
            return low
        return low + abs(value) % (high - low)

    return sane


def _ids(value: Any) -> Any:
    return [abs(v) % 250 for v in value][:8] or None if isinstance(value, list) else value


def _bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(i): min(max(v, -100), 100) for i, v in enumerate(value.values())}


def _messages(value: Any) -> Any:
    return [{"role": "user", "content": str(m)[:40]} for m in value] or None


#: Parameters whose range the schema does not say, since settings decide it.
SANE = {
    **dict.fromkeys(("temperature", "presence_penalty", "frequency_penalty"), _within(0, 2)),
    **dict.fromkeys(("top_p", "min_p"), _within(0, 1)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "top_k"), _within(1, 6)),
    **dict.fromkeys(("top_logprobs", "min_tokens", "priority"), _within(0, 5)),
    "repetition_penalty": _within(1, 2),
    "seed": _within(0, 1 << 40),
    "stop_token_ids": _ids,
    "allowed_token_ids": _ids,
    "tokens": _ids,
    "logit_bias": _bias,
    "messages": _messages,
}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Three of four valid calls are about something that is there, with numbers in range."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    lot = zlib.crc32(repr((case.body, case.path_parameters, case.query)).encode())
    if lot % 4 == 0 or not MODELS:
        return
    name = MODELS[lot % len(MODELS)]
    for key in ("name", "id"):
        if key in (case.path_parameters or {}):
            case.path_parameters[key] = name
    body = case.body
    if isinstance(body, dict):
        if "model" in body:
            body["model"] = name
        if "names" in body:
            body["names"] = [name]
        if case.path.endswith("completions") and body.get("max_completion_tokens") is None:
            body["max_tokens"] = body.get("max_tokens") or 4  # else all that the context holds
        for key, sane in SANE.items():
            if body.get(key) is not None:
                body[key] = sane(body[key])
        if isinstance(body.get("timeout_s"), float | int):
            body["timeout_s"] = min(body["timeout_s"], 5)


# ----------------------------------------------------------------- checks
@schemathesis.check
def one_envelope(ctx: Any, response: Any, case: Any) -> None:
    """Every error has our envelope, its code's own status, and says who may try again."""
    if response.status_code < 400 or case.method == "HEAD":
        return
    error = msgspec.json.decode(response.content, type=ErrorEnvelope).error
    assert set(msgspec.json.decode(response.content)["error"]) == _FIELDS
    assert error.code in TABLE, f"{error.code} is in no table"
    assert TABLE[error.code].status == response.status_code, error
    assert error.message.isprintable() and "Traceback" not in error.message
    assert response.headers.get("x-request-id"), "a client could not tell us of it"


@schemathesis.check
def only_known_failures(ctx: Any, response: Any, case: Any) -> None:
    """503 is documented, with a time to wait; 502 and 504 are somebody else's failures."""
    if response.status_code < 500:
        return
    code = msgspec.json.decode(response.content)["error"]["code"]
    assert response.status_code in (502, 503, 504), f"{response.status_code} {code}"
    assert response.status_code != 503 or response.headers.get("retry-after")

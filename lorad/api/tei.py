"""Errors as Text Embeddings Inference says them: `{"error", "error_type"}`, with its own statuses.

Goes in: a request that wants to be answered so, later an error.  Comes out: the response.  What the
guard refuses by itself (who, how large) is told in these words too, once the route was found.
"""

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from lorad.api.guard import FAILURE
from lorad.api.respond import as_lorad_error, envelope, error_headers, json
from lorad.errors import LoradError
from lorad.wire_pooling import TeiError

ErrorType = Literal["Validation", "Tokenizer", "Backend", "Overloaded", "Unhealthy"]


def speak(request: Request) -> None:
    """From here on, this request's errors are TEI's."""
    request.scope[FAILURE] = failure


def failure(error: Exception) -> Response:
    """The answer to a request that failed."""
    known = as_lorad_error(error)
    status, kind = _of(known)
    told = envelope(known).error.message
    said = f"{told} ({known.hint})" if known.hint else told
    body = TeiError(error=said, error_type=kind)
    return json(body, status=status, headers=error_headers(known))


def _of(error: LoradError) -> tuple[int, ErrorType]:
    """What TEI has for it; a status that it does not know is ours."""
    if error.status in (400, 413):
        # Not Unicode, or no prompt of that name: the texts never became tokens.
        return (413, "Validation") if error.code != "invalid_json" else (422, "Tokenizer")
    if error.status == 429:
        return 429, "Overloaded"
    if error.status == 503:
        return 503, "Unhealthy"
    if error.status >= 500:
        return 424, "Backend"
    return error.status, "Validation"

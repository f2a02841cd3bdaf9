"""What is answered where no route is: 404 or 405 in the envelope, and what to use instead.

Goes in: a path that is in no table.  Comes out: `not_found`, with the next step where clients of
other servers are known to ask.
"""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lorad.api.respond import failure
from lorad.errors import LoradError

#: The beginning of a path -> why it is not here, and what is.
_INSTEAD = {
    "/v1/responses": ("the Responses API is not served", "use POST /v1/chat/completions"),
    "/v1/assistants": ("the Assistants API is not served", "use POST /v1/chat/completions"),
    "/v1/threads": ("the Assistants API is not served", "use POST /v1/chat/completions"),
    "/v1/pooling": ("there is no such route here", "use POST /pooling"),
    "/v1/classify": ("there is no such route here", "use POST /classify"),
    "/score": ("there is no such route here", "use POST /v1/score"),
    "/embed_sparse": ("sparse vectors are not served", "use POST /embed"),
    "/embed_all": ("there is no such route here", "use POST /pooling"),
    "/predict": ("there is no such route here", "use POST /classify"),
    "/metrics": ("metrics are on the admin socket", ""),
    "/v1/load_lora_adapter": ("adapters are managed on the admin socket", ""),
    "/v1/unload_lora_adapter": ("adapters are managed on the admin socket", ""),
    "/v1/tokenize": ("there is no such route here", "use POST /tokenize"),
    "/v1/detokenize": ("there is no such route here", "use POST /detokenize"),
}


async def no_route(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        path = request.scope["path"]
        for begin, (why, instead) in _INSTEAD.items():
            if path == begin or path.startswith(f"{begin}/"):
                message = f"{why}: {instead}" if instead else why
                return failure(LoradError("not_found", message))
    return failure(error)

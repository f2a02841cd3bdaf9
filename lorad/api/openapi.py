"""`GET /openapi.json`: the routes of a socket as OpenAPI 3.1, made from the Structs that parse and
answer them.

Goes in: a table, one row a method and route; that of the inference socket is here.  Comes out: one
document; a test holds the tables against the routes.  Its schemas are msgspec's own, so that they
cannot say anything else than what is parsed.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from lorad import wire, wire_status
from lorad import wire_openai as openai
from lorad import wire_pooling as pooling
from lorad.api.deps import deps_of
from lorad.api.respond import json

_JSON, _EVENTS = "application/json", "text/event-stream"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")


Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}


def whole(low: int, high: int) -> Schema:
    """Of a number in a query, as `asked.number` takes it."""
    return {"type": "integer", "minimum": low, "maximum": high}


@dataclass(frozen=True, slots=True)
class Binary:
    """A body that is no JSON, and what it is instead."""

    media_type: str


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of a route takes and gives; `chunk` is one event's, where it may stream.

    `query`: the schemas of what the query may hold; `otherwise`: further statuses of success.
    """

    summary: str
    answer: Any  # None: nothing
    body: type[Struct] | Binary | None = None
    chunk: type[Struct] | None = None
    status: int = 200
    query: Mapping[str, Schema] = field(default_factory=dict)
    otherwise: Mapping[int, Any] = field(default_factory=dict)


Table = Mapping[tuple[str, str], Operation]
_STATUS = dict[str, str]
_MODEL = {"model": TEXT}
_VECTORS = tuple[tuple[float, ...], ...]

#: On both sockets: (method, path) -> what it does.
HEALTH: Table = {
    ("GET", "/livez"): Operation("The daemon's loop runs", _STATUS),
    ("GET", "/readyz"): Operation(
        "Requests are taken, or those for one model; else 503 says why not", _STATUS, query=_MODEL
    ),
    ("GET", "/health"): Operation("The same as /readyz", _STATUS, query=_MODEL),
    ("GET", "/startupz"): Operation("The base model has been loaded", _STATUS),
    ("GET", "/version"): Operation("Version and base model", wire_status.Version),
}
SELF: Table = {("GET", "/openapi.json"): Operation("This document", dict[str, Any])}

#: On the inference socket.
INFERENCE: Table = {
    **HEALTH,
    **SELF,
    ("GET", "/v1/models"): Operation("Models that the caller may use", openai.ModelList),
    ("GET", "/v1/models/{id}"): Operation("One of them; id may hold /", openai.ModelCard),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation", openai.ChatCompletion, openai.ChatRequest, openai.ChatChunk
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue prompts", openai.Completion, openai.CompletionRequest, openai.Completion
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Texts to vectors", pooling.EmbeddingList, pooling.EmbeddingsRequest
    ),
    ("POST", "/v1/rerank"): Operation(
        "Documents by how well they fit a query", pooling.Ranked, pooling.RerankRequest
    ),
    ("POST", "/v2/rerank"): Operation("The same", pooling.Ranked, pooling.RerankRequest),
    ("POST", "/rerank"): Operation(
        "The same for clients of TEI",
        tuple[pooling.TeiRank, ...],
        pooling.TeiRerankRequest,
        query=_MODEL,
    ),
    ("POST", "/embed"): Operation(
        "Texts to vectors for clients of TEI", _VECTORS, pooling.TeiEmbedRequest, query=_MODEL
    ),
    ("POST", "/similarity"): Operation(
        "How alike a text is to others, for clients of TEI",
        tuple[float, ...],
        pooling.TeiSimilarityRequest,
        query=_MODEL,
    ),
    ("POST", "/"): Operation(
        "/embed or /similarity, by what inputs is",
        tuple[tuple[float, ...] | float, ...],
        pooling.TeiRequest,
        query=_MODEL,
    ),
    ("POST", "/v1/score"): Operation(
        "How well texts fit each other", pooling.ScoreList, pooling.ScoreRequest
    ),
    ("POST", "/classify"): Operation(
        "Classes of texts", pooling.ClassifiedList, pooling.ClassifyRequest
    ),
    ("POST", "/pooling"): Operation(
        "Texts to a vector for each token", pooling.PoolingList, pooling.PoolingRequest
    ),
    ("POST", "/tokenize"): Operation("Text to token ids", openai.Tokens, openai.TokenizeRequest),
    ("POST", "/detokenize"): Operation(
        "Token ids to text", openai.Detokenized, openai.DetokenizeRequest
    ),
}


def describing(table: Table) -> Callable[[Request], Awaitable[Response]]:
    """The route that answers with the document of `table`, which is made when it is first asked
    for."""

    @cache
    def made(version: str) -> dict[str, Any]:
        return document(table, version)

    async def describe(request: Request) -> Response:
        return json(made(deps_of(request).version))

    return describe


def document(table: Table, version: str) -> dict[str, Any]:
    """All of it, for one version of lorad."""
    kinds = list(dict.fromkeys(_kinds(table)))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in table.items():
        paths.setdefault(path, {})[method.lower()] = _described(path, operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorad", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # whether a key is needed, the settings say
    }


def _kinds(table: Table) -> Iterator[Any]:
    for operation in table.values():
        wanted = (operation.answer, operation.body, operation.chunk, *operation.otherwise.values())
        yield from (kind for kind in wanted if kind is not None and not isinstance(kind, Binary))
    yield wire.ErrorEnvelope


def _content(
    answer: Any, schema_of: Mapping[Any, Any], chunk: type[Struct] | None = None
) -> dict[str, Any]:
    if answer is None:
        return {}
    if isinstance(answer, Binary):
        return {"content": {answer.media_type: {}}}
    content = {_JSON: {"schema": schema_of[answer]}}
    if chunk is not None:
        content[_EVENTS] = {"schema": _event(schema_of[chunk])}
    return {"content": content}


def _event(schema: Schema) -> dict[str, Any]:
    """One server-sent event: its data is text that holds JSON, but for the last `[DONE]`."""
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": schema}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _described(path: str, operation: Operation, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    done = {operation.status: _content(operation.answer, schema_of, operation.chunk)}
    done |= {status: _content(kind, schema_of) for status, kind in operation.otherwise.items()}
    failed = _content(wire.ErrorEnvelope, schema_of)
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            **{str(status): {"description": "done", **what} for status, what in done.items()},
            "default": {"description": "an error; `code` says which", **failed},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in _PARAMETER.findall(path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = _taken(operation.body, schema_of)
    return described


def _taken(body: type[Struct] | Binary, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    """A body of which no field is needed may be left out."""
    needed = isinstance(body, Binary) or any(f.required for f in msgspec.structs.fields(body))
    return {"required": needed, **_content(body, schema_of)}

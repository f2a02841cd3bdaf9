"""`GET /openapi.json`: the inference routes as OpenAPI 3.1, made from the Structs that parse and
answer them.

Goes in: the table below, one row a method and route.  Comes out: one document; a test holds the
table against the routes.  Its schemas are msgspec's own, so that they cannot say anything else than
what is parsed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from lorad import wire
from lorad import wire_openai as openai
from lorad.api.deps import deps_of
from lorad.api.respond import json

_JSON, _EVENTS = "application/json", "text/event-stream"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of a route takes and gives; `chunk` is one event's, where it may stream."""

    summary: str
    answer: Any
    body: type[Struct] | None = None
    chunk: type[Struct] | None = None


_STATUS = dict[str, str]

#: (method, path) -> what it does.
INFERENCE: Mapping[tuple[str, str], Operation] = {
    ("GET", "/livez"): Operation("The daemon's loop runs", _STATUS),
    ("GET", "/readyz"): Operation("Requests are taken; else 503 says why not", _STATUS),
    ("GET", "/health"): Operation("The same as /readyz", _STATUS),
    ("GET", "/startupz"): Operation("The base model has been loaded", _STATUS),
    ("GET", "/version"): Operation("Version and base model", wire.Version),
    ("GET", "/v1/models"): Operation("Models that the caller may use", openai.ModelList),
    ("GET", "/v1/models/{id}"): Operation("One of them; id may hold /", openai.ModelCard),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation", openai.ChatCompletion, openai.ChatRequest, openai.ChatChunk
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue prompts", openai.Completion, openai.CompletionRequest, openai.Completion
    ),
    ("POST", "/tokenize"): Operation("Text to token ids", openai.Tokens, openai.TokenizeRequest),
    ("POST", "/detokenize"): Operation(
        "Token ids to text", openai.Detokenized, openai.DetokenizeRequest
    ),
    ("GET", "/openapi.json"): Operation("This document", dict[str, Any]),
}


async def describe(request: Request) -> Response:
    return json(document(deps_of(request).version))


@cache
def document(version: str) -> dict[str, Any]:
    """All of it, for one version of lorad."""
    kinds = list(dict.fromkeys(_kinds()))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in INFERENCE.items():
        paths.setdefault(path, {})[method.lower()] = _described(path, operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorad", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # whether a key is needed, `inference.auth` says
    }


def _kinds() -> Iterator[Any]:
    for operation in INFERENCE.values():
        wanted = (operation.answer, operation.body, operation.chunk)
        yield from (kind for kind in wanted if kind is not None)
    yield wire.ErrorEnvelope


def _described(path: str, operation: Operation, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    content = {_JSON: {"schema": schema_of[operation.answer]}}
    if operation.chunk is not None:
        content[_EVENTS] = {"schema": schema_of[operation.chunk]}
    failed = {_JSON: {"schema": schema_of[wire.ErrorEnvelope]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "done", "content": content},
            "default": {"description": "an error; `code` says which", "content": failed},
        },
    }
    if names := _PARAMETER.findall(path):
        text = {"type": "string"}
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in names
        ]
    if operation.body is not None:
        body = {_JSON: {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    return described

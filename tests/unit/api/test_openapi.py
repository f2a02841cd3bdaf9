"""The document says what the routes take and give."""

import json

import msgspec
import pytest

from lorad.api import openapi
from lorad.api.app import INFERENCE
from lorad.wire_openai import ChatRequest

DOCUMENT = json.loads(msgspec.json.encode(openapi.document("1.2.3")))
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value):
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_route_is_described_and_nothing_else():
    routes = {
        (method, route.path.replace(":path", ""))
        for route in INFERENCE
        for method in route.methods - {"HEAD"}
    }
    described = {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }
    assert described == routes


def test_every_schema_that_is_referred_to_is_there():
    wanted = {reference.rpartition("/")[2] for reference in references(DOCUMENT)}
    assert wanted == set(SCHEMAS)


def test_a_schema_has_the_fields_of_what_is_parsed():
    schema = SCHEMAS["ChatRequest"]
    assert set(schema["properties"]) == set(ChatRequest.__struct_fields__)
    assert set(schema["required"]) == {"model", "messages"}


def test_the_version_is_this_daemons():
    assert (DOCUMENT["openapi"], DOCUMENT["info"]["version"]) == ("3.1.0", "1.2.3")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_may_stream_says_so(path):
    answers = DOCUMENT["paths"][path]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert answers["default"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/ErrorEnvelope"
    )


def test_a_parameter_of_the_path_is_a_parameter():
    [id] = DOCUMENT["paths"]["/v1/models/{id}"]["get"]["parameters"]
    assert (id["name"], id["in"], id["required"]) == ("id", "path", True)

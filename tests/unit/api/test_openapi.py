"""The document says what the routes take and give."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from lorad.api import openapi
from lorad.api.app import ADMIN, INFERENCE
from lorad.api.openapi_admin import ADMIN as ADMIN_TABLE
from lorad.wire_openai import ChatRequest


def read(table):
    return json.loads(msgspec.json.encode(openapi.document(table, "1.2.3")))


DOCUMENT, ADMIN_DOCUMENT = read(openapi.INFERENCE), read(ADMIN_TABLE)
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value):
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.mark.parametrize(("table", "document"), [(INFERENCE, DOCUMENT), (ADMIN, ADMIN_DOCUMENT)])
def test_every_route_is_described_and_nothing_else(table, document):
    routes = {
        (method, route.path.replace(":path", ""))
        for route in table
        for method in route.methods - {"HEAD"}
    }
    described = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
    }
    assert described == routes


@pytest.mark.parametrize("document", [DOCUMENT, ADMIN_DOCUMENT])
def test_every_schema_that_is_referred_to_is_there(document):
    wanted = {reference.rpartition("/")[2] for reference in references(document)}
    assert wanted == set(document["components"]["schemas"])


def test_what_is_no_json_says_what_it_is():
    answers = ADMIN_DOCUMENT["paths"]["/v1/load_lora_adapter"]["post"]["responses"]
    assert answers["200"]["content"] == {"text/plain": {}}
    given_up = ADMIN_DOCUMENT["paths"]["/admin/v1/uploads/{upload_id}"]["delete"]["responses"]
    assert "content" not in given_up["204"]


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
    data = answers["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
    assert data["contentSchema"]["$ref"].rpartition("/")[2] in ("ChatChunk", "Completion")
    assert answers["default"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/ErrorEnvelope"
    )


def test_a_parameter_of_the_path_is_a_parameter():
    [id] = DOCUMENT["paths"]["/v1/models/{id}"]["get"]["parameters"]
    assert (id["name"], id["in"], id["required"]) == ("id", "path", True)


READ = re.compile(r'(?:number|flag|decimal)\(request, "(\w+)"|query(?:_params)?\.get\("(\w+)"')


def test_whatever_a_route_reads_of_its_query_is_described():
    api = Path(openapi.__file__).parent
    read = {a or b for path in api.glob("*.py") for a, b in READ.findall(path.read_text())}
    told = {
        parameter["name"]
        for operations in ADMIN_DOCUMENT["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "query"
    }
    assert told == read and len(read) > 8


def test_a_body_is_needed_where_one_of_its_fields_is():
    def body(path, method="post"):
        return ADMIN_DOCUMENT["paths"][path][method]["requestBody"]

    assert not body("/admin/v1/gc")["required"]
    assert body("/admin/v1/pulls")["required"]
    file = body("/admin/v1/uploads/{upload_id}/files/{file}", "put")
    assert file == {"required": True, "content": {"application/octet-stream": {}}}


def test_success_may_have_more_than_one_answer():
    answers = ADMIN_DOCUMENT["paths"]["/admin/v1/pulls"]["post"]["responses"]
    kinds = {s: answers[s]["content"]["application/json"]["schema"]["$ref"] for s in ("200", "202")}
    assert kinds["200"].endswith("/PullPlan") and kinds["202"].endswith("/Operation")

"""Each described route answers with the fields that its schema names."""

import json

import msgspec
import pytest

from lorad.api import openapi
from lorad.api.openapi_admin import ADMIN

BODIES = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "tiny", "prompt": "x", "logprobs": 1, "echo": True},
    "/v1/embeddings": {"model": "tiny", "input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["x", "y"], "return_documents": True},
    "/v2/rerank": {"query": "x", "documents": ["x", "y"]},
    "/rerank": {"query": "x", "texts": ["x"], "return_text": True},
    "/embed": {"inputs": "x"},
    "/similarity": {"inputs": {"source_sentence": "x", "sentences": ["x", "y"]}},
    "/": {"inputs": ["x"]},
    "/v1/score": {"model": "tiny", "text_1": "x", "text_2": ["x", "y"]},
    "/classify": {"model": "tiny", "input": ["x"]},
    "/pooling": {"model": "tiny", "input": ["x"]},
    "/tokenize": {"model": "tiny", "prompt": "x", "return_token_strs": True},
    "/detokenize": {"model": "tiny", "tokens": [120]},
}


def same_fields(value, kind):
    """`value` as `kind`, and back: a field that the Struct lacks would be gone."""
    known = msgspec.convert(value, kind)
    return json.loads(msgspec.json.encode(known)) == value


@pytest.mark.parametrize(("method", "path"), openapi.INFERENCE)
def test_an_answer_is_what_the_document_says(api, call, method, path):
    target = path.replace("{id}", "acme/sql")
    answer = call(api.inference, method, target, BODIES.get(path))
    assert answer.status == 200, answer.raw
    assert same_fields(answer.json, openapi.INFERENCE[method, path].answer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_event_is_what_the_document_says(api, call, path):
    body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}}
    *events, done = call(api.inference, "POST", path, body).events
    assert done == b"data: [DONE]"
    for event in events:
        value = json.loads(event.removeprefix(b"data: "))
        assert same_fields(value, openapi.INFERENCE["POST", path].chunk)


def test_an_error_is_what_the_document_says(api, call):
    answer = call(api.inference, "POST", "/tokenize", {"model": "nobody", "prompt": "x"})
    assert same_fields(answer.json, openapi.wire.ErrorEnvelope)


#: Answered by the fakes as the daemon does, without anything there before.
ANSWERED = [
    *("livez", "version", "openapi.json", "admin/v1/status", "admin/v1/slots", "admin/v1/adapters"),
    *("admin/v1/events", "admin/v1/logs", "admin/v1/operations", "admin/v1/board"),
]


@pytest.mark.parametrize("path", ANSWERED)
def test_an_admin_answer_is_what_the_document_says(api, call, path):
    answer = call(api.admin, "GET", f"/{path}")
    assert answer.status == 200, answer.raw
    assert same_fields(answer.json, ADMIN["GET", f"/{path}"].answer)


WISHES = ["load", "evict", "pin", "unpin", "verify", "gc", "drain", "resume", "reload"]


@pytest.mark.parametrize("verb", WISHES)
def test_what_became_of_a_wish_is_what_the_document_says(api, call, verb):
    body = {} if verb in ("gc", "drain", "resume", "reload") else {"names": ["acme/sql"]}
    answer = call(api.admin, "POST", f"/admin/v1/{verb}", body)
    assert answer.status == 200, answer.raw
    assert same_fields(answer.json, ADMIN["POST", f"/admin/v1/{verb}"].answer)


@pytest.mark.parametrize(
    ("method", "target"),
    [("GET", "operations?live=maybe"), ("DELETE", "adapters/bible?keep_files=x")],
)
def test_a_flag_in_a_query_is_yes_or_no(api, call, method, target):
    answer = call(api.admin, method, f"/admin/v1/{target}")
    assert (answer.status, answer.code) == (400, "invalid_value")
    assert api.adapters.calls == []

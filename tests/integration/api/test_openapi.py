"""Each described route answers with the fields that its schema names."""

import json

import msgspec
import pytest

from lorad.api import openapi

BODIES = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "tiny", "prompt": "x", "logprobs": 1, "echo": True},
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

"""The bytes that openai-node, LangChain and LiteLLM were seen to rely on, asked for without them.

The clients themselves are in tests/clients: `make test-clients`.
"""

import json

import httpx
import pytest

from lorad.errors import TABLE, LoradError

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def http(api):
    transport = httpx.HTTPTransport(uds=str(api.inference), verify=False)
    with httpx.Client(base_url="http://lorad", transport=transport, timeout=30) as client:
        yield client


def chat(http, **more):
    return http.post("/v1/chat/completions", json=ASK | more)


@pytest.mark.parametrize("code", sorted(TABLE))
def test_each_failure_says_whether_and_when_to_try_again(api, http, code):
    """Left alone, all of them try 408, 409, 429 and 5xx again; this header comes before that."""
    api.engine.not_ready = LoradError(code, "not now")
    answer = chat(http)
    error = answer.json()["error"]
    assert answer.status_code == TABLE[code].status
    assert answer.headers["content-type"] == "application/json"
    assert set(error) == {"message", "type", "param", "code", "details"}
    assert (error["message"], error["code"], error["param"]) == ("not now", code, None)
    if answer.status_code in (408, 409, 429) or answer.status_code >= 500:
        assert answer.headers["x-should-retry"] == json.dumps(TABLE[code].retryable)
    if answer.status_code in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1, "whole seconds: openai-node reads no others"


def test_the_list_of_models_is_one_page(http):
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list" and "has_more" not in listed
    for card in listed["data"]:
        assert card["object"] == "model" and isinstance(card["created"], int)


def test_what_is_null_is_there_and_null(http):
    """LiteLLM and LangChain read these without asking whether they are there."""
    answer = chat(http).json()
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_stream_is_of_the_type_and_says_its_end(http):
    answer = chat(http, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
    *chunks, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    last = json.loads(chunks[-1].removeprefix("data: "))
    assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
    assert json.loads(chunks[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


def test_a_call_in_pieces_has_its_index_in_each_and_its_name_in_the_first(api, http):
    api.engine.reply = b'<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    answer = chat(http, model="bible", tools=[TOOL], stream=True)
    chunks = [json.loads(e.removeprefix("data: ")) for e in answer.text.split("\n\n")[:-2]]
    deltas = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", ())]
    assert {delta["index"] for delta in deltas} == {0}
    first, *more = deltas
    assert first["type"] == "function" and first["id"] and first["function"]["name"] == "f"
    assert all("id" not in d and "name" not in d["function"] for d in more)
    whole = "".join(d["function"]["arguments"] for d in deltas)
    assert json.loads(whole) == {"a": 1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_header_of_the_request_comes_back(http):
    sent = {"x-request-id": "mine-1", "x-stainless-retry-count": "1"}
    answer = http.post("/v1/chat/completions", json=ASK, headers=sent)
    assert answer.headers["x-request-id"] == "mine-1"

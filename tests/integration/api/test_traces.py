"""Every request that generates is told to who traces, once, however it ended."""

import json

import pytest

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"model": "acme/sql", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def told():
    return []


@pytest.fixture
def traced(make_api, told):
    return make_api(trace=told.append)


def chat(call, api, body=CHAT, headers=""):
    return call(api.inference, "POST", "/v1/chat/completions", body, headers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_is_told_with_its_tokens_and_whose_trace_it_is_a_part_of(
    traced, told, call, stream
):
    traced.engine.cached_tokens = 16
    headers = f"traceparent: {PARENT}\r\ntracestate: vendor=1\r\n"
    answer = chat(call, traced, CHAT | {"stream": stream, "n": 2}, headers)
    assert answer.status == 200
    traced.until(lambda: told)
    (trace,) = told
    assert (trace.ask.traceparent, trace.ask.tracestate) == (PARENT, "vendor=1")
    assert (trace.name, trace.rev, trace.tenant) == ("acme/sql", "a1" * 32, "acme")
    assert trace.code == ""
    assert trace.generation.id in (answer.json["id"] if not stream else answer.body.decode())
    assert [span.tokens for span in trace.sequences] == [12, 12]
    assert trace.received <= trace.sequences[0].begun <= trace.sequences[0].first <= trace.ended


def test_a_base_request_and_a_completion_are_told_too(traced, told, call):
    call(traced.inference, "POST", "/v1/completions", {"model": "tiny", "prompt": ["a", "b"]})
    (trace,) = told
    assert (trace.name, trace.rev, len(trace.sequences)) == (None, None, 2)
    assert trace.ask.traceparent == ""


def test_one_that_is_refused_is_told_with_the_code(traced, told, call):
    assert chat(call, traced, CHAT | {"model": "nobody"}).status == 404
    assert [(trace.code, trace.generation) for trace in told] == [("model_not_found", None)]


def test_one_that_fails_in_the_engine_is_told_with_the_code(traced, told, call):
    traced.engine.error = ("engine_restarting", "it died")
    assert chat(call, traced).status == 503
    assert [trace.code for trace in told] == ["engine_restarting"]


def test_one_whose_submit_fails_is_told_once_with_the_cause(traced, told, call, monkeypatch):
    def refuse(submit, on_delta):
        raise RuntimeError("a bug")

    monkeypatch.setattr(traced.engine, "submit", refuse)
    assert chat(call, traced).status == 500
    assert [trace.code for trace in told] == ["internal_error"]


def test_one_whose_client_leaves_is_told_as_such(traced, told, connect):
    traced.hold_engine(3)
    body = json.dumps(CHAT | {"stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: l\r\ncontent-length: {len(body)}\r\n\r\n"
    raw = connect(traced.inference).send(head.encode() + body)
    traced.until(lambda: traced.engine.submits)
    raw.close()
    traced.until(lambda: told)
    assert [trace.code for trace in told] == ["client_gone"]
    assert traced.requests.active == 0


def test_without_traces_nobody_reads_whose_trace_a_request_is_a_part_of(api, call):
    asks = []
    start = api.requests.start
    api.requests.start = lambda ask, caller: (asks.append(ask), start(ask, caller))[1]
    try:
        assert chat(call, api, headers=f"traceparent: {PARENT}\r\n").status == 200
    finally:
        del api.requests.start
    assert asks[0].traceparent == ""


def test_vectors_and_scores_are_told_with_their_inputs_and_whose_trace_they_are_a_part_of(
    traced, told, call
):
    body = {"model": "acme/sql", "query": "a", "documents": ["b", "c"]}
    headers = f"traceparent: {PARENT}\r\n"
    assert call(traced.inference, "POST", "/v1/rerank", body, headers).status == 200
    assert (
        call(traced.inference, "POST", "/v1/embeddings", {"model": "x", "input": "y"}).status == 404
    )
    ranked, refused = told
    assert (ranked.wish.endpoint, ranked.wish.traceparent) == ("rerank", PARENT)
    assert (ranked.name, ranked.rev, ranked.tenant) == ("acme/sql", "a1" * 32, "acme")
    assert (ranked.num_inputs, ranked.num_tokens, ranked.code) == (2, 10, "")
    assert refused.code == "model_not_found" and refused.num_inputs == 0

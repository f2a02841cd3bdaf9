"""Requests at the door of the real HTTP face: who waits, who is sent away, and until when."""

import json

import pytest

from lorad.config_sections import Limits

ASK = {"model": "acme/sql", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def freed(api) -> bool:
    return api.requests.waiting == 0 and api.requests.active == 0


def ask(api, call, body=ASK, headers=""):
    return call(api.inference, "POST", CHAT, body, headers)


def post(raw, body):
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: lorad\r\nconnection: close\r\n"
    return raw.send(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)


def test_one_tenant_that_fills_its_queue_leaves_the_others_theirs(make_api, connect, call):
    api = make_api(Limits(queue=20, queue_per_tenant=8, n=8))
    gate = api.hold_engine()
    full = post(connect(api.inference), ASK | {"n": 8})
    api.until(lambda: len(api.engine.submits) == 8)
    answer = ask(api, call)
    assert (answer.status, answer.code) == (429, "tenant_rate_limited")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"
    (door,) = api.requests.reception.doors.values()
    assert door.refused == {"tenant_rate_limited": 1}
    other = post(connect(api.inference), ASK | {"model": "bible"})
    api.until(lambda: len(api.engine.submits) == 9)
    assert {s.tenant for s in api.engine.submits} == {"acme", ""}
    full.close()  # a client that leaves gives its places back
    api.until(lambda: api.requests.waiting == 1)
    api.run(gate.set)
    assert ask(api, call).status == 200 and other.answer().status == 200
    api.until(lambda: freed(api))


def test_places_are_given_back_when_the_engine_fails_them(make_api, call):
    api = make_api(Limits(queue=4, queue_per_tenant=4))
    api.engine.reply, api.engine.error = b"", ("engine_restarting", "it is gone")
    for _ in range(10):
        answer = ask(api, call, ASK | {"n": 4})
        assert (answer.status, answer.code) == (503, "engine_restarting")
        assert int(answer.headers["retry-after"]) >= 1
    api.until(lambda: freed(api))


@pytest.mark.parametrize("limits", [{"queue": 4}, {"queue_per_tenant": 4}], ids=str)
def test_more_answers_than_could_ever_wait_are_no_matter_of_time(make_api, call, limits):
    api = make_api(Limits(**limits))
    answer = ask(api, call, ASK | {"n": 5})
    assert (answer.status, answer.code, answer.json["error"]["param"]) == (
        400,
        "invalid_value",
        "n",
    )
    body = {"model": "acme/sql", "prompt": ["a"] * 5}
    answer = call(api.inference, "POST", "/v1/completions", body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")


def test_a_client_may_allow_less_time_than_the_daemon(make_api, call, monkeypatch):
    monkeypatch.setattr("lorad.service.requests.DEADLINE_GRACE_SECONDS", 0.02)
    api = make_api(Limits(deadline=60.0))
    api.hold_engine()
    answer = ask(api, call, headers="x-request-timeout: 0.2\r\n")
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert 0 < api.engine.submits[0].deadline_seconds <= 0.2
    api.until(lambda: freed(api))


def test_a_stream_that_runs_out_of_time_ends_with_an_error_event(make_api, call, monkeypatch):
    monkeypatch.setattr("lorad.service.requests.DEADLINE_GRACE_SECONDS", 0.02)
    api = make_api()
    api.hold_engine(3)
    answer = ask(api, call, ASK | {"stream": True}, headers="x-request-timeout: 0.2\r\n")
    assert answer.status == 200 and b"deadline_exceeded" in answer.events[-1]
    assert b"[DONE]" not in answer.body
    api.until(lambda: freed(api))


def test_a_longer_timeout_than_the_daemons_is_the_daemons(api, call):
    assert ask(api, call, headers="x-request-timeout: 100000\r\n").status == 200
    assert api.engine.submits[0].deadline_seconds <= 600


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "nan", "inf", "5s", "", "0x10", "9" * 400])
def test_a_timeout_that_is_no_time_is_refused(api, call, value):
    answer = ask(api, call, headers=f"x-request-timeout: {value}\r\n")
    assert (answer.status, answer.code) == (400, "invalid_value")
    assert answer.json["error"]["param"] == "x-request-timeout"


def test_a_request_that_could_not_begin_in_time_is_told_when_to_come_back(make_api, connect, call):
    api = make_api(Limits(n=100))
    gate = api.hold_engine()
    waiting = post(connect(api.inference), ASK | {"n": 100})
    api.until(lambda: len(api.engine.submits) == 100)
    api.engine.starts_per_second = 11.0  # so it takes 4.5 s if the engine is twice as fast
    answer = ask(api, call, headers="x-request-timeout: 2\r\n")
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "queue_full", "3")
    assert len(api.engine.submits) == 100
    api.run(gate.set)
    assert waiting.answer().status == 200
    assert ask(api, call, headers="x-request-timeout: 2\r\n").status == 200


def test_priority_is_the_adapters_or_what_is_asked_for_below_it(api, call):
    api.adapters.priority = 70
    for asked in ({}, {"priority": 30}, {"priority": 100}):
        assert ask(api, call, ASK | asked).status == 200
    assert ask(api, call, ASK | {"model": "tiny"}).status == 200
    assert [s.priority for s in api.engine.submits] == [70, 30, 70, 50]

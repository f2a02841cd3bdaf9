"""What the guards count: routes by pattern, statuses, strangers, and clients that go wrong."""

import socket

import pytest

from lorad.api.protocol import Peer


def answers(api):
    return dict(api.http.answers)


@pytest.fixture
def counted(api):
    """A fresh count."""
    api.http.answers.clear()
    api.http.seconds.clear()
    api.http.denied.clear()
    api.requests.aborted.clear()
    return api


def test_answers_are_counted_by_the_routes_pattern_and_nothing_of_the_request(counted, call):
    call(counted.admin, "GET", "/admin/v1/adapters/acme/sql")
    call(counted.admin, "GET", "/admin/v1/adapters/nobody")
    call(counted.admin, "GET", "/no/such/path")
    call(counted.admin, "POST", "/admin/v1/slots", {})
    call(counted.admin, "BREW", "/livez")
    pattern = "/admin/v1/adapters/{name:path}"
    assert answers(counted) == {
        (pattern, "GET", "200"): 1,
        (pattern, "GET", "404"): 1,
        ("unmatched", "GET", "404"): 1,
        ("/admin/v1/slots", "POST", "405"): 1,
        ("/livez", "other", "405"): 1,
    }
    assert sum(counted.http.seconds[pattern].counts) == 2


def test_a_request_that_generates_is_counted_when_its_stream_has_ended(counted, call):
    ask = {"model": "tiny", "prompt": "x", "stream": True}
    assert call(counted.inference, "POST", "/v1/completions", ask).status == 200
    counted.until(lambda: answers(counted) == {("/v1/completions", "POST", "200"): 1})
    assert counted.requests.meter.names["__base__"].finished["stop"] >= 1


def test_strangers_are_counted_with_the_listener(counted, call, monkeypatch):
    monkeypatch.setattr("lorad.api.protocol.peer_of", lambda _: Peer(1, 54321, 1))
    assert call(counted.admin, "GET", "/metrics").status == 403
    assert dict(counted.http.denied) == {"admin": 1}
    assert answers(counted) == {("unmatched", "GET", "403"): 1}


def test_a_head_that_is_no_request_is_counted_without_a_route(counted, call):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(counted.inference))
        client.sendall(b"nonsense\r\n\r\n")
        client.recv(1 << 16)
    assert answers(counted) == {("unmatched", "other", "400"): 1}


def test_metrics_come_in_the_type_that_was_asked_for(counted, call):
    plain = call(counted.admin, "GET", "/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert b"lorad_ready 1.0" in plain.body
    headers = "accept: application/openmetrics-text\r\n"
    asked = call(counted.admin, "GET", "/metrics", headers=headers)
    assert asked.headers["content-type"] == "application/openmetrics-text"
    assert asked.headers["cache-control"] == "no-store"


def test_a_refused_request_is_counted_by_its_code(counted, call):
    counted.requests.meter.refused.clear()
    call(counted.inference, "POST", "/v1/completions", {"model": "nobody", "prompt": "x"})
    assert dict(counted.requests.meter.refused) == {"model_not_found": 1}

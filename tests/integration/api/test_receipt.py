"""Clients that are slow, large, many or wrong on the level of HTTP."""

import json
import time

import pytest

from lorad.api import protocol

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: lorad\r\n".encode()
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def test_a_head_that_does_not_end_is_408(tight, connect, elapsed):
    answer = connect(tight.inference).send(b"GET /livez HTTP/1.1\r\nhost: lor").answer()
    assert (answer.status, answer.code) == (408, "request_timeout")
    assert 0.2 < elapsed() < 10


def test_a_byte_now_and_then_buys_no_time(tight, connect, elapsed):
    raw = connect(tight.inference)
    raw.socket.settimeout(0.02)
    got = b""
    while not got:
        assert elapsed() < 10
        raw.send(b"x")
        try:
            got = raw.socket.recv(4096)
        except TimeoutError:
            continue
    assert got.startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_says_nothing_is_closed_without_a_word(tight, connect, elapsed):
    assert connect(tight.inference).read() == b""
    assert elapsed() < 10


def test_a_body_that_does_not_arrive_is_408(tight, connect):
    half = HEAD + b'content-length: 100\r\n\r\n{"model":'
    answer = connect(tight.inference).send(half).answer()
    assert (answer.status, answer.code) == (408, "request_timeout")
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-request-id"].startswith("req_")


def test_a_route_that_reads_no_body_does_not_wait_for_one(api, connect, elapsed):
    half = b"POST /nowhere HTTP/1.1\r\nhost: lorad\r\ncontent-length: 100\r\n\r\n{"
    answer = connect(api.inference).send(half).answer()
    assert answer.status == 404
    assert answer.headers["connection"] == "close"
    assert elapsed() < 10  # of the 20 that a body has


def test_a_large_body_is_413_before_it_is_read(api, connect):
    answer = connect(api.inference).send(HEAD + b"content-length: 99999999\r\n\r\n").answer()
    assert (answer.status, answer.code) == (413, "payload_too_large")


def test_a_large_body_that_does_not_say_so_is_413_on_the_way(api, connect):
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    raw = connect(api.inference).send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk * 5)
    answer = raw.answer()
    assert (answer.status, answer.code) == (413, "payload_too_large")


def test_chunks_and_a_length_together_are_refused(api, connect):
    both = b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n"
    answer = connect(api.inference).send(HEAD + both).answer()
    assert answer.status == 400


@pytest.mark.parametrize("length", [b"abc", b"-1", b"1e3", b"5, 6", b"9" * 40])
def test_a_length_that_is_no_number_is_refused(api, connect, length):
    answer = connect(api.inference).send(HEAD + b"content-length: " + length + b"\r\n\r\n").answer()
    assert answer.status in (400, 413)
    assert answer.json["error"]["code"]


def test_a_length_that_is_too_short_spoils_only_what_follows(api, connect):
    body = json.dumps(ASK).encode()
    length = f"content-length: {len(body)}\r\n\r\n".encode()
    got = connect(api.inference).send(HEAD + length + body + b"trailing lies\r\n\r\n").read()
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.count(b"HTTP/1.1 400 ") == 1


def test_large_heads_are_431_in_one_piece_or_in_many(api, connect):
    line = b"x-filler: " + b"y" * 3000 + b"\r\n"
    close = b"connection: close\r\n\r\n"
    whole = connect(api.inference).send(b"GET /livez HTTP/1.1\r\nhost: l\r\n" + line + close)
    assert whole.answer().code == "headers_too_large"
    raw = connect(api.inference).send(b"GET /livez HTTP/1.1\r\nhost: l\r\n" + line)
    answer = raw.answer()
    assert (answer.status, answer.code) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"a b c d\r\n\r\n"]
)
def test_what_is_no_http_is_400_in_the_envelope(api, connect, junk):
    answer = connect(api.inference).send(junk).answer()
    assert answer.status == 400
    assert answer.json["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_encoded_bodies_are_415(api, call, coding):
    answer = call(api.inference, "POST", CHAT, ASK, f"content-encoding: {coding}\r\n")
    assert (answer.status, answer.code) == (415, "unsupported_media_type")


def test_a_form_is_415_and_is_told_what_to_send(api, call):
    form = "content-type: application/x-www-form-urlencoded\r\n"
    answer = call(api.inference, "POST", CHAT, ASK, form)
    assert (answer.status, answer.code) == (415, "unsupported_media_type")
    assert "application/json" in answer.json["error"]["details"]["hint"]


def test_idle_connections_make_way_and_health_answers_throughout(tight, connect, call):
    crowd = [connect(tight.inference) for _ in range(40)]
    start = time.monotonic()
    assert call(tight.inference, "GET", "/readyz").status == 200
    assert time.monotonic() - start < 5
    tight.until(lambda: tight.servers[0].num_connections <= 13)
    assert len(crowd) == 40


def test_a_house_full_of_work_refuses_the_next(tight, connect, call, monkeypatch):
    users = [1001, 1002]  # who connects next
    monkeypatch.setattr(protocol, "peer_of", lambda connection: protocol.Peer(1, users[0], 1))
    gate = tight.hold_engine()
    body = json.dumps(ASK).encode()
    length = f"content-length: {len(body)}\r\n\r\n".encode()
    busy = [connect(tight.inference).send(HEAD + length + body) for _ in range(11)]
    tight.until(lambda: len(tight.engine.submits) == 11)
    answer = call(tight.inference, "GET", "/livez")
    assert (answer.status, answer.code) == (429, "queue_full")
    assert "user 1001 has 11 connections at work" in answer.body.decode()
    users.reverse()
    assert call(tight.inference, "GET", "/livez").status == 200
    busy.append(connect(tight.inference).send(HEAD + length + body))
    tight.until(lambda: len(tight.engine.submits) == 12)
    answer = call(tight.inference, "GET", "/livez")
    assert (answer.status, answer.code) == (429, "queue_full")
    assert "all 12 connections are at work" in answer.body.decode()
    assert int(answer.headers["retry-after"]) >= 1
    tight.run(gate.set)
    for raw in busy:
        assert raw.socket.recv(15).startswith(b"HTTP/1.1 200")


def test_a_connection_serves_one_request_after_another(api, connect):
    raw = connect(api.inference)
    for _ in range(3):
        raw.send(b"GET /livez HTTP/1.1\r\nhost: l\r\n\r\n")
        got = b""
        while b'{"status":"ok"}' not in got:
            got += raw.socket.recv(4096)
        assert got.startswith(b"HTTP/1.1 200 OK")


def test_pipelined_requests_are_answered_in_order(api, connect):
    pair = b"GET /livez HTTP/1.1\r\nhost: l\r\n\r\nGET /nope HTTP/1.1\r\nhost: l\r\n"
    got = connect(api.inference).send(pair + b"connection: close\r\n\r\n").read()
    assert got.index(b"200 OK") < got.index(b"404 Not Found")


@pytest.mark.parametrize("refused", [b"content-type: text/plain\r\n", b"content-encoding: br\r\n"])
def test_a_body_that_comes_after_its_refusal_does_not_cost_the_answer(api, connect, refused):
    """Clients send head and body apart; a reset in between would be all that they see."""
    body = json.dumps(ASK).encode()
    raw = connect(api.inference)
    raw.send(HEAD + refused + f"content-length: {len(body)}\r\n\r\n".encode())
    answer = b""
    while b"unsupported_media_type" not in answer or not answer.endswith(b"}"):
        answer += raw.socket.recv(65536)
    raw.socket.sendall(body)
    assert raw.socket.recv(65536) == b"", "closed, not reset"

"""A client that leaves frees the engine, whenever it leaves."""

import gc
import json
import time

import h11
import pytest

from lorad.config_sections import Limits

ASK = {"model": "acme/sql", "messages": [{"role": "user", "content": "hi"}]}


def post(raw, body):
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: l\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return raw.send(head.encode() + content)


def freed(api):
    return not api.engine.running and api.requests.active == 0 and api.requests.waiting == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", [0, 4], ids=["before the first token", "in the middle"])
def test_a_client_that_leaves_aborts_its_sequence(api, connect, stream, at):
    before = api.requests.aborted["client_disconnect"]
    api.hold_engine(at)
    raw = post(connect(api.inference), ASK | {"stream": stream})
    api.until(lambda: len(api.engine.submits) == 1)
    if stream and at:
        assert b"Hell" not in raw.socket.recv(40)  # the response has begun
    raw.close()
    api.until(lambda: freed(api))
    assert api.engine.aborts == [api.engine.submits[0].request_id]
    assert api.requests.aborted["client_disconnect"] == before + 1
    assert not +api.adapters.leases


def test_all_of_n_are_aborted(api, connect):
    api.hold_engine(2)
    raw = post(connect(api.inference), ASK | {"n": 4, "stream": True})
    api.until(lambda: len(api.engine.submits) == 4)
    raw.close()
    api.until(lambda: freed(api))
    assert set(api.engine.aborts) == {submit.request_id for submit in api.engine.submits}


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_many_clients_that_leave_leave_nothing_behind(api, connect, rounds):
    before = api.requests.aborted["client_disconnect"]
    api.hold_engine(1)
    for round in range(rounds):
        raws = [post(connect(api.inference), ASK | {"stream": True}) for _ in range(10)]
        api.until(lambda n=round: len(api.engine.submits) == 10 * (n + 1))
        for raw in raws:
            raw.close()
        api.until(lambda: freed(api))
    api.until(lambda: api.servers[0].num_connections == 0)
    assert len(api.engine.aborts) == 10 * rounds
    assert api.requests.aborted["client_disconnect"] == before + 10 * rounds
    assert not +api.adapters.leases


def test_who_leaves_an_answer_unread_is_not_kept_until_its_connection_would_have_been_idle(
    api, connect
):
    """The end of such a connection is an error to the server, and a timer for its next request was
    set: at 60 requests a second 80,000 objects were held so."""

    def held():
        gc.collect()
        return sum(isinstance(o, h11.Connection) for o in gc.get_objects())

    before = held()
    raws = [post(connect(api.inference), ASK | {"max_tokens": 3}) for _ in range(10)]
    api.until(lambda: len(api.engine.submits) == 10 and freed(api))
    api.until(lambda: api.servers[0].num_connections == 10)
    time.sleep(0.1)  # the last answer is on its way
    for raw in raws:
        raw.close()
    api.until(lambda: api.servers[0].num_connections == 0)
    api.until(lambda: held() <= before)


def test_a_reader_that_stops_reading_is_cut_off_and_the_others_go_on(api, connect, call, caplog):
    before = api.requests.aborted["slow_client"]
    api.engine.reply = lambda submit: b"x" * (200 if submit.rev is None else 990)
    stuck = [
        post(connect(api.inference), ASK | {"stream": True, "n": 16, "max_tokens": 400})
        for _ in range(2)
    ]
    api.until(lambda: len(api.engine.submits) == 32)
    other = call(
        api.inference, "POST", "/v1/chat/completions", ASK | {"model": "tiny", "max_tokens": 50}
    )
    assert other.status == 200
    api.until(lambda: freed(api))
    assert api.requests.aborted["slow_client"] == before + len(stuck)
    assert not caplog.records  # clients do not write the log


def test_a_reader_who_is_slow_but_never_stops_is_served_to_the_end(api, connect):
    """Log probabilities are not put together: there are megabytes of them."""
    api.engine.reply = b"x" * 300
    ask = {"stream": True, "n": 16, "max_tokens": 300, "logprobs": True, "top_logprobs": 5}
    raw = post(connect(api.inference), ASK | ask)
    begun, got, size = time.monotonic(), b"", 0
    while not got.endswith(b"\r\n0\r\n\r\n"):
        time.sleep(0.02)
        got = got[-8:] + (new := raw.socket.recv(1 << 16))
        size += len(new)
        assert new
    assert time.monotonic() - begun > 2 * api.limits.stall_write
    assert size > 16 * 300 * 400


def test_a_full_queue_is_429_and_empties_again(api, connect, call):
    gate = api.hold_engine()
    raws = [post(connect(api.inference), ASK | {"n": 16}) for _ in range(2)]
    api.until(lambda: len(api.engine.submits) == 32)
    answer = call(api.inference, "POST", "/v1/chat/completions", ASK)
    assert (answer.status, answer.code) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    raws[0].close()
    api.until(lambda: api.requests.waiting == 16)
    api.run(gate.set)
    assert call(api.inference, "POST", "/v1/chat/completions", ASK).status == 200


def test_a_request_ends_at_its_deadline_even_if_the_engine_does_not_end_it(
    make_api, call, monkeypatch
):
    monkeypatch.setattr("lorad.service.requests.DEADLINE_GRACE_SECONDS", 0.02)
    api = make_api(Limits(deadline=0.2))
    api.hold_engine()
    answer = call(api.inference, "POST", "/v1/chat/completions", ASK)
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    api.until(lambda: freed(api))
    assert api.engine.submits[0].deadline_seconds <= 0.2


def test_draining_refuses_the_new_and_ends_the_old_with_an_error_event(make_api, connect, call):
    api = make_api()
    api.hold_engine(3)
    raw = post(connect(api.inference), ASK | {"stream": True})
    api.until(lambda: len(api.engine.submits) == 1)
    api.run(api.requests.drain)
    refused = call(api.inference, "POST", "/v1/chat/completions", ASK)
    assert (refused.status, refused.code) == (503, "draining")
    assert "retry-after" in refused.headers
    assert api.run(api.requests.wait_idle, 0.01) is False
    api.run(api.requests.abort_all, "draining", "lorad is shutting down")
    assert api.run(api.requests.wait_idle, 5) is True
    got = raw.socket.recv(65536)
    while b"shutting down" not in got:
        got += raw.socket.recv(65536)
    assert b"[DONE]" not in got


def test_stopping_lets_answers_end_and_cuts_what_does_not(make_api, connect):
    api = make_api()
    gate = api.hold_engine(3)
    quick = post(connect(api.inference), ASK | {"stream": True})
    api.until(lambda: len(api.engine.submits) == 1)

    async def stop():
        api.loop.call_later(0.02, gate.set)
        await api.servers[0].stop(grace=5)

    api.run(stop)
    assert b"[DONE]" in quick.read()
    assert api.servers[0].num_connections == 0


FOLLOW = b"GET /admin/v1/events HTTP/1.1\r\nhost: l\r\naccept: text/event-stream\r\n\r\n"


def test_a_follower_of_events_gets_the_last_one_and_does_not_hold_the_end_up(
    make_api, connect, caplog
):
    api = make_api()
    raw = connect(api.admin).send(FOLLOW)
    api.until(lambda: api.servers[1].num_connections == 1)
    assert b"200 OK" in raw.socket.recv(65536)
    api.run(lambda: (api.events.publish("daemon.stop"), api.events.close()))
    api.run(api.servers[1].stop, 30)  # itself, it waits for 10 s
    got = raw.read()
    assert b"event: daemon.stop" in got and got.endswith(b"0\r\n\r\n")
    # The event itself is a line of the log, if another test has let such lines through.
    told = [r for r in caplog.records if (r.name, r.levelname) != ("lorad.events", "INFO")]
    assert not told


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_cut_off_at_the_end_is_no_error_of_ours(make_api, connect, stream, caplog):
    """A request that the engine never ends, and a follower that nobody told."""
    api = make_api()
    api.hold_engine(3)
    post(connect(api.inference), ASK | {"stream": stream})
    connect(api.admin).send(FOLLOW)
    api.until(lambda: len(api.engine.submits) == 1 and api.servers[1].num_connections == 1)
    for server in api.servers:
        api.run(server.stop, 0.05)
        assert server.num_connections == 0
    api.until(lambda: freed(api))
    assert not caplog.records

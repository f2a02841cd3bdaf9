"""`GET /admin/v1/stream` and `/board` over a real socket, with a board that the test changes."""

import contextlib
import socket

import msgspec
import pytest

from lorad.client import ApiError, LoradClient
from lorad.wire_stream import Board, Delta, Slot


@pytest.fixture
def admin(api):
    with LoradClient(f"unix://{api.admin}") as client:
        yield client


def slot(name, **values):
    plain = {"rev": "a1", "slot": 0, "state": "idle", "pinned": False, "priority": 50}
    return Slot(name=name, **(plain | {"rank": 8, "gpu_bytes": 1024} | values))


def show(api, **parts):
    api.run(lambda: api.board.parts.update(parts))


def deltas(messages):
    return (message for _, message in messages if isinstance(message, Delta))


def test_a_reader_gets_the_board_and_then_what_changed(api, admin):
    show(api, slots={"a": slot("a"), "b": slot("b")}, num_requests=2)
    with contextlib.closing(admin.follow_board(0.2)) as messages:
        _, board = next(messages)
        assert isinstance(board, Board)
        assert (board.sequence, board.interval_seconds) == (1, 0.2)
        show(api, slots={"b": slot("b", state="active")})
        delta = next(d for d in deltas(messages) if d.slots or d.gone)
        assert list(delta.slots) == ["b"] and delta.gone == {"slots": ("a",)}
        assert delta.num_requests is msgspec.UNSET and delta.health is msgspec.UNSET


def test_nothing_new_is_told_in_some_bytes(api, admin):
    with contextlib.closing(admin.follow_board(0.2)) as messages:
        next(messages)
        delta = next(deltas(messages))
    assert set(msgspec.to_builtins(delta)) == {"sequence", "time"}


def test_events_come_between_and_say_where_to_resume(api, admin):
    known = api.run(lambda: api.events.publish("pin.set", name="bible")).id
    with contextlib.closing(admin.follow_board(10)) as messages:
        id, board = next(messages)
        assert (id, board.events[-1].id) == (f"i1-{known}", known)
        api.run(lambda: api.events.publish("pin.cleared", name="bible"))
        id, event = next(messages)
        assert (id, event.type) == (f"i1-{known + 1}", "pin.cleared")
    with contextlib.closing(admin.follow_board(10, f"i1-{known}")) as messages:
        id, board = next(messages)
        assert (id, board.events[-1].id) == (f"i1-{known}", known)
        assert next(messages)[1] == event


def test_a_reader_of_another_daemon_is_told_of_the_gap(api, admin):
    api.run(lambda: api.events.publish("pin.set", name="bible"))
    newest = api.events.last_id
    with contextlib.closing(admin.follow_board(10, "other-7")) as messages:
        id, board = next(messages)
        assert (id, board.events) == ("other-7", ())
        assert next(messages)[1].type == "gap"
        ids = [next(messages) for _ in range(min(newest, 8))]
        assert ids[-1][0] == f"i1-{newest}"


@pytest.mark.parametrize("interval", ["0.1", "11", "soon", "nan", "-1"])
def test_an_interval_that_cannot_be_is_refused(api, admin, interval):
    with pytest.raises(ApiError) as caught:
        admin.request("GET", f"/admin/v1/stream?interval={interval}")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "interval")


def test_one_board_as_json(api, admin):
    show(api, slots={"a": slot("a")})
    assert list(admin.board().slots) == ["a"]


def test_curl_sees_server_sent_events(api, connect):
    raw = connect(api.admin)
    raw.send(b"GET /admin/v1/stream?interval=0.2 HTTP/1.1\r\nhost: lorad\r\n\r\n")
    got = b""
    while got.count(b"event: delta") < 2:
        got += raw.socket.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head.lower()
    assert b"event: board\ndata: {" in body and b"id: i1-" in body


def test_a_reader_that_stalls_costs_nothing_and_is_let_go(small_api, make_api):
    api = make_api(msgspec.structs.replace(small_api.limits, stall_write=1.5))
    show(api, slots={f"s{n}": slot(f"s{n}") for n in range(4000)})
    painted = api.run(lambda: api.board.painted)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stalled:
        stalled.connect(str(api.admin))
        stalled.sendall(b"GET /admin/v1/stream?interval=0.2 HTTP/1.1\r\nhost: lorad\r\n\r\n")
        api.until(lambda: api.board.readers == 1)
        api.until(lambda: api.board.readers == 0, 30)  # limits.stall_write
    # Seven times without a stall: the board lies in buffers, the delta after it waits for them.
    assert api.run(lambda: api.board.painted) <= painted + 2

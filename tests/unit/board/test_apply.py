"""What readers of the stream do with a board."""

import msgspec
import pytest

from lorad import wire, wire_status
from lorad.board_apply import aged, apply, with_event
from lorad.wire_stream import Board, Churn, Delta, Drain, Loaded, RequestRow, Slot


def status(**values):
    zero = {int: 0, str: "", float: 0.0}
    given = {"adapters": {}, "pool": wire_status.PoolPicture(), "inbox": None}
    plain = {
        field.name: zero[field.type]
        for field in msgspec.structs.fields(wire_status.Status)
        if field.required and field.name not in given
    }
    return wire_status.Status(**(plain | given | values))


def slot(name, **values):
    plain = {
        "rev": "a1",
        "slot": 0,
        "state": "idle",
        "pinned": False,
        "priority": 50,
        "rank": 8,
        "gpu_bytes": 1024,
    }
    return Slot(name=name, **(plain | values))


def request(id, **values):
    plain = {
        "adapter": "sql",
        "rev": "a1",
        "state": "running",
        "endpoint": "chat_completions",
        "age_seconds": 3.0,
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "generated_tokens": 5,
        "max_tokens": None,
        "tokens_per_second": 2.0,
        "priority": 50,
        "tenant": "",
        "client": "uid 1000",
    }
    return RequestRow(id=id, **(plain | values))


def board(**values):
    plain = {
        "sequence": 1,
        "time": "2026-01-01T00:00:00.000Z",
        "interval_seconds": 1.0,
        "status": status(uptime_seconds=100.0),
    }
    return Board(**(plain | values))


def delta(**values):
    return Delta(**({"sequence": 2, "time": "2026-01-01T00:00:02.000Z"} | values))


def test_rows_that_are_there_replace_or_are_added_and_those_that_are_gone_leave():
    before = board(slots={"a": slot("a"), "b": slot("b"), "c": slot("c")}, num_requests=4)
    after = apply(
        before,
        delta(slots={"b": slot("b", state="active"), "d": slot("d")}, gone={"slots": ("a",)}),
    )
    assert list(after.slots) == ["b", "c", "d"]
    assert after.slots["b"].state == "active"
    assert (after.sequence, after.num_requests) == (2, 4)
    assert list(before.slots) == ["a", "b", "c"]


def test_what_a_delta_leaves_out_has_grown_older_and_what_it_brings_has_not():
    before = board(
        slots={
            "cold": slot("cold", idle_seconds=5.0),
            "new": slot("new"),
            "coming": slot("coming", state="loading", load_seconds=0.5),
        },
        drains={"old": Drain(name="old", seconds=1.0)},
        requests={"r1": request("r1"), "r2": request("r2")},
        churn=Churn(
            recent=(Loaded(name="x", source="ram", num_bytes=1, seconds=0.1, ago_seconds=9.0),)
        ),
    )
    after = apply(before, delta(requests={"r2": request("r2", age_seconds=4.5)}))
    assert after.slots["cold"].idle_seconds == 7.0
    assert after.slots["new"].idle_seconds is None
    assert after.slots["coming"].load_seconds == 2.5
    assert after.slots["cold"].load_seconds == 0.0
    assert after.drains["old"].seconds == 3.0
    assert [row.age_seconds for row in after.requests.values()] == [5.0, 4.5]
    assert after.churn.recent[0].ago_seconds == 11.0
    assert after.status.uptime_seconds == 102.0


def test_a_clock_that_was_set_back_makes_nothing_younger():
    before = board(time="2026-01-01T00:01:00.000Z", slots={"a": slot("a", idle_seconds=5.0)})
    assert apply(before, delta()).slots["a"].idle_seconds == 5.0


@pytest.mark.parametrize("sequence", [1, 3])
def test_a_delta_that_does_not_follow_is_refused(sequence):
    with pytest.raises(ValueError, match="does not follow"):
        apply(board(), delta(sequence=sequence))


def test_a_board_is_shown_later_without_any_news():
    later = aged(board(slots={"a": slot("a", idle_seconds=5.0)}), 0.5)
    assert later.slots["a"].idle_seconds == 5.5
    assert later.time == board().time


def test_events_are_kept_up_to_a_number():
    items = [wire.EventItem(id=n, time="", type="slot.load") for n in range(1, 102)]
    live = board()
    for item in items:
        live = with_event(live, item)
    assert live.events == tuple(items[1:])

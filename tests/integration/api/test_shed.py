"""`POST /admin/v1/shed`: who came by a gateway and waits is refused, so that it asks elsewhere."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lorad.wire_status import ModelStatus

#: What a gateway says of one that it can send elsewhere.
MOVES = "x-lorad-moves: 1\r\n"


def queued(
    api: Any, monkeypatch: pytest.MonkeyPatch, running: int, waiting: int, model: str = "tiny"
) -> None:
    """As the engines' pictures have it, all of one model."""
    one = ModelStatus(name=model, base="", state="ready", running=running, waiting=waiting)
    told = {"running": running, "waiting": waiting, "models": (one,)}
    status = msgspec.structs.replace(api.listing.status(), **told)
    monkeypatch.setattr(api.listing, "status", lambda: status)


def shed(api: Any, call: Callable[..., Any], load: int) -> int:
    answer = call(api.admin, "POST", "/admin/v1/shed", {"load": load})
    assert answer.status == 200, answer.body
    return int(answer.json["requests"])


def test_the_newest_that_a_gateway_sends_elsewhere_are_refused_and_no_others(
    api: Any, ask: Callable[..., Any], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = api.hold_engine()
    oldest, direct = ask(api, MOVES), ask(api)
    stream, whole = ask(api, MOVES, stream=True), ask(api, MOVES)
    queued(api, monkeypatch, running=1, waiting=3)
    assert shed(api, call, load=4) == 0, "it has no more than that"
    assert shed(api, call, load=2) == 2
    for raw in (stream, whole):
        answer = raw.answer()
        assert (answer.status, answer.code) == (503, "draining")
        assert answer.headers.get("x-should-retry") != "false"
    api.run(gate.set)
    for raw in (oldest, direct):
        assert raw.answer().status == 200
    api.until(lambda: not api.requests.active)
    assert not +api.adapters.leases and api.requests.waiting == 0


def test_no_more_are_refused_than_the_engine_has_queued(
    api: Any, ask: Callable[..., Any], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = api.hold_engine()
    first, second = ask(api, MOVES), ask(api, MOVES)
    queued(api, monkeypatch, running=7, waiting=1)
    assert shed(api, call, load=0) == 1
    assert second.answer().status == 503
    api.run(gate.set)
    assert first.answer().status == 200


def test_a_request_for_several_answers_makes_room_for_as_many(
    api: Any, ask: Callable[..., Any], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = api.hold_engine()
    oldest, newest = ask(api, MOVES), ask(api, MOVES, n=3)
    queued(api, monkeypatch, running=0, waiting=4)
    assert shed(api, call, load=1) == 1
    assert newest.answer().status == 503
    api.run(gate.set)
    assert oldest.answer().status == 200


def test_what_waits_for_another_model_has_none_of_this_one_refused(
    api: Any, ask: Callable[..., Any], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = api.hold_engine()
    raw = ask(api, MOVES)
    queued(api, monkeypatch, running=1, waiting=5, model="other")
    assert shed(api, call, load=0) == 0
    api.run(gate.set)
    assert raw.answer().status == 200


def test_an_answer_that_has_begun_or_whose_head_is_out_stays(
    make_api: Callable[..., Any],
    ask: Callable[..., Any],
    call: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = make_api(ping_seconds=0.05)
    api.engine.reply = b"ab"
    gate = api.hold_engine(1)
    begun = ask(api, MOVES)
    api.until(lambda: all(g.begun for g, _ in api.requests.crowd))
    gates = api.hold_engine()
    pinged = ask(api, MOVES, stream=True)
    api.until(lambda: not any(g.moves for g, _ in list(api.requests.crowd)[1:]))
    queued(api, monkeypatch, running=0, waiting=2)
    assert shed(api, call, load=0) == 0
    for each in (gate, gates):
        api.run(each.set)
    assert begun.answer().status == pinged.answer().status == 200

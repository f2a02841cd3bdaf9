"""`DELETE /admin/v1/requests/{id}`: one request ends, its client is told, and nobody else."""

import asyncio
import json

import pytest

from lorad.client import ApiError, LoradClient


@pytest.fixture
def admin(api):
    with LoradClient(f"unix://{api.admin}") as client:
        yield client


@pytest.fixture
def notes(api, monkeypatch):
    """Rows of the audit."""
    rows = []

    class Notes:
        def note(self, actor, action, name, result, **more):
            rows.append((action, name, result, more.get("message", "")))

    monkeypatch.setattr(api.deps, "audit", Notes())
    return rows


def ids(api):
    """As the board has them, the oldest first."""
    return api.run(lambda: [generation.id for generation, _ in api.requests.crowd])


def test_a_stream_ends_with_an_error_event_and_the_others_go_on(api, ask, admin, notes):
    api.engine.reply = b"abcd"
    gate = api.hold_engine(2)
    first, second = ask(api, stream=True), ask(api, stream=True)
    api.until(lambda: all(g.usage().completion == 2 for g, _ in api.requests.crowd))
    one, other = ids(api)
    done = admin.cancel_request(one)
    assert (done.id, done.adapter, done.generated_tokens, done.changed) == (one, "bible", 2, True)
    said = first.answer()
    assert said.status == 200
    error = json.loads(said.events[-1].removeprefix(b"data: "))["error"]
    assert error["code"] == "draining" and "an operator cancelled" in error["message"]
    api.until(lambda: [g.id for g, _ in api.requests.crowd] == [other])
    api.run(gate.set)
    assert second.answer().events[-1] == b"data: [DONE]"
    assert notes == [("request.cancel", one, "ok", "bible")]
    api.until(lambda: not api.requests.active)
    assert not +api.adapters.leases and api.requests.waiting == 0


def test_who_waits_for_a_whole_answer_is_told_not_to_try_again(api, ask, admin):
    gate = api.hold_engine()
    raw = ask(api)
    (id,) = ids(api)
    admin.cancel_request(id)
    answer = raw.answer()
    assert (answer.status, answer.code) == (503, "draining")
    assert answer.headers["x-should-retry"] == "false"
    api.run(gate.set)


def test_an_unknown_or_ended_request_is_404_and_noted(api, ask, admin, notes):
    gate = api.hold_engine()
    raw = ask(api)
    (id,) = ids(api)
    admin.cancel_request(id)
    raw.answer()
    api.until(lambda: not len(api.requests.crowd))
    for unknown in (id, "0", "x" * 300, "é \x1b[31m"):
        with pytest.raises(ApiError) as caught:
            admin.cancel_request(unknown)
        assert (caught.value.status, caught.value.code) == (404, "not_found")
        assert "\x1b" not in str(caught.value)
    assert [row[::2] for row in notes] == [("request.cancel", "ok")] + [
        ("request.cancel", "not_found")
    ] * 4
    api.run(gate.set)


def test_a_second_cancel_of_one_whose_client_has_still_to_read_changes_nothing(api, ask, admin):
    gate = api.hold_engine()
    ask(api)
    id, twice = ids(api)[0], []

    def both():
        for _ in range(2):
            twice.append(api.requests.cancel_one(id, "draining", "bye")[2])

    api.run(both)
    assert twice == [True, False]
    api.run(gate.set)


def test_a_request_for_vectors_is_cancelled_as_any_other(api, send, admin):
    api.pool.gate = api.run(asyncio.Event)
    body = {"model": "bible", "input": ["a", "b"]}
    raw = send(api.inference, "POST", "/v1/embeddings", body)
    api.until(lambda: len(api.pool.requests) == 2)
    (id,) = ids(api)
    assert admin.cancel_request(id).changed
    answer = raw.answer()
    assert (answer.status, answer.code) == (503, "draining")
    assert answer.headers["x-should-retry"] == "false" and len(api.pool.aborted) == 2
    api.until(lambda: not api.requests.active)

"""Who asks the daemon: off the screen's thread, the newest question first, never two at once."""

import queue

import pytest

from lorad.caller import Unreachable
from lorad.tui.office import Failed, Office, answered


@pytest.fixture
def daemon(fakes):
    return fakes.FakeDaemon(fakes.adapter(1), fakes.adapter(2))


@pytest.fixture
def office(daemon):
    """And what it delivered, as a queue of calls that the screen's thread would run."""
    office, delivered = Office(daemon.client), queue.SimpleQueue()
    office.open(delivered.put)
    yield office, delivered
    daemon.let_go()
    office.close()


def name_of(number):
    return f"tenant{number:02}/adapter-{number:05}"


def test_an_answer_is_delivered_and_taken_only_where_it_is_run(office):
    office, delivered = office
    answers = []
    office.ask("detail", lambda client: client.adapter(name_of(1)), answers.append)
    run = delivered.get(timeout=30)
    assert not answers
    run()
    assert answers[0].value.adapter.name == name_of(1)


def test_of_questions_that_wait_in_a_lane_only_the_newest_is_asked(office, daemon):
    office, delivered = office
    taken = []
    daemon.hold()
    office.ask("page", lambda client: client.adapters(q="first"), lambda _: taken.append("first"))
    daemon.arrived.acquire(timeout=30)  # until then it would be replaced, too
    for word in ("second", "third"):
        office.ask(
            "page", lambda client, q=word: client.adapters(q=q), lambda _, q=word: taken.append(q)
        )
    daemon.let_go()
    delivered.get(timeout=30)()
    delivered.get(timeout=30)()
    assert taken == ["first", "third"]
    assert [call["q"] for call in daemon.calls("adapters")] == ["first", "third"]


def test_lanes_do_not_wait_for_each_other_nor_do_deeds(office, daemon):
    office, delivered = office
    taken = []
    daemon.hold()
    office.ask("page", lambda client: client.adapters(), lambda _: taken.append("page"))
    daemon.arrived.acquire(timeout=30)
    daemon.refuses["load"] = Unreachable("unix:///x", "stale")
    office.ask("quick", lambda client: "at once", lambda _: taken.append("quick"))
    office.do(lambda client: "at once", lambda _: taken.append("deed"))
    delivered.get(timeout=30)()
    delivered.get(timeout=30)()
    assert sorted(taken) == ["deed", "quick"]


@pytest.mark.parametrize("kind", ["refused", "unreachable", "failed", "broken"])
def test_what_goes_wrong_is_an_answer_in_one_line(fakes, kind):
    def call(client):
        match kind:
            case "refused":
                raise fakes.refused(409, "pinned", "acme/sql is pinned", hint="loractl unpin")
            case "unreachable":
                raise Unreachable("unix:///run/x.sock", "stale")
            case "failed":
                raise Failed("in_use: it runs", "wait")
        raise KeyError("what")

    answer = answered(None, call)
    assert answer.value is None and "\n" not in answer.error
    said = {
        "refused": ("pinned: acme/sql is pinned", "loractl unpin"),
        "failed": ("in_use: it runs", "wait"),
        "broken": ("KeyError: 'what'", ""),
    }
    if kind in said:
        assert (answer.error, answer.hint) == said[kind]
    else:
        assert "unix:///run/x.sock" in answer.error


def test_an_office_that_closed_delivers_nothing(office, daemon):
    office, delivered = office
    daemon.hold()
    office.do(lambda client: client.adapters(), lambda _: None)
    daemon.arrived.acquire(timeout=30)
    office.close()
    daemon.let_go()
    daemon.closed.acquire(timeout=30)
    assert delivered.empty()

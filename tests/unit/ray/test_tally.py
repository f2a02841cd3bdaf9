"""What an ingress knows of its replicas, and where it sends a request by that."""

import pytest

from lorad.fleet.rollout import home_of
from lorad.ray.messages import Held, Told, shortened, told_of
from lorad.ray.tally import LOST_SECONDS, Tally
from lorad.routing.affinity import ranking

REV = "a" * 64


class Timed(Tally):
    now = 0.0


@pytest.fixture
def tally() -> Timed:
    tally = Timed(origin="me", clock=lambda: tally.now)
    tally.update({"x": Told(rank="0"), "y": Told(rank="1"), "z": Told(rank="2")})
    return tally


def home(rev: str, *ranks: str) -> str:
    return {"0": "x", "1": "y", "2": "z"}[ranking(rev, ranks or ("0", "1", "2"))[0]]


def test_an_adapter_has_its_home_by_rank_and_not_by_who_has_it_now(tally) -> None:
    chosen = tally.choose(REV)
    assert (chosen.name, chosen.reason) == (home(REV), "home")
    rank = ranking(REV, ("0", "1", "2"))[0]
    others = {id: Told(rank=r) for id, r in (("x", "0"), ("y", "1"), ("z", "2")) if r != rank}
    tally.update(others)
    assert tally.choose(REV).name != home(REV)
    tally.update({**others, "new": Told(rank=rank)})  # in the place of the lost one
    assert tally.choose(REV).name == "new"


def test_others_can_tell_by_the_picture_where_a_request_will_go(tally) -> None:
    """A rollout brings an adapter to its home first."""
    found = home_of(REV, tally.seen())
    assert found.name == tally.choose(REV).name == home(REV)


def test_of_two_that_say_the_same_rank_none_is_overlooked(tally) -> None:
    tally.update({"x": Told(rank="0"), "w": Told(rank="0")})
    assert {tally.choose(None, without=("x",)).name, tally.choose(None, without=("w",)).name} == {
        "x",
        "w",
    }


def test_it_goes_where_the_adapter_is_already(tally) -> None:
    away = next(id for id in "xyz" if id != home(REV))
    told = {id: Told(rank=r) for id, r in (("x", "0"), ("y", "1"), ("z", "2"))}
    told[away] = Told(rank=told[away].rank, resident=shortened([REV]))
    tally.update(told)
    chosen = tally.choose(REV)
    assert (chosen.name, chosen.reason) == (away, "holder")


def test_one_that_is_not_ready_or_was_tried_gets_nothing(tally) -> None:
    assert tally.choose(REV, without=(home(REV),)).name != home(REV)
    tally.update({id: Told(rank=id, state="away") for id in "xyz"})
    assert tally.choose(REV) is None


def test_what_was_sent_since_counts_at_once(tally) -> None:
    for number in range(12):
        chosen = tally.choose(None)
        tally.enter(f"r{number}", chosen.name, None)
    loads = [member.replica.load for member in tally.seen()]
    assert loads == [4, 4, 4]
    tally.begin("r0")
    assert sum(member.replica.num_running for member in tally.seen()) == 1
    for number in range(12):
        tally.leave(f"r{number}")
    tally.leave("r0")
    tally.leave("never")
    assert [member.replica.load for member in tally.seen()] == [0, 0, 0]
    assert tally.under_way == 0


def test_of_what_is_published_only_the_requests_of_others_are_added(tally) -> None:
    tally.enter("r", "x", REV)
    tally.begin("r")
    others = {"you": 2}
    tally.update(
        {
            "x": Told(
                rank="0",
                num_waiting={"me": 3, **others},
                num_running={"me": 1, "you": 4},
                waiting={"me": {REV: 3}, "you": {REV: 2}},
            )
        }
    )
    (seen,) = tally.seen()
    assert (seen.replica.num_waiting, seen.replica.num_running) == (2, 5)
    assert seen.replica.waiting == {REV: 2}


def test_one_that_was_taken_elsewhere_is_counted_there(tally) -> None:
    tally.enter("r", "x", REV)
    tally.move("r", "y")
    assert {m.name: m.replica.waiting for m in tally.seen()} == {"x": {}, "y": {REV: 1}, "z": {}}


def test_what_was_sent_to_a_lost_replica_ends_without_a_trace(tally) -> None:
    tally.enter("r", "x", REV)
    tally.lose("x")
    tally.begin("r")
    tally.leave("r")
    assert [(m.name, m.state) for m in tally.seen()] == [
        ("x", "lost"),
        ("y", "ready"),
        ("z", "ready"),
    ]
    assert tally.under_way == 0


def test_a_dead_one_is_told_of_until_its_place_is_taken_or_for_a_while(tally) -> None:
    rest = {"y": Told(rank="1"), "z": Told(rank="2")}
    tally.lose("x")
    tally.update(rest)
    assert [m.name for m in tally.seen()] == ["x", "y", "z"]
    assert tally.choose(None).name != "x"
    tally.update({**rest, "new": Told(rank="0")})
    assert [m.name for m in tally.seen()] == ["new", "y", "z"]
    tally.lose("new")
    tally.now += LOST_SECONDS + 1
    assert [m.name for m in tally.seen()] == ["y", "z"]


def test_one_that_serve_has_stopped_is_not_told_of(tally) -> None:
    tally.update({"y": Told(rank="1")})
    assert [m.name for m in tally.seen()] == ["y"]


def test_a_picture_that_was_given_away_does_not_change(tally) -> None:
    before = tally.seen()[0]
    tally.enter("r", before.name, REV)
    assert before.replica.waiting == {}


def test_what_a_replica_says_survives_the_way_through_serve() -> None:
    told = Told(rank="1", resident=(REV,), num_running={"me": 1}, waiting={"me": {REV: 1}})
    assert told_of(told.stats()) == told
    assert told_of({}) == Told()


def test_of_a_revision_its_beginning_is_published() -> None:
    (short,) = shortened([REV])
    assert len(short) < len(REV) / 3
    assert REV in Held([short])
    assert "b" * 64 not in Held([short])
    assert None not in Held([short])

"""A member that joins takes its share of who waits at the others."""

import asyncio
import json

import pytest

from lorad.errors import LoradError
from lorad.fleet import relief
from lorad.fleet.members import Answer, Head, Member
from lorad.fleet.relief import Relief
from lorad.routing.affinity import Replica
from tests.fakes.small_clusters import run


@pytest.fixture(autouse=True)
def nobody_looks_by_itself(monkeypatch):
    monkeypatch.setattr(relief, "LOOK_SECONDS", 60.0)


async def until(true):
    while not true():
        await asyncio.sleep(0.001)


async def away(front, daemon):
    """It takes nothing yet, and the gateway knows."""
    daemon.state = "loading_base"
    await front.members.look()


async def joins(front, daemon):
    """It is ready, and what comes to it waits there."""
    daemon.state, daemon.queued = "ready", []
    await front.members.look()


async def filled(front, daemons, count):
    """So many wait at each of these, and nowhere else."""
    for daemon in daemons:
        daemon.queued = []
    asking = [asyncio.create_task(front.ask("tiny")) for _ in range(count * len(daemons))]
    await until(lambda: all(len(daemon.queued) >= count for daemon in daemons))
    await front.members.look()
    return asking


async def let_go(daemons, asking):
    for daemon in daemons:
        for turn in daemon.queued:
            turn.set_result(None)
    return [answer.status_code for answer in await asyncio.gather(*asking)]


def test_who_waits_is_sent_on_to_a_member_that_joins_the_newest_first():
    async def scenario(c, front):
        a, b, late = c.daemons.values()
        await away(front, late)
        relief = Relief(front.members)
        await relief.look()
        asking = await filled(front, (a, b), 6)
        first = a.queued[0], b.queued[0]
        await relief.look()
        assert not late.asked, "nobody has joined"
        await joins(front, late)
        await relief.look()
        await until(lambda: len(late.queued) >= 4)
        assert len(a.queued) == len(b.queued) == len(late.queued) == 4
        assert (a.queued[0], b.queued[0]) == first
        await front.members.look()
        await relief.look()
        assert [word for word, *_ in a.wishes] == ["shed"], "once"
        assert await let_go((a, b, late), asking) == [200] * 12
        assert late.asked[-1][0]["x-lorad-moves"] == "1"

    run(scenario)


def test_a_gateway_that_begins_takes_nobody_it_finds_for_one_that_joins():
    async def scenario(c, front):
        a, b = c.daemons.values()
        await away(front, b)
        asking = await filled(front, (a,), 4)
        await joins(front, b)
        relief, seen = Relief(front.members), front.members.seen
        front.members.seen = lambda: []
        await relief.look()
        front.members.seen = seen
        await relief.look()
        assert not a.wishes and len(a.queued) == 4
        assert await let_go((a,), asking) == [200] * 4

    run(scenario, names=("a", "b"))


def test_a_member_that_knows_no_such_word_keeps_what_it_has():
    async def scenario(c, front):
        a, late = c.daemons.values()
        await away(front, late)
        relief = Relief(front.members)
        await relief.look()
        asking = await filled(front, (a,), 3)

        def unknown(load):
            raise LookupError

        a._shed = unknown
        await joins(front, late)
        await relief.look()
        assert len(a.queued) == 3 and await let_go((a,), asking) == [200] * 3

    run(scenario, names=("a", "b"))


def test_only_a_gateway_says_that_a_request_may_be_sent_on():
    async def scenario(c, front):
        answer = await front.http.post(
            "/v1/completions", json={"model": "tiny"}, headers={"x-lorad-moves": "mine"}
        )
        assert answer.status_code == 200
        (asked,) = [one for daemon in c.daemons.values() for one in daemon.asked]
        assert asked[0].getlist("x-lorad-moves") == ["1"]
        refused = await front.http.post("/admin/v1/shed", json={"load": 0})
        assert refused.status_code == 404 and "at a member" in refused.text

    run(scenario)


def test_what_was_sent_from_a_lost_member_stays_where_it_is_when_that_comes_back():
    async def scenario(c, front):
        a, b = c.daemons.values()
        relief = Relief(front.members)
        await a.stop()
        await relief.look()
        asking = await filled(front, (b,), 4)
        await front.members.look()
        await relief.look()
        a.instance = "another"
        await a.start()
        while {member.state for member in front.members.seen()} != {"ready"}:
            await front.members.look()
        moved = [headers for headers, _ in b.asked if "x-lorad-moves" not in headers]
        assert moved, "some were for the one that was lost"
        await relief.look()
        assert [word for word, *_ in b.wishes] == ["shed"]
        assert await let_go((b,), asking) == [200] * 4

    run(scenario, names=("a", "b"))


def test_what_is_sent_on_comes_back_if_whoever_joined_is_gone_again():
    async def scenario(c, front):
        a, late = c.daemons.values()
        await away(front, late)
        (asking,) = await filled(front, (a,), 1)
        a._shed(0)
        await until(lambda: len(a.asked) == 2)
        assert "x-lorad-moves" not in a.asked[1][0], "it stays there"
        await until(lambda: a.queued)
        assert await let_go((a,), [asking]) == [200]
        a.answer = LoradError("draining", "it takes no more")
        answer = await front.ask("tiny")
        assert answer.json()["error"]["code"] == "draining" and len(a.asked) == 4

    run(scenario, names=("a", "b"))


class Told:
    """Members as a test has them, all ready; `shares`: how many each was told to keep."""

    def __init__(self):
        self.here, self.shares = {}, {}

    def put(self, name, running=0, waiting=0, instance="first"):
        replica = Replica(
            name=name, alive=True, waiting={}, num_running=running, num_waiting=waiting
        )
        self.here[name] = Member(name, "ready", instance, replica)

    def seen(self):
        return [*self.here.values()]

    async def ask(self, member, ask):
        self.shares[member] = json.loads(ask.body)["load"]
        return Answer(Head(member, 200), b'{"requests": 1}')


def shares_of(before, after):
    """What is told when the second of these is what there is, after the first."""

    async def look_twice():
        members = Told()
        relief = Relief(members)
        for each in (before, after):
            for name, told in each.items():
                members.put(name, *told)
            await relief.look()
        return members.shares

    return asyncio.run(look_twice())


@pytest.mark.parametrize(
    ("full", "told"),
    [
        ({"a": (0, 5)}, {"a": 3}),  # of 5 and none: one more stays than goes
        ({"a": (2, 6), "b": (0, 4)}, {"a": 4}),  # who has its share is not asked
        ({"a": (9, 0), "b": (3, 3)}, {"b": 5}),  # nor who has more, and nobody waits
    ],
    ids=str,
)
def test_a_member_is_told_its_share_if_it_has_more_and_somebody_waits(full, told):
    assert shares_of(full, full) == {}
    assert shares_of(full, full | {"late": (0, 0)}) == told


def test_one_that_was_started_anew_between_two_looks_has_joined():
    full = {"a": (0, 4), "b": (0, 0)}
    assert shares_of(full, full | {"b": (0, 0, "second")}) == {"a": 2}


def test_what_was_sent_on_from_everywhere_comes_back_to_one_that_has_joined_anew():
    async def scenario(c, front):
        a, b = c.daemons.values()
        await away(front, b)
        (asking,) = await filled(front, (a,), 1)
        await joins(front, b)
        for full, other in ((a, b), (b, a)):
            full._shed(0)
            await until(lambda other=other: other.queued)
        assert await let_go((a,), [asking]) == [200]
        assert len(a.asked) == 2 and len(b.asked) == 1

    run(scenario, names=("a", "b"))

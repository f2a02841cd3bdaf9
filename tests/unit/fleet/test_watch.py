"""What a gateway tells of its members by itself."""

import asyncio

from lorad.errors import LoradError
from lorad.fleet.members import Lost, Member
from lorad.fleet.table import unknown
from lorad.fleet.taking import named
from lorad.fleet.watch import Events
from lorad.routing.affinity import Replica
from lorad.service.events import EventRing


class FakeMembers:
    """`states` by name; none has anything to tell."""

    def __init__(self, **states):
        self.states = states

    def seen(self):
        return [
            Member(name, state, "1", Replica(name=name, alive=True, waiting={}))
            for name, state in self.states.items()
        ]

    async def ask(self, member, ask, *, seconds=None):
        raise Lost(member, "it says nothing")


def test_a_member_is_told_of_when_it_is_first_ready_and_one_in_the_place_of_a_lost_one_too():
    """After a redeploy `loractl events` was empty, although every replica had come anew."""

    async def scenario():
        members, ring = FakeMembers(a="ready", b="away"), EventRing()
        events = Events(members, ring)

        async def told(**states):
            members.states |= states
            before = ring.last_id
            await events.look()
            return [(item.type, item.replica) for item in ring.since(before)[0]]

        assert await told() == [("member.ready", "a")]
        assert await told() == []
        assert await told(b="ready") == [("member.ready", "b")]
        assert await told(a="lost") == [("member.lost", "a")]
        assert await told(c="away") == []
        assert await told(c="ready", d="ready") == [("member.ready", "c"), ("member.ready", "d")]

    asyncio.run(scenario())


def test_what_a_member_was_before_does_not_read_as_what_it_is():
    """`member.ready replica east away` was taken for both at once."""

    async def scenario():
        members, ring = FakeMembers(east="away"), EventRing()
        events = Events(members, ring)
        await events.look()
        members.states["east"] = "ready"
        await events.look()
        (item,) = ring.since(0)[0]
        assert (item.type, item.cause, item.message) == ("member.ready", "", "was away")
        assert item.details == {"before": "away"}

    asyncio.run(scenario())


def test_a_command_that_a_member_advises_is_meant_on_that_member():
    refused = LoradError("adapter_invalid", "it is of tiny already", hint="loractl rm bofh")
    assert named(refused, "east").hint == "on east: loractl rm bofh"
    slip = LoradError("model_not_found", "no such", hint="did you mean bible?")
    assert named(slip, "east").hint == "did you mean bible?"


def test_a_name_that_the_catalog_does_not_have_is_refused_with_the_nearest():
    assert unknown("bibel", ["bofh", "bible"]).hint == "did you mean bible?"
    assert unknown("zzz", ["bofh"]).hint == "loractl ls"


def test_a_member_that_was_never_reached_is_told_of_once():
    """A gateway with a wrong address said that it takes requests, and nothing more."""

    async def scenario():
        members, ring = FakeMembers(typo="lost", slow="lost", joins="lost"), EventRing()
        events = Events(members, ring)
        await events.look()
        assert ring.last_id == 0
        members.states |= {"slow": "ready", "joins": "away"}
        await events.look()
        await events.look()
        told = [(item.type, item.level, item.replica) for item in ring.since(0)[0]]
        assert told == [("member.lost", "warn", "typo"), ("member.ready", "info", "slow")]

    asyncio.run(scenario())

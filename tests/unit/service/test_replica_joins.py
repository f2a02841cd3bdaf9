"""An engine that takes requests again gets some of those that wait at others."""

import asyncio
import contextlib
import random
from functools import partial

import pytest

from engine.errors import EngineDied
from engine.messages import SequenceDelta
from lorad.errors import LoradError
from tests.fakes.replica_fleet import NAMES, held_back


def test_who_waits_goes_to_an_engine_that_joins_if_it_belongs_there_now(fleet, eventually):
    async def scenario(f):
        await f.world.add("a", 1)
        f.silence()
        rev, home, gate = f.world.rev(1), f.keeper(1), asyncio.Event()
        f.links[home].turn = partial(held_back, f.links[home].config, gate)
        f.born_silent = True
        f.engine(home).die()
        await eventually(lambda: f.links[home].state != "ready")
        away = f.replicas.choose(rev).name
        deltas = {f"r{n}": f.submit(f"r{n}", rev, deadline_seconds=60.0) for n in range(7)}
        await eventually(lambda: f.at("r6") == [away])
        f.engine(away).frame(deltas=(SequenceDelta(request_id="r5", tokens=(5,)),))
        await eventually(lambda: deltas["r5"])
        f.say_queued(away, 2)
        f.later = 10.0
        gate.set()
        # The newest two that have got nothing.
        await eventually(lambda: f.engine(home).submitted.keys() == {"r6", "r4"})
        assert 40.0 < f.engine(home).submitted["r6"].deadline_seconds <= 50.0, "what is left"
        assert f.engine(away).submitted.keys() == {"r0", "r1", "r2", "r3", "r5"}
        assert not deltas["r6"], "its end at the other engine is nobody's"
        begins = SequenceDelta(request_id="r6", tokens=(5,), queued_seconds=0.25)
        f.engine(home).frame(deltas=(begins,))
        f.engine(home).finish("r6")
        await eventually(lambda: len(deltas["r6"]) == 2)
        assert [delta.finish_reason for delta in deltas["r6"]] == [None, "stop"]
        assert deltas["r6"][0].queued_seconds > 10.25, "where it waited first counts too"
        f.replicas.abort("r3")
        f.replicas.join(home)
        await eventually(lambda: f.engine(home).submitted.keys() == {"r4", "r2", "r1"})
        f.say_queued(away, 0)
        f.replicas.join(home)
        assert f.replicas.where("r0") == away, "it has a place there"
        for id in ("r4", "r2", "r1"):
            f.engine(home).finish(id)
        for id in ("r0", "r5"):
            f.engine(away).finish(id)
        await eventually(lambda: f.loads() == [(0, 0, {})] * 3)

    fleet(scenario)


def test_a_request_that_belongs_where_it_waits_stays_there(fleet, eventually):
    async def scenario(f):
        await f.world.add("a", 1)
        f.silence()
        rev, home = f.world.rev(1), f.keeper(1)
        for n in range(4):
            f.submit(f"r{n}", rev)
        await eventually(lambda: f.at("r3") == [home])
        f.say_queued(home, 4)
        for other in NAMES:
            f.replicas.join(other)
        assert {f.replicas.where(f"r{n}") for n in range(4)} == {home}
        assert sorted(f.loads()) == [(0, 0, {}), (0, 0, {}), (4, 0, {rev: 4})]

    fleet(scenario)


def test_a_request_stays_where_it_is_if_the_engine_that_joins_is_gone_again(fleet, eventually):
    async def scenario(f):
        f.silence()
        deltas = {f"r{n}": f.submit(f"r{n}") for n in range(9)}
        (at,) = f.at("r8")
        other = next(name for name in NAMES if name != at)
        f.engine(other).submitted.clear()
        for id in [id for id in map("r{}".format, range(9)) if f.replicas.where(id) == other]:
            f.engine(other).submitted[id] = None
            f.engine(other).finish(id)
        await eventually(lambda: f.replicas[other].num_waiting == 0)
        f.say_queued(at, 3)
        f.engine(other).submit = refuse
        before, told = f.loads(), []
        f.engine(at).submit = f.engine(at).abort = told.append
        f.later = 10.0
        f.replicas.join(other)
        assert f.loads() == before and f.replicas.where("r8") == at
        assert not told, "it was never away"
        await asyncio.sleep(0.01)
        assert not deltas["r8"]
        begins = SequenceDelta(request_id="r8", tokens=(5,), queued_seconds=0.25)
        f.engine(at).frame(deltas=(begins,))
        await eventually(lambda: deltas["r8"])
        assert deltas["r8"][0].queued_seconds < 10.0, "nor has it waited anywhere else"
        del f.engine(other).submit
        f.replicas.join(other)
        assert told and {f.replicas.where(id) for id in told} == {other}, "it takes some by now"

    fleet(scenario)


async def moved(f, eventually):
    """Of a request that goes from the first to the second, which joins; the third is away."""
    f.silence()
    f.born_silent = True
    at, joins, last = NAMES
    gates = {name: asyncio.Event() for name in (joins, last)}
    for name, gate in gates.items():
        f.links[name].turn = partial(held_back, f.links[name].config, gate)
        f.engine(name).die()
    await eventually(lambda: "ready" not in {f.links[name].state for name in gates})
    f.submit("q")
    deltas = f.submit("r")
    f.say_queued(at, 1)
    gates[joins].set()
    await eventually(lambda: f.replicas.where("r") == joins)
    return deltas


def test_a_request_does_not_come_back_to_an_engine_that_has_not_heard_that_it_left(
    fleet, eventually
):
    async def scenario(f):
        at, joins, *_ = NAMES
        aborted, f.engine(at).abort = [], lambda id: aborted.append(id)
        deltas = await moved(f, eventually)
        assert aborted == ["r"]
        f.engine(joins).die()
        await eventually(lambda: deltas)
        f.engine(at).finish("r", "abort")  # its word of the request that had left
        await eventually(lambda: "r" not in f.links[at].flights._sinks)
        assert [(d.finish_reason, d.code) for d in deltas] == [("error", "engine_restarting")]
        assert f.loads()[0] == (1, 0, {})

    fleet(scenario)


def test_a_request_that_was_sent_on_is_not_sent_back_when_the_first_engine_joins_again(
    fleet, eventually
):
    async def scenario(f):
        at, joins, *_ = NAMES
        await moved(f, eventually)
        for _ in range(3):
            f.replicas[joins].enter(None)  # others came, and the first engine is the emptier one
        f.submit("s")
        assert f.replicas.where("s") == at
        f.say_queued(joins, 4)
        f.replicas.join(at)
        assert f.replicas.where("r") == joins

    fleet(scenario)


def test_a_request_comes_back_to_an_engine_that_has_heard_that_it_left(fleet, eventually):
    async def scenario(f):
        at, joins, *_ = NAMES
        deltas = await moved(f, eventually)
        await eventually(lambda: "r" not in f.engine(at).submitted)
        f.engine(joins).die()
        await eventually(lambda: f.replicas.where("r") == at)
        f.engine(at).finish("r")
        await eventually(lambda: deltas)
        assert [delta.finish_reason for delta in deltas] == ["stop"]

    fleet(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_go_from_engine_to_engine_end_once_each(fleet, eventually, seed):
    """Engines join again and again, some die, clients leave; each says how many it has queued."""

    async def scenario(f):
        rng, told, moved = random.Random(seed), {}, 0
        await f.world.add("a", 1)
        await f.world.add("b", 2)
        f.born_silent = True
        f.silence()

        def say_something(id):
            (at,) = f.at(id) or [None]
            if at is not None and rng.random() < 0.6:
                f.engine(at).frame(deltas=(SequenceDelta(request_id=id, tokens=(7,)),))
            elif at is not None:
                f.engine(at).finish(id)

        for n in range(120):
            rev = rng.choice((None, f.world.rev(1), f.world.rev(1), f.world.rev(2)))
            with contextlib.suppress(LoradError):
                told[f"r{n}"] = f.submit(f"r{n}", rev)
            here = list(f.replicas._flights)
            name = rng.choice(NAMES)
            match rng.randrange(6):
                case 0 if here:
                    f.replicas.abort(rng.choice(here))
                case 1 if f.engine(name).state != "dead" and rng.random() < 0.1:
                    f.engine(name).die()
                case 2 | 3:
                    for each in NAMES:
                        f.say_queued(each, rng.randrange(6))
                    before = {id: f.replicas.where(id) for id in here}
                    f.replicas.join(name)
                    moved += sum(f.replicas.where(id) != at for id, at in before.items())
                case _ if here:
                    say_something(rng.choice(here))
            if rng.random() < 0.5:
                await asyncio.sleep(0)

        def all_over():
            for id in list(f.replicas._flights):
                for name in f.at(id):
                    f.engine(name).finish(id)
            return not f.replicas._flights

        await eventually(all_over)
        ends = [[d.finish_reason for d in deltas if d.finish_reason] for deltas in told.values()]
        assert all(len(each) == 1 for each in ends) and moved
        assert f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


def refuse(submit):
    raise EngineDied("gone")

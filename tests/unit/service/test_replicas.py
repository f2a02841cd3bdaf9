"""Several engines of one model: which gets a request, and what becomes of it when one dies."""

import asyncio
import contextlib
import random
import time
from functools import partial

import pytest
from msgspec import structs

from engine.adapters.states import RESIDENT
from engine.errors import EngineDied
from engine.messages import (
    AdapterEvent,
    AddRevision,
    Load,
    RemoveRevision,
    SamplingParams,
    SequenceDelta,
    Submit,
)
from engine.pooling.requests import PoolRequest
from lorad import wire
from lorad.errors import LoradError
from lorad.routing.affinity import Router, Terms, ranking
from lorad.service.engine_link import EngineLink
from lorad.service.lineup import Lineup, ModelAdapters
from lorad.service.picture import Picture
from lorad.service.pictures import Pictures
from lorad.service.pins import PinRoom
from lorad.service.registration import Registration
from lorad.service.replica import Replica
from lorad.service.replica_revisions import ReplicaRevisions
from lorad.service.replicas import LOST, Replicas
from lorad.service.revisions import Revisions

NAMES = ("0", "1", "2")


class Fleet:
    """The world's names and store over three engines in place of its one."""

    def __init__(self, world, fake):
        w = self.world = world
        self.born_silent = False
        self.clients = {name: [] for name in NAMES}
        self.links, replicas, pictures = {}, [], {}
        for name in NAMES:
            link = self.links[name] = EngineLink(
                w.link.config,
                w.events,
                new_client=partial(self.new_client, fake, name),
                first_pause=0.0,
                replica=name,
            )
            pictures[name] = Picture(link)
            replicas.append(Replica(name, link, pictures[name]))
        self.later = 0.0  # seconds that the router's clock is ahead
        self.replicas = Replicas(replicas, clock=lambda: time.monotonic() + self.later)
        self.pictures = Pictures(pictures, replicas=True)
        shared = (w.intake, w.catalog, w.events, w.tasks, w.revisions.shelf)
        team = self.revisions = ReplicaRevisions(w.registry, self.replicas, *shared, model="base")
        for name, link in self.links.items():
            one = Revisions(w.registry, link, *shared, model="base", team=team, replica=name)
            team.join(one)
            link.on_ready = partial(self.take_ready, name)
        self.pins = PinRoom(
            w.registry, w.catalog, self.replicas, Limits(), model="base", keeps=team.keeps
        )
        told = (w.names, self.replicas, w.intake, team)
        registration = Registration("base", *told, w.events, check_pin=self.pins.check)
        model = ModelAdapters(
            "base",
            *told,
            registration,
            w.events,
            w.tasks,
            check_pin=self.pins.check,
            refresh=self.pictures.refresh,
        )
        w.adapters.models = w.adapters.outcomes._models = Lineup(w.catalog, [model])

    def new_client(self, fake, name):
        self.clients[name].append(client := fake.Client())
        client.silent = self.born_silent
        return client

    def take_ready(self, name):
        self.revisions.settle_pins()
        self.replicas.join(name)

    def say_queued(self, name, number):
        """In its picture, and all that follow."""
        picture = structs.replace(self.engine(name).snapshot(), waiting=number)
        self.engine(name).snapshot = lambda: picture
        self.replicas[name].picture.snapshot = picture

    async def start(self):
        for link in self.links.values():
            link.start()
        async with asyncio.timeout(5):
            for link in self.links.values():
                await link.ready.wait()

    async def stop(self):
        for link in self.links.values():
            await link.stop()

    def engine(self, name):
        return self.clients[name][-1]

    def on(self, n):
        """Which replicas have it on the GPU."""
        rev = self.world.rev(n)
        return {name for name in NAMES if self.engine(name).revisions.get(rev) == "gpu"}

    def pinned_on(self, n):
        return {name for name in NAMES if self.world.rev(n) in self.engine(name).pinned}

    def keeper(self, n):
        return ranking(self.world.rev(n), NAMES)[0]

    def silence(self):
        for name in NAMES:
            self.engine(name).silent = True

    def submit(self, id, rev=None, **told):
        """Its deltas, as they come."""
        deltas = []
        submit = Submit(request_id=id, prompt=[1], sampling=SamplingParams(), rev=rev, **told)
        self.replicas.submit(submit, deltas.append)
        return deltas

    def at(self, id):
        """The living engines that have a request."""
        engines = {name: self.engine(name) for name in NAMES}
        return [n for n, one in engines.items() if id in one.submitted and one.state != "dead"]

    def loads(self):
        return [(r.num_waiting, r.num_running, dict(r.waiting)) for r in self.replicas]


class Limits:
    """No limits of [lora]."""

    pin_limit, kv_floor = 0, 0


@pytest.fixture
def fleet(world, fake):
    """fleet(scenario): `scenario(fleet)` with three engines that are up."""

    def run(scenario):
        async def inner(w):
            fleet = Fleet(w, fake)
            await fleet.start()
            try:
                await scenario(fleet)
            finally:
                await fleet.stop()

        world(inner, start=False)

    return run


# ----------------------------------------------------------------- requests
def test_requests_for_an_adapter_go_to_one_engine_and_bases_go_where_least_is(fleet, eventually):
    async def scenario(f):
        await f.world.add("a", 1)
        f.silence()
        rev = f.world.rev(1)
        for n in range(4):
            f.submit(f"a{n}", rev)
        await eventually(lambda: f.at("a3"))
        assert {name for n in range(4) for name in f.at(f"a{n}")} == {f.keeper(1)}
        for n in range(4):
            f.submit(f"b{n}")
        assert [f.at(f"b{n}") for n in range(4)].count([f.keeper(1)]) == 0
        assert {f.replicas.where(f"a{n}") for n in range(4)} == {f.keeper(1)}

    fleet(scenario)


def test_what_had_not_begun_goes_on_elsewhere_and_what_streamed_ends(fleet, eventually):
    async def scenario(f):
        await f.world.add("a", 1)
        f.silence()
        rev, home = f.world.rev(1), f.keeper(1)
        streams, waits = f.submit("streams", rev), f.submit("waits", rev, deadline_seconds=60.0)
        await eventually(lambda: f.at("waits") == [home])
        f.engine(home).frame(deltas=(SequenceDelta(request_id="streams", tokens=(5,)),))
        await eventually(lambda: streams)
        f.engine(home).die()
        await eventually(lambda: f.at("waits"))
        (other,) = f.at("waits")
        assert other == ranking(rev, NAMES)[1] and not waits
        assert f.engine(other).submitted["waits"].deadline_seconds <= 60.0
        assert streams[-1].finish_reason == "error" and streams[-1].code == "engine_restarting"
        f.engine(other).finish("waits")
        await eventually(lambda: waits)
        assert [delta.finish_reason for delta in waits] == ["stop"]
        assert f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


def test_an_answer_of_which_nobody_has_seen_anything_begins_anew(fleet, eventually):
    class Sink(list):
        __call__ = list.append
        seen = False

        def begin_anew(self):
            self.clear()
            return not self.seen

    async def scenario(f):
        f.silence()
        sinks = whole, streamed = Sink(), Sink()
        streamed.seen = True
        for id, sink in zip(("whole", "streamed"), sinks, strict=True):
            submit = Submit(request_id=id, prompt=[1], sampling=SamplingParams(), rev=None)
            f.replicas.submit(submit, sink)
        homes = {id: f.at(id)[0] for id in ("whole", "streamed")}
        for id, name in homes.items():
            f.engine(name).frame(deltas=(SequenceDelta(request_id=id, tokens=(5,)),))
        await eventually(lambda: whole and streamed)
        for name in set(homes.values()):
            f.engine(name).die()
        await eventually(lambda: streamed and streamed[-1].finish_reason == "error")
        await eventually(lambda: f.at("whole"))
        f.engine(f.at("whole")[0]).finish("whole")
        await eventually(lambda: whole)
        assert [(d.tokens, d.finish_reason) for d in whole] == [((1,), "stop")]
        assert f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


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


def test_what_its_client_gave_up_is_not_begun_anew(fleet, eventually):
    async def scenario(f):
        f.silence()
        deltas = f.submit("a")
        engine = f.engine(f.at("a")[0])
        engine.abort = lambda request_id: None  # it dies before it hears of it
        f.replicas.abort("a")
        engine.die()
        await eventually(lambda: deltas)
        assert f.at("a") == [] and deltas[-1].code == "engine_restarting"
        assert f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


def test_it_goes_on_once_as_it_may_be_what_the_engine_died_of(fleet, eventually):
    async def scenario(f):
        f.silence()
        (deltas, (first,)) = f.submit("poison"), f.at("poison")
        f.engine(first).die()
        await eventually(lambda: f.at("poison"))
        (second,) = f.at("poison")
        f.engine(second).die()
        await eventually(lambda: deltas)
        assert [(d.finish_reason, d.code) for d in deltas] == [("error", "engine_restarting")]
        assert f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


def test_affinity_comes_back_with_the_engine(fleet, eventually):
    async def scenario(f):
        await f.world.add("a", 1, load=True)
        home = f.keeper(1)
        assert f.on(1) == {home}
        gate = asyncio.Event()  # else it may be back before anybody has looked
        f.links[home].turn = partial(held_back, f.links[home].config, gate)
        f.engine(home).die()
        await eventually(lambda: f.links[home].state != "ready")
        assert f.replicas.choose(f.world.rev(1)).name != home
        gate.set()
        await f.links[home].ready.wait()
        await eventually(lambda: f.on(1) == {home})  # what it held is there again
        assert f.replicas.choose(f.world.rev(1)).name == home

    fleet(scenario)


def test_events_say_on_which_engine_it_happened(fleet, eventually):
    async def scenario(f):
        await f.world.add("a", 1, load=True)
        home = f.keeper(1)
        f.engine(home).die()
        await eventually(lambda: f.links[home].restarts == 1)
        await f.links[home].ready.wait()
        await eventually(lambda: f.on(1) == {home})
        told = f.world.events.newest(1000)
        ready = [event.replica for event in told if event.type == "engine.ready"]
        assert sorted(ready) == sorted((*NAMES, home))
        assert [event.replica for event in told if event.type == "engine.died"] == [home]
        moved = AdapterEvent(rev=f.world.rev(1), before="loading", after="idle", cause="request")
        f.revisions["2"].news.publish_transition(moved)
        (last,) = f.world.events.newest(1)
        assert (last.type, last.name, last.replica) == ("slot.load", "a", "2")
        assert {event.replica for event in told if event.type == "adapter.added"} == {""}

    fleet(scenario)


def test_nobody_is_asked_while_no_engine_is_ready_and_one_is_enough(fleet, eventually):
    async def scenario(f):
        for name in NAMES[:2]:
            f.links[name].state = "engine_stalled"
        f.replicas.check()
        assert f.replicas.state == "ready"
        f.submit("one")
        f.links["2"].state = "engine_restarting"
        with pytest.raises(LoradError) as refused:
            f.submit("none")
        assert refused.value.code == "engine_stalled"
        with pytest.raises(LoradError):
            f.replicas.check()
        assert f.loads()[0] == (0, 0, {})
        f.links["0"].state = f.links["1"].state = "stopped"  # both were given up
        assert f.replicas.state == "engine_restarting", "the third will be there again"

    fleet(scenario)


def test_what_a_hanging_engine_has_not_answered_goes_elsewhere(fleet, eventually):
    async def scenario(f):
        await f.world.add("a", 1)
        f.silence()
        rev, home = f.world.rev(1), f.keeper(1)
        streams, waits = f.submit("streams", rev), f.submit("waits", rev)
        await eventually(lambda: f.at("waits") == [home])
        f.engine(home).frame(deltas=(SequenceDelta(request_id="streams", tokens=(5,)),))
        await eventually(lambda: streams)
        heard = f.engine(home).abort
        f.engine(home).abort = lambda id: None  # it hears of nothing for now
        f.links[home].state = "engine_stalled"
        f.replicas.leave(home)
        await eventually(lambda: len(f.at("waits")) == 2)
        (other,) = set(f.at("waits")) - {home}
        assert f.at("streams") == [home] and f.replicas.where("waits") == other
        f.engine(other).finish("waits")
        await eventually(lambda: waits)
        f.links[home].state = "ready"  # it goes on, with what was taken back
        heard("waits")
        f.engine(home).finish("streams")
        await eventually(lambda: streams[-1].finish_reason == "stop")
        assert [delta.finish_reason for delta in waits] == ["stop"]
        assert f.loads() == [(0, 0, {})] * 3 and f.replicas._flights == {}

    fleet(scenario)


def test_a_hanging_engine_keeps_what_it_has_where_there_is_no_other(fleet, eventually):
    async def scenario(f):
        f.silence()
        deltas = f.submit("a")
        (home,) = f.at("a")
        for link in f.links.values():
            link.state = "engine_stalled"
        f.replicas.leave(home)
        assert f.at("a") == [home]
        f.links[home].state = "ready"
        f.engine(home).finish("a")
        await eventually(lambda: deltas)
        assert deltas[-1].finish_reason == "stop" and f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


def test_an_engine_that_is_gone_and_nobody_knows_it_yet_is_passed_over(fleet, eventually):
    def gone(submit):
        raise EngineDied("it has closed its socket")

    async def scenario(f):
        f.silence()
        for name in NAMES[:2]:
            f.engine(name).submit = gone
        deltas = [f.submit(f"r{n}") for n in range(3)]
        assert [f.at(f"r{n}") for n in range(3)].count(["2"]) + sum(map(len, deltas)) == 3
        for n in range(3):
            f.replicas.abort(f"r{n}")
        await eventually(lambda: all(deltas))
        assert f.loads() == [(0, 0, {})] * 3 and f.replicas._flights == {}

    fleet(scenario)


def test_an_abort_finds_the_engine_that_has_the_request(fleet, eventually):
    async def scenario(f):
        f.silence()
        deltas = f.submit("a")
        f.replicas.abort("a")
        f.replicas.abort("never heard of")
        await eventually(lambda: deltas)
        assert deltas[-1].finish_reason == "abort"
        assert f.replicas.where("a") == "" and f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


def test_an_input_that_is_pooled_goes_on_elsewhere_too(fleet):
    class Request:
        rev = None
        request_id = "a"

    async def scenario(f):
        asked = []

        async def pool(name, request):
            asked.append(name)
            if name == asked[0]:
                raise LoradError("engine_restarting", "it died")
            return "vectors"

        for name, link in f.links.items():
            link.pool = partial(pool, name)
        assert await f.replicas.pool(Request()) == "vectors"
        assert len(set(asked)) == 2 and f.loads() == [(0, 0, {})] * 3

    fleet(scenario)


def test_an_input_that_a_hanging_engine_has_goes_on_elsewhere_once(fleet, eventually):
    async def scenario(f):
        asked, back = [], []

        async def pool(name, request):
            asked.append(name)
            if len(asked) == 3:
                return "vectors"
            hangs = gone[name] = asyncio.get_running_loop().create_future()
            return await hangs

        def take_back(name, request_id):
            back.append((name, request_id))
            gone[name].set_exception(LoradError("engine_stalled", "it hangs"))

        def hang(name):
            f.links[name].state = "engine_stalled"
            f.replicas.leave(name)

        gone = {}
        for name, link in f.links.items():
            link.pool, link.take_back = partial(pool, name), partial(take_back, name)
        one = asyncio.ensure_future(f.replicas.pool(PoolRequest(request_id="one", tokens=[1])))
        await eventually(lambda: len(asked) == 1)
        hang(asked[0])
        await eventually(lambda: len(asked) == 2)
        assert asked[1] != asked[0] and back == [(asked[0], "one")]
        hang(asked[1])  # as it may be what engines hang of, it stays there
        assert len(back) == 1 and f.replicas._inputs == {}
        gone[asked[1]].set_result("vectors")
        assert await one == "vectors"
        two = asyncio.ensure_future(f.replicas.pool(PoolRequest(request_id="two", tokens=[1])))
        assert await two == "vectors"
        assert f.loads() == [(0, 0, {})] * 3 and f.replicas._inputs == {}

    fleet(scenario)


def test_an_input_stays_with_a_hanging_engine_where_there_is_no_other(fleet, eventually):
    async def scenario(f):
        hangs, back = asyncio.get_running_loop().create_future(), []

        async def pool(request):
            return await hangs

        for link in f.links.values():
            link.pool, link.take_back = pool, back.append
        one = asyncio.ensure_future(f.replicas.pool(PoolRequest(request_id="one", tokens=[1])))
        await eventually(lambda: f.replicas._inputs)
        for link in f.links.values():
            link.state = "engine_stalled"
        for name in NAMES:
            f.replicas.leave(name)
        assert back == []
        hangs.set_result("vectors")
        assert await one == "vectors"

    fleet(scenario)


# ----------------------------------------------------------------- adapters
def test_an_adapter_is_packed_once_and_announced_where_it_is_asked_for(fleet, eventually):
    async def scenario(f):
        w = f.world
        await w.add("a", 1)
        await w.adapters.load(wire.Names(names=("a",)))
        assert w.packed == [w.rev(1)]
        assert f.on(1) == {f.keeper(1)}
        told = [name for name in NAMES if f.engine(name).kinds(AddRevision)]
        assert told == [f.keeper(1)]
        f.links[f.keeper(1)].state = "engine_stalled"
        deltas = f.submit("b", w.rev(1))
        await eventually(lambda: deltas)
        assert len([n for n in NAMES if f.engine(n).kinds(AddRevision)]) == 2
        assert w.packed == [w.rev(1)]

    fleet(scenario)


def test_a_pin_is_for_one_replica_and_moves_when_that_is_lost(fleet, eventually):
    async def scenario(f):
        w, home = f.world, f.keeper(1)
        await w.add("a", 1, pin=True)
        assert f.on(1) == f.pinned_on(1) == {home}
        gate = asyncio.Event()
        f.links[home].turn = partial(held_back, f.links[home].config, gate)
        f.engine(home).die()
        second = ranking(w.rev(1), NAMES)[1]
        await eventually(lambda: second in f.on(1) & f.pinned_on(1))
        gate.set()
        await f.links[home].ready.wait()
        await eventually(lambda: f.pinned_on(1) == {home} and home in f.on(1))
        assert f.revisions.resident(w.rev(1))
        await w.adapters.unpin(wire.Names(names=("a",)))
        assert f.pinned_on(1) == set()

    fleet(scenario)


class held_back:
    """A turn to start that waits for `gate`."""

    def __init__(self, config, gate):
        self.config, self.gate = config, gate

    async def __aenter__(self):
        await self.gate.wait()
        return self.config

    async def __aexit__(self, *_):
        return None


def test_pins_of_one_replica_are_no_matter_to_another(fleet):
    async def scenario(f):
        w = f.world
        f.pins.settings.pin_limit = 2 * f.engine("0")._info.block_bytes  # one adapter
        try:
            by_keeper = {}
            for n in range(1, 9):
                by_keeper.setdefault(f.keeper(n), []).append(n)
            one, other = [numbers for numbers in by_keeper.values() if len(numbers) > 1][:2]
            await w.add("first", one[0], pin=True)
            await w.add("elsewhere", other[0], pin=True)
            with pytest.raises(LoradError) as refused:
                await w.add("second", one[1], pin=True)
            assert refused.value.code == "no_room"
        finally:
            del f.pins.settings.pin_limit

    fleet(scenario)


def test_a_new_revision_stands_beside_the_old_one_everywhere_before_the_name_moves(
    fleet, eventually
):
    async def scenario(f):
        w = f.world
        await w.add("a", 1, load=True)
        home, other = ranking(w.rev(1), NAMES)[:2]
        await f.revisions[other].load(w.rev(1))
        assert f.on(1) == {home, other}
        f.engine(other).hold_loads.clear()
        adding = asyncio.create_task(w.add("a", 2, replace=True))
        await eventually(lambda: f.on(2) == {home})
        assert w.adapters.resolve("a").rev == w.rev(1) and not adding.done()
        f.engine(other).hold_loads.set()
        await adding
        assert f.on(2) == {home, other}
        assert w.adapters.resolve("a").rev == w.rev(2)
        await eventually(lambda: "adapter.retired" in w.types("a@" + w.rev(1)[:8]))
        assert w.types().count("adapter.retired") == 1 == w.types().count("adapter.replaced")
        for name in (home, other):
            assert [c.rev for c in f.engine(name).kinds(RemoveRevision)] == [w.rev(1)]
        assert f.on(1) == set() and not w.store.has(w.rev(1))

    fleet(scenario)


def test_a_rollout_goes_on_without_a_replica_that_dies_meanwhile(fleet, eventually):
    async def scenario(f):
        w = f.world
        await w.add("a", 1, load=True)
        home, other = ranking(w.rev(1), NAMES)[:2]
        await f.revisions[other].load(w.rev(1))
        f.engine(other).hold_loads.clear()
        adding = asyncio.create_task(w.add("a", 2, replace=True))
        await eventually(lambda: f.on(2) == {home})
        dead = f.engine(other)
        dead.die()
        await eventually(lambda: f.links[other].restarts == 1)
        dead.hold_loads.set()
        await adding
        assert w.adapters.resolve("a").rev == w.rev(2)
        await eventually(lambda: f.links[other].state == "ready")
        await eventually(lambda: w.rev(1) not in f.engine(other).revisions)
        assert home in f.on(2)

    fleet(scenario)


def test_what_is_evicted_leaves_all_of_them(fleet, eventually):
    async def scenario(f):
        w = f.world
        await w.add("a", 1, load=True)
        await f.revisions[ranking(w.rev(1), NAMES)[1]].load(w.rev(1))
        await eventually(lambda: len(f.on(1)) == 2 and len(f.pictures.places(w.rev(1))) in (0, 2))
        await f.pictures.refresh()
        assert len(f.pictures.places(w.rev(1))) == 2
        (status,) = [s for s in f.pictures.snapshot.revisions if s.rev == w.rev(1)]
        assert status.state == "idle" and status.loads == 2
        (item,) = (await w.adapters.evict(wire.Names(names=("a",)))).items
        assert item.ok and f.on(1) == set()
        await eventually(lambda: not f.revisions.resident(w.rev(1)))

    fleet(scenario)


class Hung:
    """An engine that hears nothing until it goes on, or dies."""

    def __init__(self, fleet, name):
        self.fleet, self.name = fleet, name
        self.engine, self.ends = fleet.engine(name), asyncio.get_running_loop().create_future()
        self.heard, self.engine.call = self.engine.call, self.call
        fleet.links[name]._set("engine_stalled", "the step loop has not moved")

    async def call(self, command):
        await asyncio.shield(self.ends)
        return await self.heard(command)

    def go_on(self):
        self.fleet.links[self.name]._set("ready", "ready")
        self.ends.set_result(None)

    def die(self):
        self.ends.set_exception(EngineDied("killed by the test"))
        self.engine.die()


def outcome(results):
    (item,) = results.items
    return item.ok, item.code, item.message


def test_nobody_waits_for_an_engine_that_hangs_and_it_does_what_it_was_told_later(
    fleet, eventually
):
    async def scenario(f):
        w, home = f.world, f.keeper(1)
        await w.add("a", 1, load=True)
        hung, asked = Hung(f, home), wire.Names(names=("a",))
        leaves = f"replica {home} hangs: the adapter leaves it as soon as that goes on"
        ok, code, message = outcome(await w.adapters.evict(asked))
        assert (ok, code) == (False, "engine_stalled") and message.startswith(leaves)
        assert f.on(1) == {home}, "it has heard nothing yet"
        hung.go_on()
        await eventually(lambda: f.on(1) == set())

    fleet(scenario)


def test_an_eviction_of_an_engine_that_is_replaced_instead_is_no_reason_to_load_it_again(
    fleet, eventually
):
    async def scenario(f):
        w, home = f.world, f.keeper(1)
        await w.add("a", 1, load=True)
        await w.add("b", 2, load=True)
        others = f.on(2)
        hung = Hung(f, home)
        assert not outcome(await w.adapters.evict(wire.Names(names=("a",))))[0]
        hung.die()
        await eventually(lambda: f.links[home].restarts == 1)
        await f.links[home].ready.wait()
        await w.tasks.settle()
        assert f.on(1) == set() and f.on(2) == others

    fleet(scenario)


def test_a_pin_that_a_hanging_engine_keeps_is_set_and_loaded_there_later(fleet, eventually):
    async def scenario(f):
        w, home = f.world, f.keeper(1)
        await w.add("a", 1)
        hung = Hung(f, home)
        ok, code, message = outcome(await w.adapters.pin(wire.Names(names=("a",))))
        assert (ok, code) == (False, "engine_stalled")
        assert message.startswith(f"replica {home} keeps this pin and hangs: it is loaded there")
        assert w.registry.get("a").pinned
        hung.go_on()
        await eventually(lambda: f.on(1) == f.pinned_on(1) == {home})

    fleet(scenario)


def test_a_load_goes_past_a_hanging_engine_and_a_removal_does_not_wait_for_it(fleet, eventually):
    async def scenario(f):
        w, home = f.world, f.keeper(1)
        await w.add("a", 1)
        f.engine(home).hold_loads.clear()
        loading = asyncio.create_task(w.adapters.load(wire.Names(names=("a",))))
        await eventually(lambda: f.engine(home).kinds(Load))
        hung = Hung(f, home)  # in the middle of it
        assert outcome(await loading)[0]
        (other,) = f.on(1)
        assert other != home
        await w.adapters.remove("a")
        await eventually(lambda: f.on(1) == set())
        hung.go_on()
        f.engine(home).hold_loads.set()
        await eventually(lambda: w.rev(1) not in f.engine(home).revisions)

    fleet(scenario)


def test_a_name_that_is_removed_is_forgotten_by_all(fleet, eventually):
    async def scenario(f):
        w = f.world
        await w.add("a", 1, load=True)
        await f.revisions[ranking(w.rev(1), NAMES)[1]].load(w.rev(1))
        await w.adapters.remove("a")
        await eventually(lambda: "adapter.retired" in w.types())
        assert all(w.rev(1) not in f.engine(name).revisions for name in NAMES)
        assert w.types().count("adapter.retired") == 1

    fleet(scenario)


def test_a_hot_adapter_gets_a_second_engine_and_gives_it_back(fleet, eventually):
    async def scenario(f):
        now = [0.0]
        terms = Terms(spare=100, hot_queue=3, cool_seconds=10.0)
        f.replicas._router, f.replicas._clock = Router(terms), lambda: now[0]
        await f.world.add("a", 1, load=True)
        f.silence()
        rev = f.world.rev(1)
        home, second = ranking(rev, NAMES)[:2]
        for n in range(5):
            f.submit(f"a{n}", rev)
        await eventually(lambda: f.at("a4"))
        assert [f.at(f"a{n}")[0] for n in range(5)] == [home] * 4 + [second]
        assert f.replicas[second].routed == {"spread": 1}
        for n in range(5):
            f.engine(f.at(f"a{n}")[0]).finish(f"a{n}")
        await eventually(lambda: f.loads() == [(0, 0, {})] * 3)
        now[0] = 20.0
        f.submit("b")
        assert f.replicas._router.homes(rev) == 1
        assert f.replicas.choose(rev).name == home

    fleet(scenario)


# ----------------------------------------------------------------- all at once
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_the_engines_end_up_with_what_the_names_mean(fleet, eventually, seed):
    """Four operators change a name each, requests come for all of them, and engines die."""

    async def scenario(f):
        w, told, ended = f.world, {}, []  # name -> what it may mean by now
        over = asyncio.Event()

        async def operate(name):
            rng = random.Random(f"{seed}{name}")
            for _ in range(20):
                what = rng.choice(("add", "add", "pin", "unpin", "load", "evict", "remove"))
                content = rng.randrange(1, 9)
                try:
                    if what == "add":
                        await w.add(name, content, replace=True)
                        told[name] = {w.rev(content)}
                    elif what == "remove":
                        await w.adapters.remove(name)
                        told[name] = {None}
                    else:
                        await getattr(w.adapters, what)(wire.Names(names=(name,), force=True))
                except LoradError as error:
                    assert error.code in ("model_not_found", "no_room", *LOST), error
                    if what == "add":  # it is registered, perhaps, and could not be loaded
                        told[name] = told.get(name, {None}) | {w.rev(content)}

        async def ask():
            rng = random.Random(seed)
            while not over.is_set():
                entry = w.catalog.get(rng.choice("abcd"))
                rev = entry.rev if entry is not None else None
                with contextlib.suppress(LoradError):
                    ended.append(f.submit(f"r{len(ended)}", rev))
                await asyncio.sleep(0.005)

        async def kill():
            rng = random.Random(seed)
            for _ in range(4):
                link = f.links[victim := rng.choice(NAMES)]
                before = link.restarts
                f.engine(victim).die()
                await eventually(partial(lambda link, n: link.restarts > n, link, before))
                await link.ready.wait()

        asking = asyncio.create_task(ask())
        await asyncio.gather(*map(operate, "abcd"), kill())
        over.set()
        await asking
        await eventually(lambda: all(deltas and deltas[-1].finish_reason for deltas in ended))
        assert f.loads() == [(0, 0, {})] * 3 and f.replicas._flights == {}
        assert len(ended) > 10
        meant = {name: entry.rev if (entry := w.catalog.get(name)) else None for name in told}
        assert [name for name in told if meant[name] not in told[name]] == []
        await eventually(lambda: at_rest(f, {entry.rev for entry in w.catalog}))

    fleet(scenario)


def at_rest(f, meant):
    """No engine knows what no name means; what is pinned is so on its keeper and nowhere else."""
    w = f.world
    pinned = {e.rev for e in w.catalog if e.pinned and e.rev is not None}
    for name in NAMES:
        engine = f.engine(name)
        here = {rev for rev in pinned if f.replicas.keeper(rev) == name}
        known = set(engine.revisions)
        tiers = {rev for rev, tier in f.revisions[name].tiers.items() if tier in RESIDENT}
        gpu = {rev for rev, tier in engine.revisions.items() if tier == "gpu"}
        if not (known <= meant and engine.pinned == here & known and tiers == gpu):
            return False
    return True

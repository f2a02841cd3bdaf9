"""Several engines of one model: which gets a request, and what becomes of it when one dies."""

import asyncio
from functools import partial

import pytest

from engine.errors import EngineDied
from engine.messages import AdapterEvent, SamplingParams, SequenceDelta, Submit
from engine.pooling.requests import PoolRequest
from lorad.errors import LoradError
from lorad.routing.affinity import ranking
from tests.fakes.replica_fleet import NAMES, held_back


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

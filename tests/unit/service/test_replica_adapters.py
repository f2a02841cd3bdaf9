"""Several engines of one model: where adapters are, what is pinned where, and that all end up with
what the names mean."""

import asyncio
import contextlib
import random
from functools import partial

import pytest

from engine.adapters.states import RESIDENT
from engine.errors import EngineDied
from engine.messages import AddRevision, Load, RemoveRevision
from lorad import wire
from lorad.errors import LoradError
from lorad.routing.affinity import Router, Terms, ranking
from lorad.service.replicas import LOST
from tests.fakes.replica_fleet import NAMES, held_back


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

"""What random lives found: an engine that dies, or damage, meets a change that is under way."""

import asyncio

import pytest

from lorad import wire
from lorad.errors import LoradError


def engine_knows(home, n):
    return {r.rev: r for r in home.client.engine.residency.revisions()}.get(home.rev(n))


def resident(home):
    return {rev for rev in home.revisions.tiers if home.revisions.resident(rev)}


async def die(home):
    """Until the next engine starts."""
    home.client.die()
    while home.client.state == "dead":
        await asyncio.sleep(0.001)


async def die_at_once(home):
    """Until the next engine is ready, and has not brought everything back."""
    await die(home)
    while home.link.state != "ready":
        await asyncio.sleep(0.01)


async def die_while_replacing(home, name, n):
    """While the engine is told of the new revision; the task of who asked for it."""
    home.client.state = "stalled"
    task = asyncio.create_task(home.add(name, n, replace=True))
    while not home.client._commands:
        await asyncio.sleep(0.001)
    home.client.die()
    return task


def test_residents_are_back_after_two_deaths_in_a_row(at_home):
    async def scenario(home):
        for n, name in enumerate(("a", "b", "c")):
            await home.add(name, n, load=True)
        await home.settled()
        before = resident(home)
        assert len(before) >= 2
        await die_at_once(home)
        assert resident(home) != before, "they follow behind readiness"
        await die_at_once(home)
        await home.settled()
        assert resident(home) == before

    at_home(scenario)


def test_what_is_evicted_while_the_engine_restarts_stays_away(at_home):
    async def scenario(home):
        await home.add("a", 1, load=True)
        await home.add("b", 2, load=True)
        home.client.die()
        results = await home.adapters.evict(wire.Names(names=["a"]))
        assert results.items[0].ok
        await home.settled()
        assert resident(home) == {home.rev(2)}

    at_home(scenario)


def test_what_is_loaded_before_the_pinned_ones_are_up_is_shown_as_loaded(at_home):
    async def scenario(home):
        await home.add("slow", 1, pin=True)
        home.packed_file(home.rev(1)).unlink()
        home.pack_seconds[home.rev(1)] = 5.0
        await die(home)
        while home.client.state != "ready":
            await asyncio.sleep(0.001)
        await home.add("quick", 2, load=True)
        assert home.link.state == "engine_restarting"
        await home.settled()
        assert home.revisions.tiers[home.rev(2)] == "idle" == engine_knows(home, 2).state

    at_home(scenario)


def test_who_was_told_that_a_name_is_replaced_never_meets_the_old_revision_again(at_home):
    async def scenario(home):
        await home.add("a", 1, load=True)
        task = await die_while_replacing(home, "a", 2)
        assert (await task).rev == home.rev(2)
        while home.link.state != "ready":
            await asyncio.sleep(0.001)
        assert home.adapters.resolve("a").rev == home.rev(2)

    at_home(scenario)


def test_adding_what_serves_withdraws_the_replacement_that_waits(at_home):
    async def scenario(home):
        await home.add("a", 1)
        home.engine_seconds = 5.0
        task = await die_while_replacing(home, "a", 2)
        assert home.catalog.get("a").candidate == home.rev(2)
        assert (await home.add("a", 1, replace=True)).replaced_rev is None
        await task
        await home.settled()
        assert home.adapters.resolve("a").rev == home.rev(1)
        assert not home.store.has(home.rev(2))

    at_home(scenario)


def test_a_refused_candidate_leaves_its_pin_with_the_revision_that_serves(at_home):
    async def scenario(home):
        await home.add("a", 1)
        home.pack_fails.add(home.rev(2))
        with pytest.raises(LoradError, match="not finite"):
            await home.add("a", 2, replace=True, pin=True)
        assert home.registry.get("a").pinned
        assert engine_knows(home, 1).pinned

    at_home(scenario)


def test_a_client_that_leaves_leaves_no_revision_in_the_engine(at_home):
    async def scenario(home):
        await home.add("a", 1)
        await die_at_once(home)
        home.client.state = "stalled"
        home.link.state = "ready"
        task = asyncio.create_task(home.ask("a", (1, 2), 3))
        while not home.client._commands:
            await asyncio.sleep(0.001)
        (await task).close()
        home.client.state = "ready"
        await home.settled()
        assert engine_knows(home, 1) and home.rev(1) in home.link.known
        await home.adapters.remove("a")
        await home.settled()
        assert engine_knows(home, 1) is None

    at_home(scenario)


def test_a_pin_that_is_set_while_a_damaged_file_is_packed_anew_reaches_the_engine(at_home):
    async def scenario(home):
        await home.add("a", 1)
        home.packed_file(home.rev(1)).write_bytes(b"short")
        task = asyncio.create_task(home.adapters.load(wire.Names(names=["a"])))
        while home.rev(1) in home.link.known:
            await asyncio.sleep(0.001)
        await home.adapters.pin(wire.Names(names=["a"], no_load=True))
        await task
        await home.settled()
        assert engine_knows(home, 1).pinned

    at_home(scenario)


def test_what_is_quarantined_for_damage_leaves_the_engine(at_home):
    async def scenario(home):
        await home.add("a", 1, pin=True)
        await home.adapters.evict(wire.Names(names=["a"], to="disk", force=True))
        path = home.packed_file(home.rev(1))
        path.write_bytes(b"spoilt".ljust(path.stat().st_size, b"x"))
        home.bad_packs = {}
        home.pack_fails.add(home.rev(1))
        results = await home.adapters.load(wire.Names(names=["a"]))
        assert results.items[0].code == "adapter_damaged"
        await home.settled()
        assert home.registry.get("a").stored_state == "quarantined"
        assert engine_knows(home, 1) is None
        assert home.store.has(home.rev(1)), "its files stay: it can be added again"

    at_home(scenario)


def test_a_load_that_meets_a_removal_says_so_by_name(at_home):
    async def scenario(home):
        await home.add("a", 1)
        rev = home.rev(1)
        await die_at_once(home)
        await home.adapters.remove("a")
        await home.tasks.settle()
        with pytest.raises(LoradError, match="was removed meanwhile") as caught:
            await home.revisions.load(rev)
        assert caught.value.code == "model_not_found"

    at_home(scenario)

"""One member beside its catalog: it answers of the revision that is asked for, and of no other."""

import asyncio
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.fleet import daemon as one_daemon
from lorad.fleet import joining
from lorad.fleet import table as tables
from lorad.fleet.catalog import open_catalog
from lorad.fleet.daemon import Daemon
from lorad.fleet.members import Ask, Head
from lorad.fleet.table import Entry, Table
from lorad.fleet.taking import order_for
from tests.fakes.small_daemons import SmallDaemon, rev_of


class World:
    """A catalog, a daemon, and what is added to the one without the other's knowing."""

    def __init__(self, folder):
        self.folder = folder
        self.catalog = open_catalog(str(folder / "catalog"))
        self.small = SmallDaemon(folder, "a")
        self.daemon = Daemon(self.small.site, self.catalog)

    async def enter(self, name, number, **more):
        """Into the table; the entry."""
        files = {"adapter_config.json": b"%d" % number, "adapter_model.safetensors": b"w" * 10}
        folder = self.folder / f"in-{name}-{number}"
        folder.mkdir(exist_ok=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        content = await self.catalog.add(folder)
        entry = Entry(name=name, content=content, rev=rev_of(files), model="tiny", **more)
        await self.catalog.change("add", lambda table: tables.moved(table, entry))
        return entry

    async def ready(self):
        while (await self.daemon.look()).state != "ready":
            await asyncio.sleep(0.001)

    async def ask(self, entry):
        """Status, headers and body."""
        body = b'{"model":"%s"}' % entry.name.encode()
        ask = Ask("POST", "/v1/completions", body=body, model=entry.id)
        async with aclosing(self.daemon.stream(ask)) as parts:
            head, *pieces = [part async for part in parts]
        assert isinstance(head, Head)
        return head.status, dict(head.headers), b"".join(pieces)


@pytest.fixture
def world():
    def run(scenario):
        async def inner():
            with tempfile.TemporaryDirectory(dir="/tmp") as folder:
                world = World(Path(folder))
                await world.small.start()
                try:
                    async with asyncio.timeout(20):
                        await scenario(world)
                finally:
                    await world.daemon.close()
                    await world.small.stop()

        asyncio.run(inner())

    return run


def test_what_the_daemon_lacks_is_taken_in_when_it_is_first_asked_for(world):
    async def scenario(w):
        entry = await w.enter("poet", 1)
        for _ in range(2):
            status, headers, body = await w.ask(entry)
            assert (status, headers["x-lorad-rev"]) == (200, entry.rev)
            assert body == b"data: a\n\ndata: b\n\n"
        assert w.small.wishes == [("take", "poet", entry.rev)]

    world(scenario)


def test_many_that_ask_at_once_have_it_taken_in_once(world):
    async def scenario(w):
        entry = await w.enter("poet", 1)
        answers = await asyncio.gather(*(w.ask(entry) for _ in range(8)))
        assert {status for status, _, _ in answers} == {200}
        assert len(w.small.wishes) == 1

    world(scenario)


def test_a_revision_that_the_table_does_not_mean_any_more_stays_unknown(world):
    async def scenario(w):
        old = await w.enter("poet", 1)
        new = await w.enter("poet", 2)
        status, _, body = await w.ask(old)
        assert status == 404 and b"model_not_found" in body and not w.small.wishes
        assert (await w.ask(new))[0] == 200

    world(scenario)


@pytest.mark.parametrize("how", ["another gateway was late", "the daemon was started anew"])
def test_what_is_gone_again_before_it_is_asked_for_is_taken_in_again(world, how):
    async def scenario(w):
        old = await w.enter("poet", 1)
        new = await w.enter("poet", 2)
        lost = []

        def lose():
            if how == "another gateway was late":
                w.small.serves["poet"] = old.rev
            else:
                w.small.serves.clear()

        async def lose_twice(start):
            if len(lost) < 2:
                lost.append(start.name)
                asyncio.get_running_loop().call_soon(lose)  # after this commit, before its answer

        w.small.on_commit = lose_twice
        status, headers, _ = await w.ask(new)
        assert (status, headers["x-lorad-rev"]) == (200, new.rev)
        assert lost == ["poet", "poet"] and len(w.small.wishes) == 3

    world(scenario)


def test_a_request_is_not_sent_again_for_ever(world):
    async def scenario(w):
        entry = await w.enter("poet", 1)

        async def lose(start):
            asyncio.get_running_loop().call_soon(w.small.serves.clear)

        w.small.on_commit = lose
        status, _, body = await w.ask(entry)
        assert status == 404 and b"model_not_found" in body
        assert len(w.small.asked) == one_daemon.MOST_TRIES

    world(scenario)


def test_of_what_is_there_and_not_for_who_asks_nothing_is_sent(world):
    async def scenario(w):
        entry = await w.enter("poet", 1)
        await w.ask(entry)
        w.small.answer = LoradError("model_not_found", "not for you")
        asked = len(w.small.asked)
        status, _, body = await w.ask(entry)
        assert status == 404 and b"not for you" in body
        assert len(w.small.wishes) == 1 and len(w.small.asked) == asked + 2

    world(scenario)


def test_one_that_missed_a_rollout_takes_the_new_revision_when_it_is_asked_for(world):
    async def scenario(w):
        old = await w.enter("poet", 1)
        await w.ask(old)
        new = await w.enter("poet", 2)
        assert (await w.ask(new))[1]["x-lorad-rev"] == new.rev
        assert (await w.ask(old))[0] == 404

    world(scenario)


def test_what_it_cannot_take_is_said_by_the_reason_that_it_has(world, monkeypatch):
    async def scenario(w):
        entry = await w.enter("poet", 1)
        w.small.refuses["poet"] = LoradError("adapter_invalid", "a tensor has another shape")
        opened = []

        async def note(start):
            opened.append(start.name)

        w.small.on_commit = note
        for _ in range(3):
            status, _, body = await w.ask(entry)
            assert status == 422 and b"another shape" in body
        assert opened == ["poet"], "it is not sent with every request"
        monkeypatch.setattr(one_daemon, "REFUSED_SECONDS", 0.0)
        clerk = await w.enter("clerk", 2)
        w.catalog.store.blobs.put(f"content/{clerk.content}/adapter_config.json", b"x")
        status, _, body = await w.ask(clerk)
        assert status == 502 and b"not what was put there" in body
        assert not w.small.uploads, "nothing is left open"
        w.catalog.store.blobs.put(f"content/{clerk.content}/adapter_config.json", b"2")
        assert (await w.ask(clerk))[0] == 200

    world(scenario)


def test_content_that_comes_to_another_revision_is_refused(world):
    async def scenario(w):
        entry = await w.enter("poet", 1)
        odd = Entry(name="poet", content=entry.content, rev="0" * 64, model="tiny")
        with pytest.raises(LoradError, match="where others made 000000000000"):
            await w.daemon.take_in(order_for(odd))

    world(scenario)


def test_a_daemon_that_has_just_started_is_ready_when_it_has_what_the_table_says(world):
    async def scenario(w):
        poet, clerk = await w.enter("poet", 2), await w.enter("clerk", 1)
        w.small.serves = {"poet": "0" * 64, "gone": "1" * 64}
        committing = asyncio.Event()

        async def wait(start):
            await committing.wait()

        w.small.on_commit = wait
        for _ in range(3):
            seen = await w.daemon.look()
            assert (seen.state, seen.reason) == ("away", "it takes in the catalog's adapters")
        committing.set()
        await w.ready()
        assert w.small.serves == {"poet": poet.rev, "clerk": clerk.rev}
        w.small.instance, w.small.serves = "another", {}
        assert (await w.daemon.look()).state == "away", "it was started anew"
        await w.ready()
        assert set(w.small.serves) == {"poet", "clerk"}

    world(scenario)


def test_nobody_is_ready_without_a_catalog_and_one_bad_adapter_keeps_nobody(world):
    async def scenario(w):
        await w.enter("poet", 1)
        w.small.refuses["poet"] = LoradError("adapter_invalid", "no")
        await w.enter("clerk", 1)
        await w.ready()
        assert list(w.small.serves) == ["clerk"]
        w.small.instance = "another"
        key = "table/000000000003.json"
        w.catalog.store.blobs.put(key, b"half")
        for _ in range(3):
            await w.daemon.look()
            await asyncio.sleep(0.01)
        seen = await w.daemon.look()
        assert seen.state == "away" and key in seen.reason

    world(scenario)


def test_of_thousands_only_what_was_there_and_what_is_pinned_is_taken_in():
    entries = {
        name: Entry(name=name, content="c", rev=f"{name}-2", model="tiny", pin=name == "p9")
        for name in (f"p{i}" for i in range(joining.FEW + 1))
    }
    there = {"p1": "p1-2", "p2": "p2-1", "x": "x-1"}
    found = joining.steps(Table(generation=1, entries=entries), there)
    assert (found.take, found.remove) == (("p2", "p9"), ("x",))
    del entries["p32"]
    assert joining.steps(Table(), there) == ((), ()), "a place that is empty removes nothing"
    assert len(joining.steps(Table(entries=entries), there).take) == joining.FEW - 1


def test_one_that_was_away_takes_what_it_missed_beside_its_requests(world):
    async def scenario(w):
        await w.ready()
        w.small.state = "draining"
        assert (await w.daemon.look()).state == "away"
        entry = await w.enter("poet", 1)
        w.small.serves["gone"] = "0" * 64
        w.small.state = "ready"
        assert (await w.daemon.look()).state == "ready"
        while w.small.serves != {"poet": entry.rev}:
            await asyncio.sleep(0.001)

    world(scenario)


def test_an_order_that_wants_more_than_one_under_way_has_it_and_one_that_wants_less_shares(world):
    async def scenario(w):
        entry = await w.enter("poet", 1)
        first, at_once = asyncio.Event(), asyncio.Event()
        started = []

        async def wait(start):
            started.append((start.load, start.pin, start.priority))
            first.set()
            await at_once.wait()

        w.small.on_commit = wait
        plain = order_for(entry)
        wishes = (plain, replace(plain, load=True), replace(plain, pin=True, priority=70), plain)
        orders = [asyncio.ensure_future(w.daemon.take_in(wish)) for wish in wishes]
        await first.wait()
        at_once.set()
        told = await asyncio.gather(*orders)
        assert {added.rev for added in told} == {entry.rev}
        assert started == [(False, False, None), (True, False, None), (False, True, 70)]
        assert told[1].load_seconds is not None and told[3] is told[2]
        await w.daemon.take_in(plain)
        assert len(started) == 4, "nothing was under way any more"

    world(scenario)


def test_of_two_orders_each_is_told_what_its_own_wish_came_to(world):
    async def scenario(w):
        entry = await w.enter("poet", 1)
        w.small.serves["poet"] = "0" * 64
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def wait(start):
            begun.set()
            await goes_on.wait()
            if start.pin:
                raise LoradError("no_room", "too many pins")

        w.small.on_commit = wait
        plain = order_for(entry)
        pinned = asyncio.ensure_future(w.daemon.take_in(replace(plain, pin=True)))
        await begun.wait()
        held = replace(plain, load=True, hold_seconds=60.0)
        loaded = asyncio.ensure_future(w.daemon.take_in(held))
        while "poet" not in w.small.held:
            await asyncio.sleep(0.001)
        assert w.small.held["poet"] == {"0" * 64}, "what was served before either is done"
        goes_on.set()
        with pytest.raises(LoradError, match="too many pins"):
            await pinned
        assert (await loaded).load_seconds is not None
        assert w.small.serves == {"poet": entry.rev}

    world(scenario)

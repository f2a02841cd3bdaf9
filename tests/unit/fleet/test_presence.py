"""What gateways say of themselves beside the table."""

import asyncio
import threading

import pytest

from lorad.errors import LoradError
from lorad.fleet import presence as presences
from lorad.fleet.catalog import open_catalog
from lorad.fleet.going import Going
from lorad.fleet.presence import Presence
from lorad.fleet.table import Entry


def test_a_word_that_is_being_written_does_not_outlive_the_farewell(tmp_path, monkeypatch):
    """Others would wait a minute for it at their next rollout."""

    async def scenario():
        catalog = open_catalog(str(tmp_path / "s"))
        presence, blobs = Presence(catalog), catalog.store.blobs
        await presence.beat()
        assert presence.fresh and blobs.names("gateways/")
        begun, go, ended, put = threading.Event(), threading.Event(), threading.Event(), blobs.put

        def slow(key, data, **more):
            begun.set()
            go.wait(10)
            put(key, data, **more)
            ended.set()

        monkeypatch.setattr(blobs, "put", slow)
        beating = asyncio.create_task(presence.beat())
        await asyncio.to_thread(begun.wait, 10)
        beating.cancel()
        leaving = asyncio.create_task(presence.leave())
        await asyncio.wait({leaving}, timeout=0.1)
        go.set()
        await leaving
        await asyncio.to_thread(ended.wait, 10)
        assert not blobs.names("gateways/") and not presence.fresh

    asyncio.run(scenario())


def test_a_silent_gateway_is_waited_for_as_long_as_it_goes_on_by_itself(tmp_path, monkeypatch):
    """Whatever is set at the one that waits: else that one's new revision would be done, and the
    silent one would answer with the old."""
    monkeypatch.setattr(presences, "BEAT_SECONDS", 0.02)

    async def scenario():
        catalog, others = (open_catalog(str(tmp_path / "s")) for _ in range(2))
        waits = Presence(catalog, lease_seconds=0.05)
        silent = Presence(others, lease_seconds=0.5)
        for presence in (waits, silent):
            await presence.beat()
        entry = Entry(name="poet", content="cd" * 32, rev="ab" * 32, model="tiny")
        table = await catalog.change("add poet", lambda table: {"poet": entry})
        await waits.all_at(table.generation)
        assert not silent.fresh

    asyncio.run(scenario())


class Bench:
    """Two gateways by one clock, of which the other falls silent, and a table that has moved."""

    def __init__(self, folder):
        self.now = 0.0
        self.catalog, others = (open_catalog(str(folder / "s")) for _ in range(2))
        self.waits, self.silent = (
            Presence(catalog, lease_seconds=60.0, clock=lambda: self.now)
            for catalog in (self.catalog, others)
        )

    async def begin(self):
        for presence in (self.waits, self.silent):
            await presence.beat()
        await self.waits.watch()
        entry = Entry(name="poet", content="cd" * 32, rev="ab" * 32, model="tiny")
        return (await self.catalog.change("add poet", lambda table: {"poet": entry})).generation

    def words(self):
        return self.catalog.store.blobs.names("gateways/")


def test_one_that_was_silent_before_an_order_came_is_waited_for_no_longer_for_it(
    tmp_path, monkeypatch
):
    """The first order after a gateway was killed took 66 s, and began to count anew with each
    client that hung up."""
    monkeypatch.setattr(presences, "BEAT_SECONDS", 0.01)

    async def scenario():
        bench = Bench(tmp_path)
        generation = await bench.begin()
        bench.now = 65.0
        order = asyncio.create_task(bench.waits.all_at(generation))
        await asyncio.wait({order}, timeout=0.1)
        assert not order.done(), "it may still go by the old table"
        told = bench.waits.waits_for()
        assert told == f"gateway {bench.silent.id}, silent for 65 s (at most 66 s)"
        bench.now = 67.0
        await asyncio.wait_for(order, 5)
        assert bench.words() == [f"{bench.waits.id}.json"]
        assert bench.waits.waits_for() == ""

    asyncio.run(scenario())


def test_a_word_that_nobody_renews_is_swept_without_an_order(tmp_path, monkeypatch):
    monkeypatch.setattr(presences, "BEAT_SECONDS", 0.01)

    async def scenario():
        bench = Bench(tmp_path)
        await bench.begin()
        running = asyncio.create_task(bench.waits.run())
        await asyncio.sleep(0.15)
        assert len(bench.words()) == 2
        bench.now = 67.0
        async with asyncio.timeout(5):
            while len(bench.words()) == 2:
                await asyncio.sleep(0.01)
        running.cancel()
        assert bench.words() == [f"{bench.waits.id}.json"]

    asyncio.run(scenario())


def test_one_that_speaks_again_announces_itself_before_it_looks(tmp_path, monkeypatch):
    """Its word may have been swept: a table that moves after its look would not wait for it."""

    async def scenario():
        bench = Bench(tmp_path)
        generation = await bench.begin()
        bench.now = 67.0
        assert await bench.waits.watch() == {}
        seen, look = [], bench.silent._catalog.look

        async def looks():
            seen.extend((await bench.waits.watch()).values())
            return await look()

        monkeypatch.setattr(bench.silent._catalog, "look", looks)
        await bench.silent.beat()
        assert [word.generation for word in seen] == [-1]
        (word,) = (await bench.waits.watch()).values()
        assert word.generation == generation

    asyncio.run(scenario())


def test_an_order_that_waits_says_for_whom_in_time_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(presences, "BEAT_SECONDS", 0.01)

    async def scenario():
        bench = Bench(tmp_path)
        generation = await bench.begin()
        going, done = Going(bench.waits), []

        async def order():
            await bench.waits.all_at(generation)
            done.append(True)

        bench.now = 12.0
        with pytest.raises(LoradError) as told:
            await going.within("drain poet", order(), 0.1)
        assert told.value.code == "deadline_exceeded"
        whom = f"waits for gateway {bench.silent.id}, silent for 12 s (at most 66 s)"
        assert whom in told.value.message and not done
        client = asyncio.create_task(going.within("resume poet", order(), 5))
        await asyncio.sleep(0.05)
        client.cancel()
        bench.now = 67.0
        async with asyncio.timeout(5):
            while len(done) < 2:
                await asyncio.sleep(0.01)
        assert await going.within("rm poet", asyncio.sleep(0, "done"), 5) == "done"
        await going.close()

    asyncio.run(scenario())

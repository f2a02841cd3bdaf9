"""What gateways say of themselves beside the table."""

import asyncio
import threading

from lorad.fleet import presence as presences
from lorad.fleet.catalog import open_catalog
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

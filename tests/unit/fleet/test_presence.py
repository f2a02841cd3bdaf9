"""What gateways say of themselves beside the table."""

import asyncio
import threading

from lorad.fleet.catalog import open_catalog
from lorad.fleet.presence import Presence


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

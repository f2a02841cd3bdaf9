"""An ingress that Serve ends without a word."""

import asyncio

from lorad.ray.wanted import SILENT_SECONDS, Wanted
from lorad.service.events import EventRing


def test_streams_end_when_serve_asks_no_more_and_are_had_again_when_it_does():
    """Serve waits for them before it lets an ingress take its word back, and kills it after 20 s:
    then every order at the others waited for it."""

    async def scenario():
        now, ring = [0.0], EventRing()
        wanted = Wanted(ring.close, ring.reopen, clock=lambda: now[0])

        async def told():
            return [item.type async for item in ring.follow()]

        follower = asyncio.create_task(told())
        now[0] = 1000.0
        wanted.look()
        await asyncio.sleep(0)
        assert not ring.closed, "it has not been called running yet"
        wanted.asked()
        now[0] += SILENT_SECONDS - 1
        wanted.look()
        assert not ring.closed
        now[0] += 2
        ring.publish("adapter.added")
        wanted.look()
        assert await asyncio.wait_for(follower, 5) == ["adapter.added"]
        wanted.asked()
        follower = asyncio.create_task(told())
        await asyncio.wait({follower}, timeout=0.05)
        assert not follower.done() and not ring.closed
        ring.close()
        await follower

    asyncio.run(scenario())

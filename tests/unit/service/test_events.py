"""The event ring: ids, pages, followers and gaps."""

import asyncio
import contextlib
from datetime import UTC, datetime

from lorad.service.events import EventRing, rfc3339


def ids(items):
    return [item.id for item in items]


async def take(ring, count, after):
    seen = []
    async with contextlib.aclosing(ring.follow(after)) as items:
        async for item in items:
            seen.append(item)
            if len(seen) == count:
                return seen


def test_events_are_numbered_and_paged():
    ring = EventRing()
    for n in range(5):
        ring.publish("adapter.added", name=f"a{n}")
    assert ids(ring.since(2)[0]) == [3, 4, 5]
    assert ids(ring.since(0, limit=2)[0]) == [1, 2]
    assert ring.since(5) == ((), False)
    assert ids(ring.newest(2)) == [4, 5]
    assert ids(ring.of("a3", 9)) == [4]


def test_a_reader_that_fell_behind_is_told_of_the_gap():
    ring = EventRing(capacity=3)
    for _ in range(5):
        ring.publish("x")
    items, gap = ring.since(1)
    assert gap
    assert ids(items) == [3, 4, 5]
    assert not ring.since(2)[1]
    assert [item.type for item in asyncio.run(take(ring, 4, 1))] == ["gap", "x", "x", "x"]


def test_an_id_of_another_daemon_is_a_gap():
    ring = EventRing()
    ring.publish("x")
    items, gap = ring.since(99)
    assert gap
    assert ids(items) == [1]


def test_a_follower_gets_what_comes_after_it_arrived():
    async def scenario():
        ring = EventRing()
        ring.publish("old")
        follower = asyncio.create_task(take(ring, 2, None))
        await asyncio.sleep(0)
        ring.publish("one")
        ring.publish("two")
        return [item.type for item in await asyncio.wait_for(follower, 5)]

    assert asyncio.run(scenario()) == ["one", "two"]


def test_times_are_utc_with_milliseconds():
    assert rfc3339(datetime(2025, 3, 1, 9, 30, tzinfo=UTC)) == "2025-03-01T09:30:00.000Z"

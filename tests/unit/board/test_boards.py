"""The owner of the board: when it looks, and what it asks of whom."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from lorad.board import board as module
from lorad.board.board import Boards
from lorad.service.ask import Count
from lorad.service.catalog import Catalog, Entry
from lorad.service.events import EventRing
from lorad.service.gate import Gate
from lorad.service.live import Crowd, Live
from lorad.service.meter import Meter, NameCounts
from lorad.service.snapshot import Seen
from lorad.wire_stream import Machine


class World:
    """A daemon whose clock stands until a test moves it; `asked` counts what is asked of others."""

    def __init__(self, told, status):
        self.now, self.told, self.asked = 100.0, told, Counter()
        self.meter, self.crowd = Meter(lambda: self.now), Crowd()
        self.picture = SimpleNamespace(
            snapshot=None,
            by_rev={},
            changed=lambda: self.asked.update(["picture"]),
            places=lambda rev: (),
        )
        self.sources = SimpleNamespace(
            settings=SimpleNamespace(shutdown=SimpleNamespace(drain_timeout=30.0)),
            models=(
                Seen(
                    SimpleNamespace(name="tiny"),
                    SimpleNamespace(info=None, pid=None),
                    self.picture,
                ),
            ),
            picture=self.picture,
            catalog=Catalog([Entry("sql", "r1")]),
        )
        self.events = EventRing(instance_id="i1")
        requests = SimpleNamespace(
            meter=self.meter, crowd=self.crowd, active=0, running=lambda name=None: 0
        )
        snapshot = SimpleNamespace(
            status=lambda counts: status(adapters=dict(counts)),
            counts=lambda: self.note("counts", {"idle": 1}),
            look=self.look,
        )
        tenancy = SimpleNamespace(list=lambda: self.note("tenants", SimpleNamespace(items=())))
        self.boards = Boards(
            self.sources, snapshot, requests, Gate(), tenancy, self.events, clock=lambda: self.now
        )
        self.boards._sampler = SimpleNamespace(
            sample=lambda pid, gpu: self.note("machine", Machine(daemon_rss_bytes=7))
        )
        self.boards._checks = SimpleNamespace(look=lambda: self.note("health", module.Health()))

    def note(self, what, answer):
        self.asked[what] += 1
        return answer

    async def look(self):
        self.asked["look"] += 1

    def take(self, *revisions, **fields):
        taken = self.told.snapshot(*revisions, **fields)
        self.picture.snapshot = taken
        self.boards.take_snapshot()


@pytest.fixture
def run(told, status):
    """run(work): `work` with a world, in a loop."""

    def run(work):
        async def go():
            await work(World(told, status))

        asyncio.run(go())

    return run


def test_snapshots_that_come_in_a_burst_are_one_second_of_the_windows(run):
    async def work(world):
        for number in range(50):
            world.now += 0.1
            world.take(generated_tokens=10 * number)
        history = world.boards.paint().load.tokens_history
        assert 3 <= len(history) <= 5
        assert history == pytest.approx([100.0] * len(history), rel=0.01)

    run(work)


def test_readers_of_the_same_moment_share_a_board_and_a_later_one_is_made_anew(run):
    async def work(world):
        first = world.boards.paint()
        world.now += 0.1
        assert world.boards.paint() is first
        world.now += 0.1
        assert world.boards.paint() is not first

    run(work)


def test_while_nobody_looks_nobody_is_asked(run, monkeypatch):
    monkeypatch.setattr(module, "TICK_SECONDS", 0.001)

    async def work(world):
        running = asyncio.ensure_future(world.boards.run())
        for _ in range(5):
            world.now += 10.0
            await asyncio.sleep(0.005)
        assert not world.asked
        messages = world.boards.follow(1.0)
        board = (await anext(messages)).value
        assert board.machine.daemon_rss_bytes == 7 and board.status.adapters == {"idle": 1}
        assert {"machine", "health", "tenants", "look"} <= world.asked.keys()
        await messages.aclose()
        await asyncio.sleep(0.005)
        asked = world.asked.copy()
        world.now += 10.0
        await asyncio.sleep(0.01)
        assert world.asked == asked
        running.cancel()

    run(work)


def test_without_an_engine_the_windows_go_on(run, monkeypatch):
    monkeypatch.setattr(module, "TICK_SECONDS", 0.001)

    async def work(world):
        world.now += 1.0
        world.take(generated_tokens=0)
        world.now += 1.0
        world.take(generated_tokens=60)
        assert world.boards.paint().load.tokens_per_second == 60.0
        world.picture.snapshot = None
        running = asyncio.ensure_future(world.boards.run())
        for _ in range(70):
            world.now += 1.0
            before = world.boards._ticked
            while world.boards._ticked == before:
                await asyncio.sleep(0.001)
        assert world.boards.paint().load.tokens_per_second == 0.0
        running.cancel()

    run(work)


def test_a_registry_that_cannot_be_read_leaves_the_board_as_it_was(run):
    async def work(world):
        await world.boards.once()
        world.boards._snapshot.counts = world.boards._tenancy.list = lambda: 1 / 0
        world.now += 10.0
        assert (await world.boards.once()).status.adapters == {"idle": 1}

    run(work)


class Stream:
    """A request that has got its first token."""

    rev, begun = "r1", True

    def usage(self):
        return Count(prompt=1, completion=1, cached=0)


def test_names_of_one_content_have_their_own_requests_and_tokens_on_the_board(run):
    async def work(world):
        world.sources.catalog.put(Entry("twin", "r1"))
        counts = world.meter.names["twin"] = NameCounts()
        live = Live("twin", SimpleNamespace(tenant=SimpleNamespace(name="")), world.now)
        world.crowd.enter(Stream(), live)
        for second in range(10):
            world.now += 1.0
            counts.generated_tokens = 50 * second
            status = world.told.status("r1", "active", running=1, generated_tokens=50 * second)
            world.take(status, generated_tokens=50 * second)
        held = world.boards._held(world.picture.snapshot)
        found = world.boards._slots_of(held)
        told = {name: (row.running, row.tokens_per_second) for name, row in found.items()}
        assert told == {"sql": (0, 0.0), "twin": (1, 50.0)}

    run(work)


def test_who_wants_it_oftener_than_the_engine_is_asked_has_it_asked(run):
    async def work(world):
        for interval, asked in ((1.0, 0), (0.2, 1)):
            messages = world.boards.follow(interval)
            await anext(messages)
            world.now += 1.0
            await anext(messages)
            assert bool(world.asked["picture"]) == bool(asked)
            await messages.aclose()

    run(work)

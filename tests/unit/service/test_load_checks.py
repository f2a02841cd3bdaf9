"""Which loads are looked at unasked, and when."""

import asyncio

import pytest

from engine.messages import AdapterEvent
from lorad.service.load_checks import SAMPLE_SECONDS, LoadChecks
from lorad.service.tasks import Tasks


class Watched:
    """`checked`: in this order.  `asleep` and `wake` stand for ten minutes."""

    def __init__(self, mode):
        self.tasks, self.checked, self.gone, self.broken = Tasks(), [], set(), set()
        self.slept, self.wake = [], asyncio.Event()
        self.checks = LoadChecks(
            mode,
            self.tasks,
            check=self.check,
            resident=lambda rev: rev not in self.gone,
            sleep=self.sleep,
        )

    async def check(self, rev):
        self.checked.append(rev)
        if rev in self.broken:
            raise OSError("the disk is gone")

    async def sleep(self, seconds):
        self.slept.append(seconds)
        await self.wake.wait()
        self.wake.clear()

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)

    def load(self, *revs, source="disk"):
        for rev in revs:
            event = AdapterEvent(
                rev=rev, before="loading", after="idle", cause="request", source=source
            )
            self.checks.take_transition(event)


@pytest.fixture
def watched():
    def run(mode, scenario):
        async def inner():
            w = Watched(mode)
            task = asyncio.create_task(w.checks.run())
            await scenario(w)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(inner())

    return run


def test_in_full_every_load_is_looked_at_and_a_second_one_again(watched):
    async def scenario(w):
        w.load("a", "b", "a")
        await w.settle()
        assert w.checked == ["b", "a"], "loaded anew before its turn: once"
        w.load("b")
        await w.settle()
        assert w.checked == ["b", "a", "b"] and not w.slept

    watched("full", scenario)


def test_of_a_sample_the_latest_has_the_next_turn(watched):
    async def scenario(w):
        w.load("a", "b", "c")
        await w.settle()
        assert w.checked == [] and w.slept == [SAMPLE_SECONDS]
        for expected in (["c"], ["c", "b"], ["c", "b", "a"]):
            w.wake.set()
            await w.settle()
            assert w.checked == expected
        w.wake.set()
        await w.settle()
        w.load("d")
        await w.settle()
        assert w.checked == ["c", "b", "a"], "not before ten minutes have gone by again"
        w.wake.set()
        await w.settle()
        assert w.checked == ["c", "b", "a", "d"] and set(w.slept) == {SAMPLE_SECONDS}

    watched("sample", scenario)


@pytest.mark.parametrize(("mode", "source"), [("off", "disk"), ("full", "")])
def test_nothing_is_looked_at_where_nothing_is_wished_or_loaded(watched, mode, source):
    async def scenario(w):
        w.load("a", source=source)
        await w.settle()
        assert w.checked == []

    watched(mode, scenario)


def test_who_has_made_way_is_passed_over_and_a_failure_ends_nothing(watched):
    async def scenario(w):
        w.gone, w.broken = {"a", "c"}, {"b"}
        w.load("a", "b", "c", "d")
        await w.settle()
        assert w.checked == ["b", "d"] and w.tasks.failures == 1

    watched("full", scenario)

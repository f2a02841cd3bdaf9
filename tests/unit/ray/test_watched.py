"""When a replica is well, as Serve is told."""

import asyncio

import pytest

from lorad.fleet.counting import Look
from lorad.fleet.daemon import Seen
from lorad.fleet.members import Lost
from lorad.ray.watched import FRESH_SECONDS, MISSES, Unhealthy, Watched


class FakeDaemon:
    def __init__(self):
        self.answer, self.looks, self.cuts = Seen("ready", "", "i1", Look()), 0, 0

    def says(self, state, reason=""):
        self.answer = Seen(state, reason, "i1", Look())

    async def look(self):
        self.looks += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cut(self):
        self.cuts += 1


class Bench:
    def __init__(self):
        self.now, self.daemon = 0.0, FakeDaemon()
        self.watched = Watched(self.daemon, away_seconds=100.0, clock=lambda: self.now)

    def check(self, after=1.0):
        self.now += after
        asyncio.run(self.watched.check())


@pytest.fixture
def bench():
    return Bench()


def test_one_that_is_away_is_given_the_time_to_replace_its_engine(bench) -> None:
    bench.check()
    bench.daemon.says("away", "engine_restarting")
    bench.check(99)
    with pytest.raises(Unhealthy, match="engine_restarting"):
        bench.check(2)
    bench.daemon.says("ready")
    bench.check()
    bench.daemon.says("away", "engine_restarting")
    bench.check(99)


def test_one_that_somebody_drains_is_well_for_as_long_as_that_takes(bench) -> None:
    bench.daemon.says("away", "draining")
    for _ in range(5):
        bench.check(90)


def test_what_waits_for_one_that_answers_no_more_is_ended(bench) -> None:
    bench.check()
    bench.daemon.answer = Lost("r", "it does not answer")
    bench.check()  # once may be chance
    assert (bench.watched.seen.state, bench.daemon.cuts) == ("ready", 0)
    with pytest.raises(Unhealthy, match="does not answer"):
        bench.check()
    assert (bench.watched.seen.state, bench.daemon.cuts) == ("lost", 1)
    bench.daemon.says("ready")
    bench.check()
    bench.daemon.answer = Lost("r", "it does not answer")
    for _ in range(MISSES - 1):
        bench.check()


def test_those_who_look_at_once_share_one_look(bench) -> None:
    bench.check()
    bench.check(FRESH_SECONDS / 2)
    assert bench.daemon.looks == 1
    bench.check(FRESH_SECONDS)
    assert bench.daemon.looks == 2

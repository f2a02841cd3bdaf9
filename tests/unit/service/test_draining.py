"""An operator takes the daemon or one adapter out of service, and puts it back."""

import asyncio

import pytest

from lorad.errors import LoradError
from lorad.service.draining import Draining
from lorad.service.events import EventRing
from lorad.service.gate import STOPPING, Gate
from lorad.wire_operate import DrainAsk


class Requests:
    """`left` requests of each name; a cancelled one ends at once."""

    def __init__(self, **left):
        self.left, self.cancelled = left, []
        self.ended = asyncio.Event()

    def running(self, name=None):
        return sum(self.left.values()) if name is None else self.left.get(name, 0)

    async def wait_until_idle(self, seconds, name=None):
        try:
            async with asyncio.timeout(seconds):
                while self.running(name):
                    await self.ended.wait()
                    self.ended.clear()
        except TimeoutError:
            pass
        return not self.running(name)

    def cancel(self, code, message, name=None):
        self.cancelled.append((code, name))
        count = self.running(name)
        for key in list(self.left) if name is None else [name]:
            self.end(key)
        return count

    def end(self, name):
        self.left.pop(name, None)
        self.ended.set()


class Known:
    def __init__(self, *names):
        self.names = names

    def known(self, name):
        if name not in self.names:
            raise LoradError("model_not_found", f"no adapter named {name!r}")
        return type("Record", (), {"name": name})


class Scene:
    def __init__(self, **left):
        self.gate, self.events = Gate(), EventRing()
        self.requests = Requests(**left)
        self.draining = Draining(self.gate, Known("a", "b"), self.requests, self.events)

    def refused(self, name):
        try:
            self.gate.check(name)
        except LoradError as error:
            return error.code
        return ""

    def types(self):
        return [event.type for event in self.events.newest(99)]


def play(scenario, **left):
    async def run():
        async with asyncio.timeout(10):
            await scenario(Scene(**left))

    asyncio.run(run())


def test_one_adapter_is_drained_when_its_last_request_has_ended():
    async def scenario(s):
        drain = asyncio.ensure_future(s.draining.drain(DrainAsk(name="a")))
        await asyncio.sleep(0)
        assert (s.refused("a"), s.refused("b"), s.refused(None)) == ("draining", "", "")
        assert not drain.done()
        s.requests.end("a")
        done = await drain
        assert (done.name, done.draining, done.running, done.changed) == ("a", True, 0, True)
        assert s.types() == ["drain.start", "drain.done"]
        again = s.draining.resume(DrainAsk(name="a"))
        assert (again.draining, again.changed, s.refused("a")) == (False, True, "")
        assert not s.draining.resume(DrainAsk(name="a")).changed

    play(scenario, a=1, b=1)


def test_the_daemon_is_drained_and_single_names_stay_so_when_it_resumes():
    async def scenario(s):
        await s.draining.drain(DrainAsk(name="a"))
        assert (await s.draining.drain(DrainAsk())).changed
        assert not (await s.draining.drain(DrainAsk())).changed
        assert (s.refused("a"), s.refused("b"), s.refused(None)) == ("draining",) * 3
        assert s.draining.resume(DrainAsk()).still == ("a",)
        assert (s.refused("a"), s.refused("b"), s.refused(None)) == ("draining", "", "")

    play(scenario)


def test_what_still_runs_when_the_time_is_up_goes_on_and_nothing_new_comes():
    async def scenario(s):
        with pytest.raises(LoradError, match="1 request still runs") as caught:
            await s.draining.drain(DrainAsk(name="a", timeout_s=0.01))
        assert caught.value.code == "deadline_exceeded"
        assert caught.value.hint == "loractl drain a --cancel"
        assert (s.requests.left, s.requests.cancelled) == ({"a": 1}, [])
        assert s.refused("a") == "draining"

    play(scenario, a=1)


def test_with_cancel_what_still_runs_ends_with_an_error():
    async def scenario(s):
        done = await s.draining.drain(DrainAsk(name="a", timeout_s=0.01, cancel=True))
        assert (done.cancelled, done.running) == (2, 0)
        assert s.requests.cancelled == [("draining", "a")]
        assert s.requests.left == {"b": 1}, "others go on"
        assert s.types() == ["drain.start", "drain.forced", "drain.done"]

    play(scenario, a=2, b=1)


def test_who_does_not_wait_hears_how_many_run():
    async def scenario(s):
        done = await s.draining.drain(DrainAsk(wait=False))
        assert (done.running, done.draining) == (3, True)

    play(scenario, a=2, b=1)


def test_an_unknown_name_is_no_drain_and_no_resume():
    async def scenario(s):
        for call in (s.draining.drain, s.draining.resume):
            with pytest.raises(LoradError, match="no adapter named 'c'"):
                done = call(DrainAsk(name="c"))
                await done
        assert not s.gate.held

    play(scenario)


def test_a_daemon_that_stops_does_not_resume():
    async def scenario(s):
        s.gate.closed = STOPPING
        with pytest.raises(LoradError, match="shutting down"):
            s.draining.resume(DrainAsk())
        assert s.refused("b") == "draining"

    play(scenario)

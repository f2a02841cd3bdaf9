"""Sequences on their way to the engine: each abort reaches whoever has it by then."""

import asyncio

import pytest

from engine.messages import SamplingParams, SequenceDelta, Submit
from lorad.errors import LoradError
from lorad.service.flights import Flights

SUBMIT = Submit(request_id="a", prompt=[1], sampling=SamplingParams(), rev="r")


class Sender:
    """An engine's client; `on_submit` is called within each submit."""

    def __init__(self):
        self.submitted, self.aborted = [], []
        self.on_submit = lambda: None

    def submit(self, submit):
        self.submitted.append(submit.request_id)
        self.on_submit()

    def abort(self, request_id):
        self.aborted.append(request_id)


@pytest.fixture
def scene():
    """scene(scenario): with flights, their sender, and an event that preparing waits for."""

    def run(scenario, error=None):
        async def go():
            sender, there = Sender(), asyncio.Event()

            async def prepare(rev):
                await there.wait()
                if error is not None:
                    raise error

            flights = Flights(lambda: sender, set(), prepare, asyncio.ensure_future)
            await scenario(flights, sender, there)

        asyncio.run(go())

    return run


def test_an_abort_right_after_it_was_sent_is_the_engines_to_hear(scene):
    async def scenario(flights, sender, there):
        deltas, loop = [], asyncio.get_running_loop()
        sender.on_submit = lambda: loop.call_soon(flights.abort, "a")
        flights.begin(SUBMIT, deltas.append)
        there.set()
        while not sender.submitted:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sender.aborted == ["a"] and not deltas, "its last delta follows from there"
        flights.deliver(SequenceDelta(request_id="a", finish_reason="abort"))
        assert len(deltas) == 1 and not len(flights) and not flights._preparing

    scene(scenario)


def test_what_is_aborted_before_it_was_prepared_is_never_sent(scene):
    async def scenario(flights, sender, there):
        deltas = []
        flights.begin(SUBMIT, deltas.append)
        await asyncio.sleep(0)
        flights.abort("a")
        there.set()
        await asyncio.sleep(0.01)
        assert [delta.finish_reason for delta in deltas] == ["abort"]
        assert not sender.submitted and not sender.aborted and not flights._preparing

    scene(scenario)


@pytest.mark.parametrize("begun", [False, True])
def test_when_the_engine_dies_nothing_that_was_being_prepared_is_sent(scene, begun):
    async def scenario(flights, sender, there):
        deltas = []
        flights.begin(SUBMIT, deltas.append)
        if begun:
            await asyncio.sleep(0)
        flights.end_all("engine_restarting", "it ended")
        assert not flights._preparing
        there.set()
        await asyncio.sleep(0.01)
        assert [delta.code for delta in deltas] == ["engine_restarting"] and not sender.submitted

    scene(scenario)


def test_what_cannot_be_prepared_ends_with_the_reason(scene):
    async def scenario(flights, sender, there):
        deltas = []
        flights.begin(SUBMIT, deltas.append)
        there.set()
        while not deltas:
            await asyncio.sleep(0)
        assert deltas[0].code == "no_room" and not sender.submitted and not flights._preparing

    scene(scenario, error=LoradError("no_room", "all pinned"))

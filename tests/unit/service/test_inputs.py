"""Inputs of an engine that pools: each has one end, whatever becomes of the engine."""

import asyncio

import numpy as np
import pytest

from engine.errors import EngineDied
from engine.pooling.requests import PoolRequest, PoolResult, packed
from engine.pooling_messages import Pooled
from lorad.errors import LoradError
from lorad.service.inputs import Inputs


class Sender:
    def __init__(self):
        self.sent, self.aborted, self.dead = [], [], False

    def pool(self, request):
        if self.dead:
            raise EngineDied("it is gone")
        self.sent.append(request.request_id)

    def abort_pool(self, request_id):
        self.aborted.append(request_id)


def request(request_id="a", rev=None):
    return PoolRequest(request_id=request_id, tokens=[1], rev=rev)


@pytest.fixture
def scene():
    """Run a scenario with inputs, their sender, and the revisions that were prepared."""

    def scene(scenario, prepare=None):
        async def run():
            sender, known = Sender(), set()

            async def known_now(rev):
                known.add(rev)

            inputs = Inputs(lambda: sender, known, prepare or known_now)
            async with asyncio.timeout(10):
                await scenario(inputs, sender, known)
            assert len(inputs) == 0

        asyncio.run(run())

    return scene


async def begin(inputs, *requests):
    tasks = [asyncio.ensure_future(inputs.run(one)) for one in requests]
    await asyncio.sleep(0)
    return tasks


def test_each_gets_its_own_result(scene):
    async def scenario(inputs, sender, known):
        one, two = await begin(inputs, request("one"), request("two"))
        assert sender.sent == ["one", "two"] and len(inputs) == 2
        for name, value in (("two", 2.0), ("one", 1.0)):
            inputs.deliver(packed(PoolResult(name, values=np.float32([value]))))
        assert (await one).values.tolist() == [1.0]
        assert (await two).values.tolist() == [2.0]

    scene(scenario)


@pytest.mark.parametrize("code, told", [("no_room", "no_room"), ("unheard_of", "internal_error")])
def test_an_error_of_the_engine_is_raised_by_its_code(scene, code, told):
    async def scenario(inputs, sender, known):
        (task,) = await begin(inputs, request())
        inputs.deliver(Pooled(request_id="a", code=code, message="so it is"))
        with pytest.raises(LoradError, match="so it is") as caught:
            await task
        assert caught.value.code == told

    scene(scenario)


def test_who_is_cancelled_is_taken_back_and_a_late_result_is_nobodys(scene):
    async def scenario(inputs, sender, known):
        (task,) = await begin(inputs, request())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sender.aborted == ["a"]
        inputs.deliver(packed(PoolResult("a", values=np.float32([1]))))

    scene(scenario)


def test_when_the_engine_dies_everybody_is_told(scene):
    async def scenario(inputs, sender, known):
        tasks = await begin(inputs, request("one"), request("two"))
        inputs.end_all("engine_restarting", "it ended")
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [error.code for error in ended] == ["engine_restarting"] * 2
        sender.dead = True
        with pytest.raises(LoradError, match="it is gone") as caught:
            await inputs.run(request())
        assert caught.value.code == "engine_restarting"

    scene(scenario)


def test_a_revision_is_prepared_first_and_once(scene):
    async def scenario(inputs, sender, known):
        for _ in range(2):
            (task,) = await begin(inputs, request(rev="r"))
            inputs.deliver(packed(PoolResult("a", values=np.float32([1]))))
            await task
        assert known == {"r"} and sender.sent == ["a", "a"]

    scene(scenario)


def test_one_that_cannot_be_prepared_is_never_sent(scene):
    async def refuse(rev):
        raise LoradError("load_failed", "no such file")

    async def scenario(inputs, sender, known):
        with pytest.raises(LoradError, match="no such file"):
            await inputs.run(request(rev="r"))
        assert sender.sent == []

    scene(scenario, refuse)


def test_one_whose_engine_dies_while_it_is_prepared_is_told_and_not_sent(scene):
    hold = asyncio.Event()

    async def wait(rev):
        await hold.wait()

    async def scenario(inputs, sender, known):
        (task,) = await begin(inputs, request(rev="r"))
        inputs.end_all("engine_restarting", "it ended")
        hold.set()
        with pytest.raises(LoradError, match="it ended"):
            await task
        assert sender.sent == []

    scene(scenario, wait)


def test_an_id_that_is_under_way_is_refused_and_the_first_goes_on(scene):
    async def scenario(inputs, sender, known):
        (first,) = await begin(inputs, request())
        with pytest.raises(LoradError) as caught:
            await inputs.run(request())
        assert caught.value.code == "invalid_value" and len(inputs) == 1
        inputs.deliver(packed(PoolResult("a", values=np.float32([1]))))
        assert (await first).values.tolist() == [1.0]

    scene(scenario)


def test_one_that_is_taken_back_is_told_so_and_the_engine_too(scene):
    async def scenario(inputs, sender, known):
        one, two = await begin(inputs, request("one"), request("two"))
        inputs.take_back("one", "engine_stalled", "it hangs")
        inputs.take_back("never heard of", "engine_stalled", "it hangs")
        with pytest.raises(LoradError, match="it hangs") as caught:
            await one
        assert caught.value.code == "engine_stalled" and sender.aborted == ["one"]
        inputs.deliver(packed(PoolResult("one", values=np.float32([1]))))  # it goes on after all
        inputs.deliver(packed(PoolResult("two", values=np.float32([2]))))
        assert (await two).values.tolist() == [2.0]

    scene(scenario)


def test_one_that_is_taken_back_waits_no_longer_for_its_revision(scene):
    ended = []

    async def wait(rev):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(rev)

    async def scenario(inputs, sender, known):
        (task,) = await begin(inputs, request(rev="r"))
        inputs.take_back("a", "engine_stalled", "it hangs")
        with pytest.raises(LoradError, match="it hangs"):
            await task
        assert ended == ["r"] and sender.sent == sender.aborted == []

    scene(scenario, wait)

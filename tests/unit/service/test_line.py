"""Packers have a line: hundreds of folders that arrive at once are nobody's wait but their own."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from lorad import wire
from lorad.service.line import Line
from lorad.service.registration import Terms


async def turn_by_turn():
    for _ in range(20):
        await asyncio.sleep(0)


async def queued(w, count):
    """Until so many wait to be packed."""
    async with asyncio.timeout(10):
        while sum(map(len, w.intake._packers._waiting.values())) < count:
            await asyncio.sleep(0.001)


async def wanted(w, rev):
    """Until somebody waits for it: what asks may have gone through a thread before."""
    async with asyncio.timeout(10):
        while not w.intake._packers._wanted[rev]:
            await asyncio.sleep(0.001)


def test_who_is_waited_for_goes_first_and_all_others_in_order():
    async def scenario():
        line, done, hold = Line(1), [], asyncio.Event()

        async def work(key):
            async with line.place(key):
                await hold.wait()
                done.append(key)

        jobs = [asyncio.create_task(work(key)) for key in "abcde"]
        await turn_by_turn()
        with line.wanted("d"), line.wanted("e"), line.wanted("not there"):
            jobs[4].cancel()  # one that left waits for nothing
            hold.set()
            await asyncio.gather(*jobs, return_exceptions=True)
        assert done == ["a", "d", "b", "c"]

    asyncio.run(scenario())


def test_a_turn_that_comes_as_its_owner_is_cancelled_goes_on_to_the_next():
    async def scenario():
        line, done = Line(1), []

        async def work(key):
            async with line.place(key):
                done.append(key)

        async with line.place("first"):
            lost, next_one = (asyncio.create_task(work(key)) for key in ("lost", "next"))
            await turn_by_turn()
        lost.cancel()
        await asyncio.wait_for(next_one, 1)
        with pytest.raises(asyncio.CancelledError):
            await lost
        await asyncio.wait_for(work("last"), 1)
        assert done == ["next", "last"]

    asyncio.run(scenario())


@pytest.mark.parametrize("wait", ["request", "load", "add", "remove", "patch", "unpin"])
def test_nobody_waits_for_the_packing_of_what_was_dropped_into_the_inbox(world, wait):
    """Three hundred folders kept a request, an upload and an rm waiting for a minute."""

    async def scenario(w):
        gate, pack = asyncio.Event(), w.pack

        async def held(folder, out):
            await gate.wait()
            return await pack(folder, out)

        w.intake._pack = held
        order, place = [], w.intake._packers.place  # who got a place; how long each takes is luck

        @asynccontextmanager
        async def noted(key):
            async with place(key):
                order.append(key)
                yield

        w.intake._packers.place = noted

        async def drop(n):
            staging = await w.intake.fill(lambda s: w.inbox._copy(w.folder(n), s))
            terms = Terms(source="inbox", replace=True, file_refusals=True)
            await w.adapters.take(staging, f"bulk{n}", terms)

        drops = [asyncio.create_task(drop(n)) for n in range(12)]
        await queued(w, 10)  # and two are being packed
        names, rev = wire.Names(names=("bulk11",)), w.rev(11)
        waits = {
            "request": lambda: w.revisions.prepare_for_request(rev),
            "load": lambda: w.adapters.load(names),
            "add": lambda: w.add("mine", 99),
            "remove": lambda: w.adapters.remove("bulk11"),
            "patch": lambda: w.adapters.patch("bulk11", wire.AdapterPatch(priority=7)),
            "unpin": lambda: w.adapters.unpin(names),
        }
        waiting = asyncio.create_task(waits[wait]())
        await queued(w, 11 if wait == "add" else 10)
        mine = w.rev(99) if wait == "add" else rev
        await wanted(w, mine)
        gate.set()
        await waiting
        await asyncio.gather(*drops)
        assert order.index(mine) < 4, order.index(mine)  # two had theirs before

    world(scenario)

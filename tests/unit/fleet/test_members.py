"""Daemons as members: routed, lost and found; over real sockets, with stand-ins behind them."""

import asyncio
import tempfile
from contextlib import aclosing
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.fleet import daemon as one_daemon
from lorad.fleet import local
from lorad.fleet.catalog import open_catalog
from lorad.fleet.local import LocalMembers
from lorad.fleet.members import Ask, Head, Lost
from tests.fakes.small_daemons import SmallDaemon, row

COMPLETE = Ask("POST", "/v1/completions", headers=(("x-a", "b"),), body=b"{}")
REV = "ab" * 32


def with_daemons(scenario, *names):
    """Run `scenario(members, daemons)`, and end all that it began."""

    async def run():
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            daemons = [SmallDaemon(Path(folder), name) for name in names]
            for daemon in daemons:
                await daemon.start()
            catalog = open_catalog(f"{folder}/catalog")
            members = LocalMembers([daemon.site for daemon in daemons], catalog)
            try:
                while any(member.state != "ready" for member in members.seen()):
                    await members.look()
                await scenario(members, {daemon.name: daemon for daemon in daemons})
            finally:
                await members.close()
                for daemon in daemons:
                    await daemon.stop()

    asyncio.run(run())


async def everything(parts):
    async with aclosing(parts):
        return [part async for part in parts]


def test_a_request_goes_where_its_adapter_is_and_its_answer_comes_as_it_was_sent():
    async def scenario(members, daemons):
        for home in daemons.values():
            home.rows = (row("poet", REV),)
            await members.look()
            head, *body = await everything(members.stream(COMPLETE, REV))
            assert head.member in daemons and head.status == 200
            assert dict(head.headers)["content-type"].startswith("text/event-stream")
            assert b"".join(body) == b"data: a\n\ndata: b\n\n"
            assert daemons[head.member].asked[-1][0]["x-a"] == "b"
            home.rows = ()

    with_daemons(scenario, "a", "b", "c")


def test_every_request_for_one_adapter_has_the_same_home():
    async def scenario(members, daemons):
        heads = [(await everything(members.stream(COMPLETE, REV)))[0] for _ in range(6)]
        assert len({head.member for head in heads}) == 1

    with_daemons(scenario, "a", "b", "c")


def test_a_refusal_of_a_member_is_its_answer_with_its_headers():
    async def scenario(members, daemons):
        answer = await members.ask("a", Ask("POST", "/v1/completions", body=b"whole"))
        assert answer.status == 429 and dict(answer.head.headers)["retry-after"] == "3"
        assert answer.body == b'{"by":"a"}'

    with_daemons(scenario, "a")


def test_a_member_that_cannot_be_reached_is_lost_before_its_answer_began():
    async def scenario(members, daemons):
        home = (await everything(members.stream(COMPLETE, REV)))[0].member
        await daemons[home].stop()
        with pytest.raises(Lost) as lost:
            await everything(members.stream(COMPLETE, REV))
        assert lost.value.member == home and not lost.value.began
        other = (await everything(members.stream(COMPLETE, REV)))[0].member
        assert other != home, "nobody is sent there before it has answered"
        await daemons[home].start()
        await members.look()
        assert (await everything(members.stream(COMPLETE, REV)))[0].member == home

    with_daemons(scenario, "a", "b")


def test_a_member_that_dies_in_mid_stream_is_lost_after_its_answer_began():
    async def scenario(members, daemons):
        for daemon in daemons.values():
            daemon.hold = asyncio.Event()
        async with aclosing(members.stream(COMPLETE, REV)) as parts:
            head = await anext(parts)
            assert await anext(parts) == b"data: a\n\n"
            await daemons[head.member].stop()
            with pytest.raises(Lost) as lost:
                await anext(parts)
        assert lost.value.began

    with_daemons(scenario, "a", "b")


def test_a_client_that_leaves_ends_its_request_at_the_member():
    async def scenario(members, daemons):
        daemon = daemons["a"]
        daemon.hold = asyncio.Event()
        async with aclosing(members.stream(COMPLETE, None)) as parts:
            assert isinstance(await anext(parts), Head)
            assert await anext(parts) == b"data: a\n\n"
            assert members.seen()[0].replica.num_running == 1
        assert members.seen()[0].replica.load == 0
        async with asyncio.timeout(5):
            while not daemon.gone:
                await asyncio.sleep(0.001)

    with_daemons(scenario, "a")


def test_a_member_that_hangs_is_lost_and_what_waits_for_it_ends(monkeypatch):
    monkeypatch.setattr(one_daemon, "BRIEF_SECONDS", 0.05)

    async def scenario(members, daemons):
        daemons["a"].silent = True
        waiting = asyncio.ensure_future(everything(members.stream(COMPLETE, REV)))
        await asyncio.sleep(0)
        for _ in range(local.MISSES):
            assert members.seen()[0].state == "ready", "one late answer is no loss"
            await members.look()
        with pytest.raises(Lost) as lost:
            await waiting
        assert not lost.value.began
        (member,) = members.seen()
        assert (member.state, member.reason) == ("lost", "it does not answer")

    with_daemons(scenario, "a")


def test_one_that_does_not_take_requests_is_passed_by_and_none_is_said_so():
    async def scenario(members, daemons):
        daemons["a"].state = "draining"
        await members.look()
        assert (await everything(members.stream(COMPLETE, None)))[0].member == "b"
        with pytest.raises(LoradError, match="no member takes requests") as refused:
            await everything(members.stream(COMPLETE, None, without=("b",)))
        assert refused.value.code == "engine_restarting"

    with_daemons(scenario, "a", "b")

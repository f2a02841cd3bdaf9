"""The link to the engine: readiness, deltas, deaths and restarts."""

import asyncio
import contextlib
import subprocess

import pytest

from engine.config import EngineConfig
from engine.messages import Fatal, GetSnapshot, SamplingParams, SequenceDelta, Starting, Submit
from lorad.errors import BadConfig, LoradError, NoUsableDevice, StartError
from lorad.service.engine_link import (
    REPLACE_AFTER,
    REPLACE_GRACE,
    START_SILENCE,
    EngineLink,
)
from lorad.service.events import EventRing


def submit(request_id, rev=None):
    return Submit(request_id=request_id, prompt=[1], sampling=SamplingParams(), rev=rev)


@pytest.fixture
def scene(fake, eventually):
    """Run a scenario with a started link; `clients` are the processes so far, newest last."""

    def scene(scenario, *, fatal=None, ready=True, clock=None, model=""):
        async def run():
            clients = []

            def new_client():
                clients.append(fake.Client(fatal=fatal))
                return clients[-1]

            link = EngineLink(
                EngineConfig(model="m"),
                EventRing(),
                new_client=new_client,
                first_pause=0.0,
                clock=clock or (lambda: 0.0),
                model=model,
            )
            link.start()
            if ready:
                await eventually(lambda: link.state == "ready")
            try:
                async with asyncio.timeout(10):
                    return await scenario(link, clients)
            finally:
                await link.stop()

        return asyncio.run(run())

    return scene


def test_it_is_ready_after_one_forward_pass_and_bring_up(scene):
    async def scenario(link, clients):
        assert link.info.device == "cpu"
        link.check()

    scene(scenario)


def test_before_ready_a_request_is_told_that_the_base_loads(scene):
    async def scenario(link, clients):
        with pytest.raises(LoradError) as caught:
            link.submit(submit("a"), lambda delta: None)
        assert caught.value.code == "loading_base"
        assert caught.value.retry_after

    scene(scenario, ready=False)


def test_deltas_reach_the_callback_of_their_sequence(scene, eventually):
    async def scenario(link, clients):
        seen = []
        link.submit(submit("a"), seen.append)
        await eventually(lambda: seen)
        assert (seen[0].tokens, seen[0].finish_reason) == ((1,), "stop")
        assert link.running == 0

    scene(scenario)


def test_an_unknown_revision_is_prepared_before_it_is_submitted(scene, eventually):
    async def scenario(link, clients):
        async def prepare(rev):
            clients[-1].revisions[rev] = "disk"

        link.prepare = prepare
        seen = []
        link.submit(submit("a", rev="r1"), seen.append)
        await eventually(lambda: seen)
        assert seen[0].finish_reason == "stop"

    scene(scenario)


def test_a_preparation_that_fails_is_the_requests_error(scene, eventually):
    async def scenario(link, clients):
        async def prepare(rev):
            raise LoradError("load_failed", "no such file")

        link.prepare = prepare
        seen = []
        link.submit(submit("a", rev="r1"), seen.append)
        await eventually(lambda: seen)
        assert (seen[0].finish_reason, seen[0].code) == ("error", "load_failed")

    scene(scenario)


def test_an_abort_while_preparing_ends_the_sequence(scene, eventually):
    async def scenario(link, clients):
        async def prepare(rev):
            await asyncio.Event().wait()

        link.prepare = prepare
        seen = []
        link.submit(submit("a", rev="r1"), seen.append)
        await asyncio.sleep(0)
        link.abort("a")
        assert seen[0].finish_reason == "abort"
        link.abort("a")
        assert len(seen) == 1
        assert "a" not in clients[-1].submitted

    scene(scenario)


def test_a_dead_engine_is_replaced_and_its_requests_end_with_an_error(scene, eventually):
    async def scenario(link, clients):
        brought = []

        async def bring_up(info):
            brought.append(info)

        link.bring_up = bring_up
        clients[0].silent = True
        link.known.add("r1")
        clients[0].revisions["r1"] = "gpu"
        seen = []
        link.submit(submit("a", rev="r1"), seen.append)
        clients[0].die()
        await eventually(lambda: seen)
        assert (seen[0].finish_reason, seen[0].code) == ("error", "engine_restarting")
        await eventually(lambda: link.state == "ready" and len(clients) == 2)
        assert link.restarts == 1
        assert not link.known
        assert len(brought) == 1
        assert any(item.type == "engine.died" for item in link.events.newest(9))

    scene(scenario)


def test_five_crashes_in_ten_minutes_end_the_daemon(scene, eventually):
    async def scenario(link, clients):
        for n in range(1, 6):
            await eventually(lambda n=n: link.state == "ready" and len(clients) == n)
            clients[-1].die()
            await eventually(lambda n=n: link.restarts == n)
        with pytest.raises(StartError, match="crashed 5 times") as caught:
            await link.failed
        assert caught.value.exit == 1
        with pytest.raises(LoradError, match="the engine is gone") as told:
            link.check()
        assert "restart of lorad" in told.value.hint

    scene(scenario)


def test_crashes_far_apart_do_not_add_up(scene, eventually):
    now = [0.0]

    async def scenario(link, clients):
        for n in range(1, 8):
            await eventually(lambda n=n: link.state == "ready" and len(clients) == n)
            now[0] += 1000
            clients[-1].die()
        await eventually(lambda: link.state == "ready" and len(clients) == 8)
        assert not link.failed.done()

    scene(scenario, clock=lambda: now[0])


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("no_device", NoUsableDevice),
        ("model_unsupported", BadConfig),
        ("invalid_config", BadConfig),
        ("internal_error", StartError),
    ],
)
def test_an_engine_that_cannot_start_ends_the_daemon_with_its_reason_and_the_next_step(
    scene, code, error
):
    async def scenario(link, clients):
        with pytest.raises(error, match="because") as caught:
            await link.failed
        assert type(caught.value) is error
        assert caught.value.message.endswith("because") and caught.value.hint == "do so"
        assert len(clients) == 1

    scene(scenario, fatal=Fatal(code, "because", "do so"), ready=False)


def test_of_several_models_the_reason_says_which_one_cannot_start(scene):
    async def scenario(link, clients):
        with pytest.raises(NoUsableDevice) as caught:
            await link.failed
        assert caught.value.message == "vectors: the engine did not start: no memory"
        assert caught.value.hint == "do so"
        with pytest.raises(LoradError) as told:
            link.check()
        assert "vectors: " not in told.value.message, "who asks has named the model"

    fatal = Fatal("no_device", "no memory", "do so")
    scene(scenario, fatal=fatal, ready=False, model="vectors")


def test_a_stalled_engine_is_announced_and_recovers(scene, eventually):
    async def scenario(link, clients):
        clients[0].state = "stalled"
        await eventually(lambda: link.state == "engine_stalled")
        with pytest.raises(LoradError, match="has not moved"):
            link.check()
        clients[0].state = "ready"
        await eventually(lambda: link.state == "ready")

    scene(scenario)


@pytest.fixture
def victim():
    """A process that may be killed."""
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def test_a_stalled_engine_is_tended_until_it_should_have_been_replaced(scene, eventually):
    now = 0.0

    async def scenario(link, clients):
        nonlocal now
        now = 1e6
        assert link.tended, "one that is ready has all the time"
        clients[0].state, clients[0].pid = "stalled", None  # and cannot be killed
        await eventually(lambda: link.state == "engine_stalled")
        now += REPLACE_AFTER
        assert link.tended
        now += REPLACE_GRACE + 1
        assert not link.tended
        clients[0].state = "ready"
        await eventually(lambda: link.state == "ready")
        assert link.tended

    scene(scenario, clock=lambda: now)


def test_a_start_is_tended_while_it_reports_progress(fake, eventually):
    now = 0.0

    class Slow(fake.Client):
        async def start(self, config):
            """Never done."""

    async def scenario():
        nonlocal now
        client = Slow()
        link = EngineLink(
            EngineConfig(model="m"), EventRing(), new_client=lambda: client, clock=lambda: now
        )
        link.start()
        for fraction in (0.1, 0.2):
            now += START_SILENCE - 1
            assert link.tended
            client.events.put_nowait(Starting("weights", fraction))
            await eventually(lambda fraction=fraction: link.fraction == fraction)
        now += START_SILENCE + 1
        assert not link.tended
        await link.stop()

    asyncio.run(scenario())


def test_a_start_is_silent_only_from_its_turn_on(fake, eventually):
    now, others = 0.0, asyncio.Event()

    class Slow(fake.Client):
        async def start(self, config):
            """Never done."""

    async def scenario():
        nonlocal now
        config = EngineConfig(model="m")
        link = EngineLink(config, EventRing(), new_client=Slow, clock=lambda: now)

        @contextlib.asynccontextmanager
        async def turn():
            await others.wait()
            yield config

        link.turn = turn
        link.start()
        await eventually(lambda: link._waits)
        now += 2 * START_SILENCE
        assert link.tended, "others load"
        others.set()
        await eventually(lambda: not link._waits)
        assert link.tended, "it has only just begun"
        now += START_SILENCE + 1
        assert not link.tended
        await link.stop()

    asyncio.run(scenario())


def test_an_engine_that_stays_stalled_is_killed(scene, eventually, victim):
    now = [0.0]

    async def scenario(link, clients):
        clients[0].pid = victim.pid
        clients[0].state = "stalled"
        await eventually(lambda: link.state == "engine_stalled")
        assert victim.poll() is None
        now[0] += 61
        await eventually(lambda: victim.poll() is not None)

    scene(scenario, clock=lambda: now[0])


def test_an_engine_that_cannot_be_brought_up_is_killed(scene, eventually, victim):
    async def scenario(link, clients):
        async def bring_up(info):
            clients[-1].pid = victim.pid
            raise LoradError("registry_busy", "locked")

        link.bring_up = bring_up
        clients[0].die()
        await eventually(lambda: victim.poll() is not None)
        assert link.state == "engine_restarting"

    scene(scenario)


def test_answers_with_a_code_are_errors(scene):
    async def scenario(link, clients):
        answer = await link.call(GetSnapshot(link.next_id()))
        assert answer.snapshot.slots_total == 8

    scene(scenario)


def test_stopping_ends_what_runs(scene):
    async def scenario(link, clients):
        clients[0].silent = True
        seen = []
        link.submit(submit("a"), seen.append)
        await link.stop()
        assert seen[0].code == "draining"
        with pytest.raises(LoradError, match="stopping"):
            link.check()

    scene(scenario)


def test_frames_that_wait_already_come_in_one_turn_and_then_others_have_theirs(
    scene, eventually, monkeypatch
):
    """A stream writes once a turn: a daemon that is behind catches up, and still answers others."""

    async def turns(link, client, frames):
        seen, others = [], []

        async def somebody_else():
            while len(seen) < frames:
                others.append(len(seen))
                await asyncio.sleep(0)

        link.submit(submit("a"), seen.append)
        for n in range(frames):
            last = "length" if n == frames - 1 else None
            delta = SequenceDelta(request_id="a", tokens=(n,), finish_reason=last)
            client.frame(deltas=(delta,))
        await somebody_else()
        assert [delta.tokens for delta in seen] == [(n,) for n in range(frames)]
        return others

    async def scenario(link, clients):
        clients[-1].silent = True
        monkeypatch.setattr("lorad.service.turns.TURN_SECONDS", 60.0)
        assert len(await turns(link, clients[-1], 100)) <= 3
        monkeypatch.setattr("lorad.service.turns.TURN_SECONDS", 0.0)
        await asyncio.sleep(0.01)
        assert len(await turns(link, clients[-1], 100)) >= 90

    scene(scenario)

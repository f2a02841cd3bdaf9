"""A request's model may be a reference: who is served, who waits, who is told what."""

import asyncio

import pytest

from lorad.errors import LoradError

CHUNK = 4096


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def refused(finding):
    with pytest.raises(LoradError) as raised:
        await finding
    return raised.value


def test_a_reference_is_pulled_once_for_all_who_ask_and_then_served_at_once(scene):
    async def scenario(s):
        commit = s.put("acme/sql", 1, hold_at=CHUNK)
        dynamic = s.dynamic("hf:acme/*")
        asking = [asyncio.ensure_future(dynamic.find("hf:acme/sql", 5.0)) for _ in range(5)]
        await s.until(lambda: s.fetched)
        assert dynamic.known("hf:acme/sql") == "hf:acme/sql"  # not here yet
        assert await dynamic.find("base", 0.0) == "base"
        s.hub.rule("acme/sql", hold_at=1 << 40)
        name = f"hf:acme/sql@{commit}"
        assert await asyncio.gather(*asking) == [name] * 5
        assert s.world.adapters.resolve(name).rev == s.world.rev(1)
        assert len(s.fetched) == 1
        for model in ("hf:acme/sql", name):
            assert await dynamic.find(model, 0.0) == dynamic.known(model) == name
        assert s.hub.calls().count("resolve hf:acme/sql") == 1
        record = s.world.registry.get(name)
        assert (record.source, record.tenant, record.name) == (name, None, name)
        (operation,) = s.operations.list()
        assert (operation.actor, operation.state) == ("request", "done")

    scene(scenario)


def test_a_full_disk_is_told_without_its_place_and_tried_again_soon(scene):
    async def scenario(s):
        clock = Clock()
        s.put("acme/sql", 1, error="insufficient_storage")
        dynamic = s.dynamic("hf:acme/*", clock=clock)
        error = await refused(dynamic.find("hf:acme/sql", 5.0))
        assert (error.code, error.status, error.retry_after) == ("no_room", 503, 10.0)
        assert error.message == "no disk space to fetch the adapter now"
        s.hub.rule("acme/sql", error="")
        clock.now = 11.0
        assert (await dynamic.find("hf:acme/sql", 5.0)).startswith("hf:acme/sql@")

    scene(scenario)


def test_what_the_policy_does_not_name_is_as_unknown_as_any_name(scene):
    async def scenario(s):
        commit = s.put("acme/sql", 1)
        s.put("evil/sql", 2)
        unknown = s.dynamic()
        some = s.dynamic("hf:acme/s*", "s3://bucket/*")
        for dynamic, model in (
            (unknown, "hf:acme/sql"),
            (some, "hf:evil/sql"),
            (some, "hf:acme/other"),
            (some, "hf:acme/../sql"),
            (some, "hf:acme/sql\n"),
            (some, "s3://other/x"),
            (some, "https://example.org/x.zip"),
            (some, "hf:acme/s" + "q" * 300),
        ):
            assert await dynamic.find(model, 1.0) == model
            with pytest.raises(LoradError) as error:
                s.world.adapters.resolve(model)
            assert (error.value.code, error.value.param) == ("model_not_found", "model")
            assert "does not exist" in error.value.message
        assert s.hub.calls() == []
        assert await some.find(f"hf:acme/sql@{commit}", 5.0) == f"hf:acme/sql@{commit}"

    scene(scenario)


def test_an_adapter_that_was_pulled_under_a_name_serves_its_reference(scene):
    async def scenario(s):
        commit = s.put("acme/sql", 1)
        await s.pull("hf:acme/sql", name="team/sql")
        dynamic = s.dynamic("hf:acme/*")
        assert await dynamic.find(f"hf:acme/sql@{commit}", 0.0) == "team/sql"
        assert await dynamic.find("hf:acme/sql", 0.0) == "team/sql"
        await s.world.adapters.remove("team/sql")
        s.put("acme/sql", 2, commit="2")
        await s.pull("hf:acme/sql", name="team/sql")
        again = await dynamic.find(f"hf:acme/sql@{commit}", 5.0)
        assert again == f"hf:acme/sql@{commit}"  # not what team/sql serves now

    scene(scenario)


def test_a_request_waits_no_longer_than_its_deadline_and_the_pull_goes_on(scene):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=CHUNK)
        dynamic = s.dynamic("hf:acme/*")
        late = await refused(dynamic.find("hf:acme/sql", 0.05))
        assert (late.code, late.status) == ("deadline_exceeded", 504)
        s.hub.rule("acme/sql", hold_at=1 << 40)
        assert (await dynamic.find("hf:acme/sql", 5.0)).startswith("hf:acme/sql@")
        assert len(s.fetched) == 1

    scene(scenario)


@pytest.mark.parametrize(
    ("code", "status", "told", "seconds"),
    [
        ("source_not_found", 404, "model_not_found", 60.0),
        ("source_denied", 404, "model_not_found", 60.0),
        ("source_unreachable", 503, "source_unreachable", 10.0),
        ("source_busy", 503, "source_busy", 33.0),
        ("source_offline", 503, "source_offline", 10.0),
        ("source_corrupt", 502, "source_corrupt", 60.0),
    ],
)
def test_a_failure_is_told_clearly_and_asked_for_again_only_after_a_while(
    scene, code, status, told, seconds
):
    async def scenario(s):
        clock = Clock()
        s.put("acme/sql", 1, error=code, after=33.0 if code == "source_busy" else None)
        dynamic = s.dynamic("hf:acme/*", clock=clock)
        for _ in range(3):
            error = await refused(dynamic.find("hf:acme/sql", 5.0))
            assert (error.code, error.status, error.param) == (told, status, "model")
            assert (error.retry_after is not None) == (status == 503)
            assert "acme/sql" in error.message
        clock.now = seconds - 1.0
        again = await refused(dynamic.find("hf:acme/sql", 5.0))
        assert again.retry_after in (None, pytest.approx(1.0))
        assert len(s.hub.calls()) == 1
        assert s.operations.list() == ()  # what is not there leaves no rows
        clock.now = seconds + 1.0
        s.hub.rule("acme/sql", error=None)
        assert (await dynamic.find("hf:acme/sql", 5.0)).startswith("hf:acme/sql@")
        events = [e for e in s.world.events.newest(100) if e.type == "resolve.failed"]
        assert [e.cause for e in events] == [code]

    scene(scenario)


def test_a_refused_adapter_is_told_with_its_reason(scene):
    async def scenario(s):
        s.hub.put("acme/bad", {"adapter_config.json": b'{"bad": "E_RANK_LIMIT"}'})
        dynamic = s.dynamic("hf:acme/*")
        for _ in range(2):
            error = await refused(dynamic.find("hf:acme/bad", 5.0))
            assert (error.code, error.details) == ("adapter_invalid", {"reason": "E_RANK_LIMIT"})
        assert len(s.fetched) == 1

    scene(scenario)


def test_a_new_commit_is_found_behind_the_requests_and_served_when_it_is_here(scene):
    async def scenario(s):
        clock = Clock()
        old = f"hf:acme/sql@{s.put('acme/sql', 1)}"
        dynamic = s.dynamic("hf:acme/*", every=600.0, clock=clock)
        assert await dynamic.find("hf:acme/sql", 5.0) == old
        new = f"hf:acme/sql@{s.put('acme/sql', 2, commit='2', hold_at=CHUNK)}"
        clock.now = 599.0
        assert await dynamic.find("hf:acme/sql", 0.0) == old
        assert len(s.hub.calls()) == 2
        clock.now = 601.0
        assert await dynamic.find("hf:acme/sql", 0.0) == old
        await s.until(lambda: len(s.fetched) == 2)
        assert await dynamic.find("hf:acme/sql", 0.0) == old
        s.hub.rule("acme/sql", hold_at=1 << 40)
        await s.until(lambda: dynamic.known("hf:acme/sql") == new)
        assert s.hub.calls().count("resolve hf:acme/sql") == 2
        assert await dynamic.find(old, 0.0) == old

    scene(scenario)


def test_after_a_restart_what_is_here_serves_though_its_source_is_away(scene):
    async def first(s):
        clock = Clock()
        dynamic = s.dynamic("hf:acme/*", every=0.0, clock=clock)
        s.put("acme/sql", 1, commit="zz")
        await dynamic.find("hf:acme/sql", 5.0)
        last = s.put("acme/sql", 2, commit="2")
        await dynamic.find("hf:acme/sql", 0.0)
        await s.until(lambda: dynamic.known("hf:acme/sql").endswith(last))
        return last

    last = scene(first)

    async def second(s):
        clock = Clock()
        s.hub.rule("acme/sql", error="source_unreachable")
        dynamic = s.dynamic("hf:acme/*", clock=clock)
        before = len(s.hub.calls())
        for _ in range(3):
            assert (await dynamic.find("hf:acme/sql", 0.0)).endswith(last)
        await s.until(lambda: len(s.hub.calls()) == before + 1)
        await s.until(lambda: "resolve.failed" in s.world.types())
        for _ in range(3):
            assert (await dynamic.find("hf:acme/sql", 0.0)).endswith(last)
        assert len(s.hub.calls()) == before + 1
        clock.now = 11.0
        await dynamic.find("hf:acme/sql", 0.0)
        await s.until(lambda: len(s.hub.calls()) == before + 2)

    scene(second)


def test_those_who_wait_are_bounded_and_a_drain_sends_them_away(scene):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=CHUNK)
        dynamic = s.dynamic("hf:acme/*", max_waiting=2)
        asking = [asyncio.ensure_future(dynamic.find("hf:acme/sql", 60.0)) for _ in range(2)]
        await s.until(lambda: s.fetched)
        full = await refused(dynamic.find("hf:acme/sql", 60.0))
        assert (full.code, full.status) == ("queue_full", 429)
        asking[0].cancel()  # a client that left
        await asyncio.sleep(0)
        asking[0] = asyncio.ensure_future(dynamic.find("hf:acme/sql", 60.0))
        await asyncio.sleep(0)
        dynamic.close()
        for one in asking:
            assert (await refused(one)).code == "draining"

    scene(scenario)


def test_a_pull_that_an_operator_cancels_ends_the_waiting(scene):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=CHUNK)
        dynamic = s.dynamic("hf:acme/*")
        asking = asyncio.ensure_future(dynamic.find("hf:acme/sql", 60.0))
        await s.until(lambda: s.fetched)
        await s.operations.cancel(s.operations.list()[0].id)
        error = await refused(asking)
        assert error.code == "model_not_found"
        assert "cancelled" in error.message

    scene(scenario)


def test_a_replacement_that_failed_does_not_lend_its_reference_to_what_serves(scene):
    async def scenario(s):
        old = s.put("acme/sql", 1)
        await s.pull("hf:acme/sql")
        new = s.put("acme/sql", 2, commit="2")
        s.world.bad_packs[s.world.rev(2)] = "E_RANK_LIMIT"
        assert (await s.pull("hf:acme/sql", replace=True)).reason == "E_RANK_LIMIT"
        assert s.world.adapters.resolve("sql").rev == s.world.rev(1)
        dynamic = s.dynamic("hf:acme/*")
        error = await refused(dynamic.find(f"hf:acme/sql@{new}", 5.0))
        assert error.code == "adapter_invalid"
        s.world.bad_packs.clear()
        name = await s.dynamic("hf:acme/*").find(f"hf:acme/sql@{new}", 5.0)
        assert s.world.adapters.resolve(name).rev == s.world.rev(2)
        assert old != new

    scene(scenario)


def test_what_was_quarantined_later_is_pulled_anew(scene):
    async def scenario(s):
        name = f"hf:acme/sql@{s.put('acme/sql', 1)}"
        dynamic = s.dynamic("hf:acme/*")
        assert await dynamic.find(name, 5.0) == name
        await s.world.model.losses.mark_damaged(s.world.rev(1), "block 0 is wrong")
        with pytest.raises(LoradError):
            s.world.adapters.resolve(name)
        assert await dynamic.find(name, 5.0) == name
        assert s.world.adapters.resolve(name).rev == s.world.rev(1)
        assert len(s.fetched) == 2

    scene(scenario)

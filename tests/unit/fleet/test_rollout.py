"""Rollouts over several members and gateways: all of them or none, and nobody notices."""

import asyncio

import pytest

from lorad.errors import LoradError
from lorad.fleet import presence, rollout
from lorad.fleet import table as tables
from tests.fakes.small_clusters import run


@pytest.fixture(autouse=True)
def quick_gateways(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.05)


def test_a_new_name_is_taken_in_by_its_home_and_served_by_whoever_is_asked():
    async def scenario(c, front):
        added = await front.add("poet", 1)
        assert added.status_code == 200 and added.json()["rev"] == c.rev(1), added.text
        assert sum("poet" in daemon.serves for daemon in c.daemons.values()) == 1
        assert await front.rev("poet") == c.rev(1)
        home = next(d for d in c.daemons.values() if "poet" in d.serves)
        home.state = "draining"
        await front.members.look()
        assert await front.rev("poet") == c.rev(1), "another one takes it in when it is asked"

    run(scenario)


def test_a_load_that_was_asked_for_is_told_as_its_home_tells_it():
    async def scenario(c, front):
        plain = (await front.add("clerk", 2)).json()
        assert (plain["num_bytes"], plain["load_seconds"]) == (0, None)
        told = (await front.add("poet", 1, load=True)).json()
        assert (told["state"], told["num_bytes"], told["load_seconds"]) == ("idle", 4096, 0.5)

    run(scenario)


def test_after_a_rollout_is_done_no_gateway_and_no_member_answers_with_what_was_before():
    async def scenario(c, one, other):
        await one.add("poet", 1, pin=True)
        assert all(d.serves == {"poet": c.rev(1)} for d in c.daemons.values())
        seen, done = [], asyncio.Event()

        async def ask(front):
            while not done.is_set():
                was_done = reported.is_set()
                seen.append((was_done, await front.rev("poet")))

        async def slow(start):
            await asyncio.sleep(0.03)

        for number in range(2, 5):
            reported = asyncio.Event()
            for daemon in c.daemons.values():
                daemon.on_commit = slow
            asking = [asyncio.create_task(ask(front)) for front in (one, other, one, other)]
            added = await (one, other)[number % 2].add("poet", number, replace=True)
            assert added.status_code == 200, added.text
            reported.set()
            seen_before = len(seen)
            while len(seen) < seen_before + 40:
                await asyncio.sleep(0.005)
            done.set()
            await asyncio.gather(*asking)
            done.clear()
            before = {rev for was_done, rev in seen if not was_done}
            after = {rev for was_done, rev in seen if was_done}
            assert after == {c.rev(number)}
            assert before <= {c.rev(number - 1), c.rev(number)}
            seen.clear()
            for daemon in c.daemons.values():
                assert daemon.serves == {"poet": c.rev(number)} and not daemon.held

    run(scenario, gateways=2)


def test_until_the_table_moves_everybody_gets_the_old_revision_of_members_that_have_the_new():
    async def scenario(c, front):
        await front.add("poet", 1, pin=True)
        order, go = [], asyncio.Event()

        async def wait(start):
            if not start.dry_run:
                order.append(start.name)
                if len(order) == 3:
                    await go.wait()

        for daemon in c.daemons.values():
            daemon.on_commit = wait
        adding = asyncio.create_task(front.add("poet", 2, replace=True))
        while len(order) < 3:
            await asyncio.sleep(0.001)
        has = [d for d in c.daemons.values() if d.serves["poet"] == c.rev(2)]
        assert has, "some have it by now"
        for _ in range(6):
            assert await front.rev("poet") == c.rev(1)
        go.set()
        assert (await adding).status_code == 200
        assert await front.rev("poet") == c.rev(2)

    run(scenario)


def test_a_member_that_refuses_keeps_everything_as_it_was_and_is_named():
    async def scenario(c, front):
        await front.add("poet", 1, pin=True)
        last = sorted(c.daemons)[-1]
        tried = []

        async def refuse(start):
            if not start.dry_run:
                tried.append(start.name)
                if len(tried) == 1:
                    raise LoradError("load_failed", "no more blocks")

        c.daemons[last].on_commit = refuse
        answer = await front.add("poet", 2, replace=True)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "load_failed")
        assert error["message"] == f"{last}: no more blocks"
        assert {d.serves["poet"] for d in c.daemons.values()} == {c.rev(1)}
        assert not any(d.held for d in c.daemons.values())
        assert {await front.rev("poet") for _ in range(6)} == {c.rev(1)}
        table = front.catalog.table
        assert table.entries["poet"].rev == c.rev(1) and not table.entries["poet"].before
        contents = front.catalog.store.blobs.names("content/")
        assert contents == [table.entries["poet"].content], "what came to nothing is not kept"

    run(scenario)


def test_what_no_member_takes_is_refused_before_anything_changes():
    async def scenario(c, front):
        for daemon in c.daemons.values():
            daemon.refuses["poet"] = LoradError("adapter_invalid", "a tensor has another shape")
        answer = await front.add("poet", 1)
        assert answer.status_code == 422 and "another shape" in answer.text
        assert front.catalog.table.generation == 0
        assert not front.catalog.store.blobs.names("content/")
        assert (await front.ask("poet")).status_code == 404

    run(scenario)


def test_other_content_needs_replace_and_the_same_content_is_unchanged():
    async def scenario(c, front):
        await front.add("poet", 1)
        other = await front.add("poet", 2)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "name_taken")
        same = await front.add("poet", 1)
        assert same.json()["unchanged"] is True
        assert front.catalog.table.generation == 1
        dry = await front.add("poet", 3, replace=True, dry_run=True)
        assert dry.json()["rev"] == c.rev(3)
        assert await front.rev("poet") == c.rev(1) and front.catalog.table.generation == 1

    run(scenario)


def test_of_two_gateways_that_move_one_name_one_is_told_of_the_conflict():
    async def scenario(c, one, other):
        await one.add("poet", 1)
        both = asyncio.Event()
        waiting = []

        async def wait(start):
            if not start.dry_run:
                waiting.append(start)
                if len(waiting) == 2:
                    both.set()
                await asyncio.wait_for(both.wait(), 5)

        for daemon in c.daemons.values():
            daemon.on_commit = wait
        answers = await asyncio.gather(
            one.add("poet", 2, replace=True), other.add("poet", 3, replace=True)
        )
        assert sorted(a.status_code for a in answers) == [200, 409]
        number = 2 + [a.status_code for a in answers].index(200)
        both.set()
        for front in (one, other):
            assert {await front.rev("poet") for _ in range(4)} == {c.rev(number)}

    run(scenario, gateways=2)


def test_a_member_that_dies_on_the_way_holds_nobody_up_and_has_the_new_one_later():
    async def scenario(c, front):
        await front.add("poet", 1, pin=True)
        dead = c.daemons["c"]
        await dead.stop()
        added = await front.add("poet", 2, replace=True)
        assert added.status_code == 200, added.text
        assert {await front.rev("poet") for _ in range(6)} == {c.rev(2)}
        await dead.start()
        assert dead.serves == {"poet": c.rev(1)}, "it was away"
        for daemon in c.daemons.values():
            daemon.state = "ready" if daemon is dead else "draining"
        await front.members.look()
        assert await front.rev("poet") == c.rev(2)

    run(scenario)


def test_a_gateway_that_is_silent_is_waited_for_until_it_has_stopped_by_itself():
    async def scenario(c, one, other):
        await one.add("poet", 1)
        assert await other.rev("poet") == c.rev(1)
        for task in other.gateway._tasks:  # it hangs, and comes to itself later
            task.cancel()
        began = asyncio.get_running_loop().time()
        assert (await one.add("poet", 2, replace=True)).status_code == 200
        assert asyncio.get_running_loop().time() - began >= 0.4
        answer = await other.ask("poet")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_busy")
        assert (await other.http.get("/readyz")).status_code == 503
        assert (await other.ask("tiny")).status_code == 200, "bases need no catalog"
        await other.gateway.presence.beat()
        assert await other.rev("poet") == c.rev(2)

    run(scenario, gateways=2, lease_seconds=0.5)


def test_a_name_that_is_removed_is_gone_from_all_and_unknown_at_once():
    async def scenario(c, one, other):
        await one.add("poet", 1, pin=True)
        gone = await one.http.delete("/admin/v1/adapters/poet")
        assert gone.json()["rev"] == c.rev(1)
        assert not any(d.serves for d in c.daemons.values())
        for front in (one, other):
            answer = await front.ask("poet")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert not one.catalog.store.blobs.names("content/")
        assert (await one.http.delete("/admin/v1/adapters/poet")).status_code == 404

    run(scenario, gateways=2)


def test_a_name_goes_back_to_content_that_it_had():
    async def scenario(c, front):
        for number in (1, 2, 3):
            await front.add("poet", number, replace=True)
        assert [r.rev for r in front.catalog.table.entries["poet"].before] == [c.rev(2), c.rev(1)]

        async def back(rev=""):
            return await front.http.post("/admin/v1/rollback", json={"name": "poet", "rev": rev})

        for rev, number in (("", 2), ("", 3), (c.rev(1)[:8], 1)):
            done = await back(rev)
            assert done.status_code == 200 and done.json()["rev"] == c.rev(number), done.text
            assert await front.rev("poet") == c.rev(number)
        for rev in (c.rev(9), c.rev(2)[:7], c.rev(1)):
            refused = await back(rev)
            assert refused.status_code == 404 and c.rev(3)[:12] in refused.text
            assert ("8 or more are needed" in refused.text) == (len(rev) == 7)

    run(scenario)


def test_a_few_take_it_at_once_and_the_first_alone(monkeypatch):
    monkeypatch.setattr(rollout, "AT_ONCE", 2)

    async def scenario(c, front):
        await front.add("poet", 1, pin=True)
        now, most, first = 0, [], []

        async def count(start):
            nonlocal now
            if start.dry_run:
                return
            now += 1
            most.append(now)
            await asyncio.sleep(0.02)
            now -= 1

        for daemon in c.daemons.values():
            daemon.on_commit = count
        await front.add("poet", 2, replace=True)
        assert most[0] == 1 and max(most) == 2 and len(most) == 5, (most, first)

    run(scenario, names=("a", "b", "c", "d", "e"))


def test_files_of_long_ago_leave_the_catalog():
    async def scenario(c, front):
        for number in range(1, tables.KEPT + 4):
            assert (await front.add("poet", number, replace=True)).status_code == 200
        kept = front.catalog.store.blobs.names("content/")
        assert set(kept) == front.catalog.table.contents() and len(kept) == tables.KEPT + 1

    run(scenario, names=("a",))

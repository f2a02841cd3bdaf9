"""The operator's face of a gateway: pictures of all members as of one daemon, wishes to each."""

import asyncio

import msgspec
import pytest

from lorad import wire
from lorad.board_apply import apply
from lorad.errors import LoradError
from lorad.fleet import listing, presence, watch
from lorad.wire_explain import Explained
from lorad.wire_operate import Drained
from lorad.wire_operations import Operation, OperationPage
from lorad.wire_status import Status
from lorad.wire_stream import Board, Delta
from tests.fakes.small_clusters import run
from tests.fakes.small_daemons import row


@pytest.fixture(autouse=True)
def quick_gateways(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(watch, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(listing, "FRESH_SECONDS", 0.0)


def test_status_has_a_replica_for_each_member_and_says_which_does_not_answer():
    async def scenario(c, front):
        await front.add("poet", 1)
        c.daemons["b"].state = "draining"
        await c.daemons["c"].stop()
        for _ in range(2):
            await front.members.look()
        status = await front.get("status", Status)
        assert (status.state, status.model, status.slots_total) == ("ready", "tiny", 16)
        assert status.reason == "b away: draining; c lost: it cannot be reached"
        (model,) = status.models
        states = {one.name: (one.state, one.reason) for one in model.replicas}
        assert states == {
            "a": ("ready", ""),
            "b": ("draining", ""),
            "c": ("lost", "it cannot be reached"),
        }
        assert status.adapters == {"registered": 1} and model.pool.total == 128
        await c.daemons["c"].start()

    run(scenario)


def test_a_member_that_hangs_is_shown_and_holds_nobody_up():
    async def scenario(c, front):
        c.daemons["b"].silent = True
        began = asyncio.get_running_loop().time()
        status = await front.get("status", Status)
        took = asyncio.get_running_loop().time() - began
        assert [r.state for r in status.models[0].replicas] == ["ready", "lost", "ready"]
        assert took < 4
        c.daemons["b"].silent = False

    run(scenario)


def test_lists_have_every_name_of_the_catalog_with_what_members_say_of_it():
    async def scenario(c, front):
        for name, number in (("poet", 1), ("clerk", 2), ("acme/sql", 3)):
            await front.add(name, number, labels={"for": name})
        a, b, _ = c.daemons.values()
        a.rows = (row("poet", c.rev(1), state="active", running=2, loads=1),)
        b.rows = (
            row("poet", c.rev(1), state="idle", running=0, loads=3),
            row("clerk@0000", "0" * 64, state="draining"),
        )
        page = await front.get("adapters", wire.AdapterPage)
        found = {one.name: one for one in page.items}
        assert list(found) == ["acme/sql", "clerk", "poet"] and page.total == 3
        poet = found["poet"]
        assert (poet.state, poet.running, poet.loads, poet.replicas) == ("active", 2, 4, ("a", "b"))
        assert poet.labels == {"for": "poet"} and found["clerk"].state == "registered"
        assert (found["acme/sql"].tenant, found["clerk"].rank) == ("acme", 8)
        first = await front.get("adapters?limit=2&sort=-name", wire.AdapterPage)
        rest = await front.get(
            f"adapters?limit=2&sort=-name&cursor={first.cursor}", wire.AdapterPage
        )
        names = [one.name for one in (*first.items, *rest.items)]
        assert names == ["poet", "clerk", "acme/sql"] and rest.cursor is None
        active = await front.get("adapters?state=active&q=oe", wire.AdapterPage)
        assert [one.name for one in active.items] == ["poet"]
        slots = await front.get("slots", wire.SlotPage)
        assert {one.name for one in slots.items} == {"poet", "clerk@0000"}
        assert slots.slots_total == 24

    run(scenario)


def test_who_gave_an_order_sees_what_it_did_though_somebody_looked_just_before(monkeypatch):
    async def scenario(c, front):
        monkeypatch.setattr(listing, "FRESH_SECONDS", 60.0)
        await front.get("adapters", wire.AdapterPage)
        c.daemons["a"].rows = (row("poet", c.rev(1), state="idle"),)
        page = await front.get("adapters", wire.AdapterPage)
        assert page.items == (), "the picture of before does for whoever gave none"
        await front.add("poet", 1)
        (poet,) = (await front.get("adapters", wire.AdapterPage)).items
        assert poet.replicas == ("a",)

    run(scenario)


def test_one_adapter_is_shown_and_explained_wherever_it_is():
    async def scenario(c, front):
        await front.add("poet", 1)
        await front.add("poet", 2, replace=True)
        detail = await front.get("adapters/poet?show=1", wire.AdapterDetail)
        assert (detail.adapter.rev, detail.history) == (c.rev(2), (c.rev(1),))
        for daemon in c.daemons.values():
            daemon.serves = {}
        told = await front.get("adapters/poet/explain", Explained)
        assert not told.served and "no member has taken it in" in told.why
        answer = await front.http.get("/admin/v1/adapters/nobody")
        assert answer.json()["error"]["code"] == "model_not_found"

    run(scenario)


def test_a_pin_is_on_every_member_and_one_that_refuses_it_keeps_the_table_as_it_was():
    async def scenario(c, front):
        await front.add("poet", 1)

        async def full(start):
            if start.pin:
                raise LoradError("no_room", "pins leave too little room")

        c.daemons["b"].on_commit = full
        body = {"names": ["poet", "nobody"]}
        answer = await front.http.post("/admin/v1/pin", json=body)
        results = msgspec.json.decode(answer.content, type=wire.Results)
        poet, nobody = results.items
        assert (poet.ok, poet.code) == (False, "no_room") and poet.message.startswith("b: ")
        assert (nobody.ok, nobody.code) == (False, "model_not_found")
        assert not front.catalog.table.entries["poet"].pin
        c.daemons["b"].on_commit = None
        await front.http.post("/admin/v1/pin", json=body)
        assert front.catalog.table.entries["poet"].pin
        assert all(d.serves == {"poet": c.rev(1)} for d in c.daemons.values())
        patch = {"priority": 70, "labels": {"a": "b"}}
        shown = await front.http.patch("/admin/v1/adapters/poet", json=patch)
        assert shown.json()["adapter"]["priority"] == 70
        for daemon in c.daemons.values():
            assert daemon.wishes[-1][2].priority == 70

    run(scenario)


def test_what_is_loaded_goes_to_one_member_and_what_is_evicted_leaves_all():
    async def scenario(c, front):
        await front.add("poet", 1, pin=True)
        for daemon in c.daemons.values():
            daemon.wishes = []
        answer = await front.http.post("/admin/v1/load", json={"names": ["poet"]})
        assert answer.json()["items"][0]["ok"]
        assert [len(d.wishes) for d in c.daemons.values()].count(1) == 1
        answer = await front.http.post("/admin/v1/evict", json={"names": ["poet"], "force": True})
        assert answer.json()["items"][0]["ok"]
        for daemon in c.daemons.values():
            word, ask = daemon.wishes[-1]
            assert word == "evict" and ask["force"] and ask["names"] == ["poet"]
        for daemon in c.daemons.values():
            daemon.serves, daemon.wishes = {}, []
        await front.http.post("/admin/v1/load", json={"names": ["poet"]})
        assert sum(d.serves == {"poet": c.rev(1)} for d in c.daemons.values()) == 1

    run(scenario)


def test_what_is_verified_is_verified_wherever_it_is():
    async def scenario(c, front):
        await front.add("poet", 1)
        body = {"names": ["poet"]}
        found = await front.http.post("/admin/v1/verify", json=body)
        (item,) = found.json()["items"]
        assert item["ok"], "those that do not have it have nothing to say"
        await front.http.post("/admin/v1/pin", json=body)
        bad = LoradError("adapter_damaged", "a tensor differs")
        c.daemons["b"].refuses["verify"] = bad
        found = await front.http.post("/admin/v1/verify", json=body)
        (item,) = found.json()["items"]
        assert (item["ok"], item["message"]) == (False, "b: a tensor differs")
        assert (await front.http.post("/admin/v1/verify", json={"names": ["x"]})).status_code == 404

    run(scenario)


def test_all_are_drained_and_resumed():
    async def scenario(c, front):
        answer = await front.http.post("/admin/v1/drain", json={"timeout_s": 1})
        drained = msgspec.json.decode(answer.content, type=Drained)
        assert drained.draining and drained.running == 3
        assert all(d.wishes[-1][0] == "drain" for d in c.daemons.values())
        answer = await front.http.post("/admin/v1/resume", json={})
        assert answer.json()["draining"] is False

    run(scenario)


def test_a_name_that_is_drained_is_turned_away_by_every_gateway():
    async def scenario(c, one, other):
        await one.add("poet", 1)
        answer = await one.http.post("/admin/v1/drain", json={"name": "poet", "timeout_s": 1})
        assert answer.json()["changed"] is True
        for front in (one, other):
            refused = await front.ask("poet")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert (await front.get("status", Status)).drained == ("poet",)
        assert not any(daemon.asked for daemon in c.daemons.values()), "no member took it in for it"
        await other.http.post("/admin/v1/resume", json={"name": "poet"})
        assert {(await front.ask("poet")).status_code for front in (one, other)} == {200}
        unknown = await one.http.post("/admin/v1/drain", json={"name": "nobody"})
        assert unknown.status_code == 404

    run(scenario, gateways=2)


def test_events_of_members_are_told_with_their_names_and_old_ones_are_not():
    async def scenario(c, front):
        ring, a = front.gateway.ring, c.daemons["a"]
        item = {"time": "2026-01-01T00:00:00Z", "type": "slot.load", "name": "poet"}
        a.events = (wire.EventItem(id=1, **item),)
        await asyncio.sleep(0.1)
        before = ring.last_id
        a.events += (wire.EventItem(id=2, replica="1", **item),)
        while ring.last_id == before:
            await asyncio.sleep(0.005)
        (event,) = ring.newest(1)
        assert (event.type, event.name, event.replica) == ("slot.load", "poet", "a/1")
        a.state = "draining"
        await front.members.look()
        while ring.newest(1)[0].type != "member.away":
            await asyncio.sleep(0.005)
        page = await front.get("events", wire.EventPage)
        assert page.items[-1].replica == "a" and page.instance_id == ring.instance_id

    run(scenario)


def test_the_live_stream_is_that_of_a_daemon():
    async def scenario(c, front):
        c.daemons["a"].rows = (row("poet", c.rev(1), state="active", running=1),)
        c.daemons["b"].rows = (row("poet", c.rev(1), running=2),)
        board = await front.get("board", Board)
        assert board.slots["poet"].replicas == ("a", "b") and board.slots["poet"].running == 3
        assert board.load.tokens_per_second == 6.0
        async with front.http.stream("GET", "/admin/v1/stream?interval=0.2") as answer:
            lines = answer.aiter_lines()
            seen = [await _message(lines, Board)]
            c.daemons["a"].rows = ()
            while "poet" in seen[-1].slots and seen[-1].slots["poet"].replicas != ("b",):
                seen.append(apply(seen[-1], await _message(lines, Delta)))
        assert seen[-1].slots["poet"].running == 2

    run(scenario)


async def _message(lines, kind):
    """The next of that kind."""
    async for line in lines:
        if line == f"event: {kind.__name__.lower()}":
            data = (await anext(lines)).removeprefix("data: ")
            return msgspec.json.decode(data, type=kind)
    raise AssertionError("the stream ended")


def test_metrics_of_all_members_stand_together_with_their_names():
    async def scenario(c, front):
        text = (await front.http.get("/metrics")).text
        lines = text.splitlines()
        assert lines.count("# TYPE lorad_ready gauge") == 1
        at = lines.index("# TYPE lorad_ready gauge")
        assert lines[at + 1 : at + 4] == [
            f'lorad_ready{{member="{name}"}} 1.0' for name in c.daemons
        ]
        assert 'x{member="b",a="b"} 2' in lines
        assert 'lorad_gateway_members{state="ready"} 3' in lines

    run(scenario)


def test_what_makes_no_sense_of_several_is_refused_by_name():
    async def scenario(c, front):
        for method, path in (
            ("POST", "gc"),
            ("GET", "config"),
            ("POST", "reload"),
            ("GET", "registry/check"),
            ("GET", "tenants"),
            ("GET", "logs"),
        ):
            answer = await front.http.request(method, f"/admin/v1/{path}")
            error = answer.json()["error"]
            assert answer.status_code == 404 and error["message"].startswith("a gateway has no ")
            assert "\n" not in error["message"] and error["details"]["hint"]
        for verb, hint in (("load", "loractl add DIR --load"), ("unload", "loractl rm NAME")):
            answer = await front.http.post(f"/v1/{verb}_lora_adapter", json={})
            error = answer.json()["error"]
            assert error["message"] == f"a gateway has no {verb}_lora_adapter"
            assert answer.status_code == 404 and hint in error["details"]["hint"]

    run(scenario)


def test_a_pull_that_fails_is_an_operation_that_says_why():
    async def scenario(c, front):
        start = {"reference": f"http://127.0.0.1:9/{'x' * 3}", "name": "poet"}
        answer = await front.http.post("/admin/v1/pulls", json=start)
        assert answer.status_code == 202
        begun = msgspec.json.decode(answer.content, type=Operation)
        ended = await front.get(f"operations/{begun.id}?wait_ms=20000", Operation)
        assert (ended.state, ended.name) == ("failed", "poet") and ended.code and ended.message
        page = await front.get("operations", OperationPage)
        assert [op.id for op in page.items] == [begun.id]
        assert (await front.http.get("/admin/v1/operations/0")).status_code == 404

    run(scenario)


def test_members_that_serve_different_bases_by_one_name_are_told_of(caplog):
    async def scenario(c, front):
        c.daemons["a"].fingerprint = c.daemons["c"].fingerprint = "ab" * 6
        status = await front.get("status", Status)
        assert status.reason == "", "one that does not say it may be of an earlier lorad"
        c.daemons["b"].fingerprint = "cd" * 6
        words = "a and b serve different bases as tiny"
        while (await front.get("status", Status)).reason != words:
            await asyncio.sleep(0.05)
        for _ in range(2):
            await front.gateway.look()
        assert caplog.text.count(words) == 1

    run(scenario)

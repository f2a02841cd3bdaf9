"""Several gateways behind one address: a client's next request may be another one's."""

import asyncio
import itertools
import time

import msgspec
import pytest

from lorad import wire
from lorad.fleet import admin, presence, pulls, shared_uploads
from lorad.sources.errors import Cancelled
from lorad.sources.fetch import RemoteFile, Resolved
from lorad.wire_operations import Operation, OperationPage
from tests.fakes.small_clusters import files_of, run


@pytest.fixture(autouse=True)
def quick_gateways(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(pulls, "TELL_SECONDS", 0.02)


PLACE = "operations/"


def several(scenario):
    run(scenario, names=("a", "b"), gateways=2, several=True)


async def upload(fronts, name, number, **start):
    """Each request at the next gateway; the response of the commit."""
    turn = itertools.cycle(fronts)
    begin = msgspec.json.encode(wire.UploadStart(name=name, **start))
    opened = await next(turn).http.post("/admin/v1/uploads", content=begin)
    path = f"/admin/v1/uploads/{opened.json()['upload_id']}"
    for file, data in files_of(number).items():
        put = await next(turn).http.put(f"{path}/files/{file}", content=data)
        assert put.status_code == 200, put.text
    return await next(turn).http.post(f"{path}/commit", json={}), path


def test_files_may_come_to_one_and_the_other_and_be_committed_at_either():
    async def scenario(c, one, other):
        for number, fronts in ((1, (one, other)), (2, (other, one))):
            done, path = await upload(fronts, "poet", number, replace=True)
            assert done.status_code == 200 and done.json()["rev"] == c.rev(number), done.text
            again = await one.http.post(f"{path}/commit", json={})
            assert again.json()["error"]["code"] == "not_found", "it is closed"
        assert not one.catalog.store.blobs.names("uploads/")
        assert await other.rev("poet") == c.rev(2)

    several(scenario)


def test_an_upload_is_bounded_dropped_and_forgotten(monkeypatch):
    async def scenario(c, one, other):
        begin = msgspec.json.encode(wire.UploadStart(name="poet"))
        opened = await one.http.post("/admin/v1/uploads", content=begin)
        path = f"/admin/v1/uploads/{opened.json()['upload_id']}"
        odd = await other.http.put(f"{path}/files/passwd", content=b"x")
        assert odd.json()["error"]["code"] == "invalid_value"
        none = await other.http.put("/admin/v1/uploads/../files/x", content=b"x")
        assert none.status_code == 404
        put = await other.http.put(f"{path}/files/adapter_config.json", content=b"x")
        assert put.json() == {"file": "adapter_config.json", "num_bytes": 1}
        assert (await one.http.delete(path)).status_code == 204
        assert not one.catalog.store.blobs.names("uploads/")
        await one.http.post("/admin/v1/uploads", content=begin)
        later = time.time() + 2 * shared_uploads.IDLE_SECONDS
        monkeypatch.setattr(shared_uploads.SharedUploads, "_sweep", _sweep_at(later))
        await other.http.post("/admin/v1/uploads", content=begin)
        assert len(one.catalog.store.blobs.names("uploads/")) == 1

    several(scenario)


def _sweep_at(now):
    real = shared_uploads.SharedUploads._sweep

    def sweep(self):
        self._clock = lambda: now
        real(self)

    return sweep


class Fetcher:
    """Of something that takes as long as it is held."""

    def __init__(self, held):
        self.held = held

    def resolve(self, reference):
        files = tuple(RemoteFile(name, len(data)) for name, data in files_of(7).items())
        return Resolved(reference.text, files, 101, "c0ffee")

    def fetch(self, resolved, folder, progress, cancelled):
        progress(50, 101)
        while self.held:
            if cancelled():
                raise Cancelled("cancelled")
            time.sleep(0.005)
        for name, data in files_of(7).items():
            (folder / name).write_bytes(data)


def test_a_pull_is_shown_waited_for_and_cancelled_at_either(monkeypatch):
    held = []
    monkeypatch.setattr(pulls, "fetcher_for", lambda *args, **more: Fetcher(held))

    async def begin(front, **more):
        start = {"reference": "hf:acme/poet", "name": "poet", **more}
        answer = await front.http.post("/admin/v1/pulls", json=start)
        assert answer.status_code == 202, answer.text
        return msgspec.json.decode(answer.content, type=Operation)

    async def scenario(c, one, other):
        begun = await begin(one)
        ended = await other.get(f"operations/{begun.id}?wait_ms=20000", Operation)
        assert (ended.state, ended.rev, ended.commit) == ("done", c.rev(7), "c0ffee")
        assert one.catalog.table.entries["poet"].source == "hf:acme/poet"
        held.append(True)
        begun = await begin(other, name="clerk")
        shown = await one.get(f"operations/{begun.id}?wait_ms=100", Operation)
        assert (shown.state, shown.done_bytes, shown.total_bytes) == ("running", 50, 101)
        for front in (one, other):
            page = await front.get("operations", OperationPage)
            assert [op.name for op in page.items] == ["clerk", "poet"]
            live = await front.get("operations?live=true", OperationPage)
            assert [op.id for op in live.items] == [begun.id]
        ended = await one.http.delete(f"/admin/v1/operations/{begun.id}")
        assert ended.json()["state"] == "cancelled"
        assert "clerk" not in one.catalog.table.entries
        assert (await one.http.get("/admin/v1/operations/nobody")).status_code == 404

    several(scenario)


class Broken(Fetcher):
    def resolve(self, reference):
        raise ZeroDivisionError


def test_how_a_pull_ended_is_the_last_that_others_hear_of_it(monkeypatch):
    """Its word of a moment before is still being written then; and one that fails by our own fault
    has ended, too."""
    monkeypatch.setattr(pulls, "fetcher_for", lambda *args, **more: Broken([]))

    async def scenario(c, one, other):
        blobs = one.catalog.store.blobs
        put = blobs.put

        def late(key, data, **more):
            if key.startswith("operations/") and b'"running"' in data and blobs.names(PLACE):
                time.sleep(0.1)
            put(key, data, **more)

        monkeypatch.setattr(blobs, "put", late)
        start = {"reference": "hf:acme/poet", "name": "poet"}
        for _ in range(3):
            begun = (await one.http.post("/admin/v1/pulls", json=start)).json()
            ended = await one.get(f"operations/{begun['id']}?wait_ms=20000", Operation)
            assert (ended.state, ended.code) == ("failed", "internal_error")
        await one.gateway.pulls.close()
        page = await other.get("operations", OperationPage)
        assert [op.state for op in page.items] == ["failed"] * 3

    several(scenario)


def test_what_a_gateway_that_is_gone_left_running_is_forgotten(monkeypatch):
    monkeypatch.setattr(pulls, "fetcher_for", lambda *args, **more: Fetcher([]))

    async def scenario(c, one, other):
        for name, at in (("old", "2026-01-01T00:00:00Z"), ("new", "2999-01-01T00:00:00Z")):
            left = Operation(
                id=name, kind="pull", target="x", state="running", created_at=at, updated_at=at
            )
            one.catalog.store.blobs.put(f"{PLACE}{name}.json", msgspec.json.encode(left))
        start = {"reference": "hf:acme/poet", "name": "poet"}
        begun = (await one.http.post("/admin/v1/pulls", json=start)).json()
        await one.get(f"operations/{begun['id']}?wait_ms=20000", Operation)
        await one.gateway.pulls.close()
        assert one.catalog.store.blobs.names(PLACE) == sorted([f"{begun['id']}.json", "new.json"])

    several(scenario)


def test_operators_are_told_in_time_that_an_order_waits_for_a_gateway_that_is_silent(monkeypatch):
    """They heard nothing within the 30 s that `loractl` waits, though the order took effect."""
    monkeypatch.setattr(admin, "ANSWER_SECONDS", 0.3)

    async def scenario(c, one, other):
        for name, number in (("poet", 1), ("clerk", 2), ("bard", 3)):
            assert (await one.add(name, number)).status_code == 200
        assert (await one.add("bard", 4, replace=True)).status_code == 200
        for task in other.gateway._tasks:  # as after kill -9
            task.cancel()
        waits = f"it goes on, and waits for gateway {other.gateway.presence.id}, silent for"
        drain = one.http.post("/admin/v1/drain", json={"name": "poet", "timeout_s": 0})
        back = one.http.post("/admin/v1/rollback", json={"name": "bard", "timeout_s": 0.3})
        for order, what in (
            (drain, "drain poet"),
            (back, "rollback bard"),
            (one.http.delete("/admin/v1/adapters/clerk"), "rm clerk"),
        ):
            answer = await order
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (504, "deadline_exceeded")
            assert error["message"].startswith(f"{what} is not done after 0.3 s; {waits}")
        entries = one.catalog.table.entries
        assert entries["poet"].drained and "clerk" not in entries
        assert entries["bard"].rev == c.rev(3)
        assert any("clerk" in daemon.serves for daemon in c.daemons.values())
        await other.gateway.presence.leave()
        async with asyncio.timeout(10):
            while any("clerk" in daemon.serves for daemon in c.daemons.values()):
                await asyncio.sleep(0.02)

    several(scenario)


def test_a_change_that_a_member_is_slow_to_take_is_told_in_time_and_goes_on(monkeypatch):
    monkeypatch.setattr(admin, "ANSWER_SECONDS", 0.2)

    async def scenario(c, front):
        assert (await front.add("poet", 1)).status_code == 200
        goes_on = asyncio.Event()

        async def slowly(start):
            await goes_on.wait()

        for daemon in c.daemons.values():
            daemon.on_commit = slowly
        answer = await front.http.patch("/admin/v1/adapters/poet", json={"pinned": True})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (504, "deadline_exceeded")
        assert error["message"] == "set poet is not done after 0.2 s; it goes on"
        assert error["details"]["hint"] == "loractl show NAME tells when it is done"
        assert not front.catalog.table.entries["poet"].pin
        goes_on.set()
        async with asyncio.timeout(10):
            while not front.catalog.table.entries["poet"].pin:
                await asyncio.sleep(0.02)

    run(scenario)

"""A catalog in which somebody else writes, too: people with `cp` and `rm`, full disks, two adds."""

import asyncio
import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from lorad.config import Settings
from lorad.errors import LoradError
from lorad.fleet import blobs as blobs_module
from lorad.fleet import presence
from lorad.fleet.blobs import open_blobs
from lorad.fleet.catalog import Store
from tests.fakes.small_clusters import run


@pytest.fixture(autouse=True)
def quick_gateways(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.05)


def tables_of(c) -> Path:
    return c.folder / "catalog" / "table"


def test_a_copy_of_a_table_under_another_name_is_no_table():
    async def scenario(c, one):
        await one.add("poet", 1)
        kept = tables_of(c) / "000000000001.json"
        for name in ("kept.json", "000000000001 (copy).json", "0000000000019.json"):
            (tables_of(c) / name).write_bytes(kept.read_bytes())
        assert (await one.add("poet", 2, replace=True)).status_code == 200
        other = await c.front()
        assert await one.rev("poet") == await other.rev("poet") == c.rev(2)

    run(scenario, names=("a",))


def later(body, where):
    """What a later lorad might have written of it."""
    told = json.loads(body)
    entry = told["entries"]["poet"]
    {"table": told, "entry": entry, "content": entry["before"][0]}[where]["later"] = 1
    fresh = json.dumps(told).encode()
    return hashlib.sha256(fresh).hexdigest().encode() + b"\n" + fresh


@pytest.mark.parametrize("where", ["table", "entry", "content"])
def test_a_field_of_a_later_lorad_is_refused_rather_than_lost(where):
    async def scenario(c, front):
        await front.add("poet", 1)
        await front.add("poet", 2, replace=True)
        path = tables_of(c) / "000000000002.json"
        path.write_bytes(later(path.read_bytes().partition(b"\n")[2], where))
        refused = await front.add("bard", 3)
        assert "it is of another version of lorad" in refused.text
        assert await front.rev("poet") == c.rev(2), "what was known is served on"

    run(scenario, names=("a",))


def test_a_table_that_was_renamed_is_refused():
    async def scenario(c, front):
        await front.add("poet", 1)
        was = tables_of(c) / "000000000001.json"
        (tables_of(c) / "000000000002.json").write_bytes(was.read_bytes())
        answer = await front.add("poet", 2, replace=True)
        error = answer.json()["error"]
        assert error["code"] == "source_corrupt" and "it is table 1, renamed" in error["message"]

    run(scenario, names=("a",))


def test_gateways_that_know_a_table_notice_that_another_was_written_in_its_place():
    """The way out of a damaged table is to remove it.  Gateways that had read it before it was
    damaged know it still, and the next one has its number."""

    async def scenario(c, one, two):
        await one.add("poet", 1)
        await one.add("poet", 2, replace=True)
        assert await two.rev("poet") == c.rev(2)
        (tables_of(c) / "000000000002.json").unlink()
        three = await c.front()
        assert await three.rev("poet") == c.rev(1)
        assert (await three.add("poet", 3, replace=True)).status_code == 200
        assert three.catalog.table.generation == 2
        assert {await front.rev("poet") for front in (one, two, three)} == {c.rev(3)}

    run(scenario, names=("a", "b"), gateways=2)


def test_a_disk_that_is_full_keeps_names_from_moving_and_nobody_from_being_served(monkeypatch):
    async def scenario(c, front):
        await front.add("poet", 1)
        with monkeypatch.context() as context:

            def no_room(path, data):
                with open(path, "xb"):
                    raise OSError(errno.ENOSPC, "no space")

            context.setattr(blobs_module, "_write", no_room)
            refused = await front.add("poet", 2, replace=True)
            assert refused.status_code == 507, refused.text
            await asyncio.sleep(0.4)  # longer than the lease
            assert await front.rev("poet") == c.rev(1)
            assert (await front.http.get("/readyz")).status_code == 200
        there = [name for _, _, names in os.walk(c.folder / "catalog") for name in names]
        assert not [name for name in there if name.startswith(".")], "nothing is left over"
        assert (await front.add("poet", 2, replace=True)).status_code == 200
        assert await front.rev("poet") == c.rev(2)

    run(scenario, names=("a",), lease_seconds=0.2)


def test_what_a_network_file_system_says_is_one_line(tmp_path, monkeypatch):
    def stale(path, data):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(blobs_module, "_write", stale)
    blobs = open_blobs(str(tmp_path), Settings())
    for write in (blobs.create, blobs.put):
        with pytest.raises(LoradError, match="cannot be written to") as refused:
            write("table/1", b"x")
        assert refused.value.code == "source_unreachable"


def test_files_that_one_name_gives_up_stay_while_another_is_about_to_have_them():
    async def scenario(c, front):
        await front.add("poet", 1)
        daemon, go, waits = c.daemons["a"], asyncio.Event(), asyncio.Event()

        async def wait(start):
            if start.name == "bard" and not start.dry_run:
                waits.set()
                await go.wait()

        daemon.on_commit = wait
        adding = asyncio.create_task(front.add("bard", 1))
        await waits.wait()
        assert (await front.http.delete("/admin/v1/adapters/poet")).status_code == 200
        go.set()
        assert (await adding).status_code == 200
        assert front.catalog.store.files(front.catalog.table.entries["bard"].content)
        daemon.serves.clear()
        assert await front.rev("bard") == c.rev(1), "it can be taken in again"

    run(scenario, names=("a",))


def test_files_that_another_gateway_dropped_meanwhile_are_put_there_again():
    async def scenario(c, front):
        def drop(start):
            async def dropped():
                if not start.dry_run:
                    (content,) = front.catalog.store.blobs.names("content/")
                    Store(front.catalog.store.blobs).drop(content)

            return dropped()

        c.daemons["a"].on_commit = drop
        assert (await front.add("poet", 1)).status_code == 200
        c.daemons["a"].on_commit = None
        c.daemons["a"].serves.clear()
        assert await front.rev("poet") == c.rev(1)

    run(scenario, names=("a",))


@pytest.mark.parametrize("damaged", ["adapter_model.safetensors", "files.json"])
@pytest.mark.parametrize("data", [b"half", None])
def test_damaged_files_are_whole_again_when_they_are_added_again(damaged, data):
    async def scenario(c, front):
        await front.add("poet", 1)
        blobs, content = front.catalog.store.blobs, front.catalog.table.entries["poet"].content
        key = f"content/{content}/{damaged}"
        blobs.remove(key) if data is None else blobs.put(key, data)
        c.daemons["a"].serves.clear()
        assert (await front.ask("poet")).status_code >= 400
        added = await front.add("poet", 1)
        assert added.status_code == 200 and added.json()["unchanged"], added.text
        while (await front.ask("poet")).status_code != 200:  # refusals are remembered a while
            for member in front.members._seats.values():
                member.daemon._refused.clear()

    run(scenario, names=("a",))


def test_nothing_is_put_where_the_catalog_is_not_mounted():
    async def scenario(c, front):
        await front.add("poet", 1)
        (c.folder / "catalog").rename(c.folder / "away")
        refused = await front.add("bard", 2)
        assert refused.status_code >= 400 and "is gone" in refused.text, refused.text
        assert not (c.folder / "catalog").exists()
        (c.folder / "away").rename(c.folder / "catalog")
        assert (await front.add("bard", 2)).status_code == 200

    run(scenario, names=("a",))


def test_a_name_that_was_drained_stays_drained_with_other_content():
    async def scenario(c, front):
        await front.add("poet", 1)
        assert (await front.http.post("/admin/v1/drain", json={"name": "poet"})).status_code == 200
        assert (await front.add("poet", 2, replace=True)).status_code == 200
        assert (await front.ask("poet")).json()["error"]["code"] == "draining"
        await front.http.post("/admin/v1/rollback", json={"name": "poet"})
        assert (await front.ask("poet")).json()["error"]["code"] == "draining"
        await front.http.post("/admin/v1/resume", json={"name": "poet"})
        assert await front.rev("poet") == c.rev(1)

    run(scenario, names=("a",))


def test_that_a_name_is_drained_is_told_to_whoever_may_know_that_it_is_there():
    async def scenario(c, front):
        await front.add("poet", 1)
        assert (await front.http.post("/admin/v1/drain", json={"name": "poet"})).status_code == 200
        c.daemons["a"].asked.clear()
        refused = await front.ask("poet")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await front.http.get("/v1/models/poet")).status_code == 200, "its card is shown"
        c.daemons["a"].secrets = ("poet",)
        refused = await front.ask("poet")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert not c.daemons["a"].asked, "and nothing of it was generated"

    run(scenario, names=("a",))


def test_a_head_of_the_models_is_answered():
    async def scenario(c, front):
        await front.add("poet", 1)
        for path in ("/v1/models", "/v1/models/poet"):
            assert (await front.http.head(path)).status_code == 200

    run(scenario, names=("a",))

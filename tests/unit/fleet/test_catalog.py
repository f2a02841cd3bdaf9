"""The shared catalog in a folder and in a bucket of moto's: written by several, and damaged."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.core.botocore_stubber import BotocoreStubber

from lorad.config import Settings
from lorad.errors import LoradError
from lorad.fleet import catalog as catalogs
from lorad.fleet import table as tables
from lorad.fleet.blobs import open_blobs
from lorad.fleet.catalog import Catalog, open_catalog
from lorad.fleet.table import Entry

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"\1" * 3000}


@pytest.fixture
def bucket(monkeypatch):
    """An empty one of moto's, which answers one request at a time: of two that put one object, it
    would close what the other still reads."""
    process, turn = BotocoreStubber.process_request, threading.Lock()

    def one_by_one(self, request):
        with turn:
            return process(self, request)

    monkeypatch.setattr(BotocoreStubber, "process_request", one_by_one)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "somebody")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket="adapters")
        yield "s3://adapters/team/a"


@pytest.fixture(params=["folder", "bucket"])
def where(request, tmp_path):
    """Of an empty place for a catalog."""
    if request.param == "folder":
        return str(tmp_path / "shared")
    return request.getfixturevalue("bucket")


@pytest.fixture
def adapter(tmp_path):
    def make(**files):
        folder = tmp_path / f"in-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, data in {**FILES, "README.md": b"no", **files}.items():
            (folder / name).write_bytes(data)
        return folder

    return make


def entry(name, rev="ab" * 32, content="cd" * 32, **more):
    return Entry(name=name, rev=rev, content=content, model="tiny", **more)


def add(name, **more):
    return lambda table: tables.moved(table, entry(name, **more))


def test_what_one_gateway_writes_another_reads(where):
    async def scenario():
        one, other = open_catalog(where), open_catalog(where)
        assert (await other.look()).generation == 0
        await one.change("add a", add("a"))
        await one.change("add b", add("b"))
        table = await other.look()
        assert (table.generation, sorted(table.entries)) == (2, ["a", "b"])
        assert table.entries["a"].generation == 1
        await other.change("rm a", lambda table: tables.without(table, "a"))
        assert list((await one.look()).entries) == ["b"]

    asyncio.run(scenario())


def test_of_changes_at_once_none_is_lost(where):
    async def scenario():
        writers = [open_catalog(where) for _ in range(4)]
        await asyncio.gather(
            *(
                one.change("add", add(f"a{i}-{j}"))
                for i, one in enumerate(writers)
                for j in range(3)
            )
        )
        table = await open_catalog(where).look()
        assert (table.generation, len(table.entries)) == (12, 12)

    asyncio.run(scenario())


def test_an_edit_that_has_a_reason_against_it_leaves_everything_as_it_was(where):
    async def scenario():
        one = open_catalog(where)
        await one.change("add a", add("a"))

        def refuse(table):
            raise LoradError("conflict", "somebody else was faster")

        with pytest.raises(LoradError, match="faster"):
            await one.change("add a", refuse)
        assert (await open_catalog(where).look()).generation == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-9], lambda d: d.replace(b'"a"', b'"b"'), lambda d: b""]
)
def test_a_damaged_table_is_refused_in_one_line_and_what_was_known_stays(where, damage):
    async def scenario():
        one = open_catalog(where)
        await one.change("add a", add("a"))
        other = open_catalog(where)
        await other.look()
        await one.change("add c", add("c"))
        key = "table/000000000002.json"
        one.store.blobs.put(key, damage(one.store.blobs.read(key)))
        with pytest.raises(LoradError) as refused:
            await other.look()
        assert refused.value.code == "source_corrupt" and key in refused.value.message
        assert "\n" not in refused.value.message
        assert other.trouble is refused.value and list(other.table.entries) == ["a"]
        with pytest.raises(LoradError):
            await open_catalog(where).look()
        one.store.blobs.remove(key)
        await other.look()
        assert other.trouble is None

    asyncio.run(scenario())


def test_a_catalog_that_is_gone_is_not_an_old_one_that_did_not_change(where):
    async def scenario():
        one = open_catalog(where)
        await one.change("add a", add("a"))
        assert (await one.look()).generation == 1
        one.store.blobs.remove("table/000000000001.json")
        with pytest.raises(LoradError, match="is gone"):
            await one.look()
        assert list(one.table.entries) == ["a"] and one.trouble is not None

    asyncio.run(scenario())


def test_files_come_back_as_they_were_and_only_those_that_adapters_have(where, adapter):
    async def scenario():
        one = open_catalog(where)
        content = await one.add(adapter())
        files = one.store.files(content)
        assert {f.name: b"".join(one.store.chunks(content, f)) for f in files} == FILES
        assert await one.add(adapter()) == content, "the same files are there once"
        assert await one.add(adapter(**{"adapter_config.json": b"[]"})) != content

    asyncio.run(scenario())


def test_files_that_were_changed_or_cut_are_refused_before_their_last_bytes(
    where, adapter, monkeypatch
):
    monkeypatch.setattr("lorad.fleet.blobs.CHUNK_BYTES", 1000)

    async def scenario():
        one = open_catalog(where)
        content = await one.add(adapter())
        key = f"content/{content}/adapter_model.safetensors"
        file = one.store.files(content)[1]
        for data in (b"\1" * 2999 + b"\2", b"\1" * 2000, b""):
            one.store.blobs.put(key, data)
            got = bytearray()
            with pytest.raises(LoradError, match="not what was put there"):
                for piece in one.store.chunks(content, file):
                    got += piece
            assert len(got) < len(data) or not data
        one.store.blobs.put(f"content/{content}/files.json", b'{"files":[]}')
        with pytest.raises(LoradError, match="not what was put there"):
            one.store.files(content)

    asyncio.run(scenario())


def test_files_without_their_list_are_not_there_and_are_put_there_again(where, adapter):
    async def scenario():
        one = open_catalog(where)
        content = await one.add(adapter())
        one.store.blobs.remove(f"content/{content}/files.json")
        with pytest.raises(LoradError, match="has no files"):
            one.store.files(content)
        assert await one.add(adapter()) == content and one.store.files(content)

    asyncio.run(scenario())


def test_files_go_only_when_no_name_means_them_nor_meant_them_lately(where, adapter):
    async def scenario():
        one = open_catalog(where)
        first = await one.add(adapter())
        second = await one.add(adapter(**{"adapter_config.json": b"[]"}))
        await one.change("add", add("a", content=first))
        await one.change("move", add("a", content=second, rev="ef" * 32))
        await one.drop_unused(first)
        assert one.store.files(first)
        await one.change("rm", lambda table: tables.without(table, "a"))
        await one.drop_unused(first)
        with pytest.raises(LoradError, match="has no files"):
            one.store.files(first)
        assert one.store.files(second)

    asyncio.run(scenario())


def test_old_generations_are_pruned_and_a_reader_that_was_away_finds_the_newest(where, monkeypatch):
    monkeypatch.setattr(catalogs, "KEPT_GENERATIONS", 3)

    async def scenario():
        one, other = open_catalog(where), open_catalog(where)
        await one.change("add", add("a0"))
        await other.look()
        for i in range(1, 7):
            await one.change("add", add(f"a{i}"))
        assert len(one.store.blobs.names("table/")) <= 2 * 3
        assert (await other.look()).generation == 7 and len(other.table.entries) == 7

    asyncio.run(scenario())


def test_a_name_remembers_what_it_meant():
    table = tables.Table()
    for i in range(8):
        entries = tables.moved(table, entry("a", rev=f"{i}" * 64, content=f"{i}" * 64))
        table = tables.Table(generation=table.generation + 1, entries=dict(entries))
    found = table.entries["a"]
    assert [c.rev[0] for c in found.before] == ["6", "5", "4", "3"]
    back = tables.moved(table, entry("a", rev="6" * 64, content="6" * 64))["a"]
    assert [c.rev[0] for c in back.before] == ["7", "5", "4", "3"]


def test_a_request_means_the_name_or_the_revision_that_it_has_now():
    table = tables.Table(entries={"a": entry("a")})
    assert tables.find(table, "a") is tables.find(table, "a@abababab") is table.entries["a"]
    for other in ("b", "a@", "a@ababab", "a@abababac", "hf:a/b"):
        assert tables.find(table, other) is None


def test_of_writers_in_threads_one_creates(tmp_path):
    blobs, won = open_blobs(str(tmp_path / "s"), Settings()), []
    threads = [
        threading.Thread(target=lambda i=i: won.append(blobs.create("table/1", b"%d" % i)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert [p.name for p in Path(tmp_path / "s/table").iterdir()] == ["1"], "nothing is left over"


def test_a_store_that_overwrites_is_refused_and_one_that_is_busy_asked_again(bucket, monkeypatch):
    blobs = open_blobs(bucket, Settings())
    put, busy = blobs._client.put_object, [True]

    def careless(**asked):
        asked.pop("IfNoneMatch", None)
        return put(**asked)

    monkeypatch.setattr(blobs._client, "put_object", careless)
    with pytest.raises(LoradError, match="overwrites what it was told to create once"):
        blobs.create("table/1", b"x")
    assert blobs.names("table/") == []

    def conflicting(**asked):
        if busy:
            busy.pop()
            told = {"Error": {"Code": "ConditionalRequestConflict"}}
            told["ResponseMetadata"] = {"HTTPStatusCode": 409}
            raise ClientError(told, "PutObject")
        return put(**asked)

    monkeypatch.setattr(blobs._client, "put_object", conflicting)
    assert blobs.create("table/1", b"x") and not blobs.create("table/1", b"y")


def test_a_file_system_without_hard_links_is_refused(tmp_path, monkeypatch):
    def link(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    blobs = open_blobs(str(tmp_path / "s"), Settings())
    with pytest.raises(LoradError, match="has no hard links"):
        blobs.create("table/1", b"x")
    assert not list(Path(tmp_path / "s/table").iterdir())


def test_a_link_whose_answer_was_lost_was_made_all_the_same(tmp_path, monkeypatch):
    real = os.link

    def link(*paths):
        real(*paths)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr("os.link", link)
    blobs = open_blobs(str(tmp_path / "s"), Settings())
    assert blobs.create("table/1", b"x")
    monkeypatch.undo()
    assert not blobs.create("table/1", b"y") and blobs.read("table/1") == b"x"


def test_a_place_that_is_none_is_refused():
    for word in ("gs://bucket", "relative/path", ""):
        with pytest.raises(LoradError, match="no place for a catalog"):
            open_catalog(word)
    assert isinstance(open_catalog("/a"), Catalog)

"""Garbage: what is taken for it, what never is, and that a dry run touches nothing."""

import asyncio
import errno
import os

import pytest

from lorad import wire
from lorad.errors import LoradError
from lorad.registry import failpoints


@pytest.fixture(autouse=True)
def no_hook():
    yield
    failpoints.set_hook(None)


def full_at(place):
    def hook(name):
        if name == place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failpoints.set_hook(hook)


def told(garbage):
    return [(item.kind, item.rev, item.layout) for item in garbage.items]


async def litter(w):
    """One piece of each kind; returns how they are told."""
    await w.add("served", 1)
    await w.add("gone", 2)
    w.registry.remove("gone").result()  # as a crash before the collection leaves it
    w.names.refresh("gone")
    unknown = w.store.path("e" * 64)
    unknown.mkdir()
    (unknown / "adapter_config.json").write_text("{}")
    old = w.store.packed(w.rev(1), "oldlayout")
    old.write_bytes(bytes(100))
    old.with_suffix(".sums").write_bytes(bytes(10))
    aside = w.store.directory / ".staging" / "gone-1"
    aside.mkdir()
    (aside / "file").write_bytes(bytes(7))
    half = w.store.path(w.rev(1)) / "packed-x.bin.999999999.tmp"
    half.write_bytes(bytes(5))
    return [
        ("revision", w.rev(2), ""),
        ("unknown", "e" * 64, ""),
        ("packed", w.rev(1), "oldlayout"),
        ("leftover", "gone-1", ""),
        ("leftover", half.name, ""),
    ]


def everything(w):
    return sorted(str(path) for path in w.store.directory.rglob("*") if ".cards" not in str(path))


def test_a_dry_run_names_each_piece_with_its_reason_and_touches_nothing(world):
    async def scenario(w):
        pieces = await litter(w)
        before = everything(w)
        found = await w.housekeeping.gc(wire.GcAsk(dry_run=True))
        assert sorted(told(found)) == sorted(pieces)
        assert found.dry_run and all(item.why and item.num_bytes for item in found.items)
        sizes = {item.kind: item.num_bytes for item in found.items if item.kind == "packed"}
        assert sizes == {"packed": 110}
        assert found.num_bytes == sum(item.num_bytes for item in found.items)
        assert everything(w) == before

    world(scenario)


def test_it_removes_what_it_named_and_nothing_else(world):
    async def scenario(w):
        pieces = await litter(w)
        done = await w.housekeeping.gc(wire.GcAsk())
        assert sorted(told(done)) == sorted(pieces)
        assert (await w.housekeeping.gc(wire.GcAsk())).items == ()
        assert w.store.revs() == {w.rev(1)}
        assert w.store.packed(w.rev(1), w.info.layout).exists()
        assert done.used_bytes == w.store.used_bytes()
        w.store.room.forget()
        assert done.used_bytes == w.store.used_bytes()  # kept up as counted anew
        await w.revisions.load(w.rev(1))

    world(scenario)


def test_what_a_name_serves_or_waits_for_a_request_uses_or_an_operator_kept_is_no_garbage(world):
    async def scenario(w):
        await w.add("served", 1)
        await w.add("leased", 2)
        w.adapters.lease(w.rev(2))
        await w.adapters.remove("leased")
        await w.add("kept", 3)
        await w.adapters.remove("kept", keep_files=True)
        w.bad_packs[w.rev(4)] = "E_DAMAGED"
        await w.tasks.settle()
        assert told(await w.housekeeping.gc(wire.GcAsk())) == []
        assert w.store.revs() == {w.rev(1), w.rev(2), w.rev(3)}
        w.adapters.release(w.rev(2))
        await w.tasks.settle()
        assert w.store.revs() == {w.rev(1), w.rev(3)}

    world(scenario)


def test_what_is_just_arriving_is_left_alone(world):
    async def scenario(w):
        folder = w.store.path(w.rev(1))
        folder.mkdir()
        async with w.revisions.shelf.hold(w.rev(1)):
            assert told(await w.housekeeping.gc(wire.GcAsk(dry_run=True))) == []
            await w.housekeeping.gc(wire.GcAsk())
            assert folder.exists()
        await w.housekeeping.gc(wire.GcAsk())
        assert not folder.exists()

    world(scenario)


def test_adds_and_removals_beside_it_lose_nothing(world):
    async def scenario(w):
        async def churn(n):
            for _ in range(4):
                await w.add(f"a{n}", n)
                await w.adapters.remove(f"a{n}", forget=True)
            await w.add(f"a{n}", n)

        async def tidy():
            for _ in range(10):
                await w.housekeeping.gc(wire.GcAsk())

        await asyncio.gather(*(churn(n) for n in range(1, 5)), tidy())
        await w.tasks.settle()
        assert w.store.revs() == {w.rev(n) for n in range(1, 5)}
        for n in range(1, 5):
            assert w.adapters.resolve(f"a{n}").rev == w.rev(n)
            await w.revisions.load(w.rev(n))
        assert told(await w.housekeeping.gc(wire.GcAsk(dry_run=True))) == []

    world(scenario)


def test_before_the_engine_says_its_layout_no_packed_file_is_called_stale(world):
    async def pack(w):
        await w.add("a", 1)

    world(pack)

    async def scenario(w):
        assert told(await w.housekeeping.gc(wire.GcAsk(dry_run=True))) == []

    world(scenario, start=False)


def test_a_round_at_the_start_takes_what_a_crash_left_and_what_an_older_layout_packed(
    world, eventually
):
    async def scenario(w):
        pieces = await litter(w)
        running = w.tasks.spawn(w.housekeeping.run())
        await eventually(lambda: "store.collected" in w.types())
        assert w.store.revs() == {w.rev(1)} and len(pieces) == 5
        assert not w.store.packed(w.rev(1), "oldlayout").exists()
        running.cancel()

    world(scenario)


def test_what_a_recovered_registry_may_have_forgotten_only_an_operator_removes(world):
    async def scenario(w):
        pieces = await litter(w)
        w.registry.report.lost.append("the card of somebody cannot be read")
        await w.housekeeping._round()
        left = await w.housekeeping.gc(wire.GcAsk(dry_run=True))
        assert told(left) == [pieces[1]]
        await w.housekeeping.gc(wire.GcAsk())
        assert w.store.revs() == {w.rev(1)}

    world(scenario)


def test_a_removal_on_a_full_disk_is_not_lost_and_the_next_round_frees_its_files(world):
    async def scenario(w):
        await w.add("a", 1)
        await w.adapters.remove("a")
        full_at("write.begun")
        await w.tasks.settle()
        failpoints.set_hook(None)
        assert w.tasks.failures == 0
        await w.housekeeping._round()
        assert w.store.revs() == set()

    world(scenario)


def test_a_registry_that_is_full_fails_a_gc_in_words(world):
    async def scenario(w):
        await litter(w)

        def full(place):
            if place == "write.begun":
                raise LoradError("insufficient_storage", "no space")

        failpoints.set_hook(full)
        with pytest.raises(LoradError, match="no space"):
            await w.housekeeping.gc(wire.GcAsk())
        failpoints.set_hook(None)
        assert len((await w.housekeeping.gc(wire.GcAsk())).items) == 5

    world(scenario)


def closed(*args, **options):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_store_that_cannot_be_written_to_is_told_in_a_line(world, monkeypatch):
    async def scenario(w):
        await litter(w)
        monkeypatch.setattr(w.store, "remove", closed)
        with pytest.raises(LoradError) as caught:
            await w.housekeeping.gc(wire.GcAsk())
        assert caught.value.code == "insufficient_storage"
        assert caught.value.message.startswith("cannot remove from the store: Read-only file")
        monkeypatch.undo()
        assert ("unknown", "e" * 64, "") in told(await w.housekeeping.gc(wire.GcAsk()))

    world(scenario)


def test_files_that_cannot_be_marked_are_not_kept_and_their_name_stays(world, monkeypatch):
    async def scenario(w):
        await w.add("served", 1)
        monkeypatch.setattr("pathlib.Path.touch", closed)
        with pytest.raises(LoradError) as caught:
            await w.adapters.remove("served", keep_files=True)
        assert caught.value.code == "insufficient_storage" and "kept" in caught.value.message
        assert not w.revisions.shelf.kept and w.registry.get("served") is not None

    world(scenario)

"""A store that is full: who leaves it, in which order, and who never does."""

import asyncio
import json
import shutil

import pytest

from engine.errors import AdapterInvalid
from engine.messages import AddRevision, RemoveRevision
from lorad import disk
from lorad.errors import LoradError
from lorad.service.explain import Explaining

#: Of one adapter of these tests, packed: two blocks.
PACKED = 2 << 16
#: Its own files are a few dozen bytes.
OWN = 100
COMMIT = "0" * 40


def limit(w, adapters):
    """A budget that holds so many packed adapters."""
    w.store.room.budget_bytes = adapters * (PACKED + OWN)


def packed(w):
    """Numbers of the adapters that are packed, by `add`'s n."""
    return {n for n in range(1, 9) if w.store.packed(w.rev(n), w.info.layout).exists()}


async def refused(adding):
    with pytest.raises(LoradError) as caught:
        await adding
    assert (caught.value.code, caught.value.exit) == ("insufficient_storage", 9)
    return caught.value


async def ask(w, name):
    """What a request does to the files of its adapter."""
    rev = w.adapters.resolve(name).rev
    w.adapters.lease(rev)
    await w.revisions.prepare_for_request(rev)
    w.adapters.release(rev)
    await w.adapters.flush()


def test_the_packed_file_that_was_not_used_for_longest_makes_way_and_is_packed_again(world):
    async def scenario(w):
        limit(w, 3)
        for n in (1, 2, 3):
            await w.add(f"a{n}", n)
        await ask(w, "a1")
        await w.add("a4", 4)
        assert packed(w) == {1, 3, 4}
        assert w.types("a2")[-1] == "adapter.unpacked"
        assert w.adapters.resolve("a2").rev == w.rev(2)
        assert w.listing.page().items[1].state == "registered"
        w.packed.clear()
        await ask(w, "a2")
        assert (w.packed, packed(w)) == ([w.rev(2)], {1, 2, 4})
        assert w.store.used_bytes() <= w.store.room.budget_bytes
        # Never removed from the engine in between: it would have lost its cached KV.
        assert not w.engine.kinds(RemoveRevision)
        assert [c.manifest.rev for c in w.engine.kinds(AddRevision)].count(w.rev(2)) == 2

    world(scenario)


def test_what_is_resident_pinned_leased_or_in_ram_stays_and_the_refusal_says_so(world):
    async def scenario(w):
        limit(w, 4)
        await w.add("gpu", 1, load=True)
        await w.add("pinned", 2, pin=True)
        await w.add("ram", 3)
        await w.revisions.load(w.rev(3), "ram")
        await w.add("asked", 4)
        w.adapters.lease(w.rev(4))
        error = await refused(w.add("more", 5))
        assert packed(w) == {1, 2, 3, 4}
        assert w.registry.get("more") is None and not w.store.has(w.rev(5))
        assert list((w.store.directory / ".staging").iterdir()) == []
        budget = w.store.room.budget_bytes
        assert f"budget is {budget} bytes" in error.message
        assert (
            "files of 4 adapters" in error.message and f"packed files {4 * PACKED}" in error.message
        )
        assert "loractl rm" in error.hint and "raise [store] budget" in error.hint
        w.adapters.release(w.rev(4))
        await w.add("more", 5)
        assert packed(w) == {1, 2, 3, 5}

    world(scenario)


def test_garbage_goes_before_anything_that_is_of_use(world):
    async def scenario(w):
        limit(w, 3)
        await w.add("a", 1)
        await w.add("b", 2)
        unknown = w.store.path("f" * 64)
        unknown.mkdir()
        (unknown / "adapter_model.safetensors").write_bytes(bytes(PACKED))
        w.store.room.recount("f" * 64)
        await w.add("c", 3)
        assert packed(w) == {1, 2, 3}
        assert not unknown.exists()

    world(scenario)


def test_two_that_arrive_at_once_do_not_take_the_same_room(world):
    async def scenario(w):
        limit(w, 1)
        done = await asyncio.gather(w.add("a", 1), w.add("b", 2), return_exceptions=True)
        errors = [error for error in done if isinstance(error, Exception)]
        assert [error.code for error in errors] in ([], ["insufficient_storage"])
        assert len(packed(w)) == 1
        assert w.store.used_bytes() <= w.store.room.budget_bytes + 2 * OWN

    world(scenario)


def test_content_that_is_there_under_another_name_needs_no_room(world):
    async def scenario(w):
        limit(w, 1)
        await w.add("a", 1, load=True)
        await w.add("b", 1)
        assert w.adapters.resolve("b").rev == w.rev(1)

    world(scenario)


def test_a_start_packs_ahead_only_where_nobody_else_pays_for_it(world):
    async def register(w):
        for n in (1, 2, 3):
            await w.add(f"a{n}", n)
            await w.revisions.unpack(w.rev(n), (w.info.layout,))
        assert packed(w) == set()

    world(register)

    async def scenario(w):
        limit(w, 2)
        await w.start()
        await w.tasks.settle()
        assert len(packed(w)) == 2 and len(w.packed) == 2

    world(scenario, start=False)


def test_a_budget_that_was_lowered_is_kept_by_the_next_round(world):
    async def scenario(w):
        for n in (1, 2, 3):
            await w.add(f"a{n}", n)
        limit(w, 1)
        await w.housekeeping._round()
        assert packed(w) == {3}
        w.store.room.budget_bytes = 5  # less than the adapters themselves: told, and lived with
        await w.housekeeping._round()
        assert packed(w) == set()
        assert {w.adapters.resolve(f"a{n}").rev for n in (1, 2, 3)} == {w.rev(n) for n in (1, 2, 3)}

    world(scenario)


def test_a_full_disk_makes_packed_files_leave_too(world, monkeypatch):
    """`budget` auto is what the disk holds."""

    async def scenario(w):
        await w.add("a", 1)
        await w.add("b", 2)
        free = {"bytes": PACKED - 1}
        drop = w.store.drop_packed

        def dropping(rev, layouts):
            free["bytes"] += PACKED
            return drop(rev, layouts)

        monkeypatch.setattr(w.store, "drop_packed", dropping)
        monkeypatch.setattr(disk, "free_bytes", lambda path: free["bytes"])
        await w.add("c", 3)
        assert packed(w) == {2, 3}
        free["bytes"] = -2 * PACKED
        error = await refused(w.add("d", 4))
        assert "disk is full" in error.message and "bytes are needed" in error.message

    world(scenario)


def test_files_that_are_staged_already_take_no_more_of_the_disk(world, monkeypatch):
    """They move: 516K that had arrived were refused with 976K free and 552K still to be written."""

    async def scenario(w):
        await w.add("a", 1)
        needed = []
        make = w.intake.make_room

        async def making(num_bytes, *staged):
            needed.append(num_bytes)
            monkeypatch.setattr(disk, "free_bytes", lambda path: num_bytes - sum(staged))
            await make(num_bytes, *staged)

        w.intake.make_room = making
        await w.add("b", 2)
        assert max(needed) > PACKED and packed(w) == {1, 2}

    world(scenario)


def test_a_revision_that_was_unpacked_leaves_the_engine_with_its_name(world):
    async def scenario(w):
        await w.add("a", 1)
        assert await w.revisions.unpack(w.rev(1), (w.info.layout,)) > 0
        await w.adapters.remove("a")
        await w.tasks.settle()
        assert w.engine.revisions == {} and not w.store.has(w.rev(1))

    world(scenario)


# ----------------------------------------------------------------- what can be fetched again
def source(w, n):
    """A fake Hub: what it is asked for, and what it gives."""
    asked = []

    async def refetch(name):
        asked.append(name)
        staging = await w.adapters.stage()
        shutil.copytree(w.folder(n), staging.path, dirs_exist_ok=True)
        return staging

    w.revisions.files.refetch = refetch
    return asked


def test_without_anybody_to_fetch_it_no_adapters_own_file_ever_leaves(world):
    async def scenario(w):
        await w.add("a", 1, source=f"hf:org/repo@{COMMIT}")
        w.store.room.budget_bytes = 20
        await refused(w.add("b", 2))
        assert (w.store.path(w.rev(1)) / "adapter_config.json").exists()

    world(scenario)


def test_what_its_source_has_becomes_remote_and_comes_back_when_it_is_asked_for(world):
    async def scenario(w):
        asked = source(w, 1)
        await w.add("hub", 1, source=f"hf:org/repo@{COMMIT}")
        await w.add("mine", 2)
        w.store.room.budget_bytes = 5
        await w.housekeeping._round()
        assert [row.state for row in w.listing.page().items] == ["remote", "registered"]
        assert [row.name for row in w.listing.page(state="remote").items] == ["hub"]
        assert [row.name for row in w.listing.page(state="registered").items] == ["mine"]
        assert w.listing.counts() == {"remote": 1, "registered": 1}
        assert (w.store.path(w.rev(2)) / "adapter_config.json").exists()
        w.store.room.budget_bytes = 0
        await ask(w, "hub")
        assert asked == ["hub"] and w.listing.page().items[0].state == "registered"
        held = json.loads((w.store.path(w.rev(1)) / "adapter_config.json").read_text())
        assert held == {"n": 1} and packed(w) == {1}

    world(scenario)


def test_a_remote_adapter_outlives_a_restart_and_is_not_missing(world):
    async def send_away(w):
        source(w, 1)
        await w.add("hub", 1, source=f"hf:org/repo@{COMMIT}")
        w.store.room.budget_bytes = 5
        await w.housekeeping._round()

    world(send_away)

    async def scenario(w):
        w.registry.reconcile().result()
        asked = source(w, 1)
        await w.start()
        assert w.listing.page().items[0].state == "remote"
        assert asked == []  # nobody asked for it: a start fetches nothing
        await ask(w, "hub")
        assert asked == ["hub"]

    world(scenario, start=False)


def test_other_content_from_its_source_is_refused_and_it_stays_remote(world):
    async def scenario(w):
        source(w, 7)
        await w.add("hub", 1, source=f"hf:org/repo@{COMMIT}")
        w.store.room.budget_bytes = 5
        await w.housekeeping._round()
        w.store.room.budget_bytes = 0
        with pytest.raises(LoradError, match="holds other content now"):
            await w.revisions.prepare(w.rev(1))
        assert w.listing.page().items[0].state == "remote"
        assert list((w.store.directory / ".staging").iterdir()) == []

    world(scenario)


@pytest.mark.parametrize(
    ("origin", "more"),
    [
        ("hf:org/repo", None),
        ("hf:org/repo@main", None),
        ("https://example.org/a.tar", None),
        ("upload", None),
        (f"hf:org/repo@{COMMIT}", "tokenizer.json"),
    ],
)
def test_what_may_not_come_back_as_it_was_stays(world, origin, more):
    async def scenario(w):
        source(w, 1)
        if more:
            (w.folder(1) / more).write_text("{}")
        await w.add("a", 1, source=origin)
        w.store.room.budget_bytes = 5
        await w.housekeeping._round()
        assert w.listing.page().items[0].state == "registered"
        assert (w.store.path(w.rev(1)) / "adapter_config.json").exists()

    world(scenario)


def test_what_fits_no_longer_says_at_every_place_what_would_help(world):
    async def refuse(folder, out):
        raise AdapterInvalid("E_VOCAB_RESIZED", "too many", hint="raise it")

    async def scenario(w):
        await w.add("a", 1)
        w.store.drop_packed(w.rev(1), (w.info.layout,))
        w.link.known.discard(w.rev(1))
        packing, w.intake._pack = w.intake._pack, refuse
        explaining = Explaining(w.names, {"base": lambda rev: (w.link, "")})
        await w.model.finishing.finish(w.catalog.get("a"))
        said = await explaining.explain("a")
        assert (said.why, said.hint) == ("it could not be packed: too many", "raise it")
        w.catalog.unpacked.clear()
        for _ in range(2):  # clients come again
            with pytest.raises(LoradError, match=r"^too many; raise it$") as refused:
                await ask(w, "a")
            assert refused.value.code == "model_not_found"
        assert (await explaining.explain("a")).hint == "raise it"
        told = [e for e in w.events.newest(99) if e.level == "warn"]
        assert [e.type for e in told] == ["adapter.unfinished", "adapter.not_loaded"]
        assert all(e.message.endswith("too many; raise it") for e in told)
        w.intake._pack = packing
        await ask(w, "a")
        assert w.rev(1) not in w.catalog.unpacked

    world(scenario)


def test_a_request_that_found_no_disk_space_leaves_an_event_and_explain_tells_it(world):
    async def scenario(w):
        await w.add("a", 1)
        w.store.drop_packed(w.rev(1), (w.info.layout,))
        w.link.known.discard(w.rev(1))
        packing, w.intake._pack = w.intake._pack, w.disk_full
        for _ in range(3):  # clients come again
            with pytest.raises(LoradError):
                await ask(w, "a")
        (event,) = [e for e in w.events.newest(99) if e.type == "adapter.not_loaded"]
        assert (event.name, event.cause, event.level) == ("a", "insufficient_storage", "warn")
        assert event.message.startswith("a request could not have it packed: ")
        explaining = Explaining(w.names, {"base": lambda rev: (w.link, "")})
        said = await explaining.explain("a")
        assert "no room for the packed file" in said.why and said.hint
        assert said.next == "the next request tries again"
        w.intake._pack = packing
        await ask(w, "a")
        w.link.known.discard(w.rev(1))
        assert "since the engine started" in (await explaining.explain("a")).why

    world(scenario)


def test_the_same_content_from_elsewhere_brings_a_remote_revision_back(world):
    async def scenario(w):
        source(w, 1)
        await w.add("hub", 1, source=f"hf:org/repo@{COMMIT}")
        w.store.room.budget_bytes = 5
        await w.housekeeping._round()
        w.store.room.budget_bytes = 0
        await w.add("mine", 1)
        assert [row.state for row in w.listing.page().items] == ["registered", "registered"]

    world(scenario)


# ----------------------------------------------------------------- no room while it is packed
def test_a_disk_that_is_full_while_it_is_packed_loses_nothing_and_a_request_packs_it_later(world):
    async def scenario(w):
        await w.add("a", 1)
        packing, w.intake._pack = w.intake._pack, w.disk_full
        error = await refused(w.add("a", 2, replace=True))
        assert "no room for the packed file" in error.message
        assert "bytes are needed" in error.message
        assert "nothing was changed" not in error.hint  # it is registered, and waits for room
        assert w.adapters.resolve("a").rev == w.rev(1)
        await refused(w.add("new", 3))
        with pytest.raises(LoradError) as caught:  # a tenant is not told of paths and sizes
            await w.revisions.prepare_for_request(w.rev(3))
        told = caught.value
        assert (told.code, told.message) == ("no_room", "no disk space to bring up the adapter now")
        assert "the store's disk" in told.hint  # and not, as of memory, to evict and unpin
        w.intake._pack = packing
        await ask(w, "new")
        assert packed(w) == {1, 3}
        assert (await w.add("a", 2, replace=True)).rev == w.rev(2)
        await w.tasks.settle()
        assert w.adapters.resolve("a").rev == w.rev(2) and packed(w) == {2, 3}

    world(scenario)

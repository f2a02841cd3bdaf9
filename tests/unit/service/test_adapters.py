"""Adapter truth: what names mean, how content replaces content, what operators may wish."""

import asyncio
import errno
import shutil
from concurrent.futures import Future

import msgspec
import pytest

from engine.messages import (
    AddRevision,
    Load,
    RemoveRevision,
    SamplingParams,
    SetRevision,
    Submit,
)
from lorad import wire
from lorad.errors import LoradError
from lorad.registry import failpoints


def names(*given, **options):
    return wire.Names(names=given, **options)


def test_an_added_adapter_is_registered_packed_and_resolved(world):
    async def scenario(w):
        added = await w.add("acme/bible", 1)
        assert (added.rev, added.unchanged) == (w.rev(1), False)
        assert w.packed == [w.rev(1)]
        resolved = w.adapters.resolve("acme/bible")
        assert (resolved.name, resolved.rev) == ("acme/bible", w.rev(1))
        assert w.registry.get("acme/bible").serving_rev == w.rev(1)
        assert w.registry.get("acme/bible").tenant == "acme"
        assert "adapter.added" in w.types("acme/bible")

    world(scenario)


def test_the_base_is_its_own_name_and_an_unknown_name_is_never_the_base(world):
    async def scenario(w):
        assert w.adapters.resolve("base").base
        with pytest.raises(LoradError) as caught:
            w.adapters.resolve("nobody")
        assert (caught.value.code, caught.value.status) == ("model_not_found", 404)

    world(scenario)


def test_a_name_may_be_asked_for_with_the_digest_that_it_serves(world):
    async def scenario(w):
        await w.add("a", 1)
        assert w.adapters.resolve(f"a@{w.rev(1)[:12]}").rev == w.rev(1)
        for wrong in (f"a@{w.rev(2)[:12]}", "a@", f"a@{w.rev(1)[:4]}", f"b@{w.rev(1)[:12]}"):
            with pytest.raises(LoradError):
                w.adapters.resolve(wrong)

    world(scenario)


def test_the_same_content_again_is_unchanged(world):
    async def scenario(w):
        await w.add("a", 1)
        again = await w.add("a", 1)
        assert again.unchanged
        assert w.packed == [w.rev(1)]
        assert w.types("a").count("adapter.added") == 1

    world(scenario)


def test_the_same_content_under_two_names_is_one_revision(world):
    async def scenario(w):
        await w.add("a", 1, pin=True, priority=20)
        await w.add("b", 1, priority=80)
        assert w.packed == [w.rev(1)]
        assert len(w.engine.kinds(AddRevision)) == 1
        assert w.catalog.names_of(w.rev(1)) == ("a", "b")
        last = w.engine.kinds(SetRevision)[-1]
        assert (last.pinned, last.priority) == (True, 80)
        await w.adapters.unpin(names("a"))
        last = w.engine.kinds(SetRevision)[-1]
        assert (last.pinned, last.priority) == (False, 80)
        await w.adapters.remove("b")
        assert w.adapters.resolve("a").rev == w.rev(1)
        assert w.engine.kinds(SetRevision)[-1].priority == 20

    world(scenario)


def test_other_content_needs_replace(world):
    async def scenario(w):
        await w.add("a", 1)
        with pytest.raises(LoradError) as caught:
            await w.add("a", 2)
        assert caught.value.code == "name_taken"
        assert w.adapters.resolve("a").rev == w.rev(1)
        assert not list(w.store.directory.joinpath(".staging").iterdir())

    world(scenario)


def test_a_resident_revision_is_replaced_when_the_new_one_is_resident(world, eventually):
    async def scenario(w):
        await w.add("a", 1, load=True)
        w.engine.hold_loads.clear()
        replacing = asyncio.create_task(w.add("a", 2, replace=True))
        await eventually(lambda: any(c.rev == w.rev(2) for c in w.engine.kinds(Load)))
        assert w.adapters.resolve("a").rev == w.rev(1)
        assert w.registry.get("a").candidate_rev == w.rev(2)
        w.engine.hold_loads.set()
        added = await replacing
        assert added.replaced_rev == w.rev(1)
        assert w.adapters.resolve("a").rev == w.rev(2)
        await w.tasks.settle()
        assert [c.rev for c in w.engine.kinds(RemoveRevision)] == [w.rev(1)]
        assert not w.store.has(w.rev(1))
        assert w.registry.revisions_of("a") == (w.rev(1),)

    world(scenario)


def test_without_room_for_both_the_name_flips_at_once(world):
    async def scenario(w):
        await w.add("a", 1, load=True)
        w.engine.refuse[w.rev(2)] = "no_room"
        await w.add("a", 2, replace=True)
        assert w.adapters.resolve("a").rev == w.rev(2)

    world(scenario)


def test_a_replaced_revision_outlives_its_requests(world):
    async def scenario(w):
        await w.add("a", 1, load=True)
        w.adapters.lease(w.rev(1))
        await w.add("a", 2, replace=True)
        await w.tasks.settle()
        assert not w.engine.kinds(RemoveRevision)
        assert w.store.has(w.rev(1))
        assert w.catalog.label(w.rev(1)) == f"a@{w.rev(1)[:8]}"
        w.adapters.release(w.rev(1))
        await w.tasks.settle()
        assert [c.rev for c in w.engine.kinds(RemoveRevision)] == [w.rev(1)]
        assert not w.store.has(w.rev(1))
        assert w.types(f"a@{w.rev(1)[:8]}") == ["slot.evict", "adapter.retired"]

    world(scenario)


def test_the_pin_of_a_name_moves_with_it(world):
    async def scenario(w):
        await w.add("a", 1, pin=True, priority=70)
        w.adapters.lease(w.rev(1))
        await w.add("a", 2, replace=True)
        sets = {c.rev: (c.pinned, c.priority) for c in w.engine.kinds(SetRevision)}
        assert sets[w.rev(2)] == (True, 70)
        assert sets[w.rev(1)] == (False, 50)
        w.adapters.release(w.rev(1))

    world(scenario)


def test_a_candidate_that_fails_clears_itself_and_says_why(world):
    async def scenario(w):
        await w.add("a", 1)
        w.bad_packs[w.rev(2)] = "E_NONFINITE"
        with pytest.raises(LoradError) as caught:
            await w.add("a", 2, replace=True)
        assert caught.value.details["reason"] == "E_NONFINITE"
        record = w.registry.get("a")
        assert (record.serving_rev, record.candidate_rev) == (w.rev(1), None)
        assert record.reason == "E_NONFINITE"
        assert w.adapters.resolve("a").rev == w.rev(1)
        await w.tasks.settle()
        assert not w.store.has(w.rev(2))

    world(scenario)


def test_a_candidate_whose_load_fails_does_not_take_the_name(world):
    async def scenario(w):
        await w.add("a", 1, load=True)
        w.engine.refuse[w.rev(2)] = "load_failed"
        with pytest.raises(LoradError):
            await w.add("a", 2, replace=True)
        assert w.adapters.resolve("a").rev == w.rev(1)
        assert w.registry.get("a").reason == "LOAD_FAILED"

    world(scenario)


def test_an_eviction_of_the_candidates_other_name_does_not_keep_it_from_its_name(world):
    async def scenario(w):
        await w.add("a", 1, load=True)
        await w.add("b", 2)
        w.engine.refuse[w.rev(2)] = "conflict"  # evicted while it was loading
        await w.add("a", 2, replace=True)
        assert w.adapters.resolve("a").rev == w.rev(2)
        assert w.registry.get("a").candidate_rev is None

    world(scenario)


def test_a_pin_that_could_not_load_says_that_it_is_one(world):
    async def scenario(w):
        await w.add("a", 1)
        w.store.drop_packed(w.rev(1), (w.info.layout,))
        w.link.known.discard(w.rev(1))
        w.bad_packs[w.rev(1)] = "E_VOCAB_RESIZED"
        (told,) = (await w.adapters.pin(names("a"))).items
        assert told.message == "pinned, but not loaded: cannot be packed"
        assert (told.code, told.details["reason"]) == ("adapter_invalid", "E_VOCAB_RESIZED")
        assert w.registry.get("a").pinned

    world(scenario)


def test_a_new_name_that_cannot_be_packed_is_quarantined(world):
    async def scenario(w):
        w.bad_packs[w.rev(1)] = "E_NONFINITE"
        with pytest.raises(LoradError):
            await w.add("a", 1)
        assert w.registry.get("a").stored_state == "quarantined"
        with pytest.raises(LoradError) as caught:
            w.adapters.resolve("a")
        assert caught.value.code == "model_not_found"
        results = await w.adapters.load(names("a"))
        assert results.items[0].code == "adapter_invalid"
        assert results.items[0].details["reason"] == "E_NONFINITE"
        w.bad_packs.clear()
        await w.add("a", 1)
        assert w.adapters.resolve("a").rev == w.rev(1)
        assert w.registry.get("a").reason is None

    world(scenario)


def test_a_full_disk_while_packing_blames_nobody_and_is_tried_again(world):
    async def scenario(w):
        whole, w.intake._pack = w.intake._pack, w.disk_full
        with pytest.raises(LoradError) as caught:
            await w.add("a", 1)
        assert (caught.value.code, caught.value.exit) == ("insufficient_storage", 9)
        assert w.registry.get("a").stored_state == "registered"
        w.intake._pack = whole
        await w.add("a", 1)
        assert w.registry.get("a").serving_rev == w.rev(1)

    world(scenario)


def test_a_packer_that_cannot_be_started_blames_nobody(world):
    async def no_process(folder, out):
        raise OSError(errno.EAGAIN, "no more processes")

    async def scenario(w):
        await w.add("a", 1)
        whole, w.intake._pack = w.intake._pack, no_process
        with pytest.raises(LoradError) as caught:
            await w.add("a", 2, replace=True)
        assert caught.value.code == "internal_error"
        record = w.registry.get("a")
        assert (record.serving_rev, record.candidate_rev) == (w.rev(1), w.rev(2))
        w.intake._pack = whole
        await w.add("a", 2, replace=True)
        assert w.adapters.resolve("a").rev == w.rev(2)

    world(scenario)


def test_a_disk_that_fails_under_one_adapter_does_not_end_the_daemon(world, eventually):
    async def scenario(w):
        await w.add("a", 1)
        w.link.known.clear()
        w.store.packed(w.rev(1), w.link.info.layout).unlink()
        broken = Future()
        broken.set_exception(OSError(errno.EIO, "input/output error"))
        w.registry.record_packed = lambda *given, **more: broken
        submit = Submit(
            request_id="r", prompt=[1], sampling=SamplingParams(max_tokens=1), rev=w.rev(1)
        )
        deltas = []
        w.link.submit(submit, deltas.append)
        await eventually(lambda: deltas or w.link.failed.done())
        assert not w.link.failed.done()
        assert deltas[0].code == "internal_error"

    world(scenario)


def test_content_that_cannot_be_registered_does_not_stay_on_the_full_disk(world):
    async def scenario(w):
        await w.add("a", 1)

        def full(place):
            if place == "write.begun":
                raise LoradError("insufficient_storage", "no space")

        failpoints.set_hook(full)
        try:
            for n in (
                2,
                1,
            ):  # of new content nothing stays; what another name serves is not touched
                with pytest.raises(LoradError) as caught:
                    await w.add("b", n)
                assert caught.value.code == "insufficient_storage"
        finally:
            failpoints.set_hook(None)
        assert w.store.revs() == {w.rev(1)}

    world(scenario)


def test_a_packed_file_that_was_cut_short_or_lost_is_packed_anew(world):
    async def first(w):
        for name, n in (("a", 1), ("b", 2), ("c", 3)):
            await w.add(name, n)
        short, lost = (w.store.path(w.rev(n)) / f"packed-{w.link.info.layout}.bin" for n in (1, 2))
        short.chmod(0o600)
        short.write_bytes(b"half")
        lost.unlink()

    async def second(w):
        await w.revisions.load(w.rev(1))
        await w.revisions.load(w.rev(2))
        await w.revisions.load(w.rev(3))
        assert sorted(w.packed) == sorted([w.rev(1), w.rev(2)])

    world(first)
    world(second)


def test_what_depends_on_the_bases_weights_is_packed_for_each_base(world):
    """Two bases of one shape; the plain adapter has one packed file for both."""

    async def serve_on(w, base):
        w.with_gain.add(w.rev(1))
        w.info = msgspec.structs.replace(w.info, base=base)
        await w.start()

    async def first(w):
        await serve_on(w, "cafe")
        await w.add("dora", 1)
        await w.add("plain", 2)
        assert sorted(w.packed) == sorted([w.rev(1), w.rev(2)])

    async def second(w):
        await serve_on(w, "beef")
        for n in (1, 2):
            await w.revisions.load(w.rev(n))
        assert w.packed == [w.rev(1)]
        layout = w.info.layout
        names = {path.name for path in w.store.path(w.rev(1)).glob("packed-*.bin")}
        assert names == {f"packed-{layout}wcafe.bin", f"packed-{layout}wbeef.bin"}

    async def third(w):
        await serve_on(w, "cafe")
        await w.revisions.load(w.rev(1))
        assert w.packed == []

    for scenario in (first, second, third):
        world(scenario, start=False)


def test_names_that_may_not_be_are_refused(world):
    async def scenario(w):
        for name, code in [
            ("../x", "invalid_value"),
            ("A", "invalid_value"),
            ("a/b/c", "invalid_value"),
            ("x" * 300, "invalid_value"),
            ("a\x00", "invalid_value"),
            ("base", "name_taken"),
        ]:
            with pytest.raises(LoradError) as caught:
                await w.add(name, 1)
            assert caught.value.code == code
        await w.add("a", 1)
        with pytest.raises(LoradError) as caught:
            await w.add("a", 2, source="inbox", replace=True)
        assert (caught.value.code, caught.value.hint[:12]) == ("name_taken", "loractl rm a")
        await w.add("b", 3, source="inbox")
        with pytest.raises(LoradError) as caught:
            await w.add("b", 4, replace=True)  # to remove it first would lose it for requests
        assert "into its folder in the inbox" in caught.value.hint

    world(scenario)


def test_a_dry_run_changes_nothing(world):
    async def scenario(w):
        added = await w.add("a", 1, dry_run=True, pin=True)
        assert (added.rev, added.dry_run) == (w.rev(1), True)
        assert w.registry.get("a") is None
        assert not w.store.has(w.rev(1))

    world(scenario)


def test_a_pin_of_a_name_with_the_same_content_is_named(world):
    async def scenario(w):
        await w.add("a", 1)
        await w.add("b", 1, pin=True)
        (kept,) = (await w.adapters.evict(names("a"))).items
        assert kept.message == "'a' has the same content as b, which is pinned"
        assert kept.hint == "loractl unpin b"

    world(scenario)


def test_load_evict_pin_and_unpin_answer_for_each_name(world):
    async def scenario(w):
        await w.add("a", 1)
        await w.add("b", 2)
        results = await w.adapters.load(names("a", "nobody", "b"))
        assert [(r.name, r.ok, r.code) for r in results.items] == [
            ("a", True, ""),
            ("nobody", False, "model_not_found"),
            ("b", True, ""),
        ]
        assert w.engine.revisions == {w.rev(1): "gpu", w.rev(2): "gpu"}
        await w.adapters.pin(names("a"))
        evicted = await w.adapters.evict(names("a"))
        assert evicted.items[0].code == "pinned"
        assert evicted.items[0].hint == "loractl unpin a"
        everything = await w.adapters.evict(wire.Names(all=True))
        assert [r.name for r in everything.items] == ["b"]
        assert everything.skipped == ("a",)
        assert (await w.adapters.evict(names("b"))).skipped == ()
        assert w.engine.revisions == {w.rev(1): "gpu", w.rev(2): "ram"}
        assert (await w.adapters.evict(names("b"))).items[0].ok
        forced = await w.adapters.evict(names("a", force=True, to="disk"))
        assert forced.items[0].ok
        assert w.registry.get("a").pinned
        await w.adapters.unpin(names("a"))
        assert not w.registry.get("a").pinned

    world(scenario)


def test_a_wish_that_takes_longer_than_its_caller_goes_on(world):
    async def scenario(w):
        await w.add("a", 1)
        w.engine.hold_loads.clear()
        late = (await w.adapters.load(names("a", timeout_s=0.01))).items[0]
        assert (late.code, late.ok) == ("deadline_exceeded", False)
        assert (await w.adapters.load(names("a", wait=False))).items[0].ok
        w.engine.hold_loads.set()
        await w.tasks.settle()
        assert w.engine.revisions[w.rev(1)] == "gpu"

    world(scenario)


def test_a_pin_that_the_engine_refuses_is_not_left_behind(world):
    async def scenario(w):
        await w.add("a", 1)
        w.engine.pin_room = 0
        assert (await w.adapters.pin(names("a"))).items[0].code == "no_room"
        assert not w.registry.get("a").pinned
        with pytest.raises(LoradError) as caught:
            await w.adapters.patch("a", wire.AdapterPatch(pinned=True, priority=70))
        assert caught.value.code == "no_room"
        record = w.registry.get("a")
        assert (record.pinned, record.priority) == (False, 70)

    world(scenario)


def test_a_pin_that_does_not_fit_any_more_leaves_its_adapter_served(world):
    async def first(w):
        await w.add("a", 1, pin=True)
        await w.add("b", 2, pin=True)

    async def with_a_smaller_pool(w):
        w.pin_room = 1
        await w.start()
        for name in ("a", "b"):
            await w.revisions.load(w.adapters.resolve(name).rev)
            assert w.registry.get(name).pinned
        await w.adapters.patch("a", wire.AdapterPatch(priority=70))
        await w.adapters.patch("b", wire.AdapterPatch(priority=70))
        assert w.types().count("pin.refused") == 1
        (held,) = w.engine.pinned
        (other,) = {w.rev(1), w.rev(2)} - {held}
        await w.adapters.unpin(names(*w.catalog.names_of(held)))
        assert w.engine.pinned == {other}

    world(first)
    world(with_a_smaller_pool, start=False)


def test_a_replacement_too_large_for_its_pin_still_replaces(world):
    async def scenario(w):
        await w.add("a", 1, pin=True)
        w.engine.pin_room = 0
        await w.add("a", 2, replace=True)
        assert w.adapters.resolve("a").rev == w.rev(2)
        await w.tasks.settle()
        assert w.store.revs() == {w.rev(2)}

    world(scenario)


def test_a_pin_that_leaves_too_little_room_is_refused(world):
    async def scenario(w):
        await w.add("a", 1)
        w.pins_refused = True
        assert (await w.adapters.pin(names("a"))).items[0].code == "no_room"
        assert not w.registry.get("a").pinned
        with pytest.raises(LoradError):
            await w.adapters.patch("a", wire.AdapterPatch(pinned=True))
        with pytest.raises(LoradError):
            await w.add("b", 2, pin=True)
        assert w.registry.get("b") is None

    world(scenario)


def test_labels_are_short_printable_and_few_wherever_they_come_from(world):
    wrong = ({"k" * 64: "v"}, {"=": "v"}, {"k": "v" * 257}, {"k": "\x1b]0;x"})
    many = {f"k{n}": "v" for n in range(65)}

    async def scenario(w):
        await w.add("a", 1, labels={"k": "v"})
        for labels in (*wrong, many):
            with pytest.raises(LoradError) as caught:
                await w.adapters.patch("a", wire.AdapterPatch(labels=labels))
            assert (caught.value.code, caught.value.param) == ("invalid_value", "labels")
            with pytest.raises(LoradError, match="label"):
                await w.add("b", 2, labels=labels)
        assert w.registry.get("a").labels == {"k": "v"}

    world(scenario)


def test_a_patch_changes_what_it_names(world):
    async def scenario(w):
        await w.add("a", 1, labels={"team": "x", "old": "y"})
        patch = wire.AdapterPatch(priority=90, labels={"old": None, "new": "z"})
        await w.adapters.patch("a", patch)
        record = w.registry.get("a")
        assert (record.priority, record.labels) == (90, {"team": "x", "new": "z"})
        assert not record.pinned
        with pytest.raises(LoradError):
            await w.adapters.patch("a", wire.AdapterPatch(priority=101))

    world(scenario)


def test_a_removed_adapter_is_gone_everywhere(world):
    async def scenario(w):
        await w.add("a", 1, load=True)
        removed = await w.adapters.remove("a")
        assert removed.rev == w.rev(1)
        await w.tasks.settle()
        assert not w.store.has(w.rev(1))
        assert w.engine.revisions == {}
        with pytest.raises(LoradError) as caught:
            await w.adapters.remove("a")
        assert caught.value.exit == 4

    world(scenario)


def test_kept_files_outlive_their_name_and_a_restart(world):
    async def first(w):
        await w.add("a", 1)
        await w.add("b", 2)
        await w.adapters.remove("a", keep_files=True)
        await w.adapters.remove("b")
        await w.tasks.settle()
        assert w.store.revs() == {w.rev(1)}

    async def second(w):
        await w.add("c", 3)
        await w.adapters.remove("c")
        await w.tasks.settle()
        assert w.store.revs() == {w.rev(1)}
        await w.add("d", 1)
        await w.adapters.remove("d")
        await w.tasks.settle()
        assert w.store.revs() == set()

    world(first)
    world(second)


def test_adding_with_a_load_says_where_it_is_how_big_and_how_long_that_took(world):
    async def scenario(w):
        plain = await w.add("a", 1)
        assert (plain.state, plain.num_bytes, plain.load_seconds) == ("registered", 0, None)
        for wish in ({"load": True}, {"pin": True}, {"pin": True, "load": True}):
            n = 2 + len(wish) + wish.get("load", 0)
            added = await w.add(f"a{n}", n, **wish)
            assert (added.state, added.unchanged, added.warnings) == ("idle", False, ())
            assert added.num_bytes == w.listing.detail(f"a{n}").adapter.num_bytes > 0
            assert added.load_seconds is not None and added.load_seconds >= 0
        again = await w.add(f"a{n}", n, load=True)
        assert (again.state, again.unchanged, again.load_seconds) == ("idle", True, None)
        assert again.num_bytes == added.num_bytes

    world(scenario)


def test_a_load_before_the_engine_is_ready_is_told_not_to_have_been_done(world):
    async def scenario(w):
        added = await w.add("a", 1, load=True)
        assert (added.state, added.num_bytes, added.load_seconds) == ("registered", 0, None)
        (warning,) = added.warnings
        assert warning == "not loaded, for the base is not ready yet: loractl load a, later"
        assert (await w.add("b", 2, load=True, pin=True)).warnings == ()  # READY loads it

    world(scenario, start=False)


def test_before_the_engine_is_ready_an_adapter_is_registered_and_served_later(world, eventually):
    async def scenario(w):
        added = await w.add("a", 1, pin=True)
        assert added.state == "registered"
        assert w.packed == []
        with pytest.raises(LoradError) as caught:
            w.adapters.resolve("a")
        assert caught.value.code == "loading_base"
        await w.start()
        assert w.engine.revisions == {w.rev(1): "gpu"}
        await eventually(lambda: w.registry.get("a").serving_rev == w.rev(1))

    world(scenario, start=False)


def test_a_restart_brings_back_names_pins_and_priorities(world):
    async def first(w):
        await w.add("a", 1, pin=True, priority=70)
        await w.add("b", 2, load=True)
        await w.add("c", 3)

    async def second(w):
        assert w.engine.revisions == {w.rev(1): "gpu"}
        assert w.listing.detail("a").adapter.state == "idle"
        add = w.engine.kinds(AddRevision)[0]
        assert (add.pinned, add.priority) == (True, 70)
        assert {w.adapters.resolve(n).rev for n in "abc"} == {w.rev(1), w.rev(2), w.rev(3)}
        await w.tasks.settle()
        assert w.packed == []

    world(first)
    world(second)


def test_a_replacement_that_was_cut_short_is_finished_at_the_next_start(world, eventually):
    async def first(w):
        await w.add("a", 1)

    async def second(w):
        await w.add("a", 2, replace=True)
        assert w.registry.get("a").candidate_rev == w.rev(2)

    async def third(w):
        await eventually(lambda: w.adapters.resolve("a").rev == w.rev(2))
        await w.tasks.settle()
        assert w.store.revs() == {w.rev(2)}

    world(first)
    world(second, start=False)
    world(third)


def test_a_dead_engine_gets_back_what_was_resident(world, eventually):
    async def scenario(w):
        await w.add("a", 1, pin=True)
        await w.add("b", 2, load=True)
        await w.add("c", 3)
        w.engine.die()
        await eventually(lambda: len(w.clients) == 2 and w.link.state == "ready")
        await w.tasks.settle()
        assert w.engine.revisions == {w.rev(1): "gpu", w.rev(2): "gpu"}

    world(scenario)


def test_lost_files_make_a_name_missing_until_the_content_returns(world):
    async def scenario(w):
        await w.add("a", 1)
        w.store.remove([w.rev(1)])
        w.link.known.clear()
        results = await w.adapters.load(names("a"))
        assert results.items[0].code == "load_failed"
        assert w.registry.get("a").stored_state == "missing"
        with pytest.raises(LoradError) as caught:
            w.adapters.resolve("a")
        assert caught.value.code == "model_not_found"
        await w.add("a", 1, replace=True)
        assert w.adapters.resolve("a").rev == w.rev(1)

    world(scenario)


def test_lost_files_of_a_replaced_revision_do_not_take_the_new_one_away(world):
    async def scenario(w):
        await w.add("a", 1)
        staging = await w.adapters.stage()
        shutil.copytree(w.folder(2), staging.path, dirs_exist_ok=True)
        found = await w.intake.find(staging)
        revision = await w.intake.keep(found)
        flip = w.registry.register(  # on disk, and the catalog has not heard of it
            "a", model="base", source="upload", revision=revision
        )
        await w.model.losses.mark_missing(w.rev(1))
        assert flip.done()
        assert w.registry.get("a").stored_state == "registered"
        assert w.adapters.resolve("a").rev == w.rev(2)
        assert "adapter.missing" not in w.types("a")

    world(scenario)


def test_a_name_that_changes_at_this_moment_keeps_its_files_for_a_last_request(world, eventually):
    async def scenario(w):
        await w.add("a", 1)
        await asyncio.wrap_future(w.registry.remove("a"))  # and the catalog has not heard of it
        await w.revisions.shelf.collect()  # another revision's farewell
        rev = w.adapters.resolve("a").rev
        w.adapters.lease(rev)
        assert w.store.has(rev) and w.registry.revision(rev) is not None
        w.names.refresh("a")
        w.adapters.release(rev)
        await eventually(lambda: "adapter.retired" in w.types())
        assert not w.store.has(rev)

    world(scenario)


def test_draining_refuses_what_is_new(world):
    async def scenario(w):
        await w.add("a", 1)
        w.adapters.gate.closed = "lorad is shutting down"
        with pytest.raises(LoradError) as caught:
            w.adapters.resolve("a")
        assert caught.value.code == "draining"

    world(scenario)


def test_times_of_last_use_reach_the_registry_in_batches(world):
    async def scenario(w):
        await w.add("a", 1)
        w.adapters.resolve("a")
        assert w.registry.get("a").last_used_at is None
        (row,) = w.listing.page().items
        assert row.last_used_at is not None, "who asks is told what is not written yet"
        await w.adapters.flush()
        assert w.registry.get("a").last_used_at is not None
        assert not w.names.used

    world(scenario)

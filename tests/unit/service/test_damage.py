"""Damage: a packed file is packed anew once, then its names are quarantined; and `verify`."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from engine.adapters.states import State
from engine.errors import AdapterInvalid, EngineError
from engine.messages import Load
from engine.verify_messages import Finding, Verified, VerifyReport
from lorad import wire
from lorad.errors import LoradError
from lorad.registry.records import TextFacts
from lorad.service.verification import Verification


def reason(w, name):
    record = w.registry.get(name)
    return record.stored_state, record.reason, record.reason_message


def test_a_damaged_packed_file_is_packed_anew_and_the_load_goes_on(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        rev = w.rev(1)
        w.engine.damaged[rev] = 1
        await w.revisions.load(rev)
        assert w.packed == [rev, rev]
        assert w.engine.revisions[rev] == "gpu"
        assert len(w.engine.kinds(Load)) == 2
        assert "adapter.repacked" in w.types("a")
        assert reason(w, "a")[0] is State.REGISTERED

    world(scenario)


def test_one_that_is_damaged_again_is_quarantined_with_its_reason(world, eventually):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        w.engine.damaged[w.rev(1)] = 2
        with pytest.raises(LoradError) as caught:
            await w.revisions.load(w.rev(1))
        assert (caught.value.code, caught.value.exit) == ("adapter_damaged", 8)
        assert caught.value.message == (
            "a: its packed file is damaged (block 0 is wrong), and it was packed anew before"
        )
        assert caught.value.hint.startswith("loractl rm a, and add it again")
        await eventually(lambda: "adapter.rejected" in w.types("a"))
        assert reason(w, "a") == (State.QUARANTINED, "E_DAMAGED", "block 0 is wrong")
        assert w.packed == [w.rev(1)] * 2
        with pytest.raises(LoradError) as caught:
            w.adapters.resolve("a")
        assert caught.value.code == "model_not_found"

    world(scenario)


def test_adding_it_again_takes_it_out_of_quarantine(world, eventually):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        w.engine.damaged[w.rev(1)] = 2
        with pytest.raises(LoradError):
            await w.revisions.load(w.rev(1))
        await eventually(lambda: reason(w, "a")[0] is State.QUARANTINED)
        await w.add("a", 1)
        assert w.adapters.resolve("a").rev == w.rev(1)

    world(scenario)


def test_damage_after_it_was_whole_is_new_damage(world, eventually):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        for _ in range(3):
            w.engine.damaged[w.rev(1)] = 1
            await w.revisions.load(w.rev(1))
            await eventually(lambda: w.revisions.tiers[w.rev(1)] is State.IDLE)
            await w.revisions.evict(w.rev(1), to="disk", drain=1.0, now=False, force=False)
            await eventually(lambda: w.revisions.tiers[w.rev(1)] is State.REGISTERED)
        assert len(w.packed) == 4
        assert reason(w, "a")[0] is State.REGISTERED

    world(scenario)


def test_a_request_that_met_the_damage_is_followed_by_a_fresh_file(world, eventually):
    """Nobody called load: the engine's transition alone tells of it."""

    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        w.engine.find_damaged(Load(command_id=0, rev=w.rev(1)))
        await eventually(lambda: "adapter.repacked" in w.types("a"))
        assert w.packed == [w.rev(1)] * 2
        assert w.rev(1) in w.link.known

    world(scenario)


def test_stored_files_that_are_not_the_revisions_are_not_packed_under_its_name(world, eventually):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        w.packs_as[w.rev(1)] = w.rev(2)
        w.engine.damaged[w.rev(1)] = 1
        told = r"^a: .*cannot be packed anew: .* were changed"
        with pytest.raises(LoradError, match=told) as caught:
            await w.revisions.load(w.rev(1))
        assert "add it again, or touch its files in the inbox" in caught.value.hint
        await eventually(lambda: reason(w, "a")[0] is State.QUARANTINED)
        assert "were changed" in reason(w, "a")[2]

    world(scenario)


def test_a_full_disk_is_told_as_what_keeps_it_from_being_packed_anew(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        w.intake._pack = w.disk_full
        w.engine.damaged[w.rev(1)] = 2
        with pytest.raises(LoradError, match=r"^a: ") as caught:
            await w.revisions.load(w.rev(1))
        assert "no room for the packed file" in caught.value.message
        assert caught.value.hint == "loractl load a, once that is mended"
        assert reason(w, "a")[0] is State.REGISTERED

    world(scenario)


def test_a_packed_file_without_checksums_is_packed_anew(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        before = await w.revisions.files.packed(w.rev(1))
        sums = w.store.path(w.rev(1)) / f"packed-{before.layout}.sums"
        sums.unlink()
        await w.revisions.files.packed(w.rev(1))
        assert w.packed == [w.rev(1)] * 2 and sums.is_file()

    world(scenario)


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "gone"])
def test_a_packed_file_that_the_engine_does_not_find_is_packed_anew_and_loaded(world, cut):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        await w.revisions.load(w.rev(1))
        packed = w.store.packed(w.rev(1), (await w.revisions.files.packed(w.rev(1))).layout)
        if cut:
            packed.chmod(0o640)
            packed.write_bytes(b"")
        else:
            packed.unlink()
        w.engine.unreadable[w.rev(1)] = 1
        await w.revisions.load(w.rev(1))
        assert w.packed == [w.rev(1)] * 2
        assert "adapter.repacked" in w.types("a")

    world(scenario)


def test_a_whole_packed_file_that_cannot_be_read_is_not_packed_anew(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        w.engine.unreadable[w.rev(1)] = 1
        with pytest.raises(LoradError) as caught:
            await w.revisions.load(w.rev(1))
        assert caught.value.code == "load_failed" and w.packed == [w.rev(1)]

    world(scenario)


# --------------------------------------------------------------------- verify
GOOD = VerifyReport(modules=14, worst_error=1e-7, tolerance=1e-4, bytes_checked=100)
BAD = VerifyReport(
    modules=14,
    worst_error=0.25,
    worst_layer=3,
    worst_module="q_proj",
    bytes_checked=100,
    bytes_different=2,
    findings=(Finding(what="effect", layer=3, module="q_proj", message="off by 0.25"),),
)


def verifier(w, *source, is_now=None):
    """The service, and what the verifier process was asked for; `source`: its findings.

    `is_now`: the revision that the stored files make, if they were changed.
    """
    asked = []

    async def run(model, folder, out, probe, packed):
        asked.append(SimpleNamespace(folder=folder, out=out, probe=probe, packed=packed))
        assert out.is_dir() and probe.parent == out
        checked = 50 if packed else 0
        return Verified(rev=is_now or folder.name, bytes_checked=checked, findings=source)

    service = Verification(w.names, w.lineup, w.intake, w.events, w.tasks, run=run)
    return service, asked


def test_a_cold_adapter_is_brought_up_and_what_was_compared_is_told(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        service, asked = verifier(w)
        w.engine.reports = [GOOD]
        [item] = (await service.verify(wire.Names(names=("a",)))).items
        assert (item.ok, item.modules, item.bytes_checked) == (True, 14, 100)
        assert w.engine.revisions[w.rev(1)] == "gpu"
        assert asked[0].packed is None and not asked[0].out.exists(), "nothing is left behind"
        assert "adapter.verified" in w.types("a")
        assert w.catalog.leases(w.rev(1)) == 0

    world(scenario)


def test_what_differs_is_named_and_is_an_event(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        service, _ = verifier(w)
        w.engine.reports = [BAD]
        [item] = (await service.verify(wire.Names(names=("a",)))).items
        assert (item.ok, item.code, item.worst_module) == (
            False,
            "adapter_damaged",
            "layer 3 q_proj",
        )
        assert item.message == "its effect is not the stored file's: layer 3 q_proj: off by 0.25"
        assert [(f.layer, f.module) for f in item.findings] == [(3, "q_proj")]
        assert item.hint.startswith("loractl evict a --to disk")
        [event] = [e for e in w.events.newest(100) if e.type == "adapter.damaged"]
        assert (event.level, event.name) == ("error", "a")

    world(scenario)


@pytest.mark.parametrize("known", [True, False])
def test_a_tokenizer_that_requests_are_not_read_by_is_found(world, known):
    async def scenario(w):
        await w.start()
        rev = (await w.add("a", 1)).rev
        files = {"num_tokens": 259, "own_tokenizer": True}
        if known:
            facts = TextFacts(**files, base_text="b1")
            await asyncio.wrap_future(w.registry.note_texts({rev: facts}))
        service, _ = verifier(w)
        run = service._run

        async def says(*asked):
            return msgspec.structs.replace(await run(*asked), **files)

        service._run = says
        w.engine.reports = [GOOD]
        [item] = (await service.verify(wire.Names(names=("a",)))).items
        assert item.ok == known and item.also == (("tokenizer",) if known else ())
        if not known:
            assert "its files say: its own tokenizer, 259 tokens" in item.message
            assert [f.what for f in item.findings] == ["tokenizer"]
            assert item.hint.startswith("restart lorad") and "loractl rm a" in item.hint
        [event] = [e for e in w.events.newest(100) if e.type.startswith("adapter.verif")] or [None]
        assert (event is not None and event.message.endswith("bytes, tokenizer")) == known

    world(scenario)


def test_full_compares_the_packed_file_too_and_adds_what_it_finds(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        service, asked = verifier(w, Finding(what="packed", layer=0, module="o_proj"))
        w.engine.reports = [GOOD]
        [item] = (await service.verify(wire.Names(names=("a",), full=True))).items
        assert asked[0].packed is not None and asked[0].packed.is_file()
        assert (item.ok, item.bytes_checked) == (False, 150)

    world(scenario)


@pytest.mark.parametrize("full", [False, True])
def test_damage_of_the_stored_file_is_not_laid_on_the_packed_one(world, full):
    """A fresh packed file of a changed source differs, whatever the packed file is like."""

    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        source = (Finding(what="packed", layer=0, module="o_proj"),) if full else ()
        service, _ = verifier(w, *source, is_now=w.rev(2))
        w.engine.reports = [replace(GOOD, findings=(Finding(what="stored", message="changed"),))]
        [item] = (await service.verify(wire.Names(names=("a",), full=full))).items
        assert [f.what for f in item.findings] == ["stored"]
        assert item.message == "its stored file is damaged: changed"
        assert item.hint.startswith("loractl rm a, then loractl add DIR")

    world(scenario)


def test_one_that_is_evicted_meanwhile_is_brought_back(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        service, _ = verifier(w)
        w.engine.reports = ["conflict", GOOD]
        [item] = (await service.verify(wire.Names(names=("a",)))).items
        assert item.ok and len(w.engine.kinds(Load)) == 2
        w.engine.reports = ["conflict"] * 3
        [item] = (await service.verify(wire.Names(names=("a",)))).items
        assert (item.ok, item.code) == (False, "conflict")

    world(scenario)


def test_all_are_the_resident_ones_and_an_unknown_name_is_its_own_failure(world, eventually):
    async def scenario(w):
        await w.start()
        for n, name in enumerate(("a", "b", "c")):
            await w.add(name, n)
        for n in (0, 2):
            await w.revisions.load(w.rev(n))
        await eventually(lambda: all(w.revisions.resident(w.rev(n)) for n in (0, 2)))
        service, _ = verifier(w)
        w.engine.reports = [GOOD, GOOD, GOOD]
        done = await service.verify(wire.Names(all=True))
        assert [item.name for item in done.items] == ["a", "c"]
        done = await service.verify(wire.Names(names=("nobody", "a")))
        assert [(i.name, i.code) for i in done.items] == [("nobody", "model_not_found"), ("a", "")]
        with pytest.raises(LoradError, match="names is empty"):
            await service.verify(wire.Names())

    world(scenario)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (EngineError("verifying x failed: exit status -9"), "internal_error"),
        (AdapterInvalid("E_HEADER", "the file is cut"), "adapter_invalid"),
        (OSError("no process to be had"), "internal_error"),
    ],
    ids=["killed", "refused", "not started"],
)
def test_a_verifier_that_fails_is_its_adapters_failure_and_the_next_is_verified(world, fault, code):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        await w.add("b", 2)
        faults = [fault]

        async def run(model, folder, out, probe, packed):
            if faults:
                raise faults.pop()
            return Verified(rev=folder.name)

        service = Verification(w.names, w.lineup, w.intake, w.events, w.tasks, run=run)
        w.engine.reports = [GOOD]
        done = await service.verify(wire.Names(names=("a", "b")))
        assert [(i.name, i.ok, i.code) for i in done.items] == [("a", False, code), ("b", True, "")]
        assert list((w.store.directory / ".staging").iterdir()) == []

    world(scenario)


def test_unasked_what_is_on_the_gpu_is_verified_and_told(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        await w.revisions.load(w.rev(1))
        service, asked = verifier(w)
        w.engine.reports = [GOOD, BAD]
        await service.check(w.rev(1))
        assert w.types("a")[-1] == "adapter.verified" and asked[0].packed is None
        await service.check(w.rev(1))
        assert w.events.newest(1)[0].message.startswith("its effect is not the stored file's")
        assert w.catalog.leases(w.rev(1)) == 0

    world(scenario)


def test_unasked_nothing_is_brought_back_and_one_that_is_gone_is_no_finding(world):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        service, asked = verifier(w)
        before = w.types("a")
        await service.check(w.rev(1))  # it made way while its files were read
        assert len(asked) == 1 and w.engine.revisions.get(w.rev(1)) != "gpu"
        assert not w.engine.kinds(Load) and w.types("a") == before

    world(scenario)


@pytest.mark.parametrize("known", [True, False])
def test_unasked_stored_files_that_are_refused_now_are_a_finding(world, known, caplog):
    async def scenario(w):
        await w.start()
        await w.add("a", 1)
        await w.revisions.load(w.rev(1))

        async def run(model, folder, out, probe, packed):
            raise AdapterInvalid("E_HEADER", "the file is cut") if known else OSError("no process")

        service = Verification(w.names, w.lineup, w.intake, w.events, w.tasks, run=run)
        await service.check(w.rev(1))
        damaged = [e for e in w.events.newest(100) if e.type == "adapter.damaged"]
        if known:
            [event] = damaged
            assert (event.level, event.name) == ("error", "a") and "is cut" in event.message
        else:
            assert not damaged and "a cannot be verified: cannot start" in caplog.text

    world(scenario)

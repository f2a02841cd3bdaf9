"""What the watcher reports becomes adapters, or a quarantined name that says why not."""

import asyncio
import errno
import os
import shutil
import threading
from dataclasses import replace

import pytest

from engine.errors import AdapterInvalid
from engine.messages import AdapterEvent
from lorad.errors import LoradError
from lorad.service.inbox import Memory, Seen
from lorad.watch.inbox import InboxFolder, InboxOptions


class Watcher:
    def __init__(self):
        self.retried = []

    def retry(self, folder):
        self.retried.append(folder)


def report(w, n, name=None, *, signature="s1", legal=True, problem="", **options):
    """A settled folder `f<n>` that wants to be called `name`."""
    name = name or f"a{n}"
    return InboxFolder(
        path=w.dir / "folders" / f"f{n}",
        name=name,
        tenant=None,
        legal=legal,
        display_name=name,
        options=InboxOptions(**options),
        problem=problem,
        signature=signature,
    )


def test_a_folder_becomes_an_adapter_with_what_its_lorad_toml_asks_for(world):
    async def scenario(w):
        w.folder(1)
        await w.inbox.take(report(w, 1, pin=True, priority=70, labels={"team": "x"}))
        record = w.registry.get("a1")
        assert (record.serving_rev, record.source) == (w.rev(1), "inbox")
        assert (record.pinned, record.priority, record.labels) == (True, 70, {"team": "x"})
        assert w.engine.revisions == {w.rev(1): "gpu"}

    world(scenario)


def test_a_changed_folder_replaces_and_a_bad_change_leaves_what_served(world):
    async def scenario(w):
        w.folder(1)
        await w.inbox.take(report(w, 1))
        (w.dir / "folders/f1/adapter_config.json").write_text('{"n": 2}')
        await w.inbox.take(report(w, 1, signature="s2"))
        assert w.adapters.resolve("a1").rev == w.rev(2)
        w.folder(1, bad="E_TRUNCATED")
        await w.inbox.take(report(w, 1, signature="s3"))
        assert w.adapters.resolve("a1").rev == w.rev(2)
        assert w.registry.get("a1").reason == "E_TRUNCATED"
        assert w.types("a1").count("adapter.rejected") == 1

    world(scenario)


def test_a_bad_folder_is_quarantined_until_it_is_good(world):
    async def scenario(w):
        w.folder(1, bad="E_HALF_PAIR")
        await w.inbox.take(report(w, 1))
        record = w.registry.get("a1")
        assert (record.stored_state, record.reason) == ("quarantined", "E_HALF_PAIR")
        await w.inbox.take(report(w, 1, signature="s2"))
        assert w.types("a1").count("adapter.rejected") == 1
        w.folder(1)
        await w.inbox.take(report(w, 1, signature="s3"))
        assert w.adapters.resolve("a1").rev == w.rev(1)

    world(scenario)


def test_a_mended_folder_gets_what_its_lorad_toml_has_asked_for_all_the_time(world):
    async def scenario(w):
        w.folder(1, bad="E_HALF_PAIR")
        await w.inbox.take(report(w, 1, pin=True, priority=70))
        w.folder(1)
        await w.inbox.take(report(w, 1, signature="s2", pin=True, priority=70))
        record = w.registry.get("a1")
        assert (record.stored_state, record.pinned, record.priority) == ("registered", True, 70)
        assert w.types("a1")[:2] == ["adapter.rejected", "adapter.added"]

    world(scenario)


def test_an_illegal_name_is_filed_under_a_made_up_one(world):
    async def scenario(w):
        w.folder(1)
        folder = report(w, 1, name="inbox:0123456789ab", legal=False)
        await w.inbox.take(folder)
        record = w.registry.get("inbox:0123456789ab")
        assert (record.stored_state, record.reason) == ("quarantined", "E_NAME_ILLEGAL")
        assert folder.display_name in record.reason_message
        await w.inbox.lose(folder.path)
        assert w.registry.get("inbox:0123456789ab") is None

    world(scenario)


def test_a_pin_without_room_is_told_and_the_adapter_serves_unpinned(world):
    async def scenario(w):
        w.pins_refused = True
        w.folder(1)
        await w.inbox.take(report(w, 1, pin=True))
        assert not w.registry.get("a1").pinned
        assert w.adapters.resolve("a1").rev == w.rev(1)
        assert "pin.refused" in w.types("a1")

    world(scenario)


def test_a_name_of_another_source_is_not_taken_over(world):
    async def scenario(w):
        w.inbox.watcher = Watcher()
        await w.add("a1", 7)
        w.folder(1)
        folder = report(w, 1)
        await w.inbox.take(folder)
        assert w.adapters.resolve("a1").rev == w.rev(7)
        filed = w.listing.page(state="quarantined").items
        assert [(item.reason, item.display_name) for item in filed] == [("E_NAME_TAKEN", "a1")]
        await w.adapters.remove("a1")
        w.inbox.reconsider("a1")
        assert w.inbox.watcher.retried == [folder.path]
        await w.inbox.take(folder)
        assert w.adapters.resolve("a1").rev == w.rev(1)
        assert w.listing.page(state="quarantined").total == 0

    world(scenario)


def test_the_base_models_name_is_not_taken_over_either(world):
    async def scenario(w):
        w.folder(1)
        await w.inbox.take(report(w, 1, name="base"))
        assert w.adapters.resolve("base").base
        assert w.listing.page(state="quarantined").items[0].reason == "E_NAME_TAKEN"

    world(scenario)


def test_a_wrong_lorad_toml_or_another_model_is_refused_by_name(world):
    async def scenario(w):
        w.folder(1)
        await w.inbox.take(report(w, 1, problem="lorad.toml: unknown key 'pinn'"))
        refused = w.registry.get("a1")
        assert refused.reason == "E_OPTIONS"
        assert "; mend lorad.toml" in refused.reason_message, "the next step stays with it"
        w.folder(2)
        await w.inbox.take(report(w, 2, model="qwen"))
        assert "qwen" in w.registry.get("a2").reason_message

    world(scenario)


def test_removed_content_stays_away_until_the_folder_changes(world):
    async def scenario(w):
        w.folder(1)
        await w.inbox.take(report(w, 1))
        await w.adapters.remove("a1")
        await w.inbox.take(report(w, 1, signature="touched"))
        assert w.registry.get("a1") is None
        (w.dir / "folders/f1/adapter_config.json").write_text('{"n": 2}')
        await w.inbox.take(report(w, 1, signature="s2"))
        assert w.adapters.resolve("a1").rev == w.rev(2)

    world(scenario)


def test_an_operators_word_outlives_lorad_toml_until_that_changes(world):
    async def scenario(w):
        from lorad import wire

        w.folder(1)
        await w.inbox.take(report(w, 1, pin=True))
        await w.adapters.unpin(wire.Names(names=("a1",)))
        await w.inbox.take(report(w, 1, signature="s2", pin=True))
        assert not w.registry.get("a1").pinned
        await w.inbox.take(report(w, 1, signature="s3", pin=True, priority=9))
        assert w.registry.get("a1").pinned

    world(scenario)


def test_a_folder_that_goes_leaves_its_adapter_serving(world):
    async def scenario(w):
        w.folder(1)
        folder = report(w, 1)
        await w.inbox.take(folder)
        await w.inbox.lose(folder.path)
        assert w.adapters.resolve("a1").rev == w.rev(1)
        assert "adapter.source_gone" in w.types("a1")

    world(scenario)


def test_a_folder_that_goes_takes_its_adapter_along_if_so_configured(world):
    async def scenario(w):
        w.inbox._on_delete = "remove"
        w.folder(1)
        folder = report(w, 1)
        await w.inbox.take(folder)
        await w.inbox.lose(folder.path)
        assert w.registry.get("a1") is None
        await w.inbox.take(folder)
        assert w.adapters.resolve("a1").rev == w.rev(1)

    world(scenario)


@pytest.mark.parametrize("when", ["it waits for a packer", "it is copied"])
def test_a_folder_that_goes_before_it_is_packed_is_not_packed(world, when):
    async def scenario(w):
        w.inbox._on_delete = "remove"
        busy, copying = asyncio.Event(), threading.Event()
        for other in ("x", "y"):  # both packers
            w.tasks.spawn(occupy(w, other, busy))
        await asyncio.sleep(0)
        if when == "it is copied":
            whole = w.inbox._copy
            w.inbox._copy = lambda path, staging: (copying.wait(30), whole(path, staging))
        w.folder(1)
        folder = report(w, 1)
        taking = w.tasks.spawn(w.inbox.take(folder))
        if when != "it is copied":
            await until(lambda: w.rev(1) in w.intake._packers._waiting)
        else:
            await until(w.inbox._lock(folder.path).locked)
        losing = w.tasks.spawn(w.inbox.lose(folder.path))
        await until(lambda: folder.path in w.inbox._leaving)
        copying.set()
        await until(lambda: w.catalog.is_leaving("a1"))
        busy.set()
        await taking
        await losing
        assert w.packed == []
        assert "adapter.not_loaded" not in w.types("a1")
        assert w.inbox._leaving == set() and w.inbox._memory.folders == {}
        await w.inbox.take(report(w, 1, signature="s2"))  # and once it is back, it is one again
        assert w.adapters.resolve("a1").rev == w.rev(1)

    world(scenario)


def test_one_whose_removal_fails_is_packed_after_all(world, monkeypatch):
    async def scenario(w):
        busy = asyncio.Event()
        for other in ("x", "y"):
            w.tasks.spawn(occupy(w, other, busy))
        await asyncio.sleep(0)
        w.folder(1)
        taking = w.tasks.spawn(w.inbox.take(report(w, 1)))
        await until(lambda: w.rev(1) in w.intake._packers._waiting)

        def full(name, tombstone):
            raise LoradError("insufficient_storage", "the disk is full")

        monkeypatch.setattr(w.registry, "remove", full)
        removing = w.tasks.spawn(w.adapters.remove("a1"))
        await until(lambda: w.catalog.is_leaving("a1"))
        busy.set()
        await taking
        with pytest.raises(LoradError, match="the disk is full"):
            await removing
        await until(lambda: w.catalog.get("a1").candidate is None)
        assert w.catalog.get("a1").rev == w.rev(1)
        assert w.packed == [w.rev(1)]

    world(scenario)


async def occupy(w, key, busy):
    async with w.intake._packers.place(key):
        await busy.wait()


async def until(true):
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


def test_a_full_disk_is_tried_again_and_files_nothing(world):
    async def scenario(w):
        w.inbox.watcher = Watcher()
        w.folder(1)
        folder = report(w, 1)

        def full(path, staging):
            raise LoradError("insufficient_storage", str(errno.ENOSPC))

        whole, w.inbox._copy = w.inbox._copy, full
        await w.inbox.take(folder)
        assert w.registry.get("a1") is None
        assert w.inbox.watcher.retried == [folder.path]
        w.inbox._copy = whole
        await w.inbox.take(folder)
        assert w.adapters.resolve("a1").rev == w.rev(1)

    world(scenario)


def test_a_folder_that_cannot_be_copied_safely_is_quarantined(world):
    async def scenario(w):
        w.folder(1)

        def link(path, staging):
            raise AdapterInvalid("E_NOT_REGULAR", "a symlink")

        w.inbox._copy = link
        await w.inbox.take(report(w, 1))
        assert w.registry.get("a1").reason == "E_NOT_REGULAR"
        assert not list(w.store.directory.joinpath(".staging").iterdir())

    world(scenario)


def test_what_was_seen_is_remembered_over_a_restart_but_refusals_are_looked_at_again(world):
    async def first(w):
        w.folder(1)
        await w.inbox.take(report(w, 1))
        w.folder(2, bad="E_TRUNCATED")
        await w.inbox.take(report(w, 2))
        w.inbox._memory.save()

    async def second(w):
        folders = w.dir / "folders"
        assert w.inbox.known() == {folders / "f1": "s1", folders / "f2": ""}

    world(first)
    world(second, start=False)


def test_a_stop_while_a_folder_is_packed_costs_no_second_look(world, eventually):
    async def first(w):
        w.folder(1)
        packing = asyncio.Event()

        async def pack(folder, out):
            packing.set()
            await asyncio.Event().wait()

        w.intake._pack = pack
        taking = asyncio.ensure_future(w.inbox.take(report(w, 1)))
        await packing.wait()
        taking.cancel()
        w.inbox._memory.save()

    async def second(w):
        assert w.inbox.known() == {w.dir / "folders" / "f1": "s1"}
        await w.start()
        await eventually(lambda: w.registry.get("a1").serving_rev == w.rev(1))

    world(first)
    world(second, start=False)


def test_a_broken_memory_is_an_empty_one(tmp_path):
    (tmp_path / "inbox.json").write_bytes(b"{")
    assert Memory(tmp_path / "inbox.json").folders == {}


def test_a_folder_whose_name_is_no_text_is_remembered_like_any_other(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff\xfe-caf\xc3\xa9")
    memory = Memory(tmp_path / "inbox.json")
    memory.put(folder, Seen("inbox:0123456789ab", "s1", "", "inbox:0123456789ab"))
    memory.put(tmp_path / "plain", Seen("plain", "s2", ""))
    memory.save()
    assert Memory(tmp_path / "inbox.json").folders == memory.folders


def test_a_memory_that_could_not_be_saved_is_saved_later(tmp_path):
    memory = Memory(tmp_path / "state" / "inbox.json")
    memory.put(tmp_path / "f", Seen("f", "s1", ""))
    with pytest.raises(OSError):
        memory.save()
    (tmp_path / "state").mkdir()
    memory.save()
    assert Memory(tmp_path / "state" / "inbox.json").folders == memory.folders


def test_reports_from_the_watchers_thread_arrive(world, eventually):
    async def scenario(w):
        import threading

        w.folder(1)
        thread = threading.Thread(target=w.inbox.on_folder, args=(report(w, 1),))
        thread.start()
        await eventually(lambda: w.registry.get("a1") is not None)
        thread.join()
        await w.tasks.settle()
        assert w.types("a1") == ["adapter.added"] and w.store.has(w.rev(1))

    world(scenario)


def test_a_folder_that_a_failing_disk_keeps_out_is_taken_at_the_next_rescan(world):
    async def scenario(w):
        w.inbox.watcher = Watcher()
        w.folder(1)
        whole, w.intake._inspect = w.intake._inspect, failing
        await w.inbox.take(report(w, 1))
        assert w.inbox.watcher.retried == [w.dir / "folders" / "f1"]
        w.intake._inspect = whole
        await w.inbox.take(report(w, 1))
        assert w.registry.get("a1").serving_rev == w.rev(1)

    def failing(folder):
        raise OSError(errno.EIO, "input/output error")

    world(scenario)


# ----------------------------------------------------------------- losses
def lost_files(w, n):
    """Somebody removes a revision's folder from the store."""
    shutil.rmtree(w.store.path(w.rev(n)))


def remember(w, n, signature="s1"):
    """What the watcher would report again."""
    w.inbox.watcher = watcher = Watcher()
    return watcher, report(w, n, signature=signature)


def test_an_inbox_that_is_gone_removes_nothing_and_a_deleted_folder_does(world):
    async def scenario(w):
        w.inbox._on_delete = "remove"
        for n in (1, 2):
            w.folder(n)
            await w.inbox.take(report(w, n))
        await w.inbox.lose(report(w, 1).path, with_inbox=True)
        await w.inbox.lose(report(w, 2).path)
        assert w.adapters.resolve("a1").rev == w.rev(1)
        assert w.registry.get("a2") is None
        gone = [e for e in w.events.newest(100) if e.type == "adapter.source_gone"]
        assert [(e.name, e.cause) for e in gone] == [("a1", "inbox")]
        await w.inbox.take(report(w, 1))  # it is mounted again
        assert w.types("a1").count("adapter.added") == 1

    world(scenario)


def test_what_the_store_lost_is_missing_and_its_folder_brings_it_back(world):
    async def scenario(w):
        w.folder(1)
        watcher, again = remember(w, 1)
        await w.inbox.take(again)
        lost_files(w, 1)
        await w.housekeeping._round()
        assert w.registry.get("a1").stored_state == "missing"
        assert w.types("a1").count("adapter.missing") == 1
        with pytest.raises(LoradError) as caught:
            w.adapters.resolve("a1")
        assert caught.value.code == "model_not_found"
        assert watcher.retried == [again.path]
        await w.inbox.take(again)
        assert w.adapters.resolve("a1").rev == w.rev(1)
        await w.revisions.load(w.rev(1))

    world(scenario)


def test_a_resident_copy_serves_on_while_the_store_gets_its_files_back(world):
    async def scenario(w):
        w.folder(1)
        watcher, again = remember(w, 1)
        await w.inbox.take(again)
        await w.revisions.load(w.rev(1))
        await asyncio.sleep(0)
        lost_files(w, 1)
        await w.housekeeping._round()
        assert w.adapters.resolve("a1").rev == w.rev(1)
        assert watcher.retried == [again.path]
        await w.inbox.take(again)
        assert w.store.has(w.rev(1)) and w.types("a1").count("adapter.replaced") == 0
        await w.housekeeping._round()
        assert len(watcher.retried) == 1

    world(scenario)


def test_a_cold_adapter_whose_files_are_gone_is_missing_from_its_first_request_on(
    world, eventually
):
    async def scenario(w):
        w.folder(1)
        watcher, again = remember(w, 1)
        await w.inbox.take(again)
        lost_files(w, 1)
        event = AdapterEvent(rev=w.rev(1), before="loading", after="registered", cause="error")
        w.engine.frame(adapters=(event,))  # as the engine says that it could not read it
        await eventually(lambda: w.registry.get("a1").stored_state == "missing")
        await eventually(lambda: watcher.retried == [again.path])
        assert w.types("a1") == ["adapter.added", "slot.load_failed", "adapter.missing"]
        assert w.registry.get("a1").serving_rev == w.rev(1), "its name is kept for when they come"

    world(scenario)


def test_a_folder_without_room_is_told_once_and_again_after_it_went_well(world):
    async def scenario(w):
        w.folder(1)
        watcher, folder = remember(w, 1)
        w.store.room.budget_bytes = 1
        for _ in range(3):
            await w.inbox.take(folder)
        assert w.types("a1") == ["adapter.not_loaded"] and len(watcher.retried) == 3
        assert w.listing.page().inbox_waits == ("a1",)
        with pytest.raises(LoradError) as caught:
            w.listing.detail("a1")
        assert caught.value.message.startswith("'a1' waits in the inbox: ")
        assert "loractl reload" in caught.value.hint
        w.store.room.budget_bytes = 0
        await w.inbox.take(folder)
        assert w.adapters.resolve("a1").rev == w.rev(1) and not w.listing.page().inbox_waits
        w.folder(1, more=1)
        (w.dir / "folders/f1/adapter_config.json").write_text('{"n": 2}')
        w.store.room.budget_bytes = 1
        await w.inbox.take(report(w, 1, signature="s2"))
        assert w.types("a1").count("adapter.not_loaded") == 2
        assert not w.listing.page().inbox_waits  # what serves is a row

    world(scenario)


def test_a_folder_without_room_that_is_taken_away_waits_no_more(world):
    async def scenario(w):
        w.folder(1)
        _, folder = remember(w, 1)
        w.store.room.budget_bytes = 1
        await w.inbox.take(folder)
        assert w.names.inbox_waits
        await w.inbox.lose(folder.path)
        assert not w.names.inbox_waits
        with pytest.raises(LoradError, match="no adapter named"):
            w.listing.detail("a1")

    world(scenario)


def test_an_adapter_in_anothers_folder_is_told_of_once_with_what_to_do(world):
    async def scenario(w):
        w.folder(1)
        _, folder = remember(w, 1)
        await w.inbox.take(folder)
        assert not w.listing.detail("a1").inbox_nested
        nested = replace(folder, signature="s2", nested=("f1 new", "x"))
        await w.inbox.take(nested)
        await w.inbox.take(nested)  # as at each start, where it was refused
        assert w.types("a1").count("adapter.nested") == 1
        [event] = [e for e in w.events.newest(100) if e.type == "adapter.nested"]
        assert event.level == "warn"
        assert "f1 new and 1 more in its folder are not served" in event.message
        steps = "mv -T 'f1/f1 new' .new && mv -T f1 .old && mv -T .new f1"
        assert event.message.endswith(f"cd {folder.path.parent} && {steps}")
        assert w.listing.detail("a1").inbox_nested == event.message
        assert w.listing.page().inbox_nested == ("a1",)
        assert w.registry.get("a1").serving_rev == w.rev(1)

    async def again(w):
        assert w.listing.page().inbox_nested == ("a1",), "a start has not forgotten it"
        folder = report(w, 1, signature="s3")
        await w.inbox.take(folder)
        assert not w.listing.page().inbox_nested
        await w.inbox.take(replace(folder, signature="s4", nested=("x",)))
        assert w.listing.detail("a1").inbox_nested
        await w.inbox.lose(folder.path)
        assert not w.listing.detail("a1").inbox_nested

    async def first(w):
        await scenario(w)
        w.inbox._memory.save()

    world(first)
    world(again)

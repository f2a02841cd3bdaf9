"""Rows and pages: the registry's words beside the engine's numbers."""

import asyncio
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs

from engine.messages import PackedModule
from engine.status_messages import RevisionStatus
from lorad import wire, wire_status
from lorad.errors import LoradError
from lorad.registry.records import TextFacts
from lorad.service import picture
from lorad.service.kinds import kinds_of, scalings_of
from lorad.service.snapshot import prefix_of
from tests.unit.service.conftest import INFO


def test_rows_show_the_stored_and_the_live_side(world):
    async def scenario(w):
        await w.add("a", 1, load=True, pin=True, priority=60, labels={"team": "x"})
        await w.add("acme/b", 2)
        await w.picture.refresh()
        page = w.listing.page()
        a, b = page.items
        assert (a.name, a.state, a.slot, a.pinned, a.priority) == ("a", "idle", 0, True, 60)
        assert (a.rank, a.num_bytes, a.targets) == (4, 2 << 16, ("q_proj",))
        assert a.labels == {"team": "x"}
        assert a.created_at.endswith("Z")
        assert (b.name, b.tenant, b.state, b.slot) == ("acme/b", "acme", "registered", None)
        assert (page.total, page.cursor) == (2, None)
        assert (a.prefix_query_tokens, a.prefix_hit_tokens, a.prefix_lost_tokens) == (80, 32, 16)
        assert a.prefix_saved_seconds == 0.5

    world(scenario)


def test_names_of_equal_content_show_each_what_was_asked_of_it(world):
    async def scenario(w):
        await w.add("a", 1, load=True)
        await w.add("b", 1)
        await w.picture.refresh()
        rev = w.rev(1)
        status = structs.replace(w.picture.by_rev[rev], state="active", running=2, waiting=1)
        w.picture.by_rev = {rev: status}
        for begun in (True, True, False):
            w.crowd.append((SimpleNamespace(rev=rev, begun=begun), SimpleNamespace(name="b")))
        for items in (w.listing.page().items, w.listing.slots().items):
            told = {item.name: (item.running, item.waiting) for item in items}
            assert told == {"a": (0, 0), "b": (2, 1)}
        assert w.listing.detail("a").adapter.running == 0

    world(scenario)


def test_the_prefix_cache_is_shown_as_the_engine_tells_it(world):
    async def scenario(w):
        await w.picture.refresh()
        told = wire_status.PrefixPicture(query_tokens=90, hit_tokens=32, found_blocks=(1, 1))
        assert prefix_of(w.picture.snapshot) == told

    world(scenario)


def test_whose_vocabulary_each_has_is_shown_and_what_is_used_of_the_room(world):
    async def scenario(w):
        own = TextFacts(num_tokens=INFO.vocab_size + 2, own_tokenizer=True, base_text="b")
        reserved, rows = replace(own, num_tokens=200), replace(own, own_tokenizer=False)
        assert w.listing.vocabularies("base") == (0, 0)
        for n, facts in enumerate((own, reserved, rows, None)):
            rev = (await w.add(f"a{n}", n)).rev
            if facts is not None:
                await asyncio.wrap_future(w.registry.note_texts({rev: facts}))
        shown = [(a.own_tokenizer, a.extra_tokens) for a in w.listing.page().items]
        assert shown == [(True, 2), (True, 0), (False, 2), (False, 0)]
        assert w.listing.vocabularies("base") == (2, 2)
        asked = []
        w.registry._read, read = lambda: asked.append(1) or read(), w.registry._read
        assert w.listing.vocabularies("base") == (2, 2) and not asked, "until something is written"
        await w.adapters.remove("a0")
        assert w.listing.vocabularies("base") == (2, 1)
        w.names.models = ("base", "x")
        assert w.listing.vocabularies("base") == (2, 1)
        assert w.listing.vocabularies("x") == (0, 0), "none is of another model"
        w.names.models = ("x",)
        assert w.listing.vocabularies("x") == (2, 1), "the one model has another name by now"

    world(scenario)


def test_pages_follow_each_other(world):
    async def scenario(w):
        for n in range(5):
            await w.add(f"a{n}", n)
        seen, cursor = [], None
        while True:
            page = w.listing.page(limit=2, cursor=cursor, sort="-name")
            seen += [item.name for item in page.items]
            cursor = page.cursor
            if cursor is None:
                break
        assert seen == ["a4", "a3", "a2", "a1", "a0"]

    world(scenario)


def test_sorting_by_size_goes_by_the_size_that_is_shown(world):
    async def scenario(w):
        w.with_gain.add(w.rev(2))  # whose packed file is of another stream
        for n, blocks in ((1, 8), (2, 4), (3, 1)):
            await w.add(f"a{n}", n)
            stream = w.registry.revision(w.rev(n)).stream(w.info)
            w.registry.record_packed(w.rev(n), stream, blocks, 100).result()
        await w.picture.refresh()
        shown, cursor = [], None
        while not shown or cursor is not None:
            page = w.listing.page(sort="-size", limit=1, cursor=cursor)
            shown += [(item.name, item.num_bytes >> 16) for item in page.items]
            cursor = page.cursor
        assert shown == [("a1", 8), ("a2", 4), ("a3", 1)]

    world(scenario)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("idle", ["a"]),
        ("ram", ["b"]),
        ("registered", ["c"]),
        ("quarantined", ["d"]),
        ("active", []),
    ],
)
def test_any_printed_state_can_be_asked_for(world, state, expected):
    async def scenario(w):
        await w.add("a", 1, load=True)
        await w.add("b", 2)
        await w.adapters.load(wire.Names(names=("b",), tier="ram"))
        await w.add("c", 3)
        await w.adapters.quarantine("d", "inbox", LoradError("adapter_invalid", "no"))
        await w.picture.refresh()
        assert [item.name for item in w.listing.page(state=state).items] == list(expected)
        assert w.listing.counts() == {"idle": 1, "ram": 1, "registered": 1, "quarantined": 1}

    world(scenario)


def test_an_unknown_state_is_refused(world):
    async def scenario(w):
        with pytest.raises(LoradError, match="no state"):
            w.listing.page(state="happy")

    world(scenario)


def test_detail_tells_revision_history_and_events(world):
    async def scenario(w):
        await w.add("a", 1)
        await w.add("a", 2, replace=True)
        detail = w.listing.detail("a")
        assert detail.serving.rev == w.rev(2)
        assert detail.serving.num_blocks == 2
        assert detail.candidate is None
        assert detail.history == (w.rev(1),)
        assert "adapter.replaced" in [event.type for event in detail.events]
        with pytest.raises(LoradError, match=r"no adapter named 'ab'") as caught:
            w.listing.detail("ab")
        assert caught.value.hint == "did you mean a?"
        with pytest.raises(LoradError, match="'base' is the base model, not an adapter"):
            w.listing.detail("base")

    world(scenario)


def test_detail_tells_mlx_by_the_stored_config_and_never_shows_its_scale_as_an_alpha(world):
    async def scenario(w):
        folder, staging = w.folder(1, fine_tune_type="lora"), await w.adapters.stage()
        shutil.copytree(folder, staging.path, dirs_exist_ok=True)
        await w.adapters.add(staging, "a", source="upload")
        await w.add("b", 2)
        mlx, plain = w.listing.detail("a").serving, w.listing.detail("b").serving
        assert (mlx.kinds, mlx.alpha, mlx.scalings) == (("MLX",), None, (2.0,))
        assert (plain.kinds, plain.alpha, plain.scalings) == ((), 8.0, (2.0,))

    world(scenario)


@pytest.mark.parametrize(
    ("module", "tokens", "kinds"),
    [
        (PackedModule(0, "q_proj", 4, 2.0), (), ()),
        (PackedModule(0, "q_proj", 4, 2.0), (5,), ("aLoRA",)),
        (PackedModule(0, "q_proj", 4, 2.0, gain=True), (), ("DoRA",)),
        (PackedModule(0, "q_proj", 4, 2.0, bias=True), (), ("bias",)),
        (PackedModule(1, "lm_head", 4, 2.0, gain=True), (), ("DoRA", "head")),
        (PackedModule(1, "embed_tokens", 4, 2.0), (), ("embedding",)),
        (PackedModule(1, "lm_head.rows", 4, 1.0), (), ("rows",)),
        (PackedModule(1, "score.weight.rows", 3, 1.0), (), ("classifier",)),
        (PackedModule(1, "head.dense", 4, 2.0), (), ("classifier",)),
    ],
)
def test_a_kind_is_read_off_the_modules(world, module, tokens, kinds):
    async def scenario(w):
        await w.add("a", 1)
        record = replace(w.registry.revision(w.rev(1)), modules=(module,), alora_tokens=tokens)
        assert kinds_of(record, mlx=False) == kinds

    world(scenario)


def test_scalings_are_those_of_pairs_each_once_and_not_of_replaced_rows(world):
    modules = (
        PackedModule(0, "q_proj", 4, 2.0),
        PackedModule(1, "q_proj", 8, 0.5),
        PackedModule(1, "v_proj", 4, 2.0),
        PackedModule(2, "lm_head.rows", 4, 1.0),
    )

    async def scenario(w):
        await w.add("a", 1)
        record = replace(w.registry.revision(w.rev(1)), modules=modules)
        assert scalings_of(record) == (0.5, 2.0)

    world(scenario)


def test_after_a_restart_detail_has_the_registrys_events(world):
    async def first(w):
        await w.add("a", 1)

    async def second(w):
        assert "adapter.added" in [event.type for event in w.listing.detail("a").events]

    world(first)
    world(second)


def test_slots_are_in_slot_order_and_show_replaced_revisions(world):
    async def scenario(w):
        await w.add("a", 1, load=True)
        await w.add("b", 2, load=True)
        w.adapters.lease(w.rev(1))
        await w.add("a", 3, replace=True)
        await w.picture.refresh()
        slots = w.listing.slots()
        assert [item.name for item in slots.items] == [f"a@{w.rev(1)[:8]}", "b", "a"]
        assert (slots.slots_total, slots.slots_used) == (8, 3)
        w.adapters.release(w.rev(1))

    world(scenario)


def test_without_an_engine_nothing_is_resident(world):
    async def scenario(w):
        await w.add("a", 1)
        await w.picture.refresh()
        assert w.listing.slots() == wire.SlotPage(items=(), slots_total=0, slots_used=0)
        assert w.listing.page().items[0].state == "registered"

    world(scenario, start=False)


def test_the_picture_is_taken_after_the_question(world):
    async def scenario(w):
        await w.picture.refresh()
        w.engine.revisions[w.rev(9)] = "gpu"
        await w.picture.refresh()
        assert isinstance(w.picture.by_rev[w.rev(9)], RevisionStatus)

    world(scenario)


def test_who_looks_does_not_wait_for_an_engine_in_a_long_step(world, monkeypatch):
    monkeypatch.setattr(picture, "LOOK_SECONDS", 0.01)

    async def scenario(w):
        await w.picture.refresh()
        before = w.picture.snapshot
        w.engine.hold_snapshots.clear()
        await w.picture.look()
        assert w.picture.snapshot is before
        w.engine.hold_snapshots.set()
        await w.picture.look()
        assert w.picture.snapshot is not before

    world(scenario)

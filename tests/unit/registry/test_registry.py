"""Names, revisions and what each change leaves behind."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.states import State
from engine.messages import EngineInfo, PackedModule
from lorad.errors import LoradError, RegistryUnusable
from lorad.registry.cards import Cards
from lorad.registry.records import (
    AdapterRecord,
    PackedRecord,
    Registered,
    RevisionRecord,
    TextFacts,
)
from lorad.registry.registry import Registry
from lorad.registry.rows import decode_modules, encode_modules

Add = Callable[..., Registered]


def _get(registry: Registry, name: str) -> AdapterRecord:
    record = registry.get(name)
    assert record is not None
    return record


def engine_info(layout: str, base: str = "") -> EngineInfo:
    """Of an engine of which nothing else matters."""
    fields = {field: 0 for field in EngineInfo.__struct_fields__}
    return EngineInfo(**fields | {"layout": layout, "base": base})  # type: ignore[arg-type]


def _code(future: Any) -> str:
    with pytest.raises(LoradError) as raised:
        future.result()
    return raised.value.code


def test_a_new_name_serves_at_once_or_waits_as_a_candidate(registry: Registry, add: Add) -> None:
    first = add("acme/sql", b"1", tenant="acme", labels={"team": "data"}, pin=True, priority=70)
    assert first.created and first.serving and not first.unchanged
    record = _get(registry, "acme/sql")
    assert (record.tenant, record.pinned, record.priority) == ("acme", True, 70)
    assert record.labels == {"team": "data"} and record.serving_rev == first.rev
    assert record.stored_state is State.REGISTERED and record.last_used_at is None
    second = add("x", b"2", as_candidate=True)
    record = _get(registry, "x")
    assert not second.serving
    assert (record.serving_rev, record.candidate_rev) == (None, second.rev)


def test_a_revision_comes_back_as_it_was_given(
    registry: Registry, add: Add, revision: Callable[..., RevisionRecord]
) -> None:
    rev = add("x", b"1").rev
    found = registry.revision(rev)
    assert found is not None
    assert dataclasses.replace(found, created_at=0.0) == revision(rev)
    assert registry.revision("0" * 64) is None


def test_a_replacement_leaves_settings_alone_until_it_is_promoted(
    registry: Registry, add: Add
) -> None:
    old = add("x", b"1", pin=True, priority=80, labels={"a": "b"}).rev
    new = add("x", b"2", as_candidate=True)
    assert not new.created and new.replaced_rev is None
    record = _get(registry, "x")
    assert (record.serving_rev, record.candidate_rev) == (old, new.rev)
    assert (record.pinned, record.priority, record.labels) == (True, 80, {"a": "b"})
    assert registry.promote("x", new.rev).result() is True
    record = _get(registry, "x")
    assert (record.serving_rev, record.candidate_rev) == (new.rev, None)
    assert registry.revisions_of("x") == (old,)
    assert registry.promote("x", new.rev).result() is False  # idempotent
    assert registry.revisions_of("x") == (old,)


def test_only_the_candidate_can_be_promoted(registry: Registry, add: Add) -> None:
    add("x", b"1")
    assert _code(registry.promote("x", "0" * 64)) == "conflict"
    assert _code(registry.promote("y", "0" * 64)) == "model_not_found"


def test_a_failing_candidate_is_cleared_alone_and_says_why(registry: Registry, add: Add) -> None:
    old = add("x", b"1").rev
    add("x", b"2", as_candidate=True)
    assert registry.fail_candidate("x", "E_NAN", "layer 3 is not finite").result() is True
    record = _get(registry, "x")
    assert (record.serving_rev, record.candidate_rev) == (old, None)
    assert record.stored_state is State.REGISTERED
    assert (record.reason, record.reason_message) == ("E_NAN", "layer 3 is not finite")
    assert registry.revisions_of("x") == ()


def test_a_first_candidate_that_fails_leaves_the_name_quarantined(
    registry: Registry, add: Add
) -> None:
    add("x", b"1", as_candidate=True)
    assert registry.fail_candidate("x", "E_NAN", "no").result() is False
    assert _get(registry, "x").stored_state is State.QUARANTINED
    add("x", b"2", as_candidate=True)
    record = _get(registry, "x")
    assert record.stored_state is State.REGISTERED and record.reason is None


def test_a_refused_folder_is_filed_under_its_name_with_its_reason(registry: Registry) -> None:
    done = registry.quarantine("inbox:0123456789ab", "inbox", "E_NAME", "bad", "a\\x1bb")
    assert done.result() is False
    record = _get(registry, "inbox:0123456789ab")
    assert record.stored_state is State.QUARANTINED and record.display_name == "a\\x1bb"
    assert (record.serving_rev, record.reason) == (None, "E_NAME")


def test_a_refused_replacement_never_touches_what_serves(registry: Registry, add: Add) -> None:
    rev = add("x", b"1").rev
    assert registry.quarantine("x", "inbox", "E_TRUNCATED", "short").result() is True
    record = _get(registry, "x")
    assert record.stored_state is State.REGISTERED and record.serving_rev == rev
    assert record.reason == "E_TRUNCATED"


def test_the_same_content_under_two_names_is_one_revision(registry: Registry, add: Add) -> None:
    one, two = add("a", b"same"), add("b", b"same", as_candidate=True)
    assert one.rev == two.rev
    assert registry.names_of(one.rev) == ("a", "b")
    assert len(registry.revisions([one.rev])) == 1


def test_content_that_serves_already_is_unchanged_and_ends_a_candidacy(
    registry: Registry, add: Add
) -> None:
    rev = add("x", b"1").rev
    add("x", b"2", as_candidate=True)
    again = add("x", b"1", as_candidate=True)
    assert again.unchanged and again.serving and again.rev == rev
    record = _get(registry, "x")
    assert (record.serving_rev, record.candidate_rev) == (rev, None)


def test_missing_keeps_its_pointers_and_comes_back(registry: Registry, add: Add) -> None:
    rev = add("x", b"1").rev
    assert registry.mark_missing("x").result() is True
    assert registry.mark_missing("x").result() is False
    record = _get(registry, "x")
    assert record.stored_state is State.MISSING and record.serving_rev == rev
    add("x", b"2", as_candidate=True)  # its old files do not come back with the new ones
    assert _get(registry, "x").stored_state is State.MISSING
    assert registry.mark_present("x").result() is True
    assert _get(registry, "x").stored_state is State.REGISTERED


def test_settings_change_one_by_one_and_repeats_change_nothing(
    registry: Registry, add: Add
) -> None:
    add("x", b"1")
    assert registry.set_pin("x", True).result() is True
    assert registry.set_pin("x", True).result() is False
    assert registry.set_priority("x", 90).result() is True
    assert registry.set_labels("x", {"k": "v"}).result() is True
    record = _get(registry, "x")
    assert (record.pinned, record.priority, record.labels) == (True, 90, {"k": "v"})
    assert _code(registry.set_priority("x", 101)) == "invalid_value"
    assert _code(registry.set_pin("nobody", True)) == "model_not_found"
    kinds = [event.type for event in registry.events()]
    assert kinds == ["labels.set", "priority.set", "pin.set", "adapter.added"]


def test_a_removed_name_leaves_a_tombstone_for_its_source_only(
    registry: Registry, add: Add
) -> None:
    rev = add("x", b"1", source="inbox").rev
    gone = registry.remove("x", rev).result()
    assert (gone.name, gone.serving_rev) == ("x", rev)
    assert registry.get("x") is None
    tombstone = registry.tombstone("x")
    assert tombstone is not None and (tombstone.source, tombstone.digest) == ("inbox", rev)
    add("x", b"2", source="upload")
    assert _get(registry, "x").tombstone_digest == rev
    registry.remove("x").result()
    add("x", b"3", source="inbox")  # the folder changed
    assert _get(registry, "x").tombstone_digest is None


def test_unused_revisions_are_collected_but_leased_ones_stay(registry: Registry, add: Add) -> None:
    old = add("x", b"1").rev
    new = add("x", b"2").rev
    assert registry.collect([old]).result() == ()
    assert "collect" not in {row.action for row in registry.audit_log()}, "nothing went: no news"
    assert registry.store.has(old)
    assert registry.collect().result() == (old,)
    assert [r.result for r in registry.audit_log() if r.action == "collect"] == ["ok"]
    assert not registry.store.has(old) and registry.store.has(new)
    assert registry.revision(old) is None
    assert registry.revisions_of("x") == (old,)  # the history stays


def test_a_packed_file_is_sealed_and_found_again(registry: Registry, add: Add) -> None:
    rev = add("x", b"1").rev
    path = registry.store.packed(rev, "abc123")
    path.write_bytes(b"blocks" * 100)
    registry.record_packed(rev, "abc123", 3, 500).result()
    assert path.stat().st_mode & 0o777 == 0o440
    revision = registry.revision(rev)
    assert revision is not None
    manifest = revision.packed_manifest(engine_info("abc123"))
    assert manifest is not None and manifest.path == str(path)
    assert (manifest.num_blocks, manifest.true_bytes, manifest.max_rank) == (3, 500, 8)
    assert manifest.modules == revision.modules
    assert revision.packed_manifest(engine_info("other")) is None


def test_a_packed_file_with_gains_is_for_one_base_alone(
    registry: Registry, revision: Callable[..., RevisionRecord]
) -> None:
    plain, dora = (
        revision("a" * 64, modules=(PackedModule(0, "q_proj", 8, 2.0, gain=gain),))
        for gain in (False, True)
    )
    one, other = engine_info("abc123", base="cafe"), engine_info("abc123", base="beef")
    assert plain.stream(one) == plain.stream(other) == "abc123"
    assert len({dora.stream(one), dora.stream(other), "abc123"}) == 3
    assert registry.store.packed("a" * 64, dora.stream(one)).name == "packed-abc123wcafe.bin"
    files = {dora.stream(one): PackedRecord(layout="", path="", num_blocks=1, true_bytes=1)}
    held = dataclasses.replace(dora, packed=files)
    assert held.packed_for(one) and held.packed_manifest(one)
    assert held.packed_for(other) is held.packed_for(None) is None


def test_biases_and_gains_come_back_with_their_modules() -> None:
    modules = (
        PackedModule(0, "q_proj", 8, 2.0, bias=True),
        PackedModule(1, "q_proj", 8, 2.0),
        PackedModule(1, "v_proj", 4, 2.0, gain=True),
        PackedModule(2, "lm_head.rows", 2, 1.0, tokens=(7, 5)),
    )
    assert decode_modules(encode_modules(modules)) == modules
    assert encode_modules(modules[1:2]) == '[[1,"q_proj",8,2.0]]'


def test_what_the_packer_found_otherwise_takes_the_place_of_what_was_registered(
    registry: Registry, add: Add
) -> None:
    """Which rows are an adapter's own depends on the base: older packed files hold others."""
    rev = add("x", b"1").rev
    for layout in ("old", "new"):
        registry.store.packed(rev, layout).write_bytes(b"blocks")
    registry.record_packed(rev, "old", 3, 500).result()
    found = (PackedModule(2, "lm_head.rows", 2, 1.0, tokens=(5, 7)),)
    registry.record_packed(rev, "new", 1, 100, modules=found).result()
    revision = registry.revision(rev)
    assert revision is not None and revision.modules == found
    assert set(revision.packed) == {"new"}


def test_a_vocabulary_of_its_own_comes_back_and_goes_to_the_engine(
    registry: Registry, add: Add
) -> None:
    rev = add("x", b"1").rev
    revision = registry.revision(rev)
    assert revision is not None
    assert (revision.num_tokens, revision.own_tokenizer) == (49_154, True)
    registry.store.packed(rev, "abc123").write_bytes(b"blocks")
    registry.record_packed(rev, "abc123", 3, 500).result()
    revision = registry.revision(rev)
    assert revision is not None
    manifest = revision.packed_manifest(engine_info("abc123"))
    assert manifest is not None and manifest.num_tokens == 49_154


def test_whose_vocabulary_content_has_is_what_was_found_last(registry: Registry, add: Add) -> None:
    def own() -> tuple[int, bool, str]:
        revision = registry.revision(rev)
        assert revision is not None
        return revision.num_tokens, revision.own_tokenizer, revision.base_text

    rev = add("x", b"1", facts={"num_tokens": 0, "own_tokenizer": False}).rev
    assert own() == (0, False, "")
    add("y", b"1", facts={"base_text": "b2"})
    assert own() == (49_154, True, "b2"), "x has the same content, and y was looked at later"
    for name in ("x", "y"):
        registry.remove(name).result()
    add("x", b"1", facts={"num_tokens": 0, "own_tokenizer": False})
    assert own() == (0, False, "")
    card = Cards(registry.store.directory / ".cards").read_revision(rev)
    assert card is not None and not card.own_tokenizer, "a registry made of the store alone lost it"


def test_what_was_found_beside_another_base_is_looked_for_again(
    registry: Registry, add: Add
) -> None:
    one = add("one", b"1", facts={"base_text": "b1"}).rev
    two = add("two", b"2", facts={"base_text": "b2"}, pin=True).rev
    old = add("old", b"3").rev
    add("other", b"4", model="another")
    registry.quarantine("bad", "upload", "E_SHAPE", "no").result()
    registry.touch_used({"old": 2_000_000.0}).result()
    assert registry.unlike("b1", "base") == (two, old), "the pinned first"
    assert registry.unlike("b2", "base") == (old, one), "then who was used last"
    assert set(registry.unlike("b1")) == {two, old, *registry.unlike("b1", "another")}
    now = TextFacts(num_tokens=7, own_tokenizer=True, base_text="b1")
    same = dataclasses.replace(now, num_tokens=49_154)
    assert registry.note_texts({two: same, old: now, "f" * 64: now}).result() == (old,)
    assert registry.unlike("b1", "base") == ()
    found = registry.revisions((two, old))
    assert (found[two].text, found[old].text) == (same, now)
    told = [event for event in registry.events() if event.type == "adapter.tokenizer"]
    assert [(e.rev, e.message) for e in told] == [(old, "its own tokenizer, 7 tokens")]


def test_a_packed_file_that_is_not_there_is_not_recorded(registry: Registry, add: Add) -> None:
    rev = add("x", b"1").rev
    with pytest.raises(FileNotFoundError):
        registry.record_packed(rev, "abc123", 3, 500).result()
    revision = registry.revision(rev)
    assert revision is not None and not revision.packed


def test_content_that_is_not_in_the_store_cannot_be_registered(
    registry: Registry, revision: Callable[..., RevisionRecord]
) -> None:
    future = registry.register("x", model="m", source="inbox", revision=revision("a" * 64))
    assert _code(future) == "not_found"
    assert registry.get("x") is None


def test_usage_is_counted_per_name_and_never_goes_back(registry: Registry, add: Add) -> None:
    add("a", b"same")
    add("b", b"same")
    registry.touch_used({"a": 50.0, "gone": 60.0}).result()
    registry.touch_used({"a": 40.0}).result()
    assert _get(registry, "a").last_used_at == 50.0
    assert _get(registry, "b").last_used_at is None


def test_every_change_has_one_audit_row_with_who_and_what_came_of_it(
    registry: Registry, add: Add
) -> None:
    add("x", b"1", actor="uid=1001 pid=7")
    registry.set_pin("x", True, actor="uid=0 pid=9").result()
    registry.set_pin("x", True, actor="uid=0 pid=9").result()
    registry.audit("load", actor="key:ab12", name="x", result="permission_denied").result()
    rows = [(r.actor, r.action, r.result) for r in registry.audit_log()]
    assert rows == [
        ("key:ab12", "load", "permission_denied"),
        ("uid=0 pid=9", "settings.unchanged", "unchanged"),
        ("uid=0 pid=9", "pin.set", "ok"),
        ("uid=1001 pid=7", "register", "ok"),
    ]


def test_a_refused_change_leaves_neither_event_nor_audit_row(registry: Registry, add: Add) -> None:
    add("x", b"1")
    before = registry.events(), registry.audit_log()
    _code(registry.promote("x", "0" * 64))
    assert (registry.events(), registry.audit_log()) == before


def test_events_are_asked_for_by_name_and_after_an_id(registry: Registry, add: Add) -> None:
    add("a", b"1")
    add("b", b"2")
    registry.set_pin("a", True).result()
    newest = registry.events(1)[0]
    assert [e.type for e in registry.events(name="a")] == ["pin.set", "adapter.added"]
    assert registry.events(since=newest.id) == ()
    assert newest.time > registry.events()[-1].time


def test_a_restart_brings_back_every_name_pin_and_priority(
    registry: Registry, add: Add, tmp_path: Path
) -> None:
    add("a", b"1", pin=True, priority=3, labels={"x": "y"})
    add("b", b"2")
    add("b", b"3", as_candidate=True)
    registry.quarantine("c", "inbox", "E_X", "bad").result()
    before = registry.list(), registry.all_serving(), registry.events()
    registry.close()
    again = Registry.open(tmp_path)
    try:
        assert not again.report.recovered and not again.report.created
        assert (again.list(), again.all_serving(), again.events()) == before
    finally:
        again.close()


def test_all_serving_pairs_names_with_their_revisions(registry: Registry, add: Add) -> None:
    rev = add("a", b"1").rev
    candidate = add("a", b"2", as_candidate=True).rev
    registry.quarantine("c", "inbox", "E_X", "bad").result()
    (only,) = registry.all_serving()
    assert only.adapter.name == "a"
    assert only.revision is not None and only.revision.rev == rev
    assert only.candidate is not None and only.candidate.rev == candidate


def test_reconcile_marks_missing_what_the_store_lost_and_clears_what_nobody_knows(
    registry: Registry, add: Add, put: Callable[..., str]
) -> None:
    lost, kept = add("a", b"1").rev, add("b", b"2").rev
    registry.store.packed(kept, "l1").write_bytes(b"x")
    registry.record_packed(kept, "l1", 1, 1).result()
    registry.store.packed(kept, "l1").unlink()
    stray = put(registry.store, b"never registered")
    registry.store.remove([lost])
    report = registry.reconcile().result()
    assert report.missing == (lost,) and report.unknown == (stray,)
    assert _get(registry, "a").stored_state is State.MISSING
    assert registry.store.revs() == {kept}
    revision = registry.revision(kept)
    assert revision is not None and not revision.packed


def test_a_closed_registry_answers_changes_with_a_reason(tmp_path: Path) -> None:
    registry = Registry.open(tmp_path)
    registry.close()
    registry.close()
    with pytest.raises(RegistryUnusable, match="closed"):
        registry.set_pin("x", True).result()

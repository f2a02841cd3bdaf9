"""Events and audit: on whose word, into which places, and never too many or too old."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lorad.registry import journal
from lorad.registry.records import AuditRecord
from lorad.registry.registry import Registry


def row(**words: Any) -> AuditRecord:
    usual = {"actor": "a", "action": "load", "name": "x", "rev": "", "result": "ok", "message": ""}
    return AuditRecord(id=0, time=0.0, **usual | words)


def test_what_is_done_is_on_the_word_of_whoever_acts(registry: Registry, add: Any) -> None:
    with journal.acting("uid 7 pid 1"):
        add("x", b"1")
        with journal.acting("uid 8 pid 2"):
            registry.set_pin("x", True).result()
        registry.set_pin("x", False, actor="packer").result()
        registry.set_priority("x", 3).result()
    registry.set_priority("x", 4).result()
    told = [(r.actor, r.action) for r in reversed(registry.audit_log())]
    assert told == [
        ("uid 7 pid 1", "register"),
        ("uid 8 pid 2", "pin.set"),
        ("packer", "pin.cleared"),
        ("uid 7 pid 1", "priority.set"),
        ("daemon", "priority.set"),
    ]
    assert [e.cause for e in registry.events(2)] == ["daemon", "uid 7 pid 1"]


def test_tasks_and_threads_that_it_begins_act_for_it_too(registry: Registry, add: Any) -> None:
    add("x", b"1")

    async def pin() -> None:
        await asyncio.to_thread(lambda: registry.set_pin("x", True).result())

    async def request(uid: int) -> None:
        journal.act_as(f"uid {uid}")
        await asyncio.create_task(pin())

    async def both() -> None:
        await asyncio.gather(request(1), request(2))

    asyncio.run(both())
    assert {r.actor for r in registry.audit_log(2)} == {"uid 1", "uid 2"}
    assert journal.actor_now() == "daemon"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(journal.actor_now).result() == "daemon"


def test_rows_of_both_tables_stay_below_their_number(
    registry: Registry, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "KEEP_EVENTS", 5)
    monkeypatch.setattr(journal, "KEEP_AUDIT", 7)
    add("x", b"1")
    for number in range(20):
        registry.set_priority("x", number).result()
    assert registry.events()[0].message.endswith("19")
    assert (len(registry.events()), len(registry.audit_log())) == (5, 7)


def test_rows_that_are_too_old_go_as_new_ones_come(
    registry: Registry, add: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_LOOKED_AT", 4)
    add("x", b"1")
    for number in range(10):
        registry.set_priority("x", number).result()
    clock.now += journal.KEEP_EVENTS_SECONDS + 60
    registry.set_priority("x", 50).result()
    assert (len(registry.events()), len(registry.audit_log())) == (8, 12)
    for number in range(3):
        registry.set_priority("x", number).result()
    assert (len(registry.events()), len(registry.audit_log())) == (4, 15)
    clock.now += journal.KEEP_AUDIT_SECONDS
    for number in range(10, 16):
        registry.set_priority("x", number).result()
    assert (len(registry.events()), len(registry.audit_log())) == (6, 6)


def test_several_rows_are_written_at_once_and_asked_for_by_their_words(registry: Registry) -> None:
    rows = [
        row(actor="uid 1 pid 2 key abc", action="load", name="a"),
        row(actor="uid 2 pid 2", action="evict", name="b", result="pinned"),
        row(actor="uid 1 pid 3", action="load.x", name="b"),
    ]
    registry.audit_many(rows).result()
    log = registry.audit_log
    assert [r.name for r in log()] == ["b", "b", "a"]
    assert [r.action for r in log(actor="uid 1")] == ["load.x", "load"]
    assert [r.actor for r in log(actor="key abc")] == ["uid 1 pid 2 key abc"]
    assert [r.name for r in log(action="load")] == ["b", "a"]
    assert [r.result for r in log(name="b", action="evict")] == ["pinned"]
    assert log(after=log()[0].time + 1) == () and len(log(after=log()[0].time)) == 3
    assert log(action="%") == () and log(1)[0].action == "load.x"


def test_what_is_not_kept_is_told_all_the_same(registry: Registry, add: Any) -> None:
    told: list[AuditRecord] = []
    registry.changes.on_audit = told.append
    registry.changes.keep_audit = False
    add("x", b"1")
    registry.audit_many([row()]).result()
    assert registry.audit_log() == ()
    assert [(r.action, r.name) for r in told] == [("register", "x"), ("load", "x")]
    assert [e.type for e in registry.events()] == ["adapter.added"]

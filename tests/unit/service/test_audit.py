"""Audit: every refusal is told, and nobody can fill a disk with his."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.service import audit as module
from lorad.service.audit import Audit
from tests.fakes.fresh_registry import open_fresh


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def registry() -> Iterator[Registry]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        opened = open_fresh(Path(folder))
        yield opened
        opened.close()


def rows(registry):
    return [(r.actor, r.action, r.name, r.result, r.message) for r in registry.audit_log()][::-1]


def flush(audit):
    asyncio.run(audit.flush())


def test_what_was_done_and_what_was_refused_are_rows(registry):
    audit = Audit(registry, "registry")
    audit.note("uid 1 pid 2", "load", "acme/sql", "ok", rev="a1")
    audit.note("uid 1 pid 2", "load", "acme/sql", "ok", rev="a1")
    audit.note("uid 9 pid 3", "evict", "bible", "pinned", message="it is pinned")
    flush(audit)
    assert rows(registry) == [
        ("uid 1 pid 2", "load", "acme/sql", "ok", ""),
        ("uid 1 pid 2", "load", "acme/sql", "ok", ""),
        ("uid 9 pid 3", "evict", "bible", "pinned", "it is pinned"),
    ]


def test_a_refusal_that_repeats_is_one_row_and_a_number(registry):
    time = Time()
    audit = Audit(registry, "registry", clock=time)
    for pid in range(500):
        audit.note(f"uid 9 pid {pid} key abc", "request", "acme/sql", "forbidden", message="no")
        flush(audit) if pid % 100 == 0 else None
    time.now += module.REPEAT_SECONDS
    flush(audit)
    time.now += module.REPEAT_SECONDS
    flush(audit)
    assert rows(registry) == [
        ("uid 9 pid 0 key abc", "request", "acme/sql", "forbidden", "no"),
        ("uid 9 key abc", "request", "acme/sql", "forbidden", "no; 499 times more within a minute"),
    ]
    for pid in (1, 2):
        audit.note(f"uid 9 pid {pid} key abc", "request", "acme/sql", "forbidden", message="no")
    flush(audit)
    assert len(rows(registry)) == 3
    time.now += module.REPEAT_SECONDS
    flush(audit)
    assert rows(registry)[-1][-1] == "no; once more within a minute"


def test_too_many_different_ones_are_counted(registry, monkeypatch):
    monkeypatch.setattr(module, "MAX_REMEMBERED", 10)
    time = Time()
    audit = Audit(registry, "registry", clock=time)
    for number in range(1000):
        audit.note("uid 9 pid 1", "request", f"x/{number}", "forbidden")
    flush(audit)
    told = rows(registry)
    assert len(told) == 11
    assert told[-1][3:] == ("dropped", "990 more were refused, too many to tell one by one")
    assert len(audit._seen) == 10
    time.now += 2 * module.REPEAT_SECONDS
    flush(audit)
    assert not audit._seen


def test_what_a_full_disk_does_not_take_is_written_later_and_bounded(registry, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 20)
    audit, true = Audit(registry, "registry"), registry.audit_many

    def full(_):
        raise LoradError("insufficient_storage", "the disk is full")

    monkeypatch.setattr(registry, "audit_many", full)
    for number in range(50):
        audit.note("uid 1 pid 1", "load", f"x{number}", "ok")
        flush(audit)
    assert len(audit._waiting) <= 20
    monkeypatch.setattr(registry, "audit_many", true)
    flush(audit)
    flush(audit)
    told = rows(registry)
    assert [r[2] for r in told[:20]] == [f"x{n}" for n in range(20)]
    assert told[-1][4].startswith("30 more")


@pytest.mark.parametrize(
    ("where", "table", "lines"),
    [("both", 2, 2), ("registry", 2, 0), ("journal", 0, 2), ("off", 0, 0)],
)
def test_the_setting_says_where(registry, caplog, where, table, lines):
    audit = Audit(registry, where)
    with caplog.at_level(logging.INFO, "lorad.audit"):
        registry.audit("load", actor="uid 1 pid 2", name="x", rev="ab" * 32).result()
        audit.note("uid 9 pid 3", "evict", "bible", "pinned", message="it is pinned")
        flush(audit)
        registry.touch_used({}).result()
    assert len(rows(registry)) == table
    said = [r.getMessage() for r in caplog.records if r.name == "lorad.audit"]
    assert len(said) == lines
    if lines:
        assert said == [
            "uid 1 pid 2: load x@abababababab: ok",
            "uid 9 pid 3: evict bible: pinned (it is pinned)",
        ]

"""The machine, the health of a daemon, and what cannot be looked at."""

import os
import socket
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from lorad.board.health import HealthChecks
from lorad.board.machine import Sampler
from lorad.metrics.nvml import GpuUse
from lorad.service.catalog import Catalog, Entry
from lorad.service.snapshot import Seen


class Gpu:
    def look(self, uuid):
        return GpuUse(5, 10, 0.5) if uuid == "GPU-1" else None


def test_the_machine_is_sampled_without_an_engine_and_without_a_gpu():
    told = Sampler(Gpu()).sample([], "")
    assert told.daemon_rss_bytes > 0 and 0 < told.host_used_bytes < told.host_total_bytes
    assert (told.gpu_busy, told.gpu_used_bytes, told.engine_rss_bytes) == (None, None, 0)


def test_the_gpu_is_the_engines_and_a_process_that_is_gone_is_nothing():
    told = Sampler(Gpu()).sample([2**22 + 1], "GPU-1")
    assert (told.gpu_busy, told.gpu_used_bytes, told.gpu_total_bytes) == (0.5, 5, 10)
    assert (told.engine_cpu, told.engine_rss_bytes) == (0.0, 0)


def test_a_share_is_of_the_time_between_two_samples(monkeypatch):
    now, spent = [100.0], [1.0]

    class Process:
        def __init__(self, pid):
            assert pid == os.getpid()

        def oneshot(self):
            return open(os.devnull)  # something to enter

        def cpu_times(self):
            return SimpleNamespace(user=spent[0], system=0.0)

        def memory_info(self):
            return SimpleNamespace(rss=4096)

        def create_time(self):
            return 0.0

    monkeypatch.setattr("lorad.board.machine.psutil.Process", Process)
    sampler = Sampler(Gpu(), clock=lambda: now[0])
    sampler.sample([], "")
    now[0], spent[0] = 102.0, 2.5
    assert sampler.sample([], "").daemon_cpu == 0.75


# ----------------------------------------------------------------- health
@pytest.fixture
def sources(tmp_path):
    """All is well."""
    for name in ("inference", "admin"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / name))
    (tmp_path / "inbox").mkdir()
    settings = SimpleNamespace(
        watch=SimpleNamespace(dir=str(tmp_path / "inbox")),
        inference=SimpleNamespace(socket=str(tmp_path / "inference")),
        admin=SimpleNamespace(socket=str(tmp_path / "admin")),
    )
    watcher = SimpleNamespace(mode="inotify", num_overflows=0)
    return SimpleNamespace(
        settings=settings,
        models=(
            Seen(
                SimpleNamespace(name="tiny"),
                SimpleNamespace(state="ready", progress="", restarts=0),
                None,
            ),
        ),
        folders=lambda: {"state": tmp_path},
        watcher=lambda: watcher,
        registry=SimpleNamespace(
            transactions=SimpleNamespace(errors={}), file_bytes=lambda: 1 << 20
        ),
        picture=SimpleNamespace(by_rev={}),
        catalog=Catalog([Entry("sql", "r1")]),
    )


@pytest.fixture
def look(sources, monkeypatch):
    """The checks by name, with so much free on the disk."""
    monkeypatch.setattr("lorad.board.health.free_bytes", lambda folder: 9 << 30)
    checks = HealthChecks(sources, now=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    return lambda: {check.name: check for check in checks.look().checks}


def test_where_all_is_well_every_check_says_so(look):
    found = look()
    assert set(found) == {"engine", "state disk", "inbox", "registry", "sockets", "pins"}
    assert {check.level for check in found.values()} == {"ok"}
    assert not any(check.hint for check in found.values())


@pytest.mark.parametrize(
    ("state", "level"), [("engine_stalled", "error"), ("loading_base", "warn"), ("ready", "ok")]
)
def test_an_engine_is_as_its_state_says(look, sources, state, level):
    sources.models[0].link.state = state
    assert look()["engine"].level == level


def test_an_engine_that_was_replaced_is_worth_a_look(look, sources):
    sources.models[0].link.restarts = 2
    assert (look()["engine"].level, "2 times" in look()["engine"].message) == ("warn", True)


@pytest.mark.parametrize(("free", "level"), [(1 << 30, "warn"), (1 << 20, "error")])
def test_a_disk_that_fills_is_told_of_in_time(look, monkeypatch, free, level):
    monkeypatch.setattr("lorad.board.health.free_bytes", lambda folder: free)
    assert look()["state disk"].level == level and "gc" in look()["state disk"].hint


def test_sockets_and_an_inbox_that_somebody_removed_are_errors(look, sources, tmp_path):
    (tmp_path / "admin").unlink()
    (tmp_path / "inbox").rmdir()
    found = look()
    assert (found["sockets"].level, found["inbox"].level) == ("error", "error")
    assert str(tmp_path / "admin") in found["sockets"].message


def test_pinned_adapters_that_are_not_there_are_named(look, sources):
    sources.catalog.put(Entry("sql", "r1", pinned=True))
    assert (look()["pins"].level, look()["pins"].hint) == ("warn", "loractl explain sql")
    sources.picture.by_rev["r1"] = SimpleNamespace(slot=3)
    assert look()["pins"].message == "1 pinned, all on the GPU"


def test_transactions_that_failed_are_told(look, sources):
    sources.registry.transactions.errors[("write", "full")] = 3
    assert (look()["registry"].level, "write full 3" in look()["registry"].message) == (
        "warn",
        True,
    )


def test_what_cannot_be_looked_at_is_a_finding_and_hides_no_other(look, sources):
    def broken():
        raise OSError("no such disk")

    sources.folders = broken
    found = look()
    assert (found["disk"].level, found["engine"].level) == ("error", "ok")
    assert "no such disk" in found["disk"].message


def test_the_last_refused_reload_is_told_until_one_is_taken(sources):
    checks = HealthChecks(sources, now=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    checks.note_reload(ValueError("limits.mx: unknown"))
    assert checks.look().reload_error == "limits.mx: unknown"
    checks.note_reload(None)
    told = checks.look()
    assert (told.reload_error, told.reloaded_at) == ("", "2026-01-01T00:00:00.000Z")

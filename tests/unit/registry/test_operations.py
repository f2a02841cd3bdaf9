"""Operations: ids that rise, rows that survive, and folders that wait for them."""

from pathlib import Path
from typing import Any

import pytest

from lorad.errors import LoradError
from lorad.registry import operations as rows
from lorad.registry.operations import read_id, spell
from lorad.registry.registry import Registry
from lorad.registry.store import Store


def begin(registry: Registry, target: str = "hf:a/b", **values: Any) -> str:
    given = {"wish": "{}", "name": "b", "actor": "uid 0"} | values
    return registry.operations.begin("pull", target, **given).result().id


def test_ids_rise_within_a_second_and_when_the_clock_goes_back(
    registry: Registry, clock: Any
) -> None:
    clock.now = 1_800_000_000.0
    ids = [begin(registry)]
    for step in (-0.9, -1.0, -5000.0, 3.0):  # each look at the clock is a second later
        clock.now += step
        ids.append(begin(registry))
    assert ids == sorted(set(ids))
    assert {len(id) for id in ids} == {8}


def test_an_id_is_read_as_people_type_it() -> None:
    assert spell(0) == "00000000"
    assert spell((1 << 40) - 1) == "zzzzzzzz"
    assert read_id(" O1iL7XYZ\n") == "01117xyz"
    assert [spell(n) for n in range(31, 34)] == ["0000000z", "00000010", "00000011"]


def test_rows_are_there_after_the_registry_was_opened_again(tmp_path: Path, clock: Any) -> None:
    first = Registry.open(tmp_path, clock=clock)
    id = begin(first, wish='{"pin": true}', name="sql")
    changed = first.operations.change(id, state="running", commit="c" * 40, staging="pull-1")
    changed.result()
    first.operations.note_progress({id: (5, 10)}).result()
    first.close()
    again = Registry.open(tmp_path, clock=clock)
    found = again.operations.get(id.upper())
    assert found is not None
    assert (found.state, found.done_bytes, found.total_bytes) == ("running", 5, 10)
    assert (found.wish, found.name, found.staging, found.live) == (
        '{"pin": true}',
        "sql",
        "pull-1",
        True,
    )
    assert found.updated_at > found.created_at
    again.close()


def test_a_change_of_an_operation_that_is_gone_says_so(registry: Registry) -> None:
    with pytest.raises(KeyError):
        registry.operations.change("0000000z", state="done").result()
    assert registry.operations.get("0000000z") is None


def test_the_newest_come_first_and_can_be_told_by_state_and_kind(registry: Registry) -> None:
    a, b, c = begin(registry), begin(registry), begin(registry)
    registry.operations.change(b, state="failed", code="source_not_found").result()
    registry.operations.begin("load", "x", wish="{}", name="x", actor="").result()
    known = registry.operations
    assert [r.id for r in known.list(kind="pull")] == [c, b, a]
    assert [r.id for r in known.list(states=("failed",))] == [b]
    assert [r.kind for r in known.list(limit=1)] == ["load"]


def test_ended_ones_go_by_age_and_by_number_and_live_ones_never(
    registry: Registry, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "KEEP_ROWS", 3)
    live = begin(registry)
    ended = [begin(registry) for _ in range(5)]
    for id in ended:
        registry.operations.change(id, state="done").result()
    last = begin(registry)
    kept = [record.id for record in registry.operations.list()]
    assert kept == [last, *reversed(ended[-3:]), live]
    clock.now += rows.KEEP_SECONDS
    newest = begin(registry)
    assert [r.id for r in registry.operations.list()] == [newest, last, live]


def test_a_start_keeps_the_folders_that_operations_go_on_filling(
    registry: Registry, clock: Any
) -> None:
    states = ("queued", "running", "failed", "done", "cancelled")
    for state in states:
        registry.store.reopen(f"pull-{state}")
        id = begin(registry)
        registry.operations.change(id, state=state, staging=f"pull-{state}").result()
    registry.store.stage()
    assert registry.reconcile().result().stale_staging == 3
    folder = registry.store.directory / ".staging"
    left = {path.name for path in folder.iterdir()}
    assert left == {"pull-queued", "pull-running", "pull-failed"}
    clock.now += rows.KEEP_STAGING_SECONDS
    registry.reconcile().result()
    assert {path.name for path in folder.iterdir()} == {"pull-queued", "pull-running"}


def test_a_staging_folder_is_reopened_as_it_was_left(tmp_path: Path) -> None:
    store = Store(tmp_path, budget_bytes=100)
    (store.reopen("pull-1", 100).path / "half").write_bytes(b"x" * 40)
    assert (store.reopen("pull-1", 100).path / "half").stat().st_size == 40
    with pytest.raises(LoradError) as refused:
        store.reopen("pull-2", 101)
    assert refused.value.code == "insufficient_storage"
    for id in ("../x", "", "a/b", "A"):
        with pytest.raises(ValueError, match="not the id"):
            store.reopen(id)

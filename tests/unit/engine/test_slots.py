"""SlotTable: rows, references, generations."""

import pytest

from engine.adapters.slots import SlotTable


def claim(table, rev, blocks=(), *, pinned=False):
    row = table.claim(rev, blocks, pinned=pinned, priority=50, now=0.0)
    row.ready = True
    return row


def test_slots_are_given_low_ones_first_and_found_by_revision():
    table = SlotTable(3)
    rows = [claim(table, rev, [i]) for i, rev in enumerate("abc")]
    assert [r.slot for r in rows] == [0, 1, 2] and table.num_free == 0
    assert table.find("b") is rows[1] and table.find("z") is None
    assert table.free(rows[1]) == (1,)
    assert claim(table, "d").slot == 1
    table.check()


def test_a_slot_that_is_given_anew_has_another_generation():
    table = SlotTable(1)
    first = claim(table, "a")
    table.free(first)
    again = claim(table, "a")
    assert (first.slot, again.slot) == (0, 0)
    assert first.generation != again.generation


def test_a_row_with_running_requests_cannot_be_freed():
    table = SlotTable(1)
    row = claim(table, "a")
    table.acquire(row, 1.0)
    with pytest.raises(AssertionError, match="1 running requests"):
        table.free(row)
    table.release(row)
    table.free(row)
    with pytest.raises(AssertionError, match="released twice"):
        table.release(row)


def test_nobody_runs_on_a_row_that_is_loading_or_draining():
    table = SlotTable(2)
    loading = table.claim("a", [], pinned=False, priority=50, now=0.0)
    draining = claim(table, "b")
    draining.draining = True
    for row in (loading, draining):
        with pytest.raises(AssertionError, match="takes no requests"):
            table.acquire(row, 1.0)


def test_idle_rows_may_leave_and_running_ones_may_be_drained_but_pinned_ones_neither():
    table = SlotTable(5)
    claim(table, "idle")
    table.acquire(claim(table, "running"), 1.0)
    claim(table, "pinned", pinned=True)
    table.acquire(claim(table, "pinned and running", pinned=True), 1.0)
    table.claim("loading", [], pinned=False, priority=50, now=0.0)
    assert [r.rev for r in table.idle()] == ["idle"]
    assert [r.rev for r in table.running()] == ["running"]


def test_one_revision_has_one_slot():
    table = SlotTable(2)
    claim(table, "a")
    with pytest.raises(AssertionError, match="has a slot"):
        claim(table, "a")


def test_check_finds_a_block_in_two_slots():
    table = SlotTable(2)
    claim(table, "a", [1, 2])
    claim(table, "b", [2, 3])
    with pytest.raises(AssertionError, match="two slots"):
        table.check()

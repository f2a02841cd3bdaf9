"""What the dashboard shows, without a screen: boards, deltas, events, links, a table's rows."""

import pytest
from msgspec.structs import replace

from lorad.tui.messages import Changed, Ended, Happened, Lost, Whole
from lorad.tui.model import RESTARTED, RETURNED, Model
from lorad.tui.slots import listing, told_of
from lorad.wire_stream import Delta, Drain


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def model(clock):
    return Model(clock)


def test_a_delta_tells_which_rows_it_changed(model, boards):
    board = boards.small()
    model.take(Whole(board))
    row = replace(board.slots["hooli/box"], running=9)
    delta = Delta(
        sequence=2,
        time=boards.moment(1),
        slots={"hooli/box": row},
        gone={"slots": ("stark/hr-faq",)},
    )
    diff = model.take(Changed(delta))
    assert diff.rows["slots"] == {"hooli/box", "stark/hr-faq"}
    assert not diff.rows["requests"]
    assert model.board.slots["hooli/box"].running == 9
    assert "stark/hr-faq" not in model.board.slots


def test_a_board_that_comes_again_changes_only_the_rows_that_differ(model, boards):
    board = boards.small()
    first = model.take(Whole(board))
    assert first.rows["slots"] == set(board.slots)
    slots = dict(board.slots) | {"hooli/box": replace(board.slots["hooli/box"], running=1)}
    del slots["stark/hr-faq"]
    again = model.take(Whole(replace(board, slots=slots)))
    assert again.rows["slots"] == {"hooli/box", "stark/hr-faq"}


def test_ages_grow_without_news_and_stand_still_without_a_link(model, boards, clock):
    model.take(Whole(boards.small()))
    clock.now += 5
    assert model.shown().slots["hooli/nucleus"].idle_seconds == 46.0
    clock.now += 60
    assert model.shown().slots["hooli/nucleus"].idle_seconds == 51.0
    clock.now -= 60
    model.take(Lost("ECONNREFUSED", 2.0))
    clock.now += 60
    assert model.shown().slots["hooli/nucleus"].idle_seconds == 41.0
    assert model.age() == 65.0


def test_a_lost_link_says_since_when_why_and_until_when(model, boards, clock):
    model.take(Whole(boards.small()))
    assert model.link.up
    model.take(Lost("ECONNREFUSED", 1.0))
    clock.now += 3
    model.take(Lost("ENOENT", 4.0))
    clock.now += 1
    assert (model.link.why, model.lost_seconds(), model.retry_seconds()) == ("ENOENT", 4.0, 3.0)
    clock.now += 10
    assert model.retry_seconds() == 0.0


def test_the_same_daemon_again_goes_on_where_it_was(model, boards):
    board = boards.small()
    model.take(Whole(board))
    model.take(Lost("connection broke", 1.0))
    more = boards.event(99, "slot.load", "acme/router")
    model.take(Whole(replace(board, events=(*board.events, more))))
    types = [event.type for event in model.events]
    assert types[-2:] == [RETURNED, "slot.load"]
    assert types.count("drain.start") == 1


def test_another_daemon_is_told_as_a_restart_and_counts_anew(model, boards):
    board = boards.small()
    model.take(Whole(board))
    model.take(Happened(boards.event(99, "slot.load")))
    model.take(Lost("connection broke", 1.0))
    status = replace(board.status, instance_id="inst-two", pid=5000)
    early = boards.event(1, "daemon.start")
    model.take(Whole(replace(board, status=status, events=(early,))))
    last = model.events[-2:]
    assert [event.type for event in last] == [RESTARTED, "daemon.start"]
    assert "5000" in last[0].message
    assert model.num_new == 2


def test_events_that_nobody_saw_are_counted_until_somebody_looks(model, boards):
    model.take(Whole(boards.small()))
    assert model.num_new == 0
    for number in (99, 100, 100):
        model.take(Happened(boards.event(number, "slot.load")))
    assert model.num_new == 2
    model.looked()
    assert model.num_new == 0


def test_what_is_frozen_stands_still_while_the_rest_goes_on(model, boards, clock):
    board = boards.small()
    model.take(Whole(board))
    clock.now += 2
    assert model.freeze()
    frozen = model.shown()
    clock.now += 60
    for delta in boards.deltas(board, 3):
        model.take(Changed(delta))
    model.take(Happened(boards.event(99, "slot.load")))
    assert model.shown() is frozen
    assert len(model.events) == len(board.events)
    assert model.age() == 62.0
    assert not model.freeze()
    assert model.board.sequence == 4
    assert model.events[-1].id == 99


def test_there_is_nothing_to_freeze_before_the_first_board(model):
    assert not model.freeze()


def test_a_delta_that_does_not_follow_is_a_gap_until_a_board_comes(model, boards):
    board = boards.small()
    model.take(Whole(board))
    model.take(Changed(Delta(sequence=7, time=boards.moment(7))))
    assert model.link.why.startswith("gap")
    assert model.board is board
    model.take(Whole(board))
    assert model.link.up


def test_a_delta_before_any_board_is_nothing(model, boards):
    assert not model.take(Changed(Delta(sequence=2, time=boards.moment()))).rest
    assert model.board is None


def test_an_end_is_final(model):
    model.take(Ended("the recording is over"))
    assert model.link.final and not model.link.up


# ----------------------------------------------------------------- one table
def test_the_selection_is_a_row_not_a_place(boards):
    table, rows = listing(), boards.small().slots
    table.show(rows)
    table.order_by("slot")
    table.select_place(5)
    assert table.selected == "umbrella/triage"
    table.order_by("name")
    assert table.keys[table.place] == "umbrella/triage"
    table.show({key: row for key, row in rows.items() if key != "acme/router"})
    assert table.selected == "umbrella/triage"


def test_until_a_row_is_chosen_the_first_one_is_selected_whichever_that_is(boards):
    table, rows = listing(), dict(boards.small().slots)
    table.show(rows)
    assert table.selected == "globex/summarise"
    waits = boards.busy("hooli/box", 8, 1, 40, 1)
    table.show(rows | {"hooli/box": replace(waits, waiting=1, tokens_per_second=9e9)})
    assert (table.selected, table.place) == ("hooli/box", 0)
    table.move(1)
    table.show(rows)
    assert table.selected == "globex/summarise"
    table.show(rows | {"hooli/box": replace(waits, waiting=1, tokens_per_second=9e9)})
    assert table.selected == "globex/summarise"
    table.to_top()
    table.show(rows)
    assert (table.selected, table.place) == ("globex/summarise", 0)


def test_what_an_operator_drains_says_so_in_its_row(boards):
    board = boards.small()
    held = [Drain(name=name, cause="operator", held=True) for name in ("acme/sql-gen", "hooli/box")]
    rows = told_of(replace(board, drains={drain.name: drain for drain in held}))
    assert rows["acme/sql-gen"].state == "draining"
    assert rows["hooli/box"].state == "drained"
    assert rows["stark/jarvis"].state == "loading"
    assert told_of(board) is board.slots


def test_when_the_selected_row_goes_its_neighbour_is_selected(boards):
    table, rows = listing(), boards.small().slots
    table.show(rows)
    table.order_by("slot")
    table.select_place(5)
    left = {key: row for key, row in rows.items() if key != "umbrella/triage"}
    table.show(left)
    assert table.selected == "acme/router"
    table.show({})
    assert table.selected is None and table.row is None
    table.show(left)
    assert table.selected in left


def test_a_filter_narrows_and_the_other_rows_come_back(boards):
    table = listing()
    table.show(boards.small().slots)
    table.narrow("state:idle !hooli")
    assert table.keys == ["stark/hr-faq", "wayne/bat-ops", "tyrell/voight", "tyrell/nexus6"]
    table.narrow("")
    assert len(table.keys) == 16


@pytest.mark.parametrize(
    "column, first",
    [
        ("slot", "acme/sql-gen"),
        ("state", "globex/summarise"),
        ("run", "acme/sql-gen"),
        ("prio", "umbrella/triage"),
        ("hit", "initech/tps"),
        ("idle", "tyrell/nexus6"),
        ("wait", "stark/jarvis"),
        ("name", "acme/router"),
    ],
)
def test_a_column_puts_first_what_one_looks_for(boards, column, first):
    table = listing()
    table.show(boards.small().slots)
    table.sort = "rev"
    assert table.order_by(column)
    assert table.keys[0] == first
    assert table.order_by(column)
    assert table.keys[-1] == first


def test_nobody_sorts_by_what_is_no_column(boards):
    table = listing()
    table.show(boards.small().slots)
    assert not table.order_by("colour")
    assert table.sort == "state"
    table.order_next(["slot", "name"])
    assert table.sort == "slot"
    table.order_next(["slot", "name"])
    assert table.sort == "name"
    table.order_next(["slot", "name"])
    assert table.sort == "slot"


def test_the_selection_stops_at_both_ends(boards):
    table = listing()
    table.show(boards.small().slots)
    table.move(-3)
    assert table.place == 0
    table.move(100)
    assert table.place == 15

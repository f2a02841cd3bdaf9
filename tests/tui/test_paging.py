"""Pages of ten thousand names: what is asked for, and where the selection is."""

import pytest

from lorad import wire
from lorad.tui.filtering import parse
from lorad.tui.paging import PAGE_ROWS, STATES, Ask, Pages, split


class Daemon:
    """Answers what Pages asks, at once."""

    def __init__(self, fakes, number):
        self.rows = [fakes.adapter(i, name=f"a{i:05}", pinned=i < 3) for i in range(number)]

    def answer(self, ask):
        rows = [r for r in self.rows if ask.q is None or ask.q in r.name]
        rows = [r for r in rows if ask.state is None or r.state == ask.state]
        word = ask.sort.removeprefix("-")
        rows.sort(key=lambda r: (getattr(r, word), r.name), reverse=ask.sort.startswith("-"))
        start = int(ask.cursor or 0)
        end = start + ask.limit
        following = str(end) if end < len(rows) else None
        return wire.AdapterPage(items=tuple(rows[start:end]), total=len(rows), cursor=following)


def settle(pages, daemon):
    """Take answers until nothing more is due; how many that were."""
    number = 0
    while pages.due:
        ask = pages.ask()
        pages.take(ask, daemon.answer(ask))
        number += 1
        assert number < 5
    return number


@pytest.fixture
def daemon(fakes):
    return Daemon(fakes, 250)


@pytest.fixture
def pages(daemon):
    pages = Pages()
    settle(pages, daemon)
    return pages


@pytest.mark.parametrize(
    ("text", "state", "tenant", "q", "here", "unknown"),
    [
        ("", None, None, None, 0, ""),
        ("sql", None, None, "sql", 0, ""),
        ("sql gen", None, None, "sql", 1, ""),
        ("state:idle", "idle", None, None, 0, ""),
        ("state:quar tenant:acme x", "quarantined", "acme", "x", 0, ""),
        ("state:r", None, None, None, 0, "r"),
        ("state:ram", "ram", None, None, 0, ""),
        ("state:nonsense", None, None, None, 0, "nonsense"),
        ("!sql !state:idle", None, None, None, 2, ""),
        ("rank:16 pin:yes", None, None, None, 2, ""),
    ],
)
def test_a_filter_goes_to_the_daemon_as_far_as_it_can_be_asked(
    text, state, tenant, q, here, unknown
):
    found = split(parse(text))
    assert (found.state, found.tenant, found.q) == (state, tenant, q)
    assert (len(found.here.terms), found.unknown) == (here, unknown)


def test_the_states_are_those_of_the_engine():
    from engine.adapters.states import State

    assert set(STATES) == {state.value for state in State}


def test_past_the_last_row_the_next_page_follows_and_back_again(pages, daemon):
    pages.move(PAGE_ROWS - 1)
    assert (pages.selected, pages.due) == ("a00099", False)
    pages.move(1)
    assert pages.due
    settle(pages, daemon)
    assert (pages.selected, pages.first_number) == ("a00100", 101)
    pages.move(-1)
    settle(pages, daemon)
    assert (pages.selected, pages.first_number, pages.place) == ("a00099", 1, PAGE_ROWS - 1)
    pages.move(-500)
    pages.move(-1)
    assert (pages.selected, pages.due) == ("a00000", False)


def test_the_end_is_one_page_away_and_pages_go_back_from_there(pages, daemon):
    pages.edge(1)
    assert settle(pages, daemon) == 1
    assert (pages.selected, pages.first_number, pages.num_items) == ("a00249", 151, 100)
    assert pages.keys == sorted(pages.keys)
    pages.move(1)
    assert not pages.due
    pages.move(-(PAGE_ROWS - 1))
    pages.move(-1)
    settle(pages, daemon)
    assert (pages.selected, pages.first_number) == ("a00149", 51)
    pages.edge(-1)
    settle(pages, daemon)
    assert (pages.selected, pages.first_number) == ("a00000", 1)


def test_while_a_page_is_on_its_way_further_moves_are_not_hoarded(pages):
    pages.move(PAGE_ROWS - 1)
    pages.move(1)
    before = pages.ask()
    for _ in range(10):
        pages.move(1)
    assert pages.ask() == before


def test_an_answer_to_what_is_not_asked_any_more_is_dropped(pages, daemon):
    old = pages.ask()
    pages.narrow("a0012")
    pages.take(old, daemon.answer(old))
    assert pages.due and pages.total == 250
    settle(pages, daemon)
    assert pages.total == 10


def test_a_refresh_keeps_the_selection_by_name_and_the_place_when_it_is_gone(pages, daemon):
    pages.move(7)
    daemon.rows = daemon.rows[3:]
    pages.due = True
    settle(pages, daemon)
    assert (pages.selected, pages.place) == ("a00007", 4)
    daemon.rows = [row for row in daemon.rows if row.name != "a00007"]
    pages.due = True
    settle(pages, daemon)
    assert (pages.selected, pages.place) == ("a00008", 4)


def test_when_the_rows_of_a_page_are_gone_the_page_before_is_shown(pages, daemon):
    for _ in range(2):
        pages.move(PAGE_ROWS)
        pages.move(1)
        settle(pages, daemon)
    assert pages.first_number == 201
    daemon.rows = daemon.rows[:150]
    pages.due = True
    settle(pages, daemon)
    assert (pages.first_number, pages.num_items) == (101, 50)


def test_columns_are_sorted_by_the_daemon_and_what_matters_is_first(pages, daemon):
    assert pages.order_by("pin") and pages.ask().sort == "-pinned"
    settle(pages, daemon)
    assert {pages.rows[key].pinned for key in pages.keys[:3]} == {True}
    pages.order_by("pin")
    assert pages.ask().sort == "pinned"
    assert not pages.order_by("rev")
    pages.order_next(["name", "rev", "pin", "prio"])
    assert (pages.sort, pages.ask()) == ("prio", Ask(sort="-priority"))


def test_what_the_daemon_cannot_filter_holds_within_the_page_and_asks_nothing(pages, daemon):
    pages.narrow("!a0000")
    assert not pages.due and pages.here == "!a0000"
    assert (len(pages.keys), pages.num_items) == (90, 100)
    assert pages.selected in pages.keys
    pages.narrow("rank:nothing")
    assert (pages.keys, pages.selected) == ([], None)
    pages.move(1)  # on to the next page: there may be some
    settle(pages, daemon)
    assert pages.first_number == 101

"""Rows of slots, and what each revision did within the minute."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.status_messages import EngineSnapshot, RevisionStatus
from lorad.board.sharing import NameRates
from lorad.board.slots import SlotWindows, held_of, rows
from lorad.service.catalog import Catalog, Entry
from lorad.service.meter import NameCounts
from lorad.service.whose import Whose


def tick(windows, now, taken):
    windows.tick(now, taken, held_of(taken))


some = settings(max_examples=40, deadline=None)
grown = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))


@some
@given(st.lists(st.tuples(st.integers(1, 25), st.lists(grown, min_size=3, max_size=3)), max_size=9))
def test_a_minute_of_each_revision_is_the_sum_of_its_last_sixty_seconds(told_of, steps):
    windows, now, totals, history = SlotWindows(), 0, [(0, 0, 0)] * 3, []
    for seconds, changes in steps:
        now += seconds
        totals = [
            tuple(a + b for a, b in zip(old, new, strict=True))
            for old, new in zip(totals, changes, strict=True)
        ]
        tick(windows, now, told_of(totals))
        history.append((now, changes))
        for number in range(3):
            recent = [changes[number] for then, changes in history if then > now - 60]
            expected = tuple(map(sum, zip(*recent, strict=True)))
            assert windows.sum_of(f"r{number}") == expected


@pytest.fixture(scope="module")
def told_of():
    """A snapshot of revisions r0, r1 ... from (asked, found, generated) of each."""

    def make(totals, **fields):
        revisions = [
            RevisionStatus(
                rev=f"r{number}",
                state="idle",
                slot=number,
                prefix_query_tokens=asked,
                prefix_hit_tokens=found,
                generated_tokens=generated,
            )
            for number, (asked, found, generated) in enumerate(totals)
        ]
        plain = {"step": 1, "running": 0, "waiting": 0, "pool": None, "slots_total": 8}
        plain |= {"slots_used": 0, "ram_used_bytes": 0, "ram_limit_bytes": 1, "base": None}
        return EngineSnapshot(**(plain | {"pid": 1} | fields), revisions=tuple(revisions))

    return make


def test_another_engine_counts_from_nothing(told_of):
    windows = SlotWindows()
    tick(windows, 1, told_of([(100, 50, 9)]))
    tick(windows, 2, told_of([(30, 10, 2)], pid=2))
    assert windows.sum_of("r0") == (130, 60, 11)


def test_what_a_revision_did_while_it_was_away_is_not_counted_twice(told_of, told):
    windows = SlotWindows()
    tick(windows, 1, told_of([(100, 50, 9)]))
    tick(windows, 2, told.snapshot(told.status("r0", slot=None, state="ram")))
    tick(windows, 3, told_of([(110, 50, 9)]))
    assert windows.sum_of("r0") == (110, 50, 9)


def test_a_rate_is_of_the_time_that_there_was_and_then_of_a_minute(told_of):
    windows = SlotWindows()
    for second in range(0, 11):
        tick(windows, second, told_of([(0, 0, 10 * second)]))
    assert windows.tokens_per_second("r0") == 10.0
    for second in range(11, 70):
        tick(windows, second, told_of([(0, 0, 100)]))
    assert windows.tokens_per_second("r0") == pytest.approx(10 / 60, abs=0.01)
    tick(windows, 71, None)
    assert windows.tokens_per_second("r0") == 0.0


def test_what_is_pooled_is_in_the_rate_and_in_nothing_else(told):
    windows = SlotWindows()
    for second in range(0, 11):
        status = told.status("r0", generated_tokens=second, pooled_tokens=90 * second)
        tick(windows, second, told.snapshot(status))
    assert windows.tokens_per_second(status.rev) == 91.0
    assert windows.sum_of(status.rev) == (0, 0, 10) and windows.drafts_of(status.rev) == (0, 0)


def test_a_history_of_hits_has_holes_where_nothing_was_asked(told_of):
    windows = SlotWindows()
    assert windows.hits_history("r0") == ()
    shown = {0: (0, 0, 0), 5: (100, 50, 0), 10: (100, 50, 0), 15: (100, 50, 0), 19: (110, 60, 0)}
    for second in range(0, 21):
        totals = shown[max(at for at in shown if at <= second)]
        tick(windows, second, told_of([totals]))
    assert windows.hits_history("r0") == (None, 50, None, 100)
    for second in range(21, 200):
        tick(windows, second, told_of([(110, 60, 0)]))
    assert windows.hits_history("r0") == ()


# ----------------------------------------------------------------- rows
def shown(told, *statuses, names=(), crowd=(), rates=None):
    catalog = Catalog(Entry(name, rev, **fields) for name, rev, fields in names)
    return shown_of(told.snapshot(*statuses), catalog, SlotWindows(), crowd, rates)


def shown_of(taken, catalog, windows, crowd=(), rates=None):
    whose, rates = Whose(crowd), rates or NameRates()
    return rows(held_of(taken), lambda rev: 1024, catalog, windows, whose, rates)


def test_each_name_of_a_revision_has_a_row_with_its_own_pin_and_priority(told):
    found = shown(
        told,
        told.status("r1", slot=3, state="active", running=2, max_rank=16, gpu_bytes=4096),
        names=[("acme/sql", "r1", {"pinned": True, "priority": 90}), ("copy", "r1", {})],
    )
    assert list(found) == ["acme/sql", "copy"]
    row = found["acme/sql"]
    assert (row.pinned, row.priority, row.tenant, row.rank) == (True, 90, "acme", 16)
    assert (found["copy"].pinned, found["copy"].tenant) == (False, None)


def test_names_of_one_revision_show_each_what_was_asked_of_it_and_not_what_was_of_both(told):
    rates, counts = NameRates(), {"copy": NameCounts()}
    for second in range(0, 90, 10):
        counts["copy"].generated_tokens = 30 * second
        counts["copy"].pooled_tokens = 10 * second
        rates.tick(second, ("copy", "sql"), counts)
    found = shown(
        told,
        told.status("r1", slot=3, state="active", running=2, waiting=1, generated_tokens=1000),
        names=[("copy", "r1", {}), ("sql", "r1", {})],
        crowd=[asked("copy", "r1"), asked("copy", "r1"), asked("copy", "r1", begun=False)],
        rates=rates,
    )
    told_of = {n: (row.running, row.waiting, row.tokens_per_second) for n, row in found.items()}
    assert told_of == {"copy": (2, 1, 40.0), "sql": (0, 0, 0.0)}
    rates.tick(90, ("sql",), counts)
    assert rates.tokens_per_second("copy") == 0.0, "its content is its own: nothing is kept"


def asked(name, rev, begun=True):
    return SimpleNamespace(rev=rev, begun=begun), SimpleNamespace(name=name)


def test_rows_are_in_the_order_of_slots_and_those_without_one_come_last(told):
    found = shown(
        told,
        told.status("a", slot=7),
        told.status("b", slot=None, state="loading"),
        told.status("c", slot=0),
        told.status("d", slot=None, state="registered"),
        told.status("e", slot=None, state="ram", leases=1, waiting=1),
        names=[(name, name, {}) for name in "abcde"],
    )
    assert list(found) == ["c", "a", "b"]


def test_a_replaced_revision_is_called_by_the_name_that_it_had(told):
    catalog = Catalog([Entry("sql", "old-digest")])
    catalog.put(Entry("sql", "new-digest"))
    taken = told.snapshot(told.status("old-digest", slot=1, state="active"))
    (row,) = shown_of(taken, catalog, SlotWindows()).values()
    assert row.name == "sql@old-dige"


def test_a_load_says_how_far_it_is_and_how_fast(told):
    loading = told.status(
        "r",
        slot=None,
        state="loading",
        num_blocks=8,
        load_source="disk",
        load_seconds=2.0,
        arrived_bytes=2048,
    )
    row = shown(told, loading, names=[("sql", "r", {})])["sql"]
    assert (row.load_source, row.load_fraction, row.load_seconds) == ("disk", 0.25, 2.0)
    assert row.load_bytes_per_second == 1024.0


def test_what_is_not_known_of_a_load_is_none(told):
    copying = told.status("r", slot=2, state="loading", num_blocks=8, load_source="ram")
    row = shown(told, copying, names=[("sql", "r", {})])["sql"]
    assert (row.load_fraction, row.load_bytes_per_second) == (None, None)


def test_a_row_says_how_tokens_were_guessed_within_the_minute_and_before(told):
    windows, catalog = SlotWindows(), Catalog([Entry("a", "r1")])
    seen = {"slot": 1, "state": "active"}
    for second, (made, drafted, right) in enumerate([(10, 8, 4), (40, 20, 10), (90, 60, 40)]):
        taken = told.snapshot(
            told.status(
                "r1", generated_tokens=made, draft_tokens=drafted, accepted_tokens=right, **seen
            )
        )
        tick(windows, 100 * (second > 0) + second, taken)
    (row,) = shown_of(taken, catalog, windows).values()
    assert (row.draft_tokens, row.accepted_tokens) == (52, 36), "of the last two"
    assert row.tokens_per_draw == round(80 / 44, 2)
    assert (row.life_draft_tokens, row.life_accepted_tokens) == (60, 40)


def test_a_row_that_drew_nothing_has_no_tokens_a_draw(told):
    (row,) = shown(told, told.status("r1", slot=1), names=[("a", "r1", {})]).values()
    assert row.tokens_per_draw is None and row.draft_tokens == 0

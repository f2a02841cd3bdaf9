"""Who has a label of its own, and that every series only grows whoever has one."""

import random

import pytest

from lorad.metrics.labels import HALF_LIFE_SECONDS, Labelled, Series
from lorad.metrics.metric import OTHER


def choose(labelled, uses, *, pinned=(), resident=(), now=0.0, known=None):
    known = set(uses) | set(pinned) | set(resident) if known is None else known
    return labelled.choose(known, set(pinned), set(resident), uses, now)


def test_pinned_ones_come_first_then_resident_ones_then_the_most_used():
    uses = {"busy": 100.0, "quiet": 1.0, "here": 0.0, "kept": 0.0}
    for limit, chosen in enumerate(
        [set(), {"kept"}, {"kept", "here"}, {"kept", "here", "busy"}, set(uses)]
    ):
        labelled = Labelled(limit)
        assert choose(labelled, uses, pinned=["kept"], resident=["here"]) == chosen


def test_who_has_a_label_keeps_it_until_another_is_used_twice_as_much():
    labelled = Labelled(1)
    assert choose(labelled, {"a": 10.0, "b": 0.0}) == {"a"}
    assert choose(labelled, {"a": 10.0, "b": 19.0}) == {"a"}
    assert choose(labelled, {"a": 10.0, "b": 21.0}) == {"b"}


def test_what_was_used_long_ago_counts_less():
    labelled = Labelled(1)
    assert choose(labelled, {"a": 1000.0, "b": 0.0}) == {"a"}
    later = 10 * HALF_LIFE_SECONDS
    assert choose(labelled, {"a": 1000.0, "b": 5.0}, now=later) == {"b"}
    much_later = 250 * HALF_LIFE_SECONDS
    assert choose(labelled, {"a": 1000.0, "b": 7.0}, now=much_later) == {"b"}
    assert choose(labelled, {"a": 1005.0, "b": 7.0}, now=much_later) == {"a"}


def test_a_removed_adapter_has_no_label():
    labelled = Labelled(5)
    choose(labelled, {"a": 1.0, "b": 1.0})
    assert choose(labelled, {"a": 1.0, "b": 1.0}, known={"b"}) == {"b"}


def test_what_is_counted_without_a_label_stays_with_the_others():
    series = Series()
    known = {"a", "b"}
    series.fold({("a", "stop"): 5.0, ("b", "stop"): 2.0}, {"b"}, known)
    assert dict(series) == {(OTHER, "stop"): 5.0, ("b", "stop"): 2.0}
    series.fold({("a", "stop"): 8.0, ("b", "stop"): 2.0}, {"a", "b"}, known)
    assert dict(series) == {(OTHER, "stop"): 5.0, ("a", "stop"): 3.0, ("b", "stop"): 2.0}
    series.fold({("a", "stop"): 9.0, ("b", "stop"): 4.0}, {"b"}, known)
    assert dict(series) == {(OTHER, "stop"): 6.0, ("b", "stop"): 4.0}


def test_a_name_that_is_removed_and_comes_back_begins_at_nothing():
    series = Series()
    series.fold({("a",): 5.0}, {"a"}, {"a"})
    for _ in range(2):  # its owner still has the count, and nobody may have it
        series.fold({("a",): 5.0, ("never seen",): 1.0}, set(), set())
        assert dict(series) == {}
    series.fold({("a",): 2.0}, {"a"}, {"a"})
    assert dict(series) == {("a",): 2.0}


def test_a_count_that_began_again_between_two_looks_goes_on():
    series = Series()
    series.fold({("a",): 5.0}, {"a"}, {"a"})
    series.fold({("a",): 2.0}, {"a"}, {"a"})
    assert dict(series) == {("a",): 7.0}


@pytest.mark.parametrize("seed", range(20))
def test_no_series_ever_falls_and_together_they_are_all_that_was_counted(seed):
    rng = random.Random(seed)
    labelled, series = Labelled(3), Series()
    names = [f"n{i}" for i in range(12)]
    raw = dict.fromkeys(((n, "x") for n in names), 0.0)
    grown, before = 0.0, {}
    for step in range(60):
        for name in rng.sample(names, 4):
            more = float(rng.randrange(5))
            raw[name, "x"] += more
            grown += more
        uses = {name: count for (name, _), count in raw.items()}
        chosen = choose(labelled, uses, pinned=rng.sample(names, 1), now=step * 900.0)
        assert len(chosen) <= 3
        lost = {k: v for k, v in before.items() if k[0] not in (*chosen, OTHER)}
        series.fold(raw, chosen, set(names))
        shown = dict(series)
        assert all(shown[k] >= v for k, v in before.items() if k not in lost)
        grown -= sum(lost.values())  # what a series takes along is in no other
        assert sum(shown.values()) == grown
        before = shown

"""Windows, against the same sums made from every sample there ever was."""

from itertools import pairwise
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.histogram import SECONDS, Histogram
from lorad.board.windows import Growing, Window, spread
from lorad.wire_stream import Spread

some = settings(max_examples=40, deadline=None)
steps = st.lists(
    st.tuples(st.floats(0.05, 90.0), st.integers(0, 1000), st.integers(0, 3)), max_size=60
)


@some
@given(steps)
def test_a_window_is_what_has_grown_since_the_last_sample_before_it(steps):
    window, now, totals, samples = Window(60.0), 0.0, (0, 0), []
    for seconds, *grown in steps:
        now += seconds
        totals = tuple(a + b for a, b in zip(totals, grown, strict=True))
        window.add(now, totals)
        samples.append((now, totals))
        before = [sample for sample in samples[:-1] if sample[0] <= now - 60.0]
        first, last = (before or samples)[-1 if before else 0], samples[-1]
        assert window.grown() == tuple(b - a for a, b in zip(first[1], last[1], strict=True))
        assert window.span == pytest.approx(last[0] - first[0])


@some
@given(steps)
def test_a_history_adds_up_to_what_has_grown(steps):
    window, now, total = Window(60.0), 0.0, 0
    times = []
    for seconds, grown, _ in steps:
        now, total = now + seconds, total + grown
        window.add(now, (total,))
        times.append(now)
    history = window.history(0)
    gaps = [b - a for a, b in pairwise(times)]
    added = sum(rate * gap for rate, gap in zip(history[::-1], gaps[::-1], strict=False))
    assert added == pytest.approx(sum(window.grown()))


def test_a_window_without_samples_or_with_one_says_nothing():
    window = Window()
    assert (window.grown(), window.rates(), window.span) == ((), (), 0.0)
    window.add(5.0, (7,))
    assert (window.grown(), window.rates(), window.history(0)) == ((0,), (0.0,), ())


@some
@given(st.lists(st.integers(0, 50), max_size=30))
def test_a_total_goes_on_where_its_counter_begins_anew(values):
    growing, expected, before = Growing(), 0, 0
    for value in values:
        expected += value - before if value >= before else value
        before = value
        assert growing.take(value) == expected


@some
@given(st.lists(st.floats(0.0001, 79.0), min_size=1, max_size=300))
def test_a_percentile_lies_in_the_bucket_where_the_value_of_that_rank_is(values):
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)
    told, ordered = spread(SECONDS, histogram.counts), sorted(values)
    assert told.count == len(values)
    for share, found in ((0.5, told.p50), (0.9, told.p90), (0.99, told.p99)):
        exact = ordered[max(0, -(-round(share * 100) * len(ordered) // 100) - 1)]
        above = next(n for n, bound in enumerate(SECONDS) if exact <= bound)
        low = SECONDS[above - 1] if above else 0.0
        assert low <= found <= SECONDS[above]


def test_percentiles_of_many_even_values_are_about_right():
    values = [n / 10_000 for n in range(1, 10_001)]
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)
    told, exact = spread(SECONDS, histogram.counts), quantiles(values, n=100)
    assert told.p50 == pytest.approx(exact[49], abs=0.01)
    assert told.p90 == pytest.approx(exact[89], abs=0.01)


def test_nothing_measured_is_none_and_what_is_above_all_bounds_is_the_last():
    assert spread(SECONDS, [0] * (len(SECONDS) + 1)) == Spread()
    assert spread(SECONDS, []) == Spread()
    told = spread(SECONDS, [0] * len(SECONDS) + [4])
    assert (told.count, told.p50, told.p99) == (4, SECONDS[-1], SECONDS[-1])

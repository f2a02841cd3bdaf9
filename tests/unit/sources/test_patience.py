"""Trying again, for as long as it helps; and what whoever watches is told."""

import datetime
from email.utils import format_datetime

import pytest

from lorad.sources.errors import Cancelled, FetchError
from lorad.sources.patience import (
    MAX_ATTEMPTS,
    Again,
    Meter,
    Patience,
    patiently,
    retry_after,
    silent_meter,
)


class Recorder(Meter):
    """Sleeps in its own book alone."""

    def __init__(self) -> None:
        super().__init__(lambda done, total: None, lambda: False, None)
        self.slept: list[float] = []

    def pause(self, seconds: float) -> None:
        self.slept.append(seconds)


def failing(after: float = 0.0) -> Again:
    return Again(FetchError("source_unreachable", "gone", hint="wait"), after)


def test_attempts_end_with_the_patience_and_the_last_error() -> None:
    meter = Recorder()

    def attempt() -> None:
        raise failing()

    with pytest.raises(FetchError, match="gone"):
        patiently(attempt, meter, Patience(waits=(1.0, 2.0)))
    assert meter.slept == [1.0, 2.0]


def test_the_other_side_may_ask_for_longer_waits_but_not_for_any() -> None:
    meter = Recorder()
    asked = iter((5.0, 7.0, 61.0))

    def attempt() -> None:
        raise failing(next(asked))

    with pytest.raises(FetchError):
        patiently(attempt, meter, Patience(waits=(1.0, 2.0, 4.0, 8.0), longest=60.0))
    assert meter.slept == [5.0, 7.0]


def test_an_attempt_that_brings_something_begins_the_patience_anew() -> None:
    meter, calls = Recorder(), 0

    def attempt() -> str:
        nonlocal calls
        calls += 1
        if calls < 6:
            meter.at(100 * calls)
            raise failing()
        return "whole"

    assert patiently(attempt, meter, Patience(waits=(1.0, 2.0))) == "whole"
    assert meter.slept == [1.0] * 5


def test_even_small_steps_come_to_an_end() -> None:
    meter = Recorder()

    def attempt() -> None:
        meter.at(meter.here + 1)
        raise failing()

    with pytest.raises(FetchError):
        patiently(attempt, meter, Patience(waits=(1.0,)))
    assert len(meter.slept) == MAX_ATTEMPTS


def test_what_is_told_never_goes_back() -> None:
    told: list[tuple[int, int | None]] = []
    meter = Meter(lambda *at: told.append(at), lambda: False, 30)
    for offset in (0, 4, 10, 2, 10):  # begun again after 10
        meter.at(offset)
    meter.begin()
    for offset in (5, 0, 20):
        meter.at(offset)
    assert told == [(0, 30), (4, 30), (10, 30), (15, 30), (30, 30)]


def test_a_pause_ends_when_it_is_told_to() -> None:
    calls = 0

    def cancelled() -> bool:
        nonlocal calls
        calls += 1
        return calls > 1

    with pytest.raises(Cancelled):
        Meter(lambda done, total: None, cancelled, None).pause(60.0)
    silent_meter().pause(0.0)


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after("7") == 7.0
    assert retry_after("1.5") == 1.5
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    assert 25.0 < retry_after(format_datetime(soon, usegmt=True)) <= 30.0
    for nothing in (None, "", "soon", "-5", "nan-sense", "Mon, 01 Jan 1990 00:00:00 GMT"):
        assert retry_after(nothing) == 0.0
    assert retry_after("1e300") == 86400.0
    assert retry_after("nan") == 0.0

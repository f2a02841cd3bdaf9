"""Random schedules: every owner's invariants after every step, nothing lost, no wrong token.

Admissions, aborts, preemptions, evictions, drains, replacements, loads that are late or fail, pools
that are too small: see conftest.py for what is played and what is asked of it.
"""

from collections import Counter

import pytest

#: Schedules on each device; in these few all of HAPPENINGS are met, and five times.
FAST = (2, 5, 10, 11, 14, 27, 34, 39, 40, 43, 50, 57, 58, 65, 68)
ALL = 2000
DEVICES = ("now", "ahead", "late")

#: What may happen to the engine.
HAPPENINGS = (
    *("length", "stop", "abort", "load_failed", "no_room", "model_not_found", "deadline_exceeded"),
    *("draining", "preemptions", "evictions", "aborts in mid-step", "replaced in use"),
    *(
        "drained for others",
        "copies without memory",
        "prefix hits",
        "prefixes lost",
        "invocation_missing",
    ),
)


def assert_nothing_was_left_out(census: Counter[str], device: str) -> None:
    waits = ("copies that waited for a step",) if device == "late" else ()
    rare = {name: census[name] for name in (*HAPPENINGS, *waits) if census[name] < 3}
    assert not rare, f"too seldom to prove a thing: {rare}"


@pytest.mark.parametrize("device", DEVICES)
def test_random_schedules_lose_or_confuse_nothing(live_through, device):
    assert_nothing_was_left_out(live_through(device, FAST), device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_two_thousand_random_schedules_lose_or_confuse_nothing(live_through, device):
    assert_nothing_was_left_out(live_through(device, range(ALL)), device)


@pytest.mark.parametrize("device", DEVICES)
def test_nor_do_they_where_some_rows_are_drafts(live_through, device):
    census = live_through(device, range(100, 108), drafts=True)
    assert census["wrong drafts"] > 20 and census["right drafts"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_nor_do_five_hundred_where_some_rows_are_drafts(live_through, device):
    census = live_through(device, range(500), drafts=True)
    assert_nothing_was_left_out(census, device)
    assert census["wrong drafts"] > 2000 and census["right drafts"] > 5000


@pytest.mark.parametrize("device", DEVICES)
def test_nor_do_they_where_every_other_request_is_pooled(live_through, device):
    census = live_through(device, range(200, 205), pools=True)
    assert census["pooled"] > 40 and census["length"] > 15 and census["preemptions"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_nor_do_five_hundred_where_every_other_request_is_pooled(live_through, device):
    census = live_through(device, range(500), drafts=True, pools=True)
    assert_nothing_was_left_out(census, device)
    assert census["pooled"] > 5000

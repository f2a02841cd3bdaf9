"""Rates: what a tenant had in the last minute, and when it may go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.errors import LoradError
from lorad.service.rates import Rates, Window
from lorad.service.tenants import Tenant


class Time:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def refusal(rates, tenant) -> LoradError | None:
    try:
        rates.check(tenant)
    except LoradError as error:
        return error
    return None


def test_no_more_requests_than_the_limit_begin_in_any_minute():
    time = Time()
    rates, tenant, begun = Rates(time), Tenant("acme", rpm=5), []
    for _ in range(400):
        if refusal(rates, tenant) is None:
            rates.begin(tenant).end()
            begun.append(time.now)
        time.now += 0.7
    assert len(begun) >= 5 * 280 // 62
    for start in begun:
        assert sum(start <= moment < start + 60 for moment in begun) <= 5


def test_who_waits_as_long_as_it_is_told_is_let_in_and_not_before():
    time = Time()
    rates, tenant = Rates(time), Tenant("acme", rpm=3)
    for _ in range(3):
        rates.begin(tenant).end()
        time.now += 7
    error = refusal(rates, tenant)
    assert (error.code, error.status) == ("tenant_rate_limited", 429)
    told = error.retry_after
    time.now += told - 2
    assert refusal(rates, tenant) is not None
    time.now += 2
    assert refusal(rates, tenant) is None


def test_tokens_count_while_they_are_made_and_after_the_end():
    time = Time()
    rates, tenant, used = Rates(time), Tenant("acme", tokens_per_minute=100), [40]
    spending = rates.begin(tenant)
    spending.follow(lambda: used[0])
    assert refusal(rates, tenant) is None
    used[0] = 99
    assert refusal(rates, tenant) is None
    used[0] = 100  # nobody told the meter: it looks when somebody asks
    assert refusal(rates, tenant).message == "this tenant had 100 tokens within a minute, of 100"
    used[0] = 130
    spending.end()
    spending.end()
    assert "had 130 tokens" in refusal(rates, tenant).message
    time.now += 62
    assert refusal(rates, tenant) is None


def test_tenants_have_meters_of_their_own_and_those_without_limits_none():
    rates, one, other = Rates(Time()), Tenant("acme", rpm=1), Tenant("rival", rpm=1)
    rates.begin(one)
    assert refusal(rates, one) is not None
    assert refusal(rates, other) is None
    assert rates.begin(Tenant("free")) is None
    rates.forget({"rival"})
    assert refusal(rates, one) is None


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=60))
def test_a_window_is_the_sum_of_the_last_minute_and_stays_small(steps):
    window, now, parts = Window(), 0.0, []
    for seconds, count in steps:
        now += seconds
        window.add(now, count)
        window.pass_time(now)
        parts.append((now, count))
        certain = sum(n for at, n in parts if at > now - 60)
        possible = sum(n for at, n in parts if at > now - 62)
        assert certain <= window.total <= possible
        assert len(window._parts) <= 62


@pytest.mark.parametrize("limit", [1, 5, 17])
def test_the_wait_is_until_the_sum_is_below_the_limit(limit):
    window = Window()
    for second in range(20):
        window.add(float(second), 1)
    wait = window.seconds_below(limit, 20.0)
    window.pass_time(20.0 + wait - 0.1)
    assert window.total >= limit
    window.pass_time(20.0 + wait)
    assert window.total < limit

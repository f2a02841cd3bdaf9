"""The door: who may wait, who is told to come back when, and that every place is given back."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.errors import LoradError
from lorad.service.door import Door
from lorad.service.tenants import account_of


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def make_door():
    """make_door(queue=, queue_per_tenant=): a door, with `enter` in short and its `time`."""

    def make(queue=10, queue_per_tenant=6):
        time = Time()
        door = Door(SimpleNamespace(queue=queue, queue_per_tenant=queue_per_tenant), time)

        def enter(tenant="t", count=1, rev="r", priority=50, seconds=600.0, rate=0.0):
            line = (tenant, rev, priority)
            return door.enter(line, count, seconds=seconds, starts_per_second=rate)

        return SimpleNamespace(door=door, enter=enter, time=time)

    return make


def refused(call) -> LoradError:
    with pytest.raises(LoradError) as caught:
        call()
    assert caught.value.status == 429
    assert caught.value.retry_after == int(caught.value.retry_after) >= 1
    return caught.value


def test_the_queue_has_a_limit_in_all_and_one_for_each_tenant(make_door):
    d = make_door()
    d.enter("a", 6)
    error = refused(lambda: d.enter("a"))
    assert error.code == "tenant_rate_limited" and "queue_per_tenant = 6" in error.message
    d.enter("b", 4)
    error = refused(lambda: d.enter("c"))
    assert error.code == "queue_full" and "limits.queue = 10" in error.message
    assert d.door.refused == {"tenant_rate_limited": 1, "queue_full": 1}
    assert d.door.waiting == 10


def test_a_request_counts_for_all_its_answers_or_is_refused_whole(make_door):
    d = make_door()
    d.enter("a", 4)
    refused(lambda: d.enter("a", 3))
    assert d.door.waiting == 4
    d.enter("a", 2)


def test_a_place_is_given_back_once_however_it_ends(make_door):
    d = make_door()
    place = d.enter("a", 3)
    place.leave()
    assert d.door.waiting == 2
    place.close()
    place.close()
    place.leave()
    assert d.door.waiting == 0 and not d.door._tenants and not d.door._lines


def test_who_is_refused_comes_back_when_so_many_have_left_as_were_measured(make_door):
    d = make_door(queue=40, queue_per_tenant=40)
    for _ in range(20):
        d.enter("a")
    places = [d.enter("b") for _ in range(20)]
    for place in places:
        d.time.now += 0.5
        place.leave()
    for _ in range(20):
        d.enter("b")
    assert refused(lambda: d.enter("c", 20)).retry_after == 10.0
    assert refused(lambda: d.enter("c", 1)).retry_after == 1.0
    d.time.now += 1000.0  # nothing has moved since: it is told to wait, but not for ever
    assert refused(lambda: d.enter("c", 20)).retry_after == 60.0


def test_time_without_a_queue_does_not_count_as_slow(make_door):
    d = make_door()
    for _ in range(10):
        place = d.enter("a")
        d.time.now += 0.1
        place.leave()
        d.time.now += 1000.0
    for _ in range(6):
        d.enter("a")
    assert refused(lambda: d.enter("a", 2)).retry_after == 1.0


# ------------------------------------------------------------------- deadlines
def test_a_deadline_that_the_queue_before_it_cannot_meet_is_refused_at_once(make_door):
    d = make_door(queue=1000, queue_per_tenant=1000)
    d.enter(count=100)
    error = refused(lambda: d.enter(seconds=9.0, rate=5.0))
    assert error.code == "queue_full" and error.retry_after == 1.0
    assert "100 sequences" in error.message and "10 s" in error.message
    assert refused(lambda: d.enter(seconds=2.0, rate=5.0)).retry_after == 8.0
    d.enter(seconds=11.0, rate=5.0)
    assert d.door.waiting == 101


@pytest.mark.parametrize(
    "other",
    [{"tenant": "u"}, {"rev": "s"}, {"rev": None}, {"priority": 60}, {"rate": 0.0}],
    ids=str,
)
def test_nobody_is_refused_for_what_may_be_overtaken_or_is_not_known(make_door, other):
    d = make_door(queue=1000, queue_per_tenant=1000)
    d.enter(count=100)
    d.enter(**{"seconds": 1.0, "rate": 5.0, **other})
    assert d.door.waiting == 101 and not d.door.refused


def test_who_is_more_urgent_is_ahead_too(make_door):
    d = make_door(queue=1000, queue_per_tenant=1000)
    d.enter(count=100, priority=90)
    error = refused(lambda: d.enter(seconds=1.0, rate=5.0, priority=50))
    assert error.code == "queue_full" and d.door.waiting == 100


@given(
    st.lists(st.sampled_from([0.2, 0.5, 1.0, 2.0]), min_size=30, max_size=60),
    st.floats(0.5, 60.0),
    st.integers(0, 40),
)
def test_nobody_is_refused_who_would_have_been_served_in_time(gaps, seconds, ahead):
    """As long as the engine goes on no faster than twice what it was measured at."""
    rate = len(gaps) / sum(gaps)
    door = Door(SimpleNamespace(queue=1000, queue_per_tenant=1000), Time())
    if ahead:
        door.enter(("t", None, 50), ahead, seconds=math.inf, starts_per_second=rate)
    served_after = ahead / (2.0 * rate)
    try:
        door.enter(("t", None, 50), 1, seconds=seconds, starts_per_second=rate)
    except LoradError:
        assert served_after > seconds
    else:
        assert served_after <= seconds


# ------------------------------------------------------------------- accounts
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 3), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.integers(1, 5)),
        st.tuples(st.just("close"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 50), st.just(0)),
    ),
    max_size=120,
)


@given(ACTS)
def test_the_books_agree_with_the_places_whatever_happens(acts):
    time = Time()
    door = Door(SimpleNamespace(queue=12, queue_per_tenant=5), time)
    places, left = [], []
    for kind, which, count in acts:
        if kind == "enter":
            tenant = f"t{which}"
            mine = sum(n for (t, _), n in zip(places, left, strict=True) if t == tenant)
            try:
                place = door.enter(
                    (tenant, "r", 50), count, seconds=math.inf, starts_per_second=0.0
                )
            except LoradError as error:
                full = sum(left) + count > 12
                assert error.code == ("queue_full" if full else "tenant_rate_limited")
                assert full or mine + count > 5
                assert 1 <= error.retry_after <= 60
            else:
                assert sum(left) + count <= 12 and mine + count <= 5
                places.append((tenant, place))
                left.append(count)
        elif kind == "wait":
            time.now += which / 10
        elif places:
            which %= len(places)
            if kind == "close":
                places[which][1].close()
                left[which] = 0
            else:
                places[which][1].leave(count)
                left[which] = max(left[which] - count, 0)
        assert door.waiting == sum(left) == sum(door._lines.values())
        assert min(door._tenants.values(), default=1) >= 1


def test_a_request_has_its_adapters_priority_or_less():
    assert account_of("acme/sql", None, 70).priority == 70
    assert account_of("acme/sql", 20, 70).priority == 20
    assert account_of("acme/sql", 100, 70).priority == 70
    assert account_of(None, None, None).priority == 50
    assert account_of(None, 90, None).priority == 50


def test_the_tenant_is_what_the_adapters_name_begins_with():
    assert account_of("acme/sql", None, 50).tenant.name == "acme"
    assert account_of("sql", None, 50).tenant.name == ""
    assert account_of(None, None, None).tenant.name == ""

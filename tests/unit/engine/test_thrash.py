"""Thrash: what counts as it, where it is told, and what a hold is worth; and who is remembered."""

import pytest

from engine.adapters.thrash import MANY_FRESH


def crowded(make, **more):
    """Room for one of two adapters."""
    h = make(num_blocks=12, kv_floor=8, slots=4, **more)
    h.add("a", 4)
    h.add("b", 4)
    return h


def ask(h, rev: str, times: int = 1) -> None:
    for _ in range(times):
        request = f"{rev}{len(h.deltas)}"
        h.submit(request, [1], rev, max_tokens=1)
        h.run()
        assert h.end(request).finish_reason == "length"


def record(h, rev: str):
    return next(r for r in h.residency.revisions() if r.rev == rev)


def test_coming_back_within_the_window_is_counted_and_told(make):
    h = crowded(make, thrash_window=60.0)
    for rev in "abab":
        ask(h, rev)
    assert h.residency.num_thrashes == 2
    assert [record(h, rev).num_thrashes for rev in "ab"] == [1, 1]
    away = [e.away_seconds for e in h.events if e.after == "idle" and e.before == "loading"]
    assert away[:2] == [None, None] and all(0 < seconds < 60 for seconds in away[2:])


def test_coming_back_after_the_window_is_not_thrash(make):
    h = crowded(make, thrash_window=60.0)
    ask(h, "a")
    ask(h, "b")
    h.clock.now += 61.0
    ask(h, "a")
    assert h.residency.num_thrashes == 0


def test_what_an_operator_evicts_is_not_thrash(make):
    h = crowded(make)
    ask(h, "a")
    h.evict("a")
    ask(h, "a")
    assert h.residency.num_thrashes == 0 and record(h, "a").num_evictions == 1


def test_a_cancelled_load_is_neither_an_eviction_nor_a_return(make):
    h = crowded(make)
    ask(h, "a")
    ask(h, "b")  # a makes way
    h.copier.copies_take = 9
    load = h.load("a")
    h.run(until=lambda: bool(h.copier.copying))
    h.evict("a")
    h.run()
    assert h.code(load) == "conflict" and h.residency.num_thrashes == 0


def test_only_those_who_come_back_while_most_loads_serve_one_request_are_held(make):
    h = crowded(make)
    for rev in "ab" * 20:
        ask(h, rev)
    assert h.slots.find("b").hold > 0 and h.slots.find("b").held_until > h.clock.now
    calm = crowded(make)
    for rev in "ab" * 20:
        ask(calm, rev, times=4)
    assert calm.residency.num_thrashes == 38 and MANY_FRESH == 0.5
    assert calm.slots.find("b").hold == 0


@pytest.mark.parametrize("policy", ["cost", "lfu"])
def test_how_often_an_adapter_was_used_is_known_when_it_is_back(make, policy):
    """It was lost with the slot: whoever came up last had one use, and so had everybody."""
    h = make(num_blocks=16, kv_floor=8, policy=policy)
    for rev in ("often", "x", "y"):
        h.add(rev, 4)
    ask(h, "often", times=5)
    h.evict("often")
    ask(h, "x")
    ask(h, "often")  # back, once
    ask(h, "x")
    ask(h, "y")
    assert h.slots.find("often") is not None and h.slots.find("x") is None


def test_a_load_that_was_asked_for_counts_as_a_use(make):
    h = make(num_blocks=16, kv_floor=8)
    for rev in ("loaded", "x", "y"):
        h.add(rev, 4)
    ask(h, "x")
    h.clock.now += 1.0
    h.resident("loaded")
    ask(h, "y")
    assert h.slots.find("loaded") is not None and h.slots.find("x") is None

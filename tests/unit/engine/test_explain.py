"""Explainer: every way in which a revision is or is not served, as the engine's own numbers."""

import pytest

from engine.explain import Explainer
from engine.memory.costs import Line

BLOCK = 100


def explainer(h):
    return Explainer(h.residency, h.memory, h.scheduler, h.clock, BLOCK)


def explain(h, rev):
    return explainer(h).explain(rev)


def running(h, request, rev, *, max_tokens=30) -> None:
    h.submit(request, [1], rev, max_tokens=max_tokens)
    h.run(until=lambda: request in h.deltas)


def full(make, **more):
    """Room for one of a and b; a runs."""
    h = make(num_blocks=14, kv_floor=8, **more)
    h.add("a", 4)
    h.add("b", 4)
    running(h, "r", "a", max_tokens=40)
    return h


def test_an_unknown_revision_is_none(make):
    assert explain(make(), "x") is None


def test_a_cold_one_says_from_where_it_would_come_and_who_has_the_room(make):
    h = make(num_blocks=40)
    h.memory.costs.copy, h.memory.costs.read = Line(0.5, 0.0), Line(2.0, 0.0)
    h.add("a", 4)
    told = explain(h, "a")
    assert (told.state, told.in_ram, told.load_seconds) == ("registered", False, 2.5)
    assert told.wanted_seconds is None and told.queue_turn == 0 and told.hopeless == ""
    assert (told.room.total, told.room.free, told.room.kv_floor) == (40, 40, 8)
    assert told.cost.uses == 0 and told.cost.place == 0
    h.load("a", "ram")
    h.run()
    assert (explain(h, "a").state, explain(h, "a").load_seconds) == (
        "ram",
        h.memory.costs.copy.of(4),
    )


def test_one_on_its_way_says_when_it_is_up(make):
    h = make(num_blocks=60, kv_floor=8)
    h.memory.costs.copy, h.memory.costs.read = Line(0.1, 0.0), Line(1.0, 0.5)
    for rev in ("first", "second"):
        h.add(rev, 4)
        h.host.delay[rev] = 50
        h.load(rev)
    h.step()
    told = explain(h, "second")
    assert told.state == "loading" and told.reading
    # Its own read, the blocks of the one before it, and the copy that follows.
    assert told.eta_seconds == pytest.approx(1.0 + 4 * 0.5 + 4 * 0.5 + 0.1)
    assert explain(h, "first").eta_seconds == pytest.approx(1.0 + 4 * 0.5 + 0.1)
    h.clock.now += 1.0
    assert explain(h, "first").eta_seconds == pytest.approx(4 * 0.5 + 0.1)
    h.copier.copies_take = 50
    h.run(until=lambda: bool(h.copier.copying))
    told = explain(h, "first")
    assert not told.reading and told.eta_seconds == pytest.approx(h.memory.costs.copy.of(4))


def test_one_without_room_names_who_holds_it_and_since_when_it_waits(make):
    h = full(make, starve_after=5.0)
    h.submit("q1", [1], "b")
    h.submit("q2", [2], "b")
    h.step(5)
    h.clock.now += 1.0
    told = explain(h, "b")
    assert (told.waiting, told.queue_turn, told.queue_turns) == (2, 1, 1)
    assert 1.0 < told.blocked_seconds < told.wanted_seconds < 5.0 and not told.starving
    (holder,) = told.room.holders
    assert (holder.rev, holder.blocks, holder.running, holder.pinned) == ("a", 4, 1, False)
    assert 0 < holder.tokens_left < 40 and told.room.num_holders == 1
    assert told.room.idle == 0 and told.room.num_idle == 0


def test_a_starving_one_names_who_drains_for_it_and_that_one_says_for_whom(make):
    h = full(make, starve_after=0.3)
    h.submit("q", [1], "b")
    h.run(until=lambda: h.state("a") == "draining")
    told = explain(h, "b")
    assert told.starving and told.victim == "a" and told.room.reserved_for == "b"
    assert 0 < told.victim_tokens < 40
    victim = explain(h, "a")
    assert (victim.drain_cause, victim.drain_for) == ("starvation", "b")
    assert victim.drain_seconds is None and victim.tokens_left == told.victim_tokens
    assert not victim.starving and victim.victim == "" and victim.room.reserved_for == "b"
    assert victim.room.holders == (), "it is not in its own way"


def test_one_that_an_operator_drains_says_until_when(make):
    h = full(make)
    h.evict("a", drain_timeout=5.0)
    told = explain(h, "a")
    assert (told.state, told.drain_cause, told.drain_for) == ("draining", "manual", "")
    assert told.drain_seconds == pytest.approx(5.0)


def test_one_that_can_never_have_room_says_why_though_nobody_asks_for_it(make):
    h = make(num_blocks=20, kv_floor=8)
    h.add("p", 4, pinned=True)
    h.resident("p")
    h.add("huge", 10)
    assert "beside 4 pinned ones" in explain(h, "huge").hopeless
    assert explain(h, "p").hopeless == ""


def test_the_cost_shows_all_that_it_is_made_of(make):
    h = make(num_blocks=60, slots=8)
    h.memory.costs.copy, h.memory.costs.read = Line(0.0, 0.25), Line(0.0, 1.0)
    for rev, priority in (("a", 50), ("b", 50), ("low", 10)):
        h.add(rev, 4, priority=priority)
        h.submit(f"{rev}1", [1], rev, max_tokens=1)
        h.run()
    h.submit("a2", [1], "a", max_tokens=1)
    h.run()
    cost = explain(h, "a").cost
    assert cost.uses == pytest.approx(2.0, rel=0.01)
    assert cost.uses_a_second == pytest.approx(cost.uses * 0.6931 / 300, rel=0.001)
    assert 0 < cost.reuse_chance < 1 and (cost.blocks, cost.num_bytes) == (4, 400)
    assert cost.return_seconds == h.memory.costs.to_return(4, in_ram=True)
    assert cost.saved == pytest.approx(cost.uses_a_second * cost.return_seconds / 400)
    places = {rev: explain(h, rev).cost.place for rev in ("a", "b", "low")}
    assert places == {"low": 1, "b": 2, "a": 3} and cost.victims == 3
    blocks = h.pool.num_free + 1
    assert h.memory.take_adapter(blocks - h.memory.kv_floor, "x", need_slot=True) is not None
    assert h.slots.find("low") is None, "what was told to be next went"


def test_the_engine_is_asked_one_bounded_question(make):
    """The walk is over slots and groups, not over requests: 600 that wait are two groups."""
    h = make(num_blocks=14, kv_floor=8)
    for rev in "ab":
        h.add(rev, 4)
    for n in range(300):
        h.submit(f"a{n}", [1], "a")
        h.submit(f"b{n}", [1], "b")
    told = explain(h, "b")
    assert (told.waiting, told.queue_turn, told.queue_turns) == (300, 2, 2)

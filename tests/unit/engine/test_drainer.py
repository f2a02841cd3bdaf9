"""The drainer: no adapter waits for ever, and nobody's request is aborted for another's."""

import random

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from engine.adapters.slots import SlotRow
from engine.drainer import choose_victim
from engine.recency import Usage

#: Without shrinking: a population takes a second, and what it was is told with the failure.
PHASES = (Phase.explicit, Phase.generate)
TURN = 1.0  # seconds: GRACE_SECONDS, or starve_after if that is longer


def test_the_victim_is_of_the_lowest_priority_and_ends_soonest():
    def row(rev, priority):
        return SlotRow(0, rev, (), False, priority, Usage(0.0), 0.0, 1, ready=True, refs=1)

    rows = [row("vip", 90), row("long", 50), row("short", 50), row("new", 50)]
    remaining = {"vip": 1, "long": 100, "short": 10, "new": 2}
    fresh = {"vip", "new"}

    def chosen(rows) -> str | None:
        row = choose_victim(rows, remaining.__getitem__, lambda row: row.rev in fresh)
        return row and row.rev

    assert chosen(rows) == "short"
    assert chosen([rows[0], rows[3]]) == "new"
    assert chosen([]) is None


def keep_busy(h, rev, step, *, at_least=2) -> None:
    """Requests of 12 tokens on `rev` keep arriving, so that it is never idle by itself."""
    if h.scheduler.running_on(rev) + h.scheduler.waiting_for(rev) < at_least:
        h.submit(f"{rev} {step}", [step], rev, max_tokens=12)


def steps_until_served(h, request, busy, *, limit=2000) -> int:
    for step in range(limit):
        if request in h.deltas:
            return step
        for rev in busy:
            keep_busy(h, rev, step)
        h.step()
    raise AssertionError(f"{request} starves")


def test_a_cold_adapter_behind_a_busy_one_starts_within_starve_after_and_one_drain(make):
    h = make(slots=1, starve_after=2.0)
    h.add("busy")
    h.add("cold")
    for step in range(20):
        keep_busy(h, "busy", step)
        h.step()
    h.submit("c", [1], "cold")
    began = h.clock.now
    steps_until_served(h, "c", ["busy"])
    assert 2.0 <= h.clock.now - began <= 2.0 + 25 * h.step_seconds
    drained = [e for e in h.events if e.after == "draining"]
    assert [(e.rev, e.cause) for e in drained] == [("busy", "starvation")]
    h.run()
    assert all(h.end(r).finish_reason == "length" for r in h.deltas)


def test_room_in_blocks_is_reserved_until_the_starving_adapter_has_it(make):
    h = make(num_blocks=20, kv_floor=6, slots=4, starve_after=0.5, max_model_len=24)
    for rev, blocks in (("x", 5), ("y", 5), ("big", 12)):
        h.add(rev, blocks)
    for step in range(20):
        keep_busy(h, "x", step)
        keep_busy(h, "y", step)
        h.step()
    h.submit("c", [1], "big")
    assert steps_until_served(h, "c", ["x", "y"]) < 150
    h.run()
    assert h.memory.reserved_for is None


def test_a_pinned_adapter_is_never_the_victim(make):
    h = make(slots=2, starve_after=0.1)
    h.add("pinned", pinned=True, priority=0)
    for rev in ("busy", "cold"):
        h.add(rev)
    h.resident("pinned")
    h.submit("c", [1], "cold")
    steps_until_served(h, "c", ["pinned", "busy"])
    assert {e.rev for e in h.events if e.after == "draining"} <= {"busy"}
    assert h.slots.find("pinned") is not None


def test_the_drain_ends_when_nobody_starves_any_more(make):
    h = make(slots=1, starve_after=0.1)
    h.add("busy")
    h.add("cold")
    h.submit("b", [1], "busy", max_tokens=40)
    h.run(until=lambda: "b" in h.deltas)
    h.submit("c", [1], "cold")
    h.run(until=lambda: h.state("busy") == "draining")
    h.scheduler.abort("c")
    h.submit("b2", [1], "busy", max_tokens=2)
    h.step(3)
    assert h.state("busy") == "active" and h.memory.reserved_for is None
    assert h.end("b2") is not None, "it takes requests again"


def test_adapters_that_all_starve_do_not_push_each_other_out_before_they_have_served(make):
    """One slot, and everybody starves at once: whoever comes up is left to its requests first."""
    h = make(slots=1, starve_after=0.01)
    h.copier.copies_take = 3
    for rev in "abcd":
        h.add(rev)
        h.submit(rev, [1], rev, max_tokens=2)
    h.run(limit=400)
    assert all(h.end(rev).finish_reason == "length" for rev in "abcd")
    evictions = sum(r.num_evictions for r in h.residency.revisions())
    assert evictions == 3, "each came up once"


def test_reserved_room_keeps_nobody_out_while_nobody_runs(make):
    """An adapter and its request fill the pool: there is never room for the next to starve."""
    h = make(num_blocks=14, kv_floor=0, slots=3, starve_after=0.01)
    for rev in "abc":
        h.add(rev, 5)
        h.submit(rev, [1] * 33, rev, max_tokens=2)  # nine blocks
    h.run(limit=2000)
    for rev in "abc":
        assert h.tokens(rev) == h.alone([1] * 33, rev, 2)


def test_six_adapters_on_three_slots_under_steady_load_are_all_served(make):
    h = make(slots=3, starve_after=0.2, max_num_seqs=6)
    revs = [f"v{i}" for i in range(6)]
    for rev in revs:
        h.add(rev)
    for step in range(600):
        for rev in revs:
            keep_busy(h, rev, step, at_least=1)
        h.step()
    served = {rev: sum(r.startswith(rev) for r in h.deltas) for rev in revs}
    assert min(served.values()) >= 3, served


# ------------------------------------------------------------------- requests that hardly end
LONG = 3000  # tokens: at a token a step nobody waits for their end


def long_house(make, **sizes):
    sizes = {"max_model_len": 4096, "num_blocks": 4096, "max_batch_tokens": 64, **sizes}
    return make(step_seconds=0.01, **sizes)


def wait_of(h, request, *, limit=60.0) -> float:
    """Seconds until the first token of `request`; AssertionError after `limit`."""
    began = h.clock.now
    while request not in h.deltas:
        h.step()
        assert h.clock.now - began < limit, f"{request} starves"
    return h.clock.now - began


def test_requests_with_thousands_of_tokens_left_give_way_and_go_on_later(make):
    h = long_house(make, slots=1, starve_after=1.0)
    h.add("busy")
    h.add("cold")
    for i in range(3):
        h.submit(f"b{i}", [i], "busy", max_tokens=400)
    h.step(50)
    h.submit("c", [1], "cold")
    assert 2.0 <= wait_of(h, "c") <= 2.2
    assert h.scheduler.num_preemptions == 3
    h.run(limit=2000)
    for i in range(3):
        assert h.tokens(f"b{i}") == h.alone([i], "busy", 400)
    assert h.prefix.reuse.total.hit == 0, "nobody is told that its own tokens were cached"


def test_who_gave_way_goes_on_from_the_kv_that_is_cached_of_it(make):
    h = long_house(make, slots=1, starve_after=0.5)
    h.add("busy")
    h.add("cold")
    h.submit("b", [1], "busy", max_tokens=400)
    h.step(50)
    h.submit("c", [1], "cold", max_tokens=1)
    wait_of(h, "c")
    h.run(until=lambda: h.scheduler.running_on("busy") == 1)
    chunk = next(c for c in h.work.chunks if c.seq.request_id == "b")
    assert chunk.start >= 140 and chunk.length <= h.block_size, "its prefix is kept"


def test_whoever_comes_up_has_its_time_before_it_can_be_made_to_give_way(make):
    """Three adapters on one slot, none of which would ever end: they take turns of starve_after."""
    h = long_house(make, slots=1, starve_after=0.5)
    for rev in "abc":
        h.add(rev)
        h.submit(rev, [1], rev, max_tokens=LONG)
    h.step(1000)
    served = {rev: len(h.tokens(rev)) for rev in "abc"}
    assert min(served.values()) >= 200, served
    loads = sum(r.num_loads for r in h.residency.revisions())
    assert loads <= 1000 * h.step_seconds / 0.5 + 1, "no turn is shorter than starve_after"


def test_kv_of_base_requests_gives_way_to_an_adapter_that_starves(make):
    """Nobody runs on an adapter that could be drained, and no sequence needs another block."""
    sizes = {"block_size": 64, "num_blocks": 14, "max_model_len": 192, "max_batch_tokens": 600}
    h = make(**sizes, kv_floor=8, starve_after=0.5, step_seconds=0.05)
    h.add("cold", 4)
    for i in range(4):
        h.submit(f"b{i}", [i] * 130, max_tokens=60)  # three blocks from the first row to the last
    h.step(2)
    h.submit("c", [1], "cold")
    assert wait_of(h, "c") <= 0.5 + TURN + 0.3
    assert h.scheduler.num_preemptions == 1
    h.run(limit=5000)
    assert all(h.tokens(f"b{i}") == h.alone([i] * 130, None, 60) for i in range(4))


def test_room_that_is_reserved_is_not_left_to_smaller_adapters_by_the_floor_of_kv(make):
    """The pool is empty but for adapters, and all that they may have is what `big` waits for."""
    h = long_house(make, num_blocks=100, kv_floor=86, max_model_len=200, starve_after=0.3)
    for rev, blocks in (("x", 5), ("y", 5), ("big", 12), ("small", 5)):
        h.add(rev, blocks)
    h.submit("x", [1], "x", max_tokens=60)
    h.submit("y", [1], "y", max_tokens=190)
    h.step(10)
    h.submit("c", [1], "big", max_tokens=1)
    h.run(until=lambda: h.memory.reserved_for == "big")
    h.submit("s", [1], "small", max_tokens=1)
    wait_of(h, "c")
    assert "s" not in h.deltas
    h.run()
    assert h.end("s").finish_reason == "length"


def test_an_adapter_that_came_up_finds_a_seat(make):
    """Its room is made at once, but every seat is taken by requests that hardly end."""
    h = long_house(make, slots=1, max_num_seqs=2, starve_after=0.5)
    h.add("busy")
    h.add("cold")
    h.submit("b", [1], "busy", max_tokens=5)
    h.step(2)
    for i in range(3):
        h.submit(f"base{i}", [i], max_tokens=LONG)
    h.submit("c", [1], "cold", max_tokens=2)
    h.submit("b2", [1], "busy", max_tokens=LONG)
    assert wait_of(h, "c") <= 1.0 + 0.2


def test_a_load_that_no_request_asks_for_interrupts_nobody(make):
    h = long_house(make, slots=1, starve_after=0.2)
    h.add("busy")
    h.add("wished")
    h.submit("b", [1], "busy", max_tokens=LONG)
    h.step(5)
    command = h.load("wished")
    h.step(500)
    assert h.scheduler.num_preemptions == 0 and h.code(command) is None
    assert h.state("busy") == "draining", "it gets the room when its requests have ended"


def test_a_higher_priority_is_helped_first_and_the_lower_one_in_the_end(make):
    """Urgent adapters starve all the time: a lower priority waits longer, but not for ever."""
    h = long_house(make, slots=1, starve_after=0.2)
    for rev in ("low", "h0", "h1", "h2"):
        h.add(rev)
    h.submit("c", [1], "low", priority=20, max_tokens=1)
    for i in range(3):
        h.submit(f"h{i}", [i], f"h{i}", priority=60, max_tokens=LONG)
    # Each of the three has a turn; the first of them starves again then, but has waited less.
    assert wait_of(h, "c") <= 3 * (TURN + 0.1) + 0.2


# ------------------------------------------------------------------- claims of those who left
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_cold_adapter_that_nobody_waits_for_any_more_claims_nothing(make, how):
    h = long_house(make, slots=1, starve_after=0.3)
    for rev in ("busy", "cold", "next"):
        h.add(rev, 3)
    h.submit("b", [1], "busy", max_tokens=LONG)
    h.step(5)
    h.submit("c", [1], "cold", deadline=0.45 if how == "deadline" else None)
    h.run(until=lambda: h.memory.reserved_for == "cold")
    h.run(until=lambda: h.state("busy") == "draining")
    if how == "abort":
        h.scheduler.abort("c")
    h.run(until=lambda: h.end("c") is not None)
    h.step(2)
    assert h.memory.reserved_for is None and h.state("busy") == "active"
    assert not h.host.protected and h.state("cold") == "ram"
    h.step(300)
    assert h.scheduler.num_preemptions == 0 and h.state("cold") == "ram"
    assert h.scheduler._drainer.guests == {} == h.scheduler._drainer._due


def test_one_of_several_requests_that_is_cancelled_keeps_the_others_claim(make):
    h = long_house(make, slots=1, starve_after=0.3)
    h.add("busy")
    h.add("cold")
    h.submit("b", [1], "busy", max_tokens=LONG)
    h.step(5)
    h.submit("c0", [1], "cold")
    h.submit("c1", [1], "cold")
    began = h.clock.now
    h.step(40)
    h.scheduler.abort("c0")
    wait_of(h, "c1")
    assert h.clock.now - began <= TURN + 0.1


def test_a_guest_whose_request_is_cancelled_holds_no_seat(make):
    h = long_house(make, slots=2, max_num_seqs=1, starve_after=0.1)
    for rev in ("busy", "cold"):
        h.add(rev)
    h.add("other")
    h.submit("b", [1], "busy", max_tokens=30)
    h.submit("o", [1], "other", max_tokens=2)
    h.submit("c", [1], "cold")
    h.run(until=lambda: bool(h.scheduler._drainer.guests), limit=400)
    h.scheduler.abort("c")
    h.submit("base", [2], max_tokens=2)
    h.run()
    assert all(h.end(r) for r in ("b", "o", "base"))


# ------------------------------------------------------------------- any population
POPULATION = {
    "slots": st.integers(1, 3),
    "max_num_seqs": st.integers(1, 6),
    "starve_after": st.sampled_from([0.1, 0.5, 2.0]),
    "copies_take": st.integers(1, 6),
    "reads_take": st.integers(1, 30),
    "lookahead": st.booleans(),
    "pins": st.integers(0, 1),
    "num_blocks": st.sampled_from([60, 160, 1000]),
    "colds": st.integers(1, 4),
    "cold_blocks": st.integers(1, 6),
    "seed": st.integers(0, 1 << 20),
}


class Town:
    """Long requests on the base and on busy adapters, then cold adapters, and more all the time."""

    def __init__(self, h, seed: int, pins: int) -> None:
        self.h, self.draw = h, random.Random(seed)
        self.asked: dict[str, tuple] = {}
        self.busy = [f"busy{i}" for i in range(self.draw.randrange(1, 4))]
        for i, rev in enumerate(self.busy):
            priority = self.draw.choice([10, 50, 90])
            h.add(rev, self.draw.randrange(1, 5), pinned=i < pins, priority=priority)
        for i in range(self.draw.randrange(1, 10)):
            self.ask(f"b{i}", self.somebody(), 90, priority=self.draw.choice([10, 50, 50, 90]))
        h.step(self.draw.randrange(1, 60))

    def somebody(self) -> str | None:
        return self.draw.choice([None, *self.busy])

    def ask(self, name: str, rev: str | None, most: int, **options) -> None:
        prompt = [self.draw.randrange(9)] * self.draw.randrange(1, 9)
        self.asked[name] = prompt, rev, most
        self.h.submit(name, prompt, rev, max_tokens=most, **options)

    def end(self) -> None:
        """Everybody is let end, and says what it would have said alone."""
        self.h.run(limit=20_000)
        for name, (prompt, rev, most) in self.asked.items():
            assert self.h.end(name).finish_reason == "length", f"{name}: {self.h.end(name)}"
            assert self.h.tokens(name) == self.h.alone(prompt, rev, most)


def assert_every_cold_adapter_starts_within_its_bound(
    make, slots, max_num_seqs, starve_after, copies_take, reads_take, lookahead, pins, num_blocks,
    colds, cold_blocks, seed,
):  # fmt: skip
    """From when it finds no room: `starve_after` and a turn if it is alone, else turns of others.

    One that found room at once and waits for a seat alone has its place in the queue, as all have.
    """
    sizes = {"num_blocks": num_blocks, "slots": slots, "max_num_seqs": max_num_seqs}
    h = make(
        **sizes,
        kv_floor=30,
        max_model_len=100,
        starve_after=starve_after,
        lookahead=lookahead,
        step_seconds=0.05,
    )
    h.copier.copies_take, h.host.reads_take = copies_take, reads_take
    town = Town(h, seed, min(pins, slots - 1))
    alone = colds == 1 and all(r.hungry_since is None for r in h.residency.revisions())
    names = [f"c{i}" for i in range(colds)]
    for name in names:
        h.add(f"{name} rev", cold_blocks)
        town.ask(name, f"{name} rev", town.draw.choice([1, 90]))
        h.step(town.draw.randrange(20))
    turn, load = max(starve_after, TURN), (copies_take + 10) * h.step_seconds
    # Busy ones that are queued, or were made to give way, have their turns in between.
    others = 0 if alone else colds - 1 + len(town.busy)
    # At priority 90 they go first until a cold one has waited 4 starve_after more than they have.
    urgent = 0.0 if alone else 4 * starve_after + turn
    bound = starve_after + turn + load + others * (turn + load) + urgent
    blocked: dict[str, float] = {}
    for step in range(int(bound / h.step_seconds) + 60):
        for revision in h.residency.revisions():
            name = revision.rev.removesuffix(" rev")
            if name in names and name not in h.deltas and revision.blocked_since is not None:
                blocked.setdefault(name, h.clock.now)
        late = [name for name in blocked if name not in h.deltas]
        assert all(h.clock.now - blocked[name] <= bound for name in late), (late, bound)
        if not alone and town.draw.random() < 0.1 and step < 100:
            town.ask(f"n{step}", town.somebody(), town.draw.choice([2, 60]))
        h.step()
    event(f"found no room: {len(blocked)} of {colds}, alone: {alone}")
    town.end()


@settings(max_examples=10, deadline=None, database=None, phases=PHASES)
@given(**POPULATION)
def test_every_cold_adapter_starts_within_its_bound_whoever_runs(make, **population):
    assert_every_cold_adapter_starts_within_its_bound(make, **population)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, database=None, phases=PHASES)
@given(**POPULATION)
def test_every_cold_adapter_of_two_hundred_populations_does(make, **population):
    assert_every_cold_adapter_starts_within_its_bound(make, **population)


@settings(max_examples=15, deadline=None, database=None, phases=PHASES)
@given(
    slots=st.integers(1, 3),
    starve_after=st.sampled_from([0.5, 1.0, 2.0]),
    lookahead=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@pytest.mark.slow
def test_one_cold_adapter_among_busy_ones_starts_within_two_starve_after_and_its_load(
    make, slots, starve_after, lookahead, seed
):
    draw = random.Random(seed)
    h = make(
        num_blocks=400,
        slots=slots,
        max_num_seqs=draw.choice([slots, 12]),
        max_model_len=400,
        starve_after=starve_after,
        lookahead=lookahead,
        step_seconds=0.05,
    )
    h.copier.copies_take = draw.randrange(1, 6)
    busy = [f"busy{i}" for i in range(slots)]
    for rev in busy:
        h.add(rev, priority=draw.choice([10, 50, 90]))
        h.resident(rev)
    h.add("cold")
    for i in range(draw.randrange(slots, slots + 4)):
        h.submit(f"b{i}", [i], busy[i % slots], max_tokens=draw.choice([200, 390]))
    h.step(int(max(starve_after, TURN) / h.step_seconds) + draw.randrange(20))
    h.submit("c", [1], "cold")
    load = (h.copier.copies_take + 6) * h.step_seconds
    assert wait_of(h, "c", limit=99) <= 2 * starve_after + load
    h.run(limit=20_000)
    assert all(h.end(request).finish_reason == "length" for request in h.deltas)

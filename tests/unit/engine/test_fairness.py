"""Fairness: who is next, and that no adapter waits for ever."""

from engine.adapters.slots import SlotRow
from engine.fairness import TokenCounters, WaitingQueue, choose_victim
from engine.messages import SamplingParams
from engine.recency import Usage
from engine.sequence import Sequence


def sequence(order, rev=None, priority=50) -> Sequence:
    name = f"{rev}{order}"
    return Sequence(name, [1], 1, SamplingParams(), rev, "base", "", priority, order)


def order_of(queue, counters, *, cost=10) -> list[str]:
    """Admit everything in one pass, each charged `cost`."""
    walk, names = queue.walk(), []
    while (seq := walk.next()) is not None:
        queue.remove(seq)
        counters.charge(seq.rev, prompt=cost)
        names.append(seq.request_id)
        walk.again(seq)
    return names


def queue_of(*sequences):
    counters = TokenCounters()
    queue = WaitingQueue(counters)
    for seq in sequences:
        counters.enter(seq.rev)
        queue.push(seq)
    return queue, counters


def test_one_revision_is_served_in_order_of_arrival():
    queue, counters = queue_of(*(sequence(i, "a") for i in range(3)))
    assert order_of(queue, counters) == ["a0", "a1", "a2"] and len(queue) == 0


def test_a_burst_on_one_adapter_takes_turns_with_the_others():
    queue, counters = queue_of(
        *(sequence(i, "busy") for i in range(4)), sequence(4, "calm"), sequence(5, "calm")
    )
    assert order_of(queue, counters) == ["busy0", "calm4", "busy1", "calm5", "busy2", "busy3"]


def test_priority_comes_before_fairness():
    queue, counters = queue_of(sequence(0, "a"), sequence(1, "b", 10), sequence(2, "a", 90))
    assert order_of(queue, counters) == ["a2", "a0", "b1"]


def test_a_returning_adapter_has_no_credit_from_its_absence():
    counters = TokenCounters()
    counters.enter("busy")
    counters.charge("busy", prompt=1000)
    counters.enter("back")
    assert counters.served("back") == 1000
    counters.leave("back")
    counters.charge("busy", generated=50)
    counters.enter("back")
    assert counters.served("back") == 1100


def test_a_generated_token_counts_twice_a_prompt_token():
    counters = TokenCounters()
    counters.enter(None)
    counters.charge(None, prompt=3, generated=4)
    assert counters.served(None) == 11


def test_a_preempted_sequence_goes_before_the_new_ones_of_its_group():
    queue, counters = queue_of(sequence(5, "a"))
    counters.enter("a")
    queue.push_back(sequence(1, "a"))
    assert order_of(queue, counters) == ["a1", "a5"]


def test_a_group_that_is_passed_over_is_out_of_the_pass():
    queue, _ = queue_of(sequence(0, "cold"), sequence(1, "cold"), sequence(2, "warm"))
    walk = queue.walk()
    assert [walk.next().request_id, walk.next().request_id, walk.next()] == ["cold0", "warm2", None]


def test_the_victim_is_of_the_lowest_priority_and_ends_soonest():
    def row(rev, priority):
        return SlotRow(0, rev, (), False, priority, Usage(0.0), 0.0, 1, ready=True, refs=1)

    rows = [row("vip", 90), row("long", 50), row("short", 50)]
    remaining = {"vip": 1, "long": 100, "short": 10}
    assert choose_victim(rows, remaining.__getitem__) == "short"
    assert choose_victim([], remaining.__getitem__) is None


def admitted(h) -> list[str]:
    """Everybody's first token, in order."""
    h.run()
    return list(h.deltas)


def test_prompt_tokens_that_were_served_count_against_the_next_turn(make):
    h = make(max_num_seqs=1)
    h.add("short")
    h.resident("short")
    for i in range(2):
        h.submit(f"long{i}", [i] * 30, max_tokens=1)
    for i in range(3):
        h.submit(f"short{i}", [i], "short", max_tokens=1)
    assert admitted(h) == ["long0", "short0", "short1", "short2", "long1"]


def test_generated_tokens_that_were_served_count_against_the_next_turn(make):
    h = make(max_num_seqs=1)
    h.add("terse")
    h.resident("terse")
    for i in range(2):
        h.submit(f"wordy{i}", [i], max_tokens=20)
    for i in range(3):
        h.submit(f"terse{i}", [i], "terse", max_tokens=1)
    assert admitted(h) == ["wordy0", "terse0", "terse1", "terse2", "wordy1"]


# ------------------------------------------------------------------- the drainer
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

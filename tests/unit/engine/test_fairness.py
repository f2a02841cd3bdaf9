"""Fairness: who is next, between tenants and between the adapters of one."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.fairness import TokenCounters, WaitingQueue
from engine.messages import SamplingParams
from engine.sequence import Sequence


def sequence(order, rev=None, priority=50, tenant="", weight=1.0) -> Sequence:
    name = f"{rev}{order}"
    asked = SamplingParams()
    return Sequence(
        name, [1], 1, asked, rev, "base", "", priority, order, tenant=tenant, weight=weight
    )


def order_of(queue, counters, *, cost=10) -> list[str]:
    """Admit everything in one pass, each charged `cost`."""
    walk, names = queue.walk(), []
    while (seq := walk.next()) is not None:
        queue.remove(seq)
        counters.charge(seq.tenant, seq.rev, prompt=cost, weight=seq.weight)
        names.append(seq.request_id)
        walk.again(seq)
    return names


def queue_of(*sequences):
    counters = TokenCounters()
    queue = WaitingQueue(counters)
    for seq in sequences:
        counters.enter(seq.tenant, seq.rev)
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
    counters.enter("", "busy")
    counters.charge("", "busy", prompt=1000)
    counters.enter("", "back")
    assert counters.served("", "back")[1] == 1000
    counters.leave("", "back")
    counters.charge("", "busy", generated=50)
    counters.enter("", "back")
    assert counters.served("", "back")[1] == 1100


def test_a_generated_token_counts_twice_a_prompt_token():
    counters = TokenCounters()
    counters.enter("", None)
    counters.charge("", None, prompt=3, generated=4)
    assert counters.served("", None) == (11, 11)


def test_a_preempted_sequence_goes_before_the_new_ones_of_its_group():
    queue, counters = queue_of(sequence(5, "a"))
    counters.enter("", "a")
    queue.push_back(sequence(1, "a"))
    assert order_of(queue, counters) == ["a1", "a5"]


def test_a_group_that_is_passed_over_is_out_of_the_pass():
    queue, _ = queue_of(sequence(0, "cold"), sequence(1, "cold"), sequence(2, "warm"))
    walk = queue.walk()
    assert [walk.next().request_id, walk.next().request_id, walk.next()] == ["cold0", "warm2", None]


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


def test_who_was_promised_the_next_seat_goes_first_and_the_oldest_promise_before_priority():
    queue, _ = queue_of(
        sequence(0, "a", 90), sequence(1, "b", 10), sequence(2, "c", 90), sequence(3, "d", 50)
    )
    walk = queue.walk({"c": 7.0, "b": 5.0})
    assert [walk.next().request_id for _ in range(4)] == ["b1", "c2", "a0", "d3"]


# ------------------------------------------------------------------- tenants
def test_a_tenant_with_fifty_adapters_gets_no_more_than_one_with_one():
    many = [sequence(i, f"m{i % 50}", tenant="many") for i in range(100)]
    one = [sequence(100 + i, "o", tenant="one") for i in range(20)]
    order = order_of(*queue_of(*many, *one))
    assert [name[0] for name in order[:40]] == ["m", "o"] * 20


def test_the_adapters_of_a_tenant_share_what_it_gets():
    a = [sequence(i, "a", tenant="x") for i in range(8)]
    b = [sequence(8 + i, "b", tenant="x") for i in range(4)]
    other = [sequence(20 + i, "c", tenant="y") for i in range(8)]
    order = [name[0] for name in order_of(*queue_of(*a, *b, *other))]
    assert "".join(order[:16]) == "acbc" * 4


def test_who_weighs_twice_is_served_twice():
    heavy = [sequence(i, "h", tenant="heavy", weight=2.0) for i in range(40)]
    light = [sequence(40 + i, "l", tenant="light") for i in range(40)]
    first = order_of(*queue_of(*heavy, *light))[:30]
    assert sum(name[0] == "h" for name in first) == 20


def test_one_revision_of_two_tenants_is_charged_to_the_one_that_asked():
    counters = TokenCounters()
    for tenant in ("x", "y"):
        counters.enter(tenant, "shared")
    counters.charge("x", "shared", generated=5)
    assert counters.served("x", "shared") == (10, 10)
    assert counters.served("y", "shared") == (0, 0)


def test_who_comes_when_nobody_is_left_starts_where_the_last_one_left():
    counters = TokenCounters()
    counters.enter("", "a")
    counters.charge("", "a", prompt=1000)
    counters.leave("", "a")
    counters.enter("", "b")
    assert counters.served("", "b") == (1000, 1000), "a must not pay for having been alone"


def test_a_revision_that_is_gone_is_forgotten_unless_it_is_back():
    counters = TokenCounters()
    counters.enter("x", "a")
    counters.forget("a")
    assert counters.accounts() == {("x", "a")}
    counters.leave("x", "a")
    counters.forget("a")
    assert counters.accounts() == set()
    assert counters.served("x", "a") == (0.0, 0.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 40), st.booleans()),
        min_size=1,
        max_size=120,
    ),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=4, max_size=4),
)
def test_no_tenant_that_waits_falls_behind_another_by_more_than_one_request(requests, weights):
    """Of any two that wait all the time, each has what its weight makes its share."""
    sequences = []
    for order, (tenant, rev, cost, urgent) in enumerate(requests):
        name, weight = f"t{tenant}", weights[tenant]
        seq = sequence(order, f"{name}/{rev}", 90 if urgent else 50, name, weight)
        seq.num_prompt = cost
        sequences.append(seq)
    urgent = [seq for seq in sequences if seq.priority == 90] or sequences
    queue, counters = queue_of(*urgent)
    left = Counter(seq.tenant for seq in urgent)
    most = 40 / min(weights)
    while (seq := queue.walk().next()) is not None:
        queue.remove(seq)
        counters.charge(seq.tenant, seq.rev, prompt=seq.num_prompt, weight=seq.weight)
        left[seq.tenant] -= 1
        waiting = [counters.served(t, None)[0] for t, count in left.items() if count]
        if waiting:
            assert max(waiting) - min(waiting) <= most


def test_a_tenant_with_many_adapters_waits_for_its_turn_in_the_engine_too(make):
    h = make(max_num_seqs=1, slots=8, num_blocks=200)
    for i in range(5):
        h.add(f"m{i}")
        h.resident(f"m{i}")
    h.add("one")
    h.resident("one")
    for i in range(10):
        h.submit(f"m{i}", [i] * 4, f"m{i % 5}", tenant="many", max_tokens=4)
    for i in range(3):
        h.submit(f"one{i}", [i] * 4, "one", tenant="one", max_tokens=4)
    assert admitted(h)[:6] == ["m0", "one0", "m1", "one1", "m2", "one2"]


def test_a_weight_that_is_no_share_is_refused_and_ends_nothing_else(make):
    h = make()
    for i, weight in enumerate((0.0, -1.0, float("inf"), float("nan"))):
        h.submit(f"r{i}", [1], weight=weight)
    h.submit("good", [1], weight=0.25)
    h.run()
    assert all(h.end(f"r{i}").code == "invalid_value" for i in range(4))
    assert h.end("good").finish_reason == "length"

"""Scheduler: what is in a step.  Budgets, order, chunks, room, preemption."""

import pytest

from engine.admission import StepBuilder


def ids(work) -> list[str]:
    return [c.seq.request_id for c in work.chunks]


def test_one_request_runs_to_its_last_token(make):
    h = make()
    h.submit("r", [1, 2, 3], max_tokens=5)
    h.run()
    assert h.tokens("r") == h.alone([1, 2, 3], None, 5)
    assert h.end("r").finish_reason == "length"
    assert h.deltas["r"][0].cached_tokens == 0
    assert h.pool.counts.kv_active == 0


def test_base_and_adapters_run_in_one_step_even_when_every_slot_is_taken(make):
    """N adapters and the base are N + 1 identities: the base takes no slot."""
    h = make(slots=3)
    for rev in "abc":
        h.add(rev)
    h.resident("a", "b", "c")
    for i, rev in enumerate(["c", None, "a", "b", "a"]):
        h.submit(f"r{i}", [5, i], rev)
    work = h.step()
    assert [c.seq.rev for c in work.chunks] == [None, "a", "a", "b", "c"]
    h.run()
    for i, rev in enumerate(["c", None, "a", "b", "a"]):
        assert h.tokens(f"r{i}") == h.alone([5, i], rev, 4)


def test_more_adapters_than_slots_take_turns(make):
    h = make(slots=2)
    for rev in "abcde":
        h.add(rev)
        h.submit(rev, [1], rev, max_tokens=3)
    h.run()
    for rev in "abcde":
        assert h.tokens(rev) == h.alone([1], rev, 3)


def test_rows_of_a_slot_are_consecutive_and_decode_comes_before_prefill_in_it(make):
    h = make()
    h.add("a")
    h.resident("a")
    h.submit("a decodes", [1], "a", max_tokens=9)
    h.submit("base decodes", [1], max_tokens=9)
    h.step()
    h.submit("a prefills", [1] * 5, "a")
    h.submit("base prefills", [1] * 5)
    work = h.step()
    assert ids(work) == ["base decodes", "base prefills", "a decodes", "a prefills"]
    assert [c.length for c in work.chunks] == [1, 5, 1, 5]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding(make):
    h = make(max_batch_tokens=8)
    h.submit("short", [1], max_tokens=20)
    h.step()
    prompt = list(range(20))
    h.submit("long", prompt, max_tokens=2, priority=90)
    chunks = []
    while h.end("long") is None:
        work = h.step()
        assert "short" in ids(work), "decoding goes on in every step"
        chunks += [(c.start, c.length, c.samples) for c in work.chunks if c.length > 1]
    assert chunks == [(0, 7, False), (7, 7, False), (14, 6, True)]
    assert h.tokens("long") == h.alone(prompt, None, 2)


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_arriving(make):
    h = make(max_batch_tokens=8, max_num_seqs=4)
    h.submit("long", [3] * 40, max_tokens=1)
    for i in range(40):
        h.submit(f"s{i}", [i], max_tokens=1)
        h.step()
        if h.end("long"):
            break
    assert h.end("long") is not None and i <= 8


def test_no_more_sequences_run_than_allowed(make):
    h = make(max_num_seqs=3)
    for i in range(10):
        h.submit(f"r{i}", [i])
    assert len(h.step().chunks) == 3 and h.scheduler.num_waiting == 7
    h.run()
    assert all(h.end(f"r{i}").finish_reason == "length" for i in range(10))


def test_a_cold_adapter_is_passed_over_and_holds_up_nobody_behind_it(make):
    h = make(max_num_seqs=2)
    h.add("cold")
    h.host.delay["cold"] = 30
    h.submit("c1", [1], "cold", priority=90)
    h.submit("c2", [1], "cold", priority=90)
    h.submit("base", [1], max_tokens=3)
    assert h.run(until=lambda: h.end("base") is not None) == 3


def test_who_waits_for_memory_is_not_overtaken(make):
    h = make(num_blocks=10, kv_floor=0)
    h.submit("runs", [1] * 16, max_tokens=12)
    h.step()
    h.submit("big", [2] * 32, max_tokens=1)
    h.submit("small", [3], max_tokens=1, priority=10)
    h.step()
    assert h.end("small") is None
    h.run()
    firsts = list(h.deltas)
    assert firsts.index("big") < firsts.index("small")


# ------------------------------------------------------------------- trading places
def test_kv_and_an_adapter_trade_places_and_answers_stay_right(make):
    h = make(num_blocks=12, kv_floor=0, slots=2)
    h.add("a", 8)
    prompt = [2] * 36
    for i in range(3):
        h.submit(f"a{i}", [1, 2, 3], "a")
        h.run()
        assert h.slots.find("a") is not None
        h.submit(f"base{i}", prompt)
        h.run()
        assert h.slots.find("a") is None, "its blocks hold KV now"
    for i in range(3):
        assert h.tokens(f"a{i}") == h.alone([1, 2, 3], "a", 4)
        assert h.tokens(f"base{i}") == h.alone(prompt, None, 4)


def test_the_blocks_of_an_evicted_adapter_are_the_ones_that_kv_gets(make):
    h = make(num_blocks=12, kv_floor=0)
    h.add("a", 8)
    h.resident("a")
    blocks = set(h.slots.find("a").blocks)
    h.submit("base", [2] * 40, max_tokens=1)
    work = h.step()
    assert blocks & set(work.chunks[0].seq.blocks)


# ------------------------------------------------------------------- preemption
def test_the_newest_of_the_lowest_priority_is_preempted_and_its_answer_is_right(make):
    h = make(num_blocks=10, kv_floor=0, max_num_seqs=3)
    for request, priority in (("old", 50), ("vip", 90), ("new", 50)):
        h.submit(request, [len(request)] * 7, priority=priority, max_tokens=12)
    preempted = set()
    while h.scheduler.has_work:
        before = {s.request_id for s in h.scheduler._running}
        h.step()
        gone = before - {s.request_id for s in h.scheduler._running}
        preempted |= {r for r in gone if h.end(r) is None}
    assert preempted == {"new"} and h.scheduler.num_preemptions >= 1
    for request in ("old", "vip", "new"):
        assert h.tokens(request) == h.alone([len(request)] * 7, None, 12)


def test_room_that_was_taken_from_one_is_not_given_to_a_newcomer_in_the_same_step(make):
    h = make(num_blocks=9, kv_floor=0, max_num_seqs=3)
    h.add("tiny", 1, pinned=True)
    h.resident("tiny")
    h.submit("old", [1] * 15, max_tokens=12)
    h.submit("new", [2] * 12, max_tokens=12)
    h.step()
    h.submit("newcomer", [3], "tiny")
    while not h.scheduler.num_preemptions:
        work = h.step()
    assert ids(work) == ["old"]


def test_who_gave_way_goes_before_those_who_came_later(make):
    h = make(max_num_seqs=1)
    h.submit("first", [1], max_tokens=9)
    h.step(2)
    h.submit("later", [2], max_tokens=1)
    (seq,) = h.scheduler._running
    h.scheduler._preempt(seq, StepBuilder(h.scheduler.limits))
    assert ids(h.step()) == ["first"]


def test_a_prompt_that_gives_way_in_a_step_has_no_rows_in_it(make):
    h = make(num_blocks=7, kv_floor=0, max_batch_tokens=3)
    h.submit("old", [1] * 3, max_tokens=12)
    h.step()
    h.submit("new", [2] * 19, max_tokens=1)
    h.run(until=lambda: h.scheduler.num_preemptions > 0)
    work = h.work
    assert ids(work) == ["old"] and not h.deltas.get("new"), "it was at its prompt still"
    h.run()
    assert h.tokens("old") == h.alone([1] * 3, None, 12)
    assert h.tokens("new") == h.alone([2] * 19, None, 1)


def test_a_newcomer_does_not_get_the_block_that_a_running_sequence_needs_next(make):
    h = make(num_blocks=4, kv_floor=0)
    h.submit("old", [1] * 11, max_tokens=5)
    h.step()
    h.submit("new", [2] * 3, max_tokens=3)
    h.run()
    assert h.scheduler.num_preemptions == 0
    assert h.tokens("old") == h.alone([1] * 11, None, 5)
    assert h.tokens("new") == h.alone([2] * 3, None, 3)


def test_a_preempted_sequence_finds_its_own_blocks_again(make):
    h = make(num_blocks=16, kv_floor=0, max_batch_tokens=64)
    h.submit("r", [1] * 30, max_tokens=8)
    h.step(2)
    (seq,) = h.scheduler._running
    h.step()
    h.scheduler._preempt(seq, StepBuilder(h.scheduler.limits))
    work = h.step()
    assert [(c.start, c.length) for c in work.chunks] == [(32, 1)]
    h.run()
    assert h.tokens("r") == h.alone([1] * 30, None, 8)
    assert h.deltas["r"][0].cached_tokens == 0, "told once, at the first admission"


def test_a_preempted_sequence_holds_no_slot_reference_so_its_adapter_may_leave(make):
    """Queued and preempted requests hold a lease only."""
    h = make(num_blocks=14, kv_floor=4, slots=1, max_num_seqs=2)
    h.add("a", 4)
    h.submit("base", [1] * 20, max_tokens=14, priority=90)
    h.submit("r", [2] * 8, "a", max_tokens=20)
    h.run(until=lambda: h.scheduler.num_preemptions > 0)
    assert h.slots.find("a") is None or h.slots.find("a").refs == 0
    h.run()
    assert h.tokens("r") == h.alone([2] * 8, "a", 20)
    assert h.tokens("base") == h.alone([1] * 20, None, 14)


def test_a_sequence_that_outgrows_the_pool_alone_ends_with_no_room(make):
    h = make(num_blocks=4, kv_floor=0)
    h.submit("r", [1] * 10, max_tokens=30)
    h.run()
    assert (h.end("r").finish_reason, h.end("r").code) == ("error", "no_room")
    assert h.tokens("r") == h.alone([1] * 10, None, 7)


def test_a_slot_reassigned_under_an_unchanged_request_set_is_seen_in_the_next_step(make):
    """Rule 1: the same two requests, and their adapters have changed slots in between."""
    h = make(slots=2, max_num_seqs=2)
    for rev in "ab":
        h.add(rev)
    h.resident("a", "b")
    for rev in "ab":
        h.submit(rev, [1], rev, max_tokens=20)
    first = {c.seq.rev: c.seq.slot for c in h.step().chunks}
    for seq in list(h.scheduler._running)[::-1]:
        h.scheduler._preempt(seq, StepBuilder(h.scheduler.limits))
    for rev in "ab":
        h.evict(rev, to="disk")
    h.host.delay["a"] = 9
    requests = {"a", "b"}
    h.step()
    h.run(until=lambda: h.work is not None and set(ids(h.work)) == requests)
    work = h.work
    assert {c.seq.rev: c.seq.slot for c in work.chunks} == {"a": first["b"], "b": first["a"]}
    h.run()
    for rev in "ab":
        assert h.tokens(rev) == h.alone([1], rev, 20)


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 64])
def test_chunked_prefill_equals_whole_prefill(make, budget):
    h = make(max_batch_tokens=budget, max_num_seqs=1)
    prompt = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]
    h.submit("r", prompt, max_tokens=3)
    h.run()
    assert h.tokens("r") == h.alone(prompt, None, 3)

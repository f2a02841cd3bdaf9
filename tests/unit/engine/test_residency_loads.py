"""Residency: bringing revisions up.  Requests, Loads, failures, budgets; who may not be delayed."""

import pytest

from engine.adapters.loader import LATE_SECONDS, MOST_LATE
from engine.adapters.tiers import HostDone


def moves(h, rev) -> list[str]:
    return [e.after for e in h.events if e.rev == rev]


def test_a_request_brings_its_adapter_up_and_every_transition_is_an_event(make):
    h = make()
    h.add("a", 3)
    h.submit("r", [1, 2], "a", max_tokens=2)
    h.run()
    assert h.tokens("r") == h.alone([1, 2], "a", 2)
    assert moves(h, "a") == ["loading", "ram", "loading", "idle", "active", "idle"]
    loaded = next(e for e in h.events if e.after == "idle")
    assert (loaded.cause, loaded.slot, loaded.num_bytes) == ("request", 0, 300)
    assert loaded.seconds == pytest.approx(0.01)


def test_an_adapter_comes_up_while_its_request_waits_for_a_seat(make):
    h = make(max_num_seqs=1)
    h.add("cold", 3)
    h.submit("first", [1, 2, 3], max_tokens=30)
    h.run(until=lambda: "first" in h.deltas)
    h.submit("r", [1], "cold", max_tokens=1)
    assert h.run(until=lambda: h.state("cold") == "idle") < 10
    assert "r" not in h.deltas and h.end("first") is None
    h.run()
    assert h.tokens("r") == h.alone([1], "cold", 1)


def test_a_load_is_answered_when_the_copy_has_ended_and_not_before(make):
    h = make()
    h.add("a")
    h.copier.copies_take = 5
    command = h.load("a")
    h.run(until=lambda: h.state("a") == "loading" and bool(h.copier.copying))
    h.step(3)
    assert h.code(command) is None
    h.run()
    assert h.code(command) == "" and h.state("a") == "idle"


def test_a_load_to_ram_claims_no_blocks(make):
    h = make()
    h.add("a")
    command = h.load("a", "ram")
    h.run()
    assert h.code(command) == "" and h.state("a") == "ram"
    assert h.pool.counts.adapter == 0
    assert h.code(h.load("a", "ram")) == "", "it is there already"


def test_every_load_of_one_revision_is_answered_once(make):
    h = make()
    h.add("a")
    commands = [h.load("a"), h.load("a", "ram"), h.load("a")]
    h.run()
    assert [h.code(c) for c in commands] == ["", "", ""]
    assert h.host.num_reads == 1


def test_a_slow_read_delays_nobody(make):
    """Bounded by step count: others stream a token a step, and other adapters load meanwhile."""
    h = make()
    for rev in ("slow", "quick"):
        h.add(rev)
    h.host.delay["slow"] = 100
    h.submit("base", [1, 2, 3], max_tokens=20)
    h.submit("s", [1], "slow")
    h.submit("q", [1], "quick", max_tokens=3)
    steps = h.run(until=lambda: h.end("base") is not None)
    assert steps == 20
    assert h.end("q") is not None and h.end("s") is None
    h.run()
    assert h.tokens("s") == h.alone([1], "slow", 4)


def test_a_slow_read_does_not_hold_up_what_is_in_ram_already(make):
    h = make(blocks_in_flight=2)
    for rev in ("slow", "warm"):
        h.add(rev)
    h.load("warm", "ram")
    h.run()
    h.host.delay["slow"] = 100
    h.submit("s", [1], "slow")
    h.step()
    h.submit("w", [1], "warm", max_tokens=1)
    assert h.run(until=lambda: h.end("w") is not None) <= 3


def test_reads_in_flight_are_bounded_by_bytes_but_one_may_always_start(make):
    h = make(blocks_in_flight=5)
    for rev, blocks in (("a", 9), ("b", 3), ("c", 2), ("d", 1)):
        h.add(rev, blocks)
        h.host.delay[rev] = 50
        h.load(rev)
    h.step()
    assert set(h.host.reading) == {"a"}, "larger than the budget, and alone"
    h.run(until=lambda: "a" not in h.host.reading)
    h.step()
    assert set(h.host.reading) == {"b", "c"}


def test_a_failed_read_fails_the_waiting_requests_of_that_revision_only(make):
    h = make()
    for rev in ("bad", "good"):
        h.add(rev)
    h.host.errors["bad"] = "bad.bin: expected 200 bytes, found 7"
    h.submit("b1", [1], "bad")
    h.submit("b2", [2], "bad")
    h.submit("g", [1], "good")
    command = h.load("bad")
    h.run()
    for request in ("b1", "b2"):
        end = h.end(request)
        assert (end.finish_reason, end.code) == ("error", "load_failed")
        assert "found 7" in end.message
        assert h.tokens(request) == [], "never base weights"
    assert h.code(command) == "load_failed"
    assert h.state("bad") == "registered"
    assert h.tokens("g") == h.alone([1], "good", 4)


def test_a_file_that_fails_is_not_read_again_for_the_same_requests(make):
    h = make()
    h.add("bad")
    h.host.errors["bad"] = "I/O error"
    h.submit("b1", [1], "bad")
    h.run()
    assert moves(h, "bad") == ["loading", "registered"]
    assert not h.host.reading


def test_after_a_failed_read_the_next_request_tries_again(make):
    h = make()
    h.add("a")
    h.host.errors["a"] = "I/O error"
    h.submit("r1", [1], "a")
    h.run()
    h.host.errors["a"] = ""
    h.submit("r2", [1], "a")
    h.run()
    assert h.end("r2").finish_reason == "length"


def test_what_can_never_fit_is_no_room_at_once(make):
    h = make(num_blocks=20, kv_floor=8)
    h.add("big", 13)
    command = h.load("big")
    h.submit("r", [1], "big")
    h.step()
    assert h.code(command) == "no_room"
    assert h.end("r").code == "no_room" and "13 blocks" in h.end("r").message
    assert h.host.num_reads == 0


def test_an_adapter_that_leaves_no_room_for_kv_is_told_so(make):
    h = make(num_blocks=20, kv_floor=8)
    h.add("big", 21)
    h.submit("r", [1], "big")
    h.step()
    assert h.end("r").code == "no_room"
    assert "21 blocks" in h.end("r").message and "-" not in h.end("r").message


def test_what_exceeds_host_memory_is_no_room(make):
    h = make(ram_blocks=2)
    h.add("a", 3)
    h.submit("r", [1], "a")
    h.step()
    assert h.end("r").code == "no_room" and "ram_cache" in h.end("r").message


def test_with_all_slots_pinned_a_request_for_another_adapter_is_no_room_at_once(make):
    h = make(slots=1)
    h.add("p", pinned=True)
    h.resident("p")
    h.add("a")
    h.submit("r", [1], "a")
    h.step()
    assert h.end("r").code == "no_room" and "pinned" in h.end("r").message


def test_requests_on_a_loading_adapter_are_never_run_as_base(make):
    h = make()
    h.add("a")
    h.host.delay["a"] = 5
    h.copier.copies_take = 5
    h.submit("r", [1, 2], "a")
    h.submit("base", [1, 2], max_tokens=30)
    for _ in range(10):
        work = h.step()
        assert [c.seq.request_id for c in work.chunks] == ["base"]
    assert h.state("a") == "loading"
    h.run()
    assert h.tokens("r") == h.alone([1, 2], "a", 4)


def test_cancelled_requests_give_up_their_claim_on_host_memory(make):
    h = make(ram_blocks=2)
    for rev in ("a", "b"):
        h.add(rev)
        h.host.delay[rev] = 5
    h.submit("r", [1], "a")
    h.step()
    h.scheduler.abort("r")
    h.submit("s", [1], "b")
    h.run(limit=30)
    assert h.end("s").finish_reason == "length"
    assert h.state("a") == "registered", "read, wanted by nobody, gave way"


def test_a_read_that_has_not_begun_is_not_made_for_requests_that_were_cancelled(make):
    h = make(blocks_in_flight=2, ram_blocks=4)
    h.add("a")
    h.add("b")
    h.submit("r", [1], "a")
    h.launch()
    h.submit("s", [1], "b")
    h.scheduler.abort("r")
    h.settle()
    assert h.host.cancelled == ["a"]
    h.step()
    assert h.state("a") == "registered" and "a" not in h.host.sizes and not h.host.protected - {"b"}
    assert [e.cause for e in h.events if e.rev == "a"] == ["request", "cancel"]
    h.run()
    assert h.end("s").finish_reason == "length" and h.end("r").finish_reason == "abort"


def test_whoever_asks_again_for_what_was_just_cancelled_is_served(make):
    h = make()
    h.add("a")
    h.submit("r", [1], "a")
    h.launch()
    h.scheduler.abort("r")
    h.submit("s", [1], "a")
    h.settle()
    assert h.host.cancelled == ["a"]
    h.run()
    assert h.tokens("s") == h.alone([1], "a", 4) and h.host.num_reads == 2


def test_of_several_requests_for_one_read_the_last_to_be_cancelled_cancels_it(make):
    h = make()
    h.add("a")
    command = h.load("a")
    for name in ("r", "s"):
        h.submit(name, [1], "a")
    h.launch()
    h.scheduler.abort("r")
    h.scheduler.abort("s")
    h.settle()
    assert h.host.cancelled == [], "an operator waits for it too"
    h.run()
    assert h.code(command) == ""


def test_a_load_whose_requests_were_cancelled_ends_idle_and_evictable(make):
    h = make()
    h.add("a")
    h.copier.copies_take = 4
    h.submit("r", [1], "a")
    h.run(until=lambda: bool(h.copier.copying))
    h.scheduler.abort("r")
    h.run()
    assert h.state("a") == "idle" and [r.rev for r in h.slots.idle()] == ["a"]


def test_host_memory_that_evicts_a_revision_is_noticed(make):
    h = make(ram_blocks=2)
    for rev in ("a", "b"):
        h.add(rev)
        h.load(rev, "ram")
        h.run()
    assert (h.state("a"), h.state("b")) == ("registered", "ram")


def test_requests_of_higher_priority_are_loaded_first(make):
    h = make(blocks_in_flight=2)
    for rev, priority in (("low", 10), ("high", 90)):
        h.add(rev)
        h.submit(rev, [1], rev, priority=priority)
    h.step()
    assert set(h.host.reading) == {"high"}


def test_a_file_of_another_layout_is_refused(make):
    h = make()
    h.residency._orders._layout = "0123456789ab"
    command = h.add("a")
    assert h.code(command) == "load_failed"
    assert "layout x" in h.answers[command].message
    assert not h.residency.knows("a")


def test_one_that_hangs_or_is_huge_keeps_the_others_from_starting_for_a_moment_only(make):
    h = make(blocks_in_flight=5)
    for rev, blocks in (("huge", 9), ("other", 3)):
        h.add(rev, blocks)
        h.host.delay[rev] = 10_000 if rev == "huge" else 1
        h.load(rev)
    h.step()
    assert set(h.host.reading) == {"huge"}
    begun = h.clock.now
    h.run(until=lambda: h.state("other") == "idle")
    assert h.clock.now - begun < 2 * LATE_SECONDS
    assert set(h.host.reading) == {"huge"}


def test_so_many_late_ones_are_passed_over_and_no_more(make):
    h = make(blocks_in_flight=3)
    late = [f"late{n}" for n in range(MOST_LATE + 3)]
    for rev in late:
        h.add(rev, 3)
        h.host.delay[rev] = 10_000
        h.load(rev)
    for _ in range(400):
        h.step()
    assert len(h.host.reading) == MOST_LATE + 1, "the last of them counts against the limit"


def test_a_copy_for_which_the_device_has_no_memory_fails_alone(make):
    h = make()
    for rev in ("a", "b"):
        h.add(rev, 3)
    h.copier.no_memory.add("a")
    command = h.load("a")
    h.submit("r", [1, 2], "a")
    h.submit("s", [1, 2], "b", max_tokens=3)
    h.submit("base", [1, 2], max_tokens=3)
    h.run()
    assert h.code(command) == "load_failed" and h.end("r").code == "load_failed"
    assert "no memory left" in h.end("r").message
    assert h.tokens("s") == h.alone([1, 2], "b", 3)
    assert h.end("base").finish_reason == "length"
    assert (h.state("a"), h.slots.find("a"), h.pool.counts.adapter) == ("ram", None, 3)
    h.copier.no_memory.clear()
    h.submit("later", [1, 2], "a", max_tokens=3)
    h.run()
    assert h.tokens("later") == h.alone([1, 2], "a", 3)


# ------------------------------------------------------------------- what loads are seen to cost
def test_reads_and_copies_correct_what_it_costs_to_bring_one_back(make, monkeypatch):
    h = make()
    costs = h.memory.costs
    before = costs.to_load(2, in_ram=False), costs.to_load(2, in_ram=True)
    poll = h.host.poll
    slow = lambda: [HostDone(done.rev, done.error, seconds=3.0) for done in poll()]  # noqa: E731
    monkeypatch.setattr(h.host, "poll", slow)
    h.add("a")
    h.resident("a")
    whole, copied = costs.to_load(2, in_ram=False), costs.to_load(2, in_ram=True)
    assert copied > before[1], "a step of 10 ms, and not 82 microseconds"
    assert whole - copied > 0.1, "a tenth of the way to three seconds"


def test_host_copies_that_are_gone_when_they_are_needed_are_noticed(make):
    h = make(num_blocks=40, slots=8, ram_blocks=2)
    for rev in "ab":
        h.add(rev)
    h.resident("a")
    h.evict("a")
    h.resident("a")
    assert h.memory.costs.kept == 1.0, "it was there"
    h.evict("a")
    h.resident("b")  # and takes the place of the copy of a
    assert not h.host.ready("a")
    h.resident("a")
    assert h.memory.costs.kept < 1.0


def loads(h, rev) -> list[tuple[str, float]]:
    return [(e.source, e.load_seconds) for e in h.events if e.rev == rev and e.source]


def test_a_load_to_the_gpu_says_where_from_and_how_long_in_all(make):
    h = make()
    h.add("a", 3)
    h.copier.copies_take = 3
    h.load("a")
    h.run()
    (source, seconds), *more = loads(h, "a")
    assert (source, more) == ("disk", [])
    assert seconds > sum(e.seconds for e in h.events if e.after == "idle"), "the read counts too"
    h.evict("a")
    h.load("a")
    h.run()
    assert [source for source, _ in loads(h, "a")] == ["disk", "ram"]


def test_what_was_only_wanted_in_host_memory_comes_from_there_later(make):
    h = make()
    h.add("a")
    h.load("a", "ram")
    h.run()
    assert loads(h, "a") == []
    h.load("a")
    h.run()
    assert [source for source, _ in loads(h, "a")] == ["ram"]


def test_the_first_delta_says_how_long_a_request_was_queued(make):
    h = make()
    h.add("a")
    h.submit("warm", [1], max_tokens=1)
    h.submit("r", [1, 2], "a", max_tokens=3)
    h.host.delay["a"] = 50
    h.run()
    first, *rest = h.deltas["r"]
    assert first.queued_seconds >= 0.4, "it waited for the read"
    assert all(d.queued_seconds is None for d in rest)
    assert h.deltas["warm"][0].queued_seconds == pytest.approx(0.01)


def test_a_step_looks_at_those_that_host_memory_has_lost_and_at_no_others(make):
    h = make(num_blocks=128, ram_blocks=80, slots=8)
    for n in range(40):
        h.add(f"r{n}")
        h.load(f"r{n}", "ram")
    h.run(until=lambda: h.state("r39") == "ram")
    asked, ready = [], h.host.ready
    h.host.ready = lambda rev: asked.append(rev) or ready(rev)
    h.step(3)
    assert asked == []
    h.add("more")
    h.load("more", "ram")
    h.run(until=lambda: h.state("more") == "ram")
    lost = [f"r{n}" for n in range(40) if not ready(f"r{n}")]
    assert len(lost) == 1 and set(asked) <= {"more", *lost}
    assert h.state(lost[0]) == "registered"

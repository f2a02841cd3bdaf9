"""Residency: evict, drain, remove, pin.  One answer each; no request loses what it runs on."""

import pytest


def running(h, request, prompt, rev, *, max_tokens=30) -> None:
    """Submit, and step until it streams."""
    h.submit(request, prompt, rev, max_tokens=max_tokens)
    h.run(until=lambda: request in h.deltas)


def test_evicting_an_idle_adapter_frees_its_slot_and_blocks_at_once(make):
    h = make()
    h.add("a", 3)
    h.resident("a")
    command = h.evict("a")
    assert h.code(command) == "" and h.state("a") == "ram"
    assert h.pool.counts.adapter == 0 and h.slots.num_free == 4


def test_evicting_to_disk_leaves_host_memory_too(make):
    h = make()
    h.add("a")
    h.resident("a")
    h.evict("a", to="disk")
    assert h.state("a") == "registered" and not h.host.ready("a")
    h.load("a", "ram")
    h.run()
    assert h.code(h.evict("a", to="disk")) == ""
    assert h.state("a") == "registered"
    assert h.code(h.evict("a", to="disk")) == "", "nothing to do is done"


def test_evicting_a_running_adapter_waits_for_its_requests(make):
    h = make()
    h.add("a")
    running(h, "r", [1], "a", max_tokens=10)
    command = h.evict("a")
    assert h.state("a") == "draining"
    h.submit("late", [2], "a")
    h.run(until=lambda: h.code(command) is not None)
    assert h.end("r").finish_reason == "length"
    assert h.tokens("r") == h.alone([1], "a", 10)
    assert h.end("late") is None and h.tokens("late") == []
    h.run()
    assert h.tokens("late") == h.alone([2], "a", 4), "queued requests make it load again"


def test_a_drain_that_takes_too_long_aborts_what_runs(make):
    h = make()
    h.add("a")
    running(h, "r", [1], "a")
    command = h.evict("a", drain_timeout=5.0)
    h.step(3)
    assert h.code(command) is None
    h.clock.now += 5.0
    h.step()
    assert h.code(command) == ""
    assert (h.end("r").finish_reason, h.end("r").code) == ("abort", "draining")
    assert h.tokens("r") == h.alone([1], "a", len(h.tokens("r")))


def test_evicting_with_abort_running_ends_requests_in_the_next_step(make):
    h = make()
    h.add("a")
    running(h, "r", [1], "a")
    h.submit("base", [1], max_tokens=30)
    command = h.evict("a", abort_running=True)
    h.step()
    assert h.code(command) == "" and h.end("r").finish_reason == "abort"
    assert h.end("base") is None


def test_queued_requests_never_block_an_eviction(make):
    h = make(max_num_seqs=1)
    h.add("a")
    h.resident("a")
    h.submit("base", [1], max_tokens=20)
    h.step()
    h.submit("queued", [1], "a")
    h.step()
    assert h.code(h.evict("a")) == ""
    assert h.slots.find("a") is None
    h.run()
    assert h.end("queued").finish_reason == "length"


def test_a_pinned_adapter_leaves_only_by_force(make):
    h = make()
    h.add("a", pinned=True)
    h.resident("a")
    assert h.code(h.evict("a")) == "pinned" and h.state("a") == "idle"
    assert h.code(h.evict("a", force=True)) == "" and h.state("a") == "ram"


def test_pinned_adapters_are_never_reclaimed(make):
    h = make(num_blocks=12, kv_floor=4, slots=2)
    h.add("p", 4, pinned=True)
    h.add("a", 4)
    h.add("b", 4)
    h.resident("p")
    for i, rev in enumerate(["a", "b", "a", "b"]):
        h.submit(f"r{i}", [1] * 9, rev)
        h.run()
        assert h.slots.find("p") is not None
        assert h.end(f"r{i}").finish_reason == "length"


def test_cancelling_a_load_gives_its_blocks_back_only_after_the_copy_has_ended(make):
    h = make()
    h.add("a", 3)
    h.copier.copies_take = 6
    load = h.load("a")
    h.run(until=lambda: bool(h.copier.copying))
    command = h.evict("a")
    assert h.code(load) == "conflict" and h.copier.cancelled == ["a"]
    while h.copier.copying:
        assert h.pool.counts.adapter == 3 and h.code(command) is None
        h.step()
    assert h.code(command) == "" and h.state("a") == "ram"
    assert h.pool.counts.adapter == 0


def test_whoever_takes_the_blocks_of_a_cancelled_load_gets_its_fence(make):
    """Rule 11: the taker waits for the copy that was under way."""
    h = make(num_blocks=12, kv_floor=4)
    h.add("a", 8)
    h.load("a")
    h.run(until=lambda: bool(h.copier.copying))
    taken = set(h.copier.targets["a"])
    h.evict("a")
    h.step()
    h.submit("r", [1] * 40, max_tokens=1)
    fences: list[object] = []
    while h.end("r") is None:
        work = h.step()
        fences += work.fences
        if taken & set(work.chunks[0].seq.blocks):
            assert "copy of a" in fences
    assert set(fences) == {"copy of a"}


def test_an_adapter_that_takes_blocks_of_kv_gets_the_fence_of_the_step(make):
    h = make(num_blocks=12, kv_floor=4)
    h.pool.stamp = "step 1"
    h.submit("r", [1] * 40, max_tokens=1)
    h.run()
    h.prefix.drop("base")
    h.add("a", 8)
    h.resident("a")
    assert h.copier.fences["a"] == ("step 1",)


def test_evicting_in_mid_read_ends_in_the_tier_that_was_asked_for(make):
    h = make()
    for rev, to, state in (("a", "ram", "ram"), ("b", "disk", "registered")):
        h.add(rev)
        h.host.delay[rev] = 5
        h.load(rev)
        h.step()
        command = h.evict(rev, to=to)
        assert h.code(command) is None
        h.run()
        assert h.code(command) == "" and h.state(rev) == state


def test_two_evicts_of_one_revision_are_both_answered(make):
    h = make()
    h.add("a")
    running(h, "r", [1], "a")
    patient, hasty = h.evict("a"), h.evict("a", abort_running=True)
    h.step()
    assert (h.code(patient), h.code(hasty)) == ("", "")


def test_a_load_during_a_drain_is_answered_when_it_is_back(make):
    h = make()
    h.add("a")
    running(h, "r", [1], "a", max_tokens=5)
    h.evict("a")
    load = h.load("a")
    h.step()
    assert h.code(load) is None
    h.run()
    assert h.code(load) == "" and h.state("a") == "idle"
    assert h.slots.find("a").generation > 1


# ------------------------------------------------------------------- remove
def test_a_removed_revision_takes_no_requests_and_is_gone_with_its_last_lease(make):
    h = make()
    h.add("a")
    running(h, "r", [1], "a", max_tokens=6)
    h.submit("queued", [3], "a")
    command = h.remove("a")
    h.submit("late", [1], "a")
    h.step()
    assert h.end("late").code == "model_not_found"
    assert h.code(command) is None
    h.run()
    assert h.tokens("r") == h.alone([1], "a", 6)
    assert h.tokens("queued") == h.alone([3], "a", 4)
    assert h.code(command) == ""
    assert not list(h.residency.revisions()) and h.host.sizes == {}


def test_a_removed_revision_takes_its_cached_kv_along(make):
    h = make()
    h.add("a")
    h.submit("r", [1] * 20, "a", max_tokens=1)
    h.run()
    assert h.pool.counts.kv_cached == 5
    h.remove("a")
    assert h.pool.num_free == h.pool.num_blocks


def test_kv_that_equals_the_bases_stays_when_its_revision_is_removed(make):
    h = make()
    h.add("a", changes_kv=False)
    h.submit("r", [1] * 20, "a", max_tokens=1)
    h.run()
    h.remove("a")
    assert h.pool.counts.kv_cached == 5


@pytest.mark.parametrize("to", ["ram", "disk"])
def test_moving_down_keeps_cached_kv(make, to):
    h = make()
    h.add("a")
    h.submit("r1", [1] * 20, "a")
    h.run()
    h.evict("a", to=to)
    h.submit("r2", [1] * 20, "a")
    h.run()
    assert h.deltas["r2"][0].cached_tokens == 16
    assert h.tokens("r2") == h.tokens("r1")


def test_removing_in_mid_copy_waits_for_the_copy(make):
    h = make()
    h.add("a")
    h.copier.copies_take = 5
    h.load("a")
    h.run(until=lambda: bool(h.copier.copying))
    command = h.remove("a")
    assert h.code(command) is None and h.pool.counts.adapter == 2
    h.run()
    assert h.code(command) == "" and h.pool.num_free == h.pool.num_blocks


def test_one_that_is_removed_in_mid_copy_and_added_again_is_copied_once_more(make):
    """Its copy was cut short when nobody wanted it; its blocks are not whole when that ends."""
    h = make()
    h.add("a", 3)
    h.copier.copies_take = 5
    h.load("a")
    h.run(until=lambda: bool(h.copier.copying))
    h.remove("a")
    h.add("a", 3)
    h.submit("r", [1, 2], "a", max_tokens=3)
    h.run()
    assert h.tokens("r") == h.alone([1, 2], "a", 3)


def test_adding_a_revision_again_revives_it(make):
    h = make()
    h.add("a")
    running(h, "r", [1], "a")
    removal = h.remove("a")
    assert h.code(h.add("a")) == "" and h.code(removal) == "conflict"
    h.submit("again", [2], "a", max_tokens=2)
    h.run()
    assert h.end("again").finish_reason == "length" and h.state("a") == "idle"


def test_commands_about_an_unknown_revision_are_answered(make):
    h = make()
    commands = [h.load("x"), h.evict("x"), h.remove("x"), h.set("x", pinned=True)]
    assert [h.code(c) for c in commands] == ["model_not_found"] * 4


# ------------------------------------------------------------------- pins
def test_pins_leave_room_for_the_kv_floor_and_the_largest_adapter(make):
    h = make(num_blocks=20, kv_floor=8)
    h.add("a", 4)
    h.add("b", 4)
    h.add("c", 4)
    assert h.code(h.set("a", pinned=True)) == ""
    assert h.code(h.set("b", pinned=True)) == ""
    refused = h.set("c", pinned=True)
    assert h.code(refused) == "no_room" and "KV floor" in h.answers[refused].message
    assert h.code(h.set("a", pinned=False)) == ""
    assert h.code(h.set("c", pinned=True)) == ""


def test_a_revision_added_with_a_pin_that_does_not_fit_is_known_and_not_pinned(make):
    h = make(num_blocks=20, kv_floor=8)
    assert h.code(h.add("a", 8, pinned=True)) == "no_room"
    assert h.residency.knows("a")
    (revision,) = h.residency.revisions()
    assert not revision.pinned


def test_adding_twice_is_harmless_and_brings_the_new_priority(make):
    h = make()
    h.add("a", priority=50)
    h.resident("a")
    assert h.code(h.add("a", priority=80)) == ""
    assert h.state("a") == "idle" and h.slots.find("a").priority == 80


def test_all_slots_but_one_may_be_pinned(make):
    h = make(slots=2)
    h.add("a")
    h.add("b")
    assert h.code(h.set("a", pinned=True)) == ""
    assert h.code(h.set("a", pinned=True)) == "", "it does not count against itself"
    refused = h.set("b", pinned=True)
    assert h.code(refused) == "no_room" and "slots" in h.answers[refused].message


# ------------------------------------------------------------------- host copies
def test_the_host_copy_of_a_pinned_adapter_is_kept_longest_until_it_is_on_the_gpu(make):
    h = make()
    h.add("a", priority=80)
    h.load("a", "ram")
    h.run()
    assert h.host.worth["a"] == 80
    h.set("a", pinned=True, priority=80)
    assert h.host.worth["a"] > 100
    h.resident("a")
    assert h.host.worth["a"] < 0, "it never leaves the GPU: nobody needs its copy"
    h.evict("a", force=True)
    assert h.host.worth["a"] > 100
    h.set("a", pinned=False, priority=30)
    assert h.host.worth["a"] == 30


def test_host_memory_makes_room_by_priority_and_leaves_loads_on_their_way_alone(make):
    h = make(num_blocks=40, slots=8, ram_blocks=8)
    for rev, priority in (("vip", 90), ("low", 10), ("mid", 50)):
        h.add(rev, priority=priority)
        h.load(rev, "ram")
        h.run()
    h.add("slow")
    h.host.delay["slow"] = 30
    h.load("slow")
    h.step()
    h.add("next")
    h.resident("next")
    assert [r for r in ("vip", "low", "mid") if not h.host.ready(r)] == ["low"]
    assert h.state("slow") == "idle"
    assert {(e.before, e.after, e.cause) for e in h.events if e.rev == "low"} >= {
        ("ram", "registered", "lru")
    }


def test_leaving_the_gpu_is_a_use_of_the_host_copy(make):
    """Its copy was the oldest, though it was in use all the time, and was dropped at once."""
    h = make(num_blocks=40, slots=8, ram_blocks=6)
    for rev in ("first", "x", "y"):
        h.add(rev)
        h.resident(rev)
    h.evict("first")
    h.add("z")
    h.resident("z")
    assert h.host.ready("first") and not h.host.ready("x")


# ------------------------------------------------------------------- cached KV
def test_an_adapter_that_makes_way_for_another_keeps_its_cached_kv(make):
    h = make(num_blocks=24, kv_floor=16, slots=4)
    h.add("a", 6)
    h.add("b", 6)
    h.submit("r1", [1] * 20, "a")
    h.run()
    h.resident("b")
    assert h.state("a") == "ram"
    h.submit("r2", [1] * 20, "a")
    h.run()
    assert h.deltas["r2"][0].cached_tokens == 16 and h.tokens("r2") == h.tokens("r1")


def test_cached_kv_of_a_replaced_revision_goes_with_its_last_lease_and_not_before(make):
    h = make()
    h.add("old")
    h.submit("r1", [1] * 20, "old", max_tokens=1)
    h.run()
    cached = h.pool.counts.kv_cached
    running(h, "r2", [2], "old", max_tokens=6)
    h.remove("old")
    h.step(2)
    assert h.pool.counts.kv_cached >= cached == 5
    h.run()
    assert h.pool.counts.kv_cached == 0 and len(h.prefix) == 0


def test_both_floors_hold_while_adapters_and_sequences_press_on_each_other(make):
    h = make(num_blocks=32, kv_floor=10, adapter_floor=8, slots=8)
    for n in range(8):
        h.add(f"a{n}", 4)
    for n in range(40):
        h.submit(f"r{n}", [n] * (5 + 7 * (n % 6)), f"a{n % 8}" if n % 3 else None, max_tokens=5)
    while h.scheduler.has_work:
        h.step()  # `Reclaimer.check` and more, each time
        counts = h.pool.counts
        assert counts.adapter <= 22 and counts.kv_active <= 24
    assert all(h.end(f"r{n}").finish_reason == "length" for n in range(40))


def test_of_a_revision_that_is_told_again_its_text_is_taken_and_nothing_moves(make):
    h = make()
    h.add("a", 3)
    running(h, "r", [1], "a")
    assert h.code(h.add("a", 3, num_tokens=259, tokenizer="/a/tokenizer.json")) == ""
    manifest = h.residency.manifest("a")
    assert (manifest.num_tokens, manifest.tokenizer) == (259, "/a/tokenizer.json")
    assert h.state("a") == "active"
    h.remove("a")
    assert h.code(h.add("a", 3)) == "", "it may stay after all"
    assert h.residency.manifest("a").num_tokens == 0

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

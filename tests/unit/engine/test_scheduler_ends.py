"""Scheduler: how sequences end, and that each gives back all it held exactly once."""

import pytest


def free(h) -> bool:
    """Nothing is held by a sequence: only cache is left."""
    counts = h.pool.counts
    refs = [row.refs for row in h.slots.rows.values()]
    leases = [r.leases for r in h.residency.revisions()]
    return not (counts.kv_active or any(refs) or any(leases) or h.scheduler.has_work)


def test_an_end_token_stops_and_is_part_of_the_output(make):
    probe = make()
    answer = probe.alone([1, 2], None, 6)
    h = make(eos=frozenset({answer[3]}))
    h.submit("r", [1, 2], max_tokens=6)
    h.submit("ignores", [1, 2], max_tokens=6, ignore_eos=True)
    h.submit("at least 5", [1, 2], max_tokens=6, min_tokens=5)
    h.submit("at least 3", [1, 2], max_tokens=6, min_tokens=3)
    h.run()
    assert (h.tokens("r"), h.end("r").finish_reason) == (answer[:4], "stop")
    assert (h.tokens("ignores"), h.end("ignores").finish_reason) == (answer, "length")
    assert h.tokens("at least 5") == answer
    assert h.tokens("at least 3") == answer[:4], "the fourth token may end it"


def test_stop_token_ids_stop_even_when_end_tokens_are_ignored(make):
    answer = make().alone([1, 2], None, 6)
    h = make()
    h.submit("r", [1, 2], max_tokens=6, stop_token_ids=(answer[1],), ignore_eos=True)
    h.run()
    assert (h.tokens("r"), h.end("r").finish_reason) == (answer[:2], "stop")


def test_the_context_limit_ends_a_sequence_with_length(make):
    h = make(max_model_len=10)
    h.submit("r", [1] * 6, max_tokens=100)
    h.run()
    assert len(h.tokens("r")) == 4 and h.end("r").finish_reason == "length"


def test_max_tokens_zero_computes_the_prompt_and_tells_no_token(make):
    h = make()
    h.submit("r", [1] * 6, max_tokens=0, prompt_logprobs=0)
    h.run()
    assert h.tokens("r") == [] and h.end("r").finish_reason == "length"
    assert free(h)


@pytest.mark.parametrize(
    ("prompt", "rev", "code"),
    [
        ([], None, "invalid_value"),
        ([1] * 64, None, "invalid_value"),
        ([1] * 40, None, "no_room"),
        ([1], "unknown", "model_not_found"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(make, prompt, rev, code):
    h = make(num_blocks=8, kv_floor=0)
    h.submit("r", prompt, rev)
    h.step()
    assert (h.end("r").finish_reason, h.end("r").code) == ("error", code)
    assert len(h.deltas["r"]) == 1 and h.end("r").message


def test_a_request_whose_adapter_and_prompt_cannot_both_fit_is_no_room(make):
    h = make(num_blocks=12, kv_floor=2)
    h.add("a", 8)
    h.submit("r", [1] * 20, "a")
    h.step()
    assert h.end("r").code == "no_room"


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(make):
    h = make()
    h.submit("r", [1], max_tokens=3)
    h.submit("r", [2], max_tokens=3)
    refusals = h.scheduler.take_deltas()
    assert [(d.code, d.finish_reason) for d in refusals] == [("invalid_value", "error")]
    h.run()
    assert h.tokens("r") == h.alone([1], None, 3)
    h.submit("r", [2], max_tokens=3)
    assert h.scheduler.num_waiting == 1, "the id is free again"


@pytest.mark.parametrize("rev", [None, "a"])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_everything_within_two_steps(make, rev, steps):
    h = make(max_batch_tokens=8)
    h.add("a")
    h.resident("a")
    h.submit("r", [1] * 20, rev, max_tokens=20)
    h.step(steps)
    h.scheduler.abort("r")
    h.step(2)
    assert h.end("r").finish_reason == "abort" and free(h)


def test_an_abort_in_mid_step_is_carried_out_when_the_step_is_settled(make):
    h = make()
    h.add("a")
    h.resident("a")
    h.submit("r", [1] * 8, "a")
    work = h.launch()
    h.scheduler.abort("r")
    assert h.end("r") is None and work.chunks[0].seq.blocks, "its rows are being computed"
    h.settle()
    assert h.end("r").finish_reason == "abort" and h.tokens("r") == []
    assert free(h)


def test_aborting_an_unknown_or_ended_request_is_ignored(make):
    h = make()
    h.scheduler.abort("nobody")
    h.submit("r", [1], max_tokens=1)
    h.run()
    h.scheduler.abort("r")
    h.run()
    assert len(h.deltas["r"]) == 1


def test_aborting_a_request_whose_adapter_loads_ends_its_lease(make):
    h = make()
    h.add("a")
    h.host.delay["a"] = 20
    h.submit("r", [1], "a")
    h.step(3)
    h.scheduler.abort("r")
    h.run()
    assert h.end("r").finish_reason == "abort" and free(h)


@pytest.mark.parametrize("running", [True, False])
def test_past_its_deadline_a_request_ends_with_an_error(make, running):
    h = make()
    h.add("cold")
    h.host.delay["cold"] = 1000
    h.submit("r", [1], None if running else "cold", max_tokens=30, deadline=0.5)
    h.step(3)
    h.clock.now += 0.5
    h.step()
    assert (h.end("r").finish_reason, h.end("r").code) == ("error", "deadline_exceeded")
    assert bool(h.tokens("r")) == running


def test_deadlines_of_requests_that_have_ended_are_not_kept_until_then(make):
    """A soak of minutes grew by each request; ten minutes of traffic were kept."""
    h = make()
    h.add("cold")
    h.host.delay["cold"] = 100_000
    h.submit("stays", [1], "cold", deadline=30.0)
    for n in range(300):
        h.submit(f"r{n}", [1, n], max_tokens=1, deadline=600.0)
        h.run(until=lambda n=n: h.end(f"r{n}") is not None)
    assert len(h.scheduler._deadlines._heap) <= 2 * 2 + 64 + 1
    assert h.end("stays") is None
    h.clock.now += 30.0
    h.step(2)
    assert h.end("stays").code == "deadline_exceeded"


def test_a_deadline_that_was_met_does_nothing_later(make):
    h = make()
    h.submit("r", [1], max_tokens=1, deadline=0.5)
    h.run()
    del h.deltas["r"]
    h.submit("r", [1], max_tokens=3)
    h.clock.now += 1
    h.run()
    assert h.end("r").finish_reason == "length", "the id is another request's now"


def test_sixteen_samples_of_one_prompt_take_and_give_back_sixteen_references(make):
    h = make(max_num_seqs=16, max_batch_tokens=200, num_blocks=200)
    h.add("a")
    h.resident("a")
    for i in range(16):
        h.submit(f"r{i}", [1] * 9, "a", max_tokens=3 + i % 3)
    h.step()
    assert h.slots.find("a").refs == 16
    (revision,) = h.residency.revisions()
    assert (revision.leases, revision.running, revision.waiting) == (16, 16, 0)
    h.scheduler.abort("r3")
    h.scheduler.abort("r3")
    h.run()
    assert free(h)
    assert h.code(h.remove("a")) == "", "nothing holds it"


def test_leases_and_references_end_once_whatever_the_end(make):
    h = make(max_num_seqs=3)
    h.add("a")
    h.add("bad")
    h.host.errors["bad"] = "I/O error"
    for i in range(12):
        rev = [None, "a", "bad"][i % 3]
        h.submit(f"r{i}", [i + 1] * (i + 1), rev, max_tokens=i, deadline=0.04 if i == 4 else None)
    h.scheduler.abort("r7")
    h.step(2)
    h.scheduler.abort("r10")
    h.run()
    assert free(h)
    ends = {i: h.end(f"r{i}") for i in range(12)}
    assert {ends[i].code for i in (2, 5, 8, 11)} == {"load_failed"}
    assert ends[4].code == "deadline_exceeded"
    assert ends[7].finish_reason == ends[10].finish_reason == "abort"


def test_everything_can_be_aborted_for_a_shutdown(make):
    h = make(max_num_seqs=2)
    for i in range(5):
        h.submit(f"r{i}", [1], max_tokens=30)
    h.step(2)
    h.scheduler.abort_all()
    h.step()
    assert all(h.end(f"r{i}").finish_reason == "abort" for i in range(5)) and free(h)

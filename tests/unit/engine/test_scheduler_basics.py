"""Scheduler: batching, budgets, ends.  The fake model of conftest stands in for the runner."""


def test_one_request_runs_to_its_last_token(make):
    h = make()
    h.submit("r", [1, 2, 3], max_tokens=5)
    h.run()
    assert h.tokens("r") == h.alone([1, 2, 3], None, 5)
    assert h.end("r").finish_reason == "length"
    assert h.deltas["r"][0].cached_tokens == 0
    assert h.pool.counts.kv_active == 0


def test_base_and_adapters_run_in_one_step(make):
    h = make()
    for rev in "abc":
        h.add(rev)
    h.resident("a", "b", "c")
    for rev in (None, "a", "b", "c", "a"):
        h.submit(f"{rev}{len(h.deltas)}{id(rev)}{h.scheduler.num_waiting}", [5, 6], rev)
    work = h.step()
    assert [c.seq.rev for c in work.chunks] == [None, "a", "a", "b", "c"]

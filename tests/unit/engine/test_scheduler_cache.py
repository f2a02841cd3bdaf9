"""Scheduler: cached prefixes.  Shared where equal, never where not."""

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]


def cached(h, request, rev=None, prompt=PROMPT, **options) -> int:
    h.submit(request, prompt, rev, **options)
    h.run()
    assert h.tokens(request) == h.alone(prompt, rev, len(h.tokens(request)))
    return h.deltas[request][0].cached_tokens


def test_a_second_request_reuses_full_blocks_and_computes_at_least_one_token(make):
    h = make()
    assert [cached(h, "r1"), cached(h, "r2")] == [0, 16]
    assert [cached(h, "r3", prompt=PROMPT[:16]), cached(h, "r4", prompt=PROMPT[:5])] == [12, 4]


def test_generated_tokens_are_reused_too(make):
    h = make()
    cached(h, "r1", max_tokens=8)
    longer = PROMPT + h.tokens("r1")
    assert cached(h, "r2", prompt=longer) == 24


def test_revisions_share_nothing_with_each_other_or_with_the_base(make):
    """Rule 3: a new revision of the same adapter is another identity: zero cached tokens."""
    h = make()
    for rev in ("old", "new"):
        h.add(rev)
    assert [cached(h, "r1"), cached(h, "r2", "old"), cached(h, "r3", "new")] == [0, 0, 0]
    assert [cached(h, "r4"), cached(h, "r5", "old"), cached(h, "r6", "new")] == [16, 16, 16]


def test_a_revision_that_changes_no_kv_shares_the_bases(make):
    h = make()
    h.add("head", changes_kv=False)
    assert [cached(h, "r1"), cached(h, "r2", "head"), cached(h, "r3")] == [0, 16, 16]


def test_salts_share_nothing(make):
    h = make()
    assert [cached(h, "r1", salt="x"), cached(h, "r2", salt="y"), cached(h, "r3")] == [0, 0, 0]
    assert cached(h, "r4", salt="x") == 16


def test_prompt_logprobs_compute_every_row(make):
    h = make()
    cached(h, "r1")
    assert cached(h, "r2", prompt_logprobs=0) == 0


def test_requests_that_run_at_the_same_time_share_blocks(make):
    h = make(num_blocks=12, kv_floor=0)
    cached(h, "r0", max_tokens=1)
    for i in range(6):
        h.submit(f"s{i}", PROMPT, max_tokens=2)
    h.step()
    assert h.pool.counts.kv_active == 4 + 6
    h.run()
    assert len({tuple(h.tokens(f"s{i}")) for i in range(6)}) == 1


def test_what_was_evicted_is_computed_again_and_equal(make):
    h = make(num_blocks=8, kv_floor=0)
    cached(h, "r1")
    cached(h, "other", prompt=[7] * 26)
    assert cached(h, "r2") < 16
    assert h.tokens("r1") == h.tokens("r2")


def test_hits_are_counted_per_revision_once_a_request(make):
    h = make()
    h.add("a")
    for i in range(3):
        cached(h, f"r{i}", "a")
    cached(h, "base")
    assert (h.prefix.reuse.of("a").asked, h.prefix.reuse.of("a").hit) == (51, 32)
    assert (h.prefix.reuse.of("").asked, h.prefix.reuse.of("").hit) == (17, 0)
    assert (h.prefix.reuse.total.asked, h.prefix.reuse.total.hit) == (68, 32)


def test_an_aborted_request_leaves_only_blocks_that_are_right(make):
    h = make(max_batch_tokens=6)
    h.submit("r1", PROMPT, max_tokens=9)
    h.step(2)
    h.scheduler.abort("r1")
    h.step()
    assert cached(h, "r2") == 12

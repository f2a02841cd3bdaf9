"""Blocks change hands behind fences: a device that is as late as it may be, copies that are early.

A step is computed when its draw is waited for, or when a copy waits for its fence.  A block that is
given to an adapter too early is overwritten under rows that are still to be computed.
"""

import random

import pytest

#: One answer in three ends by itself: with lookahead a row of it is under way by then.
MANY_ENDS = frozenset(range(0, 9973, 3))
REVS = {"a": 2, "b": 3, "c": 5}  # blocks


def busy(make_late, seed: int, **options) -> int:
    """Requests, aborts and evictions on a pool that is full; the copies that had to wait."""
    draw = random.Random(seed)
    sizes = {"num_blocks": 18, "slots": 2, "max_num_seqs": 4, "max_batch_tokens": 12, "kv_floor": 0}
    h = make_late(eos=MANY_ENDS, **sizes, **options)
    for rev, blocks in REVS.items():
        h.add(rev, blocks)
    asked = {}
    for n in range(60):
        prompt = [draw.randrange(20) for _ in range(draw.randrange(1, 18))]
        rev = draw.choice([None, *REVS])
        asked[f"r{n}"] = prompt, rev
        h.submit(f"r{n}", prompt, rev, max_tokens=draw.choice([1, 3, 12]))
        if draw.random() < 0.2:
            h.scheduler.abort(f"r{draw.randrange(n + 1)}")
        if draw.random() < 0.2:
            h.evict(draw.choice(list(REVS)), abort_running=draw.random() < 0.5)
        h.step(draw.randrange(4))
    h.run(limit=2000)
    for request_id, (prompt, rev) in asked.items():
        tokens = h.tokens(request_id)
        assert h.end(request_id) and tokens == h.alone(prompt, rev, len(tokens))
    return h.num_waits


def test_no_block_changes_hands_under_a_step_that_is_computed_late(make_late):
    assert sum(busy(make_late, seed) for seed in range(20)) > 20


def test_the_fence_of_the_step_before_would_come_too_early(make_late):
    """A row for nobody is in the newest step, and a freed block has to wait for that one."""
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(20):
            busy(make_late, seed, fence_of=lambda step: step - 1)

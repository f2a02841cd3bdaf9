"""Blocks change hands behind fences: a device that is as late as it may be, copies that are early.

A step is computed when its draw is waited for, or when a copy waits for its fence.  A block that is
given to an adapter too early is overwritten under rows that are still to be computed.
"""

import random
from collections import deque

import pytest

from engine.sequence import Chunk, StepWork

#: One answer in three ends by itself: with lookahead a row of it is under way by then.
MANY_ENDS = frozenset(range(0, 9973, 3))
REVS = {"a": 2, "b": 3, "c": 5}  # blocks


class Known:
    """A sequence as the upload has it: nothing that changes later changes it."""

    def __init__(self, seq, rows) -> None:
        self.seq, self.request_id = seq, seq.request_id
        self.tokens, self.blocks = tuple(seq.tokens), tuple(seq.blocks)
        self.slot = rows.get(seq.slot)  # the row itself: the slot may be another's by then

    def __eq__(self, other) -> bool:
        return self.seq is other.seq

    def __hash__(self) -> int:
        return id(self.seq)


@pytest.fixture
def make_late(make):
    """Harnesses; `fence_of`: step just launched -> the one that freed blocks wait for."""

    class LateHarness(make):
        def __init__(self, fence_of=lambda step: step, **sizes) -> None:
            super().__init__(lookahead=True, **sizes)
            self.fence_of = fence_of
            self.launched = 0
            self.queue = deque()  # launched, not computed: number, work, what is drawn
            self.num_waits = 0  # copies that had to wait for a step
            self.start, self.copier.start = self.copier.start, self.copy

        def settle(self) -> None:
            if len(self.flights) > (self.work is not None):
                work, drawn = self.flights[0]
                if any(chunk.samples for chunk in work.chunks):  # else nothing is waited for
                    while any(entry[2] is drawn for entry in self.queue):
                        self.compute()
            super().settle()

        def copy(self, rev, blocks) -> None:
            fences = [f for f in self.pool.take_fences(blocks) if isinstance(f, int)]
            before = len(self.queue)
            while self.queue and self.queue[0][0] <= max(fences, default=0):
                self.compute()
            self.num_waits += len(self.queue) < before
            self.start(rev, blocks)

        def compute(self) -> None:
            _, work, drawn = self.queue.popleft()
            drawn.update(super()._run(work))

        def _run(self, work):
            rows, drawn = self.slots.rows, {}
            chunks = [Chunk(Known(c.seq, rows), c.start, c.length, c.samples) for c in work.chunks]
            self.launched += 1
            self.queue.append((self.launched, StepWork(tuple(chunks)), drawn))
            self.pool.stamp = self.fence_of(self.launched)
            return drawn

        def _weights(self, row):
            if row is None:
                return None
            assert all(self.arena[b] == row.rev for b in row.blocks), "half an adapter"
            return row.rev

    return LateHarness


def live(make_late, seed: int, **options) -> int:
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
    assert sum(live(make_late, seed) for seed in range(20)) > 20


def test_the_fence_of_the_step_before_would_come_too_early(make_late):
    """A row for nobody is in the newest step, and a freed block has to wait for that one."""
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(20):
            live(make_late, seed, fence_of=lambda step: step - 1)

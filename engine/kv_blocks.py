"""Blocks of sequences: which ones a sequence holds, what it finds in them, whether there is room.

Goes in: sequences that begin, grow, are computed and leave.  Comes out: their `blocks`, shared with
the prefix index as soon as they are full, and given back once.  Decides about nobody's turn.
"""

from collections import Counter
from collections.abc import Iterable

from engine.admission import SchedulerLimits, StepBuilder
from engine.memory.reclaim import Reclaimer
from engine.sequence import Sequence


class KvBlocks:
    """Of every running sequence; a waiting one holds none."""

    def __init__(self, memory: Reclaimer, limits: SchedulerLimits) -> None:
        self._memory, self._limits = memory, limits
        self._pool, self._prefix = memory.pool, memory.prefix
        self._drafted: set[int] = set()  # blocks that hold a draft model's KV of all their tokens

    def cached(self, seq: Sequence) -> list[int]:
        """Those that hold the beginning of its tokens; not its own yet.

        Prompt log-probabilities need every row of the prompt, so nothing is reused for them.
        """
        if seq.sampling.prompt_logprobs is not None and not seq.num_generated:
            return []
        if not seq.reuses:
            return []
        return self._prefix.find(seq.tokens, seq.identity, seq.salt, seq.chain, seq.activation)

    def has_room(self, seq: Sequence, found: list[int], running: list[Sequence]) -> bool:
        """Room for all of `seq` beside the next token of those that run.

        Room that is reserved counts as taken, but not while nobody runs: then it could stay taken
        for ever, for one starving adapter after another.
        """
        blocks = self._limits.blocks
        need = blocks(seq.length + bool(running)) - len(found)
        need += sum(map(self._pool.is_cached, found))
        need += sum(max(blocks(s.length + 1) - len(s.blocks), 0) for s in running)
        return need <= self._memory.kv_room(seq.rev, admission=bool(running))

    def are_coming(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether an input that is pooled computes right now what follows the blocks that are
        cached of `seq`."""
        if not seq.reuses:
            return False
        found = len(self.cached(seq))
        following = seq.chain[found : found + 1]
        return any(
            key in other.chain[other.num_entered :]
            for other in running
            if other.pooled is not None and other.identity == seq.identity
            for key in following
        )

    def begin(self, seq: Sequence, found: list[int], step: StepBuilder) -> None:
        """Hold `found` and take the rest, which `has_room` has promised."""
        self._prefix.share(found)
        seq.blocks, seq.num_entered = found, len(found)
        seq.num_computed = len(found) * self._limits.block_size
        taken = self.take(seq, step)
        assert taken, f"{seq.request_id}: room was promised and is not there"

    def take(self, seq: Sequence, step: StepBuilder) -> bool:
        """Blocks for all tokens of `seq`, at once: no load can take what its next chunk needs.

        False: there are too few, and none was taken.
        """
        missing = self._limits.blocks(seq.length) - len(seq.blocks)
        if missing > 0:
            blocks = self._memory.take_kv(missing, seq.rev)
            if blocks is None:
                return False
            self._hold(seq, blocks, step)
        return True

    def take_for_drafts(self, seq: Sequence, count: int, step: StepBuilder) -> int:
        """Blocks for rows of `count` drafts behind all tokens of `seq`; how many of them have one.

        A guess takes what is free, and pushes nothing out.
        """
        size, length = self._limits.block_size, seq.length + count
        missing = self._limits.blocks(length) - len(seq.blocks)
        if 0 < missing <= self._pool.num_free:
            blocks = self._memory.take_kv(missing, seq.rev)
            if blocks is not None:
                self._hold(seq, blocks, step)
        return min(count, len(seq.blocks) * size - seq.length)

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks of drafts that were wrong."""
        count = self._limits.blocks(seq.length)
        if count < len(seq.blocks):
            self._prefix.release(seq.blocks[count:])
            seq.blocks = seq.blocks[:count]  # another list: what was known of the old one is void

    def _hold(self, seq: Sequence, blocks: list[int], step: StepBuilder) -> None:
        step.wait_for(self._pool.take_fences(blocks))
        seq.blocks += blocks
        if self._drafted:
            self._drafted.difference_update(blocks)

    # ------------------------------------------------------------- the draft model's share
    def find_drafted(self, seq: Sequence, computed: int) -> int:
        """Of `seq`, whose first `computed` tokens have the draft model's KV: how many really do,
        where other sequences have filled blocks that it shares.  Never the last token."""
        size = self._limits.block_size
        last = (len(seq.tokens) - 1) // size
        while (at := computed // size) < last and seq.blocks[at] in self._drafted:
            computed = (at + 1) * size
        return computed

    def note_drafted(self, seq: Sequence, before: int, computed: int) -> None:
        """Tokens `before` to `computed` of `seq` have it now, and stay."""
        size = self._limits.block_size
        self._drafted.update(seq.blocks[before // size : computed // size])

    def enter_full(self, seq: Sequence) -> None:
        """What is computed now enters the prefix index, and not before."""
        count = seq.num_computed // self._limits.block_size
        if count == seq.num_entered or not seq.reuses:
            return
        identity, activation = seq.identity, seq.activation
        self._prefix.keys(seq.tokens, count, seq.chain, identity, seq.salt, activation)
        for i in range(seq.num_entered, count):
            self._prefix.enter(seq.chain, i, seq.blocks[i], identity, activation)
        seq.num_entered = count

    def give_back(self, seq: Sequence) -> None:
        """Its full blocks stay filed until somebody needs the room."""
        self._prefix.release(seq.blocks)
        seq.blocks, seq.num_computed, seq.num_entered, seq.flying = [], 0, 0, 0

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless pool and index agree with those that run, and nobody else
        holds anything."""
        self._pool.check()
        self._prefix.check()
        users = Counter(block for seq in running for block in seq.blocks)
        for block, count in users.items():
            assert self._pool.refs(block) == count, f"block {block}: lost reference"
        assert len(users) == self._pool.counts.kv_active, "KV without a sequence"

"""Scheduler: which rows run in the next step, and what becomes of them.

Goes in: Submits, aborts, and what was sampled.  Comes out: StepWork for the runner, and
SequenceDeltas.  Continuous batching under a token budget: decode rows first, then chunks of the
prompts that run, then new sequences by priority, fairness and arrival.  A sequence whose adapter is
not on the GPU is passed over and delays nobody; no row is ever computed with other weights than
its own.  Torch-free; the clock is injected; knows nothing of text, names or devices.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping

from engine.adapters.residency import Residency
from engine.admission import Refusal, SchedulerLimits, StepBuilder, never_fits
from engine.arrivals import Arrivals, refused
from engine.backlog import Backlog
from engine.deadlines import Deadlines, lateness
from engine.drafting import Drafting, DraftModel
from engine.drainer import Drainer
from engine.fairness import GENERATED_WEIGHT, TokenCounters, WaitingQueue
from engine.kv_blocks import KvBlocks
from engine.memory.reclaim import Reclaimer
from engine.messages import SequenceDelta, Submit
from engine.sequence import Chunk, Doom, PooledInput, Sampled, Sequence, Status, StepWork
from engine.settle import append, tell
from engine.speculation import Speculation

__all__ = ["Chunk", "Sampled", "Scheduler", "SchedulerLimits", "StepWork"]

#: How an input that is pooled ends: with the last of its rows.
POOLED_WHOLE = Doom("stop", "", "")


class Scheduler:
    """Owns every live sequence.  The rest may come between any `schedule` and `settle`.

    Steps are settled in the order in which they were scheduled.  One more may be scheduled before
    the last one is settled: its rows then stand on tokens that are still being drawn.  What ends or
    gives way in between leaves a row behind that is computed for nobody, into blocks that have a
    new owner only in later steps.
    """

    def __init__(
        self,
        *,
        memory: Reclaimer,
        residency: Residency,
        limits: SchedulerLimits,
        clock: Callable[[], float],
        draft_model: DraftModel | None = None,
    ) -> None:
        self.memory = memory
        self.residency = residency
        self.limits = limits
        self._clock = clock
        self._prefix = memory.prefix
        self._blocks = KvBlocks(memory, limits)
        self._arrivals = Arrivals(memory, residency, limits, clock)
        self._counters = TokenCounters()
        self._waiting = WaitingQueue(self._counters)
        self._running: list[Sequence] = []  # by rank
        self._live: dict[str, Sequence] = {}
        self._deadlines = Deadlines()
        rows = min(limits.mixed_tokens, limits.max_batch_tokens)
        self.speculation = Speculation(limits.speculation_tokens, rows, limits.draft_cost)
        self.drafting = Drafting(
            self.speculation, self._blocks, draft_model, rows, limits.block_size
        )
        self._drainer = Drainer(residency, limits.starve_after, self.tokens_left, clock)
        self._deltas: list[SequenceDelta] = []
        self.backlog = Backlog(clock())
        self.num_preemptions = 0

    # ------------------------------------------------------------- arriving and leaving
    def add(self, submit: Submit, pooled: PooledInput | None = None) -> Sequence | None:
        """Queue a request and want its adapter; one that cannot ever run ends in `take_deltas`.

        With `pooled` nothing is drawn for it: it ends when its last row is settled.
        """
        if submit.request_id in self._live:
            # The other one goes on: this delta is the end of the second Submit, not of the first.
            taken = f"request id {submit.request_id} is in use"
            self._deltas.append(refused(submit.request_id, "invalid_value", taken))
            return None
        seq = self._arrivals.sequence(submit, pooled)
        if isinstance(seq, Refusal):
            self._deltas.append(refused(submit.request_id, seq.code, seq.message))
            return None
        self._live[seq.request_id] = seq
        self._counters.enter(seq.tenant, seq.account)
        if seq.rev is not None:
            self.residency.lease(seq.rev, seq.priority)
        self._deadlines.note(seq, self._live)
        self._waiting.push(seq)
        return seq

    def abort(self, request_id: str, code: str = "", message: str = "") -> None:
        """End a sequence now, or when a launched step is settled.  Unknown ids are ignored."""
        seq = self._live.get(request_id)
        if seq is not None:
            self._doom(seq, Doom("abort", code, message))

    def fail(self, seq: Sequence, code: str, message: str) -> None:
        """The same with an error, for one that cannot go on."""
        if seq.status is not Status.FINISHED and seq.doom is None:
            self._doom(seq, Doom("error", code, message))

    def abort_all(self, code: str = "", message: str = "") -> None:
        """End everything, for a shutdown."""
        for request_id in list(self._live):
            self.abort(request_id, code, message)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have something to do, loads and drains included."""
        return bool(self._live or self._deltas or self.residency.busy)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_generating(self) -> int:
        """Of those that run."""
        return sum(seq.pooled is None for seq in self._running)

    def waiting_for(self, rev: str | None) -> int:
        """Queued sequences on `rev` (None = base)."""
        return len(self._waiting.of_revision(rev))

    def turn_of(self, rev: str | None) -> tuple[int, int]:
        """When the queue comes to `rev`, 1 = next, and of how many it comes to; 0: none waits."""
        return self._waiting.walk(self._drainer.guests).turn_of(rev)

    def tokens_left(self, rev: str) -> int:
        """Steps until the running sequences of `rev` have ended, at most."""
        return max((seq.remaining for seq in self._running if seq.rev == rev), default=0)

    def running_on(self, rev: str | None) -> int:
        """Running sequences on `rev` (None = base)."""
        return sum(seq.rev == rev for seq in self._running)

    def take_deltas(self) -> list[SequenceDelta]:
        """Ends outside of a step since the last call: refusals, aborts, deadlines, failed loads."""
        deltas, self._deltas = self._deltas, []
        return deltas

    # ------------------------------------------------------------- the step
    def schedule(self) -> StepWork | None:
        """The next step's rows; None = nothing can run now."""
        self.residency.advance()
        self._end_what_cannot_go_on()
        step = StepBuilder(self.limits)
        self._make_way_for_starving(step)
        prompts = self._extend_decoding(step)
        self.drafting.add_rows(step)
        self._extend_prompts(prompts, step)
        before = self.num_generating
        if not step.preempted:  # room that was taken from one is not for a newcomer
            self._admit_waiting(step)
        self._note_backlog(self.num_generating - before)
        return self._launch(step)

    def settle(self, work: StepWork, sampled: Mapping[str, Sampled]) -> list[SequenceDelta]:
        """Take a computed step in.  `sampled` has an entry for each chunk that samples."""
        deltas = []
        for chunk in work.chunks:
            seq = chunk.seq
            seq.owed -= chunk.draws
            if seq.status is Status.FINISHED:
                continue  # it ended while this row of it was under way
            if chunk.stay == seq.stay:
                seq.flying -= chunk.length
                seq.num_computed += chunk.length - len(chunk.drafts)
                self._blocks.enter_full(seq)
            if chunk.samples and seq.doom is None:
                seq.doom = sampled[seq.request_id].doom
            if seq.doom is not None or seq.is_done:
                deltas.append(self._end(seq, seq.doom or POOLED_WHOLE))
            elif chunk.samples:
                drawn = sampled[seq.request_id]
                delta = append(seq, drawn, self.limits)
                if chunk.drafts:
                    self.drafting.keep(chunk, len(drawn.more), len(delta.tokens) - 1)
                tokens = len(delta.tokens) * GENERATED_WEIGHT
                self._counters.note(seq.tenant, seq.rev, tokens / seq.weight)
                if delta.finish_reason is not None:
                    self._retire(seq)
                deltas.append(delta)
        return deltas

    # ------------------------------------------------------------- rows that are not drawn for
    def put_off(self, chunk: Chunk) -> None:
        """Nothing is drawn for the last row of a launched chunk: it counts as not computed, and is
        computed once more after `resume`.  Its sequence keeps its place and its memory."""
        seq = chunk.seq
        assert chunk.samples and seq.status is Status.RUNNING and chunk.stay == seq.stay
        chunk.samples, chunk.length = False, chunk.length - 1
        seq.owed, seq.flying, seq.held = seq.owed - 1, seq.flying - 1, True

    def resume(self, seq: Sequence) -> None:
        """The row that was put off may be computed now."""
        seq.held = False

    # ------------------------------------------------------------- running sequences
    def _extend_decoding(self, step: StepBuilder) -> list[Sequence]:
        """A row for everybody who makes tokens; returns those at their prompt still, by rank.

        Who gives way ranks after everybody that was looked at, so it has neither row nor chunk yet.
        """
        prompts = []
        for seq in list(self._running):
            if seq.status is not Status.RUNNING or seq.doom is not None or not seq.may_go_on:
                continue
            if seq.held and seq.pending == 1:
                continue
            if seq.is_prompt:
                if seq.pending:  # else all of an input that is pooled is under way
                    prompts.append(seq)
            elif step.left and self._grow(seq, step):
                step.decode(seq)
        return prompts

    def _extend_prompts(self, prompts: list[Sequence], step: StepBuilder) -> None:
        """Chunks of prompts that run.  They have had all their blocks since they were admitted."""
        backlog = sum(seq.pending for seq in prompts if seq.pooled is None)
        backlog += self._backlog_of_waiting()
        first = prompts[0] if prompts else None
        step.open(first, backlog, queued=self._waiting.num_generating > 0)
        for seq in sorted(prompts[1:], key=lambda s: (-s.priority, s.pending)):
            step.go_on(seq)

    def _grow(self, seq: Sequence, step: StepBuilder) -> bool:
        """A block for its newest token, taken from who ranks last; False = `seq` itself did."""
        while seq.length > len(seq.blocks) * self.limits.block_size:
            if self._blocks.take(seq, step):
                break
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, step: StepBuilder) -> None:
        """Back to the queue.  Its full blocks stay filed: most of the way back is a cache hit."""
        step.preempted = True
        self._leave_running(seq)
        seq.status = Status.WAITING
        self._waiting.push_back(seq)
        self.num_preemptions += 1

    # ------------------------------------------------------------- waiting sequences
    def _backlog_of_waiting(self) -> int:
        """Rows of those who could start now: their adapter is there, and so is a seat."""
        seats, waiting = self.limits.max_num_seqs - len(self._running), self._waiting.num_generating
        if not waiting or seats <= 0:
            return 0
        return self._waiting.num_tokens(self._could_run) * min(seats, waiting) // waiting

    def _admit_waiting(self, step: StepBuilder) -> None:
        guests = self._drainer.guests
        if not guests and len(self._running) >= self.limits.max_num_seqs:
            return
        walk = self._waiting.walk(guests)
        while not step.full and (seq := walk.next()) is not None:
            if seq.rev is not None and not self.residency.can_acquire(seq.rev):
                continue  # its whole group waits; the others go past
            if seq.pooled is not None and not self._may_pool(seq, step):
                continue  # so does this one, for a step
            due = guests.get(seq.rev)
            kept = len(guests) if due is None else 0
            has_seat = len(self._running) < self.limits.max_num_seqs - kept
            if not has_seat or not self._admit(seq, step):
                if due is not None and due <= self._clock():
                    self._drainer.note_stuck(seq.rev)  # who gives way has a row in this step
                return  # nobody overtakes it to the memory that it waits for
            if due is None:
                walk.again(seq)
            else:  # one request is what it was owed; with the next it takes its turn
                del guests[seq.rev]
                walk = self._waiting.walk(guests)

    def _may_pool(self, seq: Sequence, step: StepBuilder) -> bool:
        """What many inputs begin with, such as an instruction or a query ahead of its documents, is
        computed once, and they wait."""
        return step.takes(seq) and not self._blocks.are_coming(seq, self._running)

    def _note_backlog(self, starts: int) -> None:
        ready = self._waiting.num_tokens(self._could_run) > 0
        self.backlog.note(self._clock(), starts, left_over=ready)

    def _could_run(self, rev: str | None) -> bool:
        return rev is None or self.residency.can_acquire(rev)

    def _make_way_for_starving(self, step: StepBuilder) -> None:
        for seq in self._drainer.who_gives_way(self._running):
            self._preempt(seq, step)

    def _admit(self, seq: Sequence, step: StepBuilder) -> bool:
        """Start `seq` if the pool holds all its tokens; False = it has to wait for memory."""
        found = self._blocks.cached(seq)
        if not self._blocks.has_room(seq, found, self._running):
            wrong = never_fits(len(seq.tokens), seq.rev, self.limits, self.memory, self.residency)
            if wrong is None:
                return False
            self._deltas.append(self._end(seq, Doom("error", wrong.code, wrong.message)))
            return True
        self._waiting.remove(seq)
        insort(self._running, seq, key=lambda s: s.rank)
        seq.status, seq.admitted_at = Status.RUNNING, self._clock()
        seq.slot = self.residency.acquire(seq.rev) if seq.rev is not None else -1
        if seq.cached_tokens is None:
            self._note_first_admission(seq, found)
        self._blocks.begin(seq, found, step)
        step.begin(seq)
        return True

    def _note_first_admission(self, seq: Sequence, found: list[int]) -> None:
        """A sequence that was preempted finds its own blocks again: that saves nobody anything."""
        seq.cached_tokens = len(found) * self.limits.block_size
        seq.queued_seconds = seq.admitted_at - seq.arrived_at
        prompt = seq.num_prompt - seq.cached_tokens
        self._counters.charge(seq.tenant, seq.account, prompt=prompt, weight=seq.weight)
        if seq.sampling.prompt_logprobs is None and seq.reuses:
            seconds = self.memory.costs.token_seconds
            self._prefix.note(seq.rev or "", seq.num_prompt, found, seq.chain, seconds)

    # ------------------------------------------------------------- small acts
    def _launch(self, step: StepBuilder) -> StepWork | None:
        work = step.build()
        for chunk in work.chunks if work else ():
            chunk.seq.flying += chunk.length
            chunk.seq.owed += chunk.draws
        return work

    def _end_what_cannot_go_on(self) -> None:
        for rev, code, message in self.residency.take_failures():
            for seq in self._waiting.of_revision(rev):
                self._doom(seq, Doom("error", code, message))
        for rev in self.residency.overdue():
            for seq in [s for s in self._running if s.rev == rev]:
                self._doom(seq, Doom("abort", "draining", "its adapter was evicted; try again"))
        for late in self._deadlines.pass_by(self._clock(), self._live):
            self._doom(late, Doom("error", "deadline_exceeded", lateness(late)))
        for rev in self.residency.take_gone():
            self._counters.forget(rev)
            self._prefix.reuse.forget(rev)
            self.speculation.forget_revision(rev)

    def _doom(self, seq: Sequence, doom: Doom) -> None:
        if seq.flying:
            seq.doom = doom
        else:
            self._deltas.append(self._end(seq, doom))

    def _end(self, seq: Sequence, doom: Doom) -> SequenceDelta:
        self._retire(seq)
        return tell(seq, reason=doom.reason, code=doom.code, message=doom.message)

    def _retire(self, seq: Sequence) -> None:
        """Give back everything that a sequence holds, once."""
        if seq.status is Status.RUNNING:
            self._leave_running(seq)
        else:
            self._waiting.remove(seq)
        seq.status = Status.FINISHED
        del self._live[seq.request_id]
        self.drafting.forget(seq)
        self._counters.leave(seq.tenant, seq.account)
        if seq.rev is not None:
            self.residency.end_lease(seq.rev)

    def _leave_running(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._blocks.give_back(seq)
        seq.stay += 1
        if seq.rev is not None:
            self.residency.release(seq.rev)
        seq.slot = -1

    def check(self) -> None:
        """Raise AssertionError unless sequences and owners agree."""
        self._blocks.check(self._running)
        self.memory.check()
        self.residency.check()
        assert len(self._live) == len(self._running) + len(self._waiting)
        ranks = [seq.rank for seq in self._running]
        assert ranks == sorted(ranks), "out of order"
        on = Counter(seq.rev for seq in self._running)
        leases = Counter(seq.rev for seq in self._live.values())
        for revision in self.residency.revisions():
            assert on[revision.rev] == revision.running, f"{revision.rev}: slot reference lost"
            assert leases[revision.rev] == revision.leases, f"{revision.rev}: lease lost"
        for seq in self._live.values():
            seq.check(self.limits.block_size)

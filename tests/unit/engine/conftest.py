"""A small engine without a model: real pool, prefix index, residency and scheduler over fakes.

`Harness` steps it.  Each row of its runner writes a number into a fake arena, made from its token,
its weights and all that lies in the sequence's blocks before it, read back from there; a token is
drawn from the same.  A wrong block, a stale prefix or a wrong slot changes every answer after it.
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from zlib import crc32

import pytest

from engine.adapters.residency import Residency
from engine.adapters.slots import SlotTable
from engine.adapters.tiers import HostDone
from engine.errors import NoRoom
from engine.memory.pool import BlockPool
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer
from engine.messages import (
    AdapterEvent,
    AddRevision,
    Answer,
    Evict,
    Load,
    PackedManifest,
    RemoveRevision,
    SamplingParams,
    SequenceDelta,
    SetRevision,
    Submit,
)
from engine.pooling_messages import PoolRequest
from engine.scheduler import Sampled, Scheduler, SchedulerLimits, StepWork
from engine.sequence import PooledInput
from engine.speculation import verified

BLOCK_BYTES = 100


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeHost:
    """Reads end after `delay[rev]` polls (default `reads_take`), with `errors[rev]` if set.

    They begin with the first poll: until then they can be cancelled.
    """

    def __init__(self, limit_blocks: int = 1000, reads_take: int = 1) -> None:
        self.limit_bytes = limit_blocks * BLOCK_BYTES
        self.reads_take = reads_take
        self.delay: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.reading: dict[str, int] = {}
        self.sizes: dict[str, int] = {}  # of what is ready or being read, oldest first
        self.protected: set[str] = set()
        self.worth: dict[str, int] = {}
        self.num_reads = 0
        self.cancelled: list[str] = []  # in all
        self._queued: set[str] = set()
        self._ended: list[HostDone] = []
        self._lost: list[str] = []

    @property
    def used_bytes(self) -> int:
        return sum(self.sizes.values())

    def want(self, rev: str, path: str, num_bytes: int) -> bool:
        if rev in self.sizes:
            return True
        for victim in sorted(self.sizes, key=lambda r: self.worth.get(r, 50)):
            full = self.used_bytes + num_bytes > self.limit_bytes
            if full and victim not in self.reading and victim not in self.protected:
                del self.sizes[victim]
                self._lost.append(victim)
        if self.used_bytes + num_bytes > self.limit_bytes:
            return False
        self.sizes[rev] = num_bytes
        self.reading[rev] = self.delay.get(rev, self.reads_take)
        self.num_reads += 1
        self._queued.add(rev)
        return True

    def cancel(self, rev: str) -> None:
        if rev in self._queued:
            self._queued.discard(rev)
            self.cancelled.append(rev)
            self._ended.append(HostDone(rev, cancelled=True))

    def ready(self, rev: str) -> bool:
        return rev in self.sizes and rev not in self.reading

    def protect(self, rev: str, on: bool) -> None:
        (self.protected.add if on else self.protected.discard)(rev)

    def appraise(self, rev: str, worth: int) -> None:
        self.worth[rev] = worth

    def touch(self, rev: str) -> None:
        if rev in self.sizes:
            self.sizes[rev] = self.sizes.pop(rev)

    def drop(self, rev: str) -> None:
        assert rev not in self.reading, "dropped while it is read"
        self.sizes.pop(rev, None)

    def take_lost(self) -> list[str]:
        lost, self._lost = self._lost, []
        return lost

    def poll(self) -> list[HostDone]:
        told, self._ended = self._ended, []
        for done in told:
            del self.reading[done.rev], self.sizes[done.rev]
        self._queued.clear()
        self.reading = {rev: left - 1 for rev, left in self.reading.items()}
        ended = [rev for rev, left in self.reading.items() if left <= 0]
        for rev in ended:
            del self.reading[rev]
            if self.errors.get(rev):
                del self.sizes[rev]
        return told + [HostDone(rev, self.errors.get(rev, "")) for rev in ended]


class FakeCopier:
    """Copies end after `copies_take` polls; then the arena's blocks hold the revision.

    For those in `no_memory` the device has none left.
    """

    def __init__(self, pool: BlockPool, host: FakeHost, arena: dict[int, object]) -> None:
        self.pool = pool
        self.host = host
        self.arena = arena
        self.copies_take = 1
        self.copying: dict[str, int] = {}
        self.targets: dict[str, list[int]] = {}
        self.fences: dict[str, tuple[object, ...]] = {}
        self.cancelled: list[str] = []
        self.no_memory: set[str] = set()
        self.cut_short: set[str] = set()  # cancelled in time: their blocks stay half copied

    def start(self, rev: str, blocks: list[int]) -> None:
        assert rev not in self.copying and self.host.ready(rev)
        if rev in self.no_memory:
            raise NoRoom("the device has no memory left")
        self.copying[rev] = self.copies_take
        self.cut_short.discard(rev)
        self.targets[rev] = list(blocks)
        self.fences[rev] = self.pool.take_fences(blocks)
        self.pool.fence(blocks, f"copy of {rev}")
        for block in blocks:
            self.arena[block] = "half copied"

    def poll(self) -> list[str]:
        self.copying = {rev: left - 1 for rev, left in self.copying.items()}
        ended = [rev for rev, left in self.copying.items() if left <= 0]
        for rev in ended:
            del self.copying[rev]
            for block in self.targets[rev] if rev not in self.cut_short else ():
                self.arena[block] = rev
        return ended

    def busy(self, rev: str) -> bool:
        return rev in self.copying

    def cancel(self, rev: str) -> None:
        self.cancelled.append(rev)
        if self.copying[rev] > 1:
            self.cut_short.add(rev)


class Harness:
    """Everything of part "scheduling", and a fake runner.  Sizes in blocks."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        slots: int = 4,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 32,
        mixed_tokens: int = 0,  # 0 = max_batch_tokens
        crowd_tokens: int = 0,  # 0 = mixed_tokens
        max_model_len: int = 64,
        kv_floor: int = 8,
        adapter_floor: int = 0,
        policy: str = "cost",
        ram_blocks: int = 1000,
        blocks_in_flight: int = 1000,
        starve_after: float = 2.0,
        thrash_window: float = 60.0,
        eos: frozenset[int] = frozenset(),
        step_seconds: float = 0.01,
        pooled_tokens: int = 1 << 30,
        lookahead: bool = False,
        speculation_tokens: int = 0,
    ) -> None:
        self.clock = Clock()
        self.step_seconds = step_seconds
        self.arena: dict[int, object] = {}
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixIndex(self.pool, block_size, self.clock)
        self.memory = Reclaimer(
            self.pool,
            self.prefix,
            policy=policy,  # type: ignore[arg-type]
            kv_floor=kv_floor,
            adapter_floor=adapter_floor,
        )
        self.slots = SlotTable(slots)
        self.host = FakeHost(ram_blocks)
        self.copier = FakeCopier(self.pool, self.host, self.arena)
        self.residency = Residency(
            slots=self.slots,
            host=self.host,
            copier=self.copier,
            room=self.memory,
            clock=self.clock,
            block_bytes=BLOCK_BYTES,
            bytes_in_flight=blocks_in_flight * BLOCK_BYTES,
            thrash_window=thrash_window,
        )
        self.scheduler = Scheduler(
            memory=self.memory,
            residency=self.residency,
            limits=SchedulerLimits(
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                mixed_tokens=mixed_tokens or max_batch_tokens,
                crowd_tokens=crowd_tokens,
                max_model_len=max_model_len,
                eos_token_ids=eos,
                starve_after=starve_after,
                speculation_tokens=speculation_tokens,
                pooled_tokens=pooled_tokens,
            ),
            clock=self.clock,
        )
        self.scheduler.speculation._guess = self._guess
        self.pooled: dict[str, int] = {}  # what the last row of each was
        self._rows_read: dict[str, list[int]] = {}  # of those of which all are
        self.num_right: Counter[int] = Counter()  # drafts by how many of their tokens were right
        self.work: StepWork | None = None
        self.lookahead = lookahead
        #: Launched and not settled, oldest first; computed at launch, as a stream would in order.
        self.flights: deque[tuple[StepWork, dict[str, Sampled]]] = deque()
        self._drawing: dict[object, int] = {}  # what the last flight draws, on the "device"
        self.deltas: dict[str, list[SequenceDelta]] = {}
        self.events: list[AdapterEvent] = []
        self.answers: dict[int, Answer] = {}
        self.shares_base_kv: set[str | None] = {None}
        self.invocations: dict[str | None, tuple[int, ...]] = {}  # of those that are activated
        self._ids = count(1)

    # ------------------------------------------------------------- asking for things
    def submit(
        self,
        request_id: str,
        prompt: list[int],
        rev: str | None = None,
        *,
        max_tokens: int = 4,
        priority: int = 50,
        salt: str = "",
        deadline: float | None = None,
        fallback: str = "",
        tenant: str = "",
        weight: float = 1.0,
        **sampling: object,
    ) -> None:
        self.scheduler.add(
            Submit(
                request_id=request_id,
                prompt=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
                rev=rev,
                priority=priority,
                cache_salt=salt,
                deadline_seconds=deadline,
                alora_fallback=fallback,  # type: ignore[arg-type]
                tenant=tenant,
                weight=weight,
            )
        )

    def pool_input(
        self,
        request_id: str,
        tokens: list[int],
        rev: str | None = None,
        *,
        reuses: bool = True,
        **more: object,
    ) -> None:
        """An input that is pooled: of its rows the last is read, or without `reuses` all are."""
        asked = Submit(
            request_id=request_id,
            prompt=tokens,
            sampling=SamplingParams(max_tokens=0),
            rev=rev,
            **more,  # type: ignore[arg-type]
        )
        request = PoolRequest(request_id=request_id, tokens=tokens)
        self.scheduler.add(asked, PooledInput(request, len(tokens), reuses=reuses))

    def add(
        self,
        rev: str,
        num_blocks: int = 2,
        *,
        changes_kv: bool = True,
        pinned: bool = False,
        priority: int = 50,
        alora_tokens: tuple[int, ...] = (),
        num_tokens: int = 0,
        tokenizer: str = "",
    ) -> int:
        if not changes_kv:
            self.shares_base_kv.add(rev)
        self.invocations[rev] = alora_tokens
        manifest = PackedManifest(
            rev=rev,
            path=f"/{rev}.bin",
            layout="x",
            num_blocks=num_blocks,
            true_bytes=1,
            max_rank=1,
            changes_kv=changes_kv,
            modules=(),
            alora_tokens=alora_tokens,
            num_tokens=num_tokens,
            tokenizer=tokenizer,
        )
        return self.command(AddRevision, manifest=manifest, priority=priority, pinned=pinned)

    def remove(self, rev: str) -> int:
        return self.command(RemoveRevision, rev=rev)

    def load(self, rev: str, tier: str = "gpu") -> int:
        return self.command(Load, rev=rev, tier=tier)

    def evict(self, rev: str, **options: object) -> int:
        return self.command(Evict, rev=rev, **options)

    def set(self, rev: str, *, pinned: bool, priority: int = 50) -> int:
        return self.command(SetRevision, rev=rev, pinned=pinned, priority=priority)

    def command(self, kind: type, **fields: object) -> int:
        command_id = next(self._ids)
        self.residency.command(kind(command_id=command_id, **fields))
        self._collect([])
        return command_id

    # ------------------------------------------------------------- letting time pass
    def launch(self) -> StepWork | None:
        """Half a step: scheduled and launched, not settled."""
        self.clock.now += self.step_seconds
        if self.flights and self.scheduler.drafting.must_know(self.flights[-1][0]):
            self.work = None
            self.settle()
        self._decoding = {s for s in self.scheduler._running if not s.is_prompt}
        self.work = self.scheduler.schedule()
        self._check_order()
        if self.work is not None:
            self.flights.append((self.work, self._run(self.work)))
        return self.work

    def settle(self) -> None:
        """The other half: of the step before the launched one, if there is lookahead."""
        deltas = []
        if len(self.flights) > (self.lookahead and self.work is not None):
            deltas = self.scheduler.settle(*self.flights.popleft())
        self._collect(deltas)
        self.scheduler.check()
        for revision in self.residency.revisions():
            held = revision.goal or revision.reading or revision.copying
            assert held or revision.rev not in self.host.protected, "host memory held for nobody"

    def step(self, times: int = 1) -> StepWork | None:
        work = None
        for _ in range(times):
            work = self.launch()
            self.settle()
        return work

    def run(self, *, until: Callable[[], bool] | None = None, limit: int = 500) -> int:
        """Step until the condition holds (default: nothing is left to do); returns the steps."""
        for steps in range(limit):
            if until() if until else not self.scheduler.has_work and not self.flights:
                return steps
            self.step()
        raise AssertionError(f"not there after {limit} steps")

    # ------------------------------------------------------------- looking
    def tokens(self, request_id: str) -> list[int]:
        return [t for delta in self.deltas.get(request_id, []) for t in delta.tokens]

    def end(self, request_id: str) -> SequenceDelta | None:
        ends = [d for d in self.deltas.get(request_id, []) if d.finish_reason]
        assert len(ends) <= 1, "two ends"
        return ends[0] if ends else None

    def state(self, rev: str) -> str:
        return {r.rev: r.state for r in self.residency.revisions()}[rev]

    def code(self, command_id: int) -> str | None:
        """None = not answered yet."""
        answer = self.answers.get(command_id)
        return answer.code if answer else None

    def resident(self, *revs: str) -> None:
        """Add nothing; bring known revisions to the GPU."""
        for rev in revs:
            self.load(rev)
        self.run()

    def alone(self, prompt: list[int], rev: str | None, num_tokens: int) -> list[int]:
        """What the fake model answers, computed from its definition, one token after another."""
        writer = None if rev in self.shares_base_kv else rev
        begin = activation(prompt, self.invocations.get(rev, ()))
        assert begin is not None or not num_tokens, "never runs"
        answer: list[int] = []
        history = 0
        for i, token in enumerate(prompt):
            history = _after(history, _row(history, token, writer if i >= (begin or 0) else None))
        for _ in range(num_tokens):
            answer.append(_draw(history, rev))
            history = _after(history, _row(history, answer[-1], writer))
        return answer

    # ------------------------------------------------------------- the fake runner
    def _run(self, work: StepWork) -> dict[str, Sampled]:
        drawn = {}
        drawing = {}
        for chunk in work.chunks:
            seq, draws = chunk.seq, []
            known = (*seq.tokens, *chunk.drafts)
            weights = self._weights(seq.slot)
            writer = None if weights in self.shares_base_kv else weights
            history = 0
            for i in range(chunk.start + chunk.length):
                number, offset = seq.blocks[i // self.block_size], i % self.block_size
                if i >= chunk.start:
                    token = known[i] if i < len(known) else self._drawing[seq]
                    block = self.arena.setdefault(number, {})
                    if not isinstance(block, dict):
                        block = self.arena[number] = {}
                    by = writer if i >= seq.activation else None
                    block[offset] = (_row(history, token, by), i)
                value, position = self.arena[number][offset]  # type: ignore[index]
                assert position == i, "KV of another position"
                history = _after(history, value)
                if i >= chunk.start + chunk.length - chunk.draws:
                    draws.append(Sampled(_draw(history, weights)))
            if seq.pooled is not None:
                self._read(chunk, _draw(history, weights))
            if chunk.samples:
                drawing[seq] = draws[0].token
                drawn[seq.request_id] = told = verified(chunk.drafts, draws)
                if chunk.drafts:
                    self.num_right[len(told.more)] += 1
        self._drawing = drawing
        return drawn

    def _read(self, chunk, last: int) -> None:
        """As a pooler does; what was kept of rows before is void when the first one comes."""
        seq, rows = chunk.seq, range(chunk.start, chunk.start + chunk.length)
        ends = rows.stop == len(seq.tokens)
        if not seq.pooled.reuses:
            kept = self._rows_read.setdefault(seq.request_id, [])
            kept[:] = rows if not chunk.start else [*kept, *rows]
            assert not ends or kept == list(range(len(seq.tokens))), "a row was left out"
        if ends:
            self.pooled[seq.request_id] = last

    def _guess(self, seq, most: int) -> tuple[int, ...]:
        """What the fake model will draw, wrong from some place on or nowhere; now and then none."""
        if not crc32(f"{seq.request_id} {len(seq.tokens)}".encode()) % 5:
            return ()
        begun = seq.num_generated
        right = self.alone(seq.tokens[: seq.num_prompt], seq.rev, begun + most)[begun:]
        wrong_at = crc32(f"{len(seq.tokens)} {seq.request_id}".encode()) % (most + 2)
        return tuple(t + (i >= wrong_at) for i, t in enumerate(right))

    def _weights(self, slot: int) -> str | None:
        if slot < 0:
            return None
        row = self.slots.rows[slot]
        assert all(self.arena[b] == row.rev for b in row.blocks), "half an adapter"
        return row.rev

    def _check_order(self) -> None:
        """Rows of a slot are consecutive, base first; budgets hold."""
        chunks = self.work.chunks if self.work else ()
        slots = [c.seq.slot if c.inactive < c.length else -1 for c in chunks]
        assert slots == sorted(slots)
        decoding = sum(1 + len(c.drafts) for c in chunks if c.seq in self._decoding)
        limits = self.scheduler.limits
        most = max(limits.rows(decoding), limits.rows(decoding, 10**9))
        assert sum(c.length for c in chunks) <= most
        assert len({c.seq.request_id for c in chunks}) == len(chunks)
        for c in chunks:
            row = self.slots.rows.get(c.seq.slot)
            assert (row.rev if row else None) == c.seq.rev, "rows on other weights"

    def _collect(self, deltas: list[SequenceDelta]) -> None:
        for delta in [*deltas, *self.scheduler.take_deltas()]:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        self.events += self.residency.take_events()
        for answer in self.residency.take_answers():
            assert answer.command_id not in self.answers, "two answers to one command"
            self.answers[answer.command_id] = answer


def _number(rev: str | None) -> int:
    """Of a revision's weights; `hash` of a text differs between runs."""
    return crc32((rev or "").encode())


def _row(history: int, token: int, writer: str | None) -> int:
    """The KV of a token after `history`, under the weights of `writer`."""
    return hash((history, token, _number(writer)))


def activation(prompt: list[int], wanted: tuple[int, ...]) -> int | None:
    """From which row an adapter acts, by its definition; None: it is not invoked."""
    if not wanted:
        return 0
    places = [i for i in range(len(prompt)) if tuple(prompt[i : i + len(wanted)]) == wanted]
    return max(places, default=None)


def _after(history: int, row: int) -> int:
    """All rows so far, as one number."""
    return hash((history, row))


def _draw(history: int, weights: str | None) -> int:
    return hash((history, _number(weights), 1)) % 9973


@pytest.fixture(scope="session")
def make() -> type[Harness]:
    return Harness

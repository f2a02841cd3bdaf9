"""One step on the device: pack, one forward pass, sample.

Goes in: the scheduler's work.  Comes out: a `Sampled` for each sequence whose last row is sampled.
`launch`, `sample` and `collect` are the three parts of a step, `run` all of them: only `collect`
waits for the device.  Whatever the mix of adapters, there is one forward pass a step, and
`forward_passes` counts them.  Knows nothing of queues, tiers or stop rules.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.adapters.plan import StepPlanner
from engine.adapters.slots import SlotRow
from engine.batch import Batch, Batcher, Packed
from engine.forward import Forward
from engine.graphs import START_GRAPHS
from engine.guides import Masks
from engine.kernels.lora_meta import LoraMeta
from engine.ladder import Ladder, Rung
from engine.memory.arena import Arena
from engine.messages import PackedManifest, TokenLogprobs
from engine.models.decoder import Decoder
from engine.sampler import Drawn, Sampler
from engine.sequence import Chunk, Sampled, Sequence, StepWork
from engine.speculation import verified
from engine.upload import Words

NO_MASKS = Masks()
#: Prompt rows get their logits this many at a time: 2,048 rows of a 128k vocabulary are 1 GB.
PROMPT_ROWS = 128
#: (rows, slot) of a step's rows, side by side; -1 = the base model.
Owners = list[tuple[int, int]]


@dataclass(slots=True)
class Flight:
    """A step that was launched.  `logits` has a row for each draw."""

    work: StepWork
    batch: Batch
    logits: Tensor | None
    drawn: Drawn | None = None
    pooled: object = None  # what `Runner.pool` made of its hidden states
    late: frozenset[int] = frozenset()  # rows whose draw is nobody's
    launched: float = 0.0  # seconds of the caller's clock


class Crew(Protocol):
    """The ranks beside the first."""

    def step(
        self,
        packed: Packed,
        lora: LoraMeta | None,
        owners: Owners | None,
        owed: list[tuple[int, int]],
    ) -> None:
        """They do the same forward pass."""
        ...


class Runner:
    """Runs steps.  Used from the step loop's thread only."""

    def __init__(
        self, model: Decoder, arena: Arena, batcher: Batcher, planner: StepPlanner, sampler: Sampler
    ) -> None:
        self._model = model
        may_bring = model.spec.extra_vocab and model.ranks is None
        own = planner.own_embeddings() if may_bring else None
        self.forward = Forward(model, arena, batcher.ladder, own)
        self._device = arena.device
        self._batcher = batcher
        self._planner = planner
        planner.bind(batcher.plan)
        #: What draws; a model that drafts draws with it too.
        self.sampler = self._sampler = sampler
        #: Padded steps; None where steps are not padded.
        self.graphs = self.forward.graphs
        #: The other ranks, who are told every step; None = there are none, or all do the same.
        self.crew: Crew | None = None
        #: What the last draw is for: sequence -> its place in the batcher's `ids`.
        self._drawing: dict[Sequence, int] = {}
        #: request id -> position -> log-probability of that prompt token, until the first sample.
        self._prompts: dict[str, dict[int, TokenLogprobs]] = {}
        #: Of an engine that pools: gets a step's chunks and their hidden states (T, hidden).
        self.pool: Callable[[Seq[Chunk], Tensor], object] | None = None
        self.forward_passes = 0
        #: What the next owner of a block that this step has used waits for; None on the CPU.
        self.fence: torch.cuda.Event | None = None

    @property
    def vocab_size(self) -> int:
        """Of the embedding: any of these ids may be in a sequence, and others of its adapter's."""
        return self._model.spec.vocab_size

    @property
    def room(self) -> int:
        """Columns behind the model's weights for guests (`guests.py`)."""
        return self._model.room

    @property
    def ladder(self) -> Ladder | None:
        """What steps are padded to; None where they are not."""
        return self._batcher.ladder

    def usual(self) -> list[tuple[Rung, LoraMeta | None]]:
        """What graphs are captured for at start, the most rows first; None = base rows only.

        As fine a choice as START_GRAPHS graphs allow, or the coarsest.  Nothing where steps are not
        padded.
        """
        rungs = self.ladder.all if self.ladder else ()
        for coarse in (1, 2, 4, 8):
            plans: list[tuple[Rung, LoraMeta | None]] = []
            for rung in rungs:
                plans.append((rung, None))
                plans += [(rung, plan) for plan in self._planner.classes(rung, coarse)]
            if len(plans) <= START_GRAPHS:
                break
        return plans

    def capture(self, progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Capture the usual graphs."""
        usual = self.usual()
        for done, (rung, plan) in enumerate(usual, start=1):
            self.capture_one(rung, plan)
            progress(done / len(usual))

    @torch.inference_mode()
    def capture_one(self, rung: Rung, plan: LoraMeta | None) -> None:
        """Capture the graph of one rung and plan."""
        assert self.graphs is not None, "nothing is captured where steps are not padded"
        self.graphs.capture(self._batcher.blank(rung), plan)

    def pretending(
        self, rows: Mapping[int, SlotRow], manifest_of: Callable[[str], PackedManifest]
    ) -> AbstractContextManager[None]:
        """Run steps on other slots than the table's for a while; see `StepPlanner`."""
        return self._planner.pretending(rows, manifest_of)

    def run(self, work: StepWork) -> dict[str, Sampled]:
        """Request id -> what was drawn, for the chunks that sample."""
        flight = self.launch(work)
        self.sample(flight)
        return self.collect(flight)

    @torch.inference_mode()
    def launch(self, work: StepWork) -> Flight:
        """Upload, and start the forward pass.

        A row whose token the last `sample` is still drawing finds it on the device.
        """
        plans: list[LoraMeta | None] = []

        def plan(words: Words, rung: Rung | None) -> int:
            known = self.graphs.kinds(rung) if self.graphs and rung else ()
            plans.append(self._planner.meta(work, words, rung, known))
            return self._planner.words_of(plans[0])

        batch = self._batcher.pack(work, self._drawing, plan)
        owners, owed = self._embedding_owners(work), _owed(work.chunks)
        if self.crew is not None:
            self.crew.step(self._batcher.packed(), plans[0], owners, [one.rows for one in owed])
        self._wait_for(work.fences)
        logits, hidden = self._forward(batch, plans[0], owners, owed)
        pooled = self.pool(work.chunks, hidden) if self.pool is not None else None
        self.forward_passes += 1
        self._record_fence()
        return Flight(work, batch, logits, pooled=pooled)

    @torch.inference_mode()
    def sample(self, flight: Flight, masks: Masks = NO_MASKS) -> None:
        """Start the draw for a launched step; its sequences' earlier tokens are known by now.

        What is drawn for the `late` rows of `masks`, which it needs none for, is nobody's.
        """
        flight.late = frozenset(masks.late)
        self._drawing = {seq: i for i, seq in enumerate(flight.batch.sampled)}
        if flight.logits is None:
            return
        flight.drawn = self._sampler.launch(
            flight.logits,
            flight.batch.sampled,
            tokens=self._batcher.ids,
            masks=masks.ready,
            ahead=flight.batch.ahead,
        )
        flight.logits = None
        self.share_draws(flight.batch)

    def share_draws(self, batch: Batch) -> None:
        """Where the next step may stand on tokens that only a device knows, all ranks' do."""
        ranks = self._model.ranks
        if ranks is not None and self._batcher.lookahead and batch.sampled:
            ranks.from_first(self._batcher.ids[: len(batch.sampled)])

    @torch.inference_mode()
    def follow(
        self,
        packed: Packed,
        lora: LoraMeta | None,
        owners: Owners | None,
        owed: list[tuple[int, int]],
    ) -> None:
        """What `launch` of another rank's runner does, and the device's part of its `sample`."""
        batch = self._batcher.lay(packed)
        embedded = self._embedded(batch, owners)
        self.forward.run(batch, lora, embedded, owed)
        self.share_draws(batch)
        self._record_fence()

    def collect(self, flight: Flight) -> dict[str, Sampled]:
        """Wait for the draw: request id -> what was drawn."""
        if flight.drawn is None:
            return {}
        drawn = self._sampler.finish(flight.drawn)
        if flight.batch.ahead:
            return self._verified(flight, drawn)
        return {
            seq.request_id: self._with_prompt(seq, one)
            for row, (seq, one) in enumerate(zip(flight.batch.sampled, drawn, strict=True))
            if row not in flight.late
        }

    def start_over(self) -> None:
        """Forget every step so far: they were a rehearsal."""
        self.forward_passes, self.fence = 0, None
        if self.graphs is not None:
            self.graphs.start_over()
        self._drawing.clear()
        self._prompts.clear()
        self._batcher.forget()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what was kept for sequences that have ended."""
        for request_id in request_ids:
            self._prompts.pop(request_id, None)

    # ------------------------------------------------------------- one level down
    def _verified(self, flight: Flight, drawn: list[Sampled]) -> dict[str, Sampled]:
        """The same of a step with drafts: several rows may be one sequence's."""
        rows: dict[Sequence, list[int]] = {}
        for row, seq in enumerate(flight.batch.sampled):
            rows.setdefault(seq, []).append(row)
        told = {}
        for seq, own in rows.items():
            if own[0] not in flight.late:
                drafts = flight.batch.ahead.get(own[-1], ())
                one = verified(drafts, [drawn[row] for row in own])
                told[seq.request_id] = self._with_prompt(seq, one)
        return told

    def _forward(
        self, batch: Batch, lora: LoraMeta | None, owners: Owners | None, owed: "list[_Owed]"
    ) -> tuple[Tensor | None, Tensor]:
        """Logits of the sampled rows, None if there are none; and hidden states of all."""
        embedded = self._embedded(batch, owners)
        told = iter(owed)
        logits, hidden = self.forward.run(
            batch,
            lora,
            embedded,
            [one.rows for one in owed],
            lambda logits, hidden: self._note_prompt(next(told), logits, hidden),
        )
        return self._adapted(batch, logits, hidden), hidden

    def _embedded(self, batch: Batch, owners: Owners | None) -> Tensor | None:
        """All rows' embeddings, if some row's adapter has a part in them."""
        if owners is None:
            return None
        ends = self._planner.ends(owners, "embed_tokens", joined=True)
        return self._model.embed(batch.tokens, ends)

    def _embedding_owners(self, work: StepWork) -> Owners | None:
        """(rows, slot) of a step for which some row's adapter has a part in the embeddings that is
        computed ahead of it; None in a usual step."""
        owners: Owners = []
        if self._planner.has_ends:
            for c in work.chunks:
                owners += ((c.inactive, -1), (c.length - c.inactive, c.seq.slot))
        return None if self._planner.place_own(owners) else owners

    def _adapted(self, batch: Batch, logits: Tensor | None, hidden: Tensor) -> Tensor | None:
        """The logits of the sampled rows as their adapters' heads have them; in a usual step none
        of these has any."""
        sampled = ((1, seq.slot) for seq in batch.sampled)
        ends = self._planner.ends(sampled, "lm_head", joined=True)
        if ends is not None and logits is not None:
            rows = batch.sample_rows[: len(batch.sampled)]
            self._model.adapt_logits(logits, hidden.index_select(0, rows), ends)
        return logits

    def _wait_for(self, fences: tuple[object, ...]) -> None:
        for fence in fences:
            assert isinstance(fence, torch.cuda.Event)
            torch.cuda.current_stream(self._device).wait_event(fence)

    def _record_fence(self) -> None:
        if self._device.type == "cuda":
            self.fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.fence.record(torch.cuda.current_stream(self._device))

    def _note_prompt(self, one: "_Owed", logits: Tensor, hidden: Tensor) -> None:
        """Row i speaks of token i + 1; the prompt's last row speaks of no prompt token."""
        seq, count = one.chunk.seq, one.stop - one.start
        base = min(max(one.chunk.start + one.chunk.inactive - one.start, 0), count)
        owners = (base, -1), (count - base, seq.slot)
        ends = self._planner.ends(owners, "lm_head", joined=True)
        if ends is not None:
            self._model.adapt_logits(logits, hidden, ends)
        targets = seq.tokens[one.start + 1 : one.stop + 1]
        num_top = seq.sampling.prompt_logprobs or 0
        limit = seq.num_tokens
        rows = self._sampler.prompt_logprobs(logits, targets, num_top, limit)
        known = self._prompts.setdefault(seq.request_id, {})
        known.update(zip(range(one.start + 1, one.stop + 1), rows, strict=True))

    def _with_prompt(self, seq: Sequence, sampled: Sampled) -> Sampled:
        if not _owes_prompt(seq):
            return sampled
        known = self._prompts.pop(seq.request_id, {})
        if len(known) < seq.num_prompt - 1:  # a second Submit of this id was refused meanwhile
            return sampled
        rows = (None, *(known[i] for i in range(1, seq.num_prompt)))
        return replace(sampled, prompt_logprobs=rows)


@dataclass(frozen=True, slots=True)
class _Owed:
    """Prompt tokens [start, stop) of a chunk whose first row is row `at` of the step: those behind
    them are owed their log-probabilities."""

    chunk: Chunk
    at: int
    start: int
    stop: int

    @property
    def rows(self) -> tuple[int, int]:
        first = self.at + self.start - self.chunk.start
        return first, first + self.stop - self.start


def _owed(chunks: tuple[Chunk, ...]) -> list[_Owed]:
    """At most PROMPT_ROWS of them at a time; nothing in a usual step."""
    found, row = [], 0
    for chunk in chunks:
        if _owes_prompt(chunk.seq):
            end = min(chunk.start + chunk.length, chunk.seq.num_prompt - 1)
            for start in range(chunk.start, end, PROMPT_ROWS):
                found.append(_Owed(chunk, row, start, min(start + PROMPT_ROWS, end)))
        row += chunk.length
    return found


def _owes_prompt(seq: Sequence) -> bool:
    """Asked for, and not told yet: it goes out with the first sampled token."""
    return seq.sampling.prompt_logprobs is not None and len(seq.tokens) == seq.num_prompt

"""EngineCore: the step loop's body.  `step` is the whole engine as one sentence.

Goes in: commands, through `take`.  Comes out: a StepFrame from every `step`, with all that the step
has to say.  Everything here happens on the thread that calls it; readers, copiers and the socket
have threads of their own, and ring `bell` when there is something to do.

With lookahead (on a card) a step is launched before the last one is settled, so that settling,
telling, scheduling and packing happen while the device computes.  The device's queue never runs
empty: forward N, draw N, forward N + 1, where the draw is put there once draw N - 1 is settled.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from engine.adapters.residency import Residency
from engine.adapters.slots import SlotTable
from engine.admission import SchedulerLimits
from engine.assembly import is_card, make_draft_model, make_planner, make_runner, warm_up
from engine.config import EngineConfig
from engine.desk import Desk, Owners
from engine.errors import EngineError
from engine.explain import Explainer
from engine.grammar_shelf import GrammarShelf
from engine.guides import Guides
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer
from engine.messages import Command, EngineInfo, PackedManifest, SequenceDelta, StepFrame
from engine.pooling.beside import Beside
from engine.pooling_messages import Pooled
from engine.prefill_clock import PrefillClock
from engine.ranks.building import build_all
from engine.runner import Flight
from engine.scheduler import Scheduler
from engine.sequence import StepWork
from engine.snapshot import Painter, Traffic
from engine.startup import Machine
from engine.stats import Stats
from engine.status_messages import EngineSnapshot
from engine.verifier import Verifier

#: How long an idle loop sleeps if nobody rings: never needed, but a lost ring must not hang it.
IDLE_SECONDS = 1.0
#: While something waits on a clock or on room (deadlines, drains, starvation).
WAITING_SECONDS = 0.01
#: While the copy stream works: nobody rings when an event completes.
COPYING_SECONDS = 0.0005


class EngineCore:
    """One engine on the calling thread.  `progress` hears of the start; see `engine/startup.py`.

    `lookahead` None: on a card, unless deterministic.  `on_death`, from another thread, when a rank
    has died without which no step ends; None: the process says so and ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[str, float], None] = lambda *_: None,
        bell: threading.Event | None = None,
        lookahead: bool | None = None,
        on_death: Callable[[EngineError], None] | None = None,
    ) -> None:
        self.bell = bell or threading.Event()
        #: `crew`: the other ranks of the model; None = this process has all of it.
        self.machine, self.crew = build_all(
            config,
            progress=progress,
            wake=self.bell.set,
            lookahead=lookahead,
            on_death=on_death,
        )
        machine = self.machine
        self.config = config = machine.config
        self.info: EngineInfo = machine.info
        self.pool = machine.pool
        self.slots = SlotTable(config.slots)
        self.prefix = PrefixIndex(self.pool, config.block_size, time.monotonic)
        self.reclaimer = Reclaimer(
            self.pool,
            self.prefix,
            policy=config.eviction,
            kv_floor=_kv_floor(machine),
            adapter_floor=config.adapter_floor // machine.layout.block_bytes,
        )
        self.residency = Residency(
            slots=self.slots,
            host=machine.host,
            copier=machine.copier,
            room=self.reclaimer,
            clock=time.monotonic,
            block_bytes=machine.layout.block_bytes,
            shards=machine.layout.shards,
            bytes_in_flight=config.load_bytes_in_flight,
            thrash_window=config.thrash_window,
            layout=machine.layout.id,
            base=machine.info.base,
            max_rank=config.max_rank,
            vocabulary=machine.vocabulary,
        )
        if lookahead is None:
            lookahead = machine.device.type == "cuda" and not config.deterministic
        self.lookahead = lookahead
        planner = make_planner(
            config, machine.arena, self.slots.rows, self._manifest, machine.model.room
        )
        self.runner = make_runner(
            config, machine.model, machine.arena, planner, machine.vocab_size, lookahead=lookahead
        )
        self.pooling = Beside(machine, planner) if config.pools is not None else None
        if self.pooling is not None:
            self.runner.pool = self.pooling.launch
            generates = config.purpose != "pool"
            self.info = replace(self.info, pooling=self.pooling.info, generates=generates)
        self.draft_model = None
        if machine.draft is not None:
            self.draft_model = make_draft_model(config, machine.draft, machine.arena, self.runner)
        self.scheduler = Scheduler(
            memory=self.reclaimer,
            residency=self.residency,
            limits=_limits(machine),
            clock=time.monotonic,
            draft_model=self.draft_model,
        )
        self.verifier = Verifier(
            machine.arena,
            planner,
            self.residency,
            rows=config.max_batch_tokens,
            deterministic=config.deterministic,
            wake=self.bell.set,
        )
        tokenizer, ends = Path(config.model) / "tokenizer.json", machine.spec.eos_token_ids
        shelf = GrammarShelf(tokenizer, machine.vocab_size, ends)
        self.guides = Guides(shelf.of, self.bell.set)
        if is_card(machine.device) and self.info.generates:
            self.guides.read_ahead()
        drafts = self.draft_model
        warm_up(self.runner, drafts, self.verifier, config, machine.layout, progress)
        if self.crew is not None:
            self.crew.serve()
            self.runner.crew, planner.on_slot = self.crew, self.crew.slot
        self.stats = Stats(self._lora_bytes)
        self._painter = Painter(
            pool=self.pool,
            prefix=self.prefix,
            slots=self.slots,
            host=machine.host,
            residency=self.residency,
            stats=self.stats,
            block_size=config.block_size,
            block_bytes=machine.layout.block_bytes,
        )
        explainer = Explainer(
            residency=self.residency,
            memory=self.reclaimer,
            scheduler=self.scheduler,
            clock=time.monotonic,
            block_bytes=machine.layout.block_bytes,
        )
        self._desk = Desk(
            Owners(
                scheduler=self.scheduler,
                residency=self.residency,
                guides=self.guides,
                verifier=self.verifier,
                explainer=explainer,
                pooling=self.pooling,
                snapshot=self.snapshot,
            ),
            vocabulary=machine.vocabulary,
            generates=self.info.generates,
            alone=self.crew is None,
        )
        self._flight: Flight | None = None  # launched, and not settled
        self._prefill = PrefillClock(self.reclaimer.costs.observe_prefill)
        self._ran = False
        progress("ready", 1.0)

    # ------------------------------------------------------------- the sentence
    def take(self, command: Command) -> None:
        """Queue a command for the next step."""
        self._desk.take(command)

    def step(self) -> StepFrame:
        """One turn: what arrived, what has ended, what runs now, what there is to tell."""
        self._desk.carry_out()
        self._let_guided_go_on()
        under_way = self._flight is not None
        deltas = self._settle_what_must_be_known()
        work = self.scheduler.schedule()  # polls reads and copies first
        deltas += self.scheduler.take_deltas()
        self._ran = work is not None or under_way
        deltas += self._advance(work)
        self.verifier.advance()
        return self._publish(deltas)

    @property
    def idle(self) -> bool:
        """The last step ran and settled nothing: `wait` before the next one."""
        return not (self._ran or self._desk.busy or self.verifier.waiting)

    @property
    def starts_per_second(self) -> float:
        """How fast queued sequences begin while some wait that could run; any thread may ask."""
        return self.scheduler.backlog.per_second

    def wait(self) -> None:
        """Sleep until the bell rings, or until something that waits on a clock may be due."""
        copying = self.machine.copier.in_flight or self.verifier.in_flight
        if self.machine.device.type == "cuda" and copying:
            seconds = COPYING_SECONDS
        elif self.scheduler.has_work:
            seconds = WAITING_SECONDS
        else:
            seconds = IDLE_SECONDS
        self.bell.wait(seconds)
        self.bell.clear()

    def shutdown(self) -> StepFrame:
        """End every sequence with reason "abort", and tell so."""
        self._desk.carry_out()
        deltas = self._advance(None)
        self.scheduler.abort_all("draining", "the engine is shutting down")
        return self._publish([*deltas, *self.scheduler.take_deltas()])

    def snapshot(self) -> EngineSnapshot:
        """One consistent picture; call it between two steps."""
        self.stats.keep(r.rev for r in self.residency.revisions())
        scheduler = self.scheduler
        return self._painter.paint(
            now=time.monotonic(),
            everybody=Traffic(scheduler.num_running, scheduler.num_waiting),
            base=Traffic(scheduler.running_on(None), scheduler.waiting_for(None)),
            preemptions=scheduler.num_preemptions,
            late_masks=self.guides.num_late,
            passes=self.runner.forward_passes,
        )

    def close(self) -> None:
        """End the reader's and the copier's threads.  The core cannot be used after it."""
        if self._flight is not None:
            self.runner.collect(self._flight)
            self._flight = None
        self.verifier.close()
        self.guides.close()
        self.machine.copier.close()
        self.machine.host.close()
        if self.crew is not None:
            self.crew.close()

    # ------------------------------------------------------------- one level down
    def _advance(self, work: StepWork | None) -> list[SequenceDelta]:
        """Launch `work`; settle the step before it, or with no lookahead `work` itself."""
        deltas: list[SequenceDelta] = []
        before, self._flight = self._flight, self._launch(work) if work else None
        if before is not None:
            deltas += self._settle(before)
        if self._flight is None:
            self._prefill.forget()
        else:
            self._sample(self._flight)  # every token before the one to draw is known now
        if self._flight is not None and not self.lookahead:
            deltas += self._settle(self._flight)
            self._flight = None
        return deltas

    def _settle_what_must_be_known(self) -> list[SequenceDelta]:
        """Drafts stand on known tokens, and what stands on drafts is known once they are judged."""
        flight = self._flight
        if flight is None or not self.scheduler.drafting.must_know(flight.work):
            return []
        self._flight = None
        return self._settle(flight)

    def _launch(self, work: StepWork) -> Flight:
        launched = time.monotonic()
        if self.draft_model is not None:
            launched -= self.draft_model.take_seconds()
        flight = self.runner.launch(work)
        flight.launched = launched
        self.pool.stamp = self.runner.fence
        return flight

    def _sample(self, flight: Flight) -> None:
        if not self.guides:
            self.runner.sample(flight)
            return
        masks = self.guides.masks(flight.batch.sampled)
        chunks = {chunk.seq: chunk for chunk in flight.work.chunks}
        for row in masks.late:
            self.scheduler.put_off(chunks[flight.batch.sampled[row]])
        self.runner.sample(flight, masks)

    def _let_guided_go_on(self) -> None:
        for seq, code, message in self.guides.take_failures():
            self.scheduler.fail(seq, code, message)
        for seq in self.guides.take_ready():
            self.scheduler.resume(seq)

    def _settle(self, flight: Flight) -> list[SequenceDelta]:
        waited = bool(flight.drawn or flight.pooled) or self.machine.device.type == "cpu"
        sampled = self.runner.collect(flight)
        if self.pooling is not None:
            self.pooling.collect(flight.pooled)
        now = time.monotonic()
        self._prefill.settled(flight.work, flight.launched, now, waited=waited)
        self.stats.note(flight.work, flight.launched, now, waited=waited)
        deltas = self.scheduler.settle(flight.work, sampled)
        for outcome in self.scheduler.speculation.take_outcomes():
            self.stats.note_drafts(outcome.rev, outcome.proposed, outcome.accepted)
        if self.guides:
            self.guides.follow(chunk.seq for chunk in flight.work.chunks)
        return deltas

    def _publish(self, deltas: list[SequenceDelta]) -> StepFrame:
        self.runner.forget(d.request_id for d in deltas if d.finish_reason is not None)
        self.guides.forget_ended()
        said, pooled = self._desk.take_said(), list[Pooled]()
        if self.pooling is not None:
            deltas, pooled = self.pooling.tell(deltas)
        return StepFrame(
            step=self.stats.steps,
            deltas=(*said.refused, *deltas),
            adapters=tuple(self.residency.take_events()),
            answers=(
                *said.answers,
                *self.residency.take_answers(),
                *self.verifier.take_answers(),
            ),
            pooled=(*said.unpooled, *pooled),
        )

    def _manifest(self, rev: str) -> PackedManifest:
        return self.residency.manifest(rev)

    def _lora_bytes(self, rev: str) -> int:
        revision = self.residency.find(rev)
        return revision.manifest.true_bytes if revision else 0


def _limits(machine: Machine) -> SchedulerLimits:
    config = machine.config
    return SchedulerLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        mixed_tokens=config.mixed_tokens,
        # More rows than graphs are captured for would wait for the interpreter; a CPU takes as long
        # for a row whatever stands beside it.
        crowd_tokens=config.graph_tokens if machine.device.type == "cuda" else 0,
        max_model_len=config.max_model_len,
        eos_token_ids=frozenset(machine.spec.eos_token_ids),
        starve_after=config.starve_after,
        speculation_tokens=config.draft_tokens,
        pooled_tokens=config.pooled_tokens,
        draft_cost=machine.info.draft_weight_bytes / machine.info.weight_bytes,
    )


def _kv_floor(machine: Machine) -> int:
    """Blocks that adapters never take: as configured, or one full-length sequence, at most 10%."""
    config = machine.config
    if config.kv_floor:
        return -(-config.kv_floor // machine.layout.block_bytes)
    longest = -(-config.max_model_len // config.block_size)
    return max(1, min(longest, config.num_blocks // 10))

"""PoolingCore: the step loop's body of an engine that pools.  `step` is the whole as one sentence.

Goes in: requests and commands, through `take`.  Comes out: a PoolingFrame from every `step`.  Each
input is computed whole in one step, and nothing of it stays: there is no cache, no decode loop, and
whoever is not computed holds no slot.  Adapters live as they do beside a decoder: the same packed
files, tiers, commands and events (`adapters/residency.py`).

On a card a step is launched before the one ahead of it is told of: what that has to say comes down,
and what arrives meanwhile is made ready, while the card computes.  Not so while it gives way to an
engine that generates on the same card: then steps are small, one at a time, and after each the card
is left to the other (`pace.py`).

Everything happens on the thread that calls it; readers and copiers have threads of their own, and
ring `bell` when there is something to do.
"""

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from engine.adapters.orders import AdapterCommand
from engine.adapters.residency import Residency
from engine.adapters.slots import SlotTable
from engine.assembly import is_card, make_planner
from engine.compile_ahead import compile_before_plans
from engine.errors import EngineError
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer
from engine.messages import AdapterEvent, Answer
from engine.pooling.admission import Admission
from engine.pooling.answers import Answers
from engine.pooling.batch import Landing, Placed, StepRunner
from engine.pooling.config import PoolingConfig
from engine.pooling.machine import build, largest_step
from engine.pooling.pace import Pace
from engine.pooling.queue import Item, Queue
from engine.pooling.requests import AbortPool, PoolRequest, PoolResult
from engine.pooling_messages import GiveWay
from engine.stats import Stats

#: How long an idle loop sleeps if nobody rings: never needed, but a lost ring must not hang it.
IDLE_SECONDS = 1.0
#: While something waits for an adapter, for room or for a clock.
WAITING_SECONDS = 0.01

PoolCommand = PoolRequest | AbortPool | GiveWay | AdapterCommand


@dataclass(frozen=True, slots=True)
class PoolingFrame:
    """All that one step has to say."""

    results: tuple[PoolResult, ...] = ()
    adapters: tuple[AdapterEvent, ...] = ()
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched."""

    landing: Landing
    items: tuple[Item, ...]
    adapters: tuple[str, ...]
    names: frozenset[str]  # of requests
    began: float


class PoolingCore:
    """One pooling engine on the calling thread.  Raises as `machine.build` does."""

    def __init__(
        self,
        config: PoolingConfig,
        *,
        progress: Callable[[str, float], None] = lambda *_: None,
        bell: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bell = bell or threading.Event()
        self.machine = machine = build(config, progress=progress, wake=self.bell.set)
        self.config, self.info = machine.config, machine.info
        self._clock = clock
        self.slots = slots = SlotTable(self.config.slots)
        # An index that stays empty: adapters are all that can make way.
        self.prefix = PrefixIndex(machine.pool, 1, clock)
        self.reclaimer = Reclaimer(machine.pool, self.prefix, policy=self.config.eviction)
        self.residency = Residency(
            slots=slots,
            host=machine.host,
            copier=machine.copier,
            room=self.reclaimer,
            clock=clock,
            block_bytes=machine.layout.block_bytes,
            bytes_in_flight=self.config.load_bytes_in_flight,
            thrash_window=self.config.thrash_window,
            layout=machine.layout.id,
            base=machine.info.base,
            max_rank=self.config.max_rank,
        )
        largest = largest_step(self.config)
        self.planner = planner = make_planner(
            replace(self.config, max_batch_tokens=largest),
            machine.arena,
            slots.rows,
            lambda rev: self.residency.manifest(rev),
        )
        if is_card(machine.device):
            progress("kernels", 0.95)
            compile_before_plans(machine.backbone.layers, planner, machine.device)
        answers = Answers(machine.spec, machine.pooler, machine.head, machine.words, planner)
        self._runner = StepRunner(machine.backbone, answers, max_seqs=self.config.max_num_seqs)
        self._flight: Flight | None = None
        self._ended = -math.inf  # when the last step was through, by the clock
        self._admission = Admission(
            self.config,
            machine.spec,
            machine.pooler,
            machine.head,
            scores_words=machine.words is not None,
        )
        self._queue = Queue(self.config.max_batch_tokens, self.config.max_num_seqs)
        self._pace = Pace(self.config.max_batch_tokens)
        self._held = False  # the next step is not due yet
        self._orders = itertools.count()
        self._commands: list[PoolCommand] = []
        self._results: list[PoolResult] = []
        self._ran = False
        self.stats = Stats(self._lora_bytes)
        progress("ready", 1.0)

    # ------------------------------------------------------------- the sentence
    def take(self, command: PoolCommand) -> None:
        """Queue a request or a command for the next step."""
        self._commands.append(command)

    def step(self) -> PoolingFrame:
        """One turn: what arrived, what has ended, what runs now, what there is to tell."""
        self._carry_out_commands()
        self.residency.advance()
        self._end_what_cannot_go_on()
        self._relieve_who_starves()
        self._run(self._next())
        return self._publish()

    @property
    def idle(self) -> bool:
        """The last step ran nothing: `wait` before the next one."""
        return not (self._ran or self._commands)

    @property
    def num_steps(self) -> int:
        """That ran something."""
        return self.stats.steps

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> list[str | None]:
        """Revisions, None = the base model, of all inputs that the device computes."""
        return [item.request.rev for item in self._flight.items] if self._flight else []

    @property
    def share(self) -> float:
        """Of the device's time, that it keeps to."""
        return self._pace.share

    @property
    def queue(self) -> Queue:
        """To be read only."""
        return self._queue

    def wait(self) -> None:
        """Sleep until the bell rings, or until something that waits may be due."""
        waits = len(self._queue) or self.residency.busy
        seconds = WAITING_SECONDS if waits else IDLE_SECONDS
        if self._held:
            seconds = min(self._pace.seconds_left(self._clock()), seconds)
        self.bell.wait(seconds)
        self.bell.clear()

    def abandon(self) -> list[str]:
        """Forget everybody who waits: the ids of those, who get no result."""
        self._commands, entering = [], self._commands
        waiting = [item.request.request_id for item in self._queue]
        for request_id in waiting:
            self._forget(self._queue.remove(request_id))
        return waiting + [c.request_id for c in entering if isinstance(c, PoolRequest)]

    def close(self) -> None:
        """End the reader's and the copier's threads.  The core cannot be used after it."""
        self.machine.copier.close()
        self.machine.host.close()

    # ------------------------------------------------------------- one level down
    def _carry_out_commands(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            match command:
                case PoolRequest():
                    self._enter(command)
                case AbortPool():
                    self._forget(self._queue.remove(command.request_id))
                case GiveWay():
                    self._pace.keep_to(command.share)
                case _:
                    self.residency.command(command)

    def _enter(self, request: PoolRequest) -> None:
        manifest = None
        try:
            if request.rev is not None and self.residency.knows(request.rev):
                manifest = self.residency.manifest(request.rev)
            item = self._admission.admit(request, manifest, next(self._orders), self._clock())
        except EngineError as error:
            self._fail(request.request_id, error.code, error.message)
            return
        running = self._flight.names if self._flight else frozenset()
        if request.request_id in self._queue or request.request_id in running:
            self._fail(request.request_id, "invalid_value", "a request of this id is waiting")
            return
        if request.rev is not None:
            self.residency.lease(request.rev, request.priority)
        self._queue.add(item)

    def _end_what_cannot_go_on(self) -> None:
        failures = {rev: (code, text) for rev, code, text in self.residency.take_failures()}
        now = self._clock()
        for item in self._queue:
            if item.request.rev in failures:
                self._fail(item.request.request_id, *failures[item.request.rev])
            elif item.deadline is not None and item.deadline <= now:
                text = "the request waited longer than its deadline"
                self._fail(item.request.request_id, "deadline_exceeded", text)
            else:
                continue
            self._forget(self._queue.remove(item.request.request_id))
        self.residency.take_gone()

    def _relieve_who_starves(self) -> None:
        """Nobody holds a slot for longer than a step, so that to reserve room is enough: whoever
        is awaited makes way for who waited longer than is fair."""
        starving = self.residency.starving(self.config.starve_after)
        self.residency.reserve_for(starving.rev if starving else None)

    def _next(self) -> list[Item]:
        """Who goes with the next step: while it gives way, nobody before that is due, and nobody
        beside a step that runs."""
        due = self._flight is None and not self._pace.seconds_left(self._clock())
        self._held = self._pace.gives_way and not due and len(self._queue) > 0
        return [] if self._held else self._queue.take(self._may_run, self._pace.rows)

    def _may_run(self, rev: str | None) -> bool:
        return rev is None or self.residency.can_acquire(rev)

    def _run(self, items: list[Item]) -> None:
        """Launch these, then tell of those who were launched before."""
        ahead, self._flight = self._flight, self._launch(items) if items else None
        self._ran = bool(items or ahead)
        if ahead is not None:
            self._settle(ahead)
        if self._flight is not None and self._flight.landing.there is None:
            self._settle(self._flight)  # it has landed: a CPU's step waits for itself
            self._flight = None

    def _launch(self, items: list[Item]) -> Flight:
        revs = {item.request.rev for item in items}
        slots = {rev: -1 if rev is None else self.residency.acquire(rev) for rev in revs}
        began = self._clock()
        landing = self._runner.launch(Placed(i, slots[i.request.rev]) for i in items)
        adapters = tuple(rev for rev in revs if rev is not None)
        names = frozenset(item.request.request_id for item in items)
        return Flight(landing, tuple(items), adapters, names, began)

    def _settle(self, flight: Flight) -> None:
        self._results += self._runner.collect(flight.landing)
        began, self._ended = max(flight.began, self._ended), self._clock()
        rows = Counter[str | None]()
        for item in flight.items:
            rows[item.request.rev] += item.length
        self.stats.note_pooled(rows, self._ended - began)
        self._pace.note(rows.total(), self._ended - began, self._ended)
        for rev in flight.adapters:
            self.residency.release(rev)
        for item in flight.items:
            self._forget(item)

    def _forget(self, item: Item | None) -> None:
        if item is not None and item.request.rev is not None:
            self.residency.end_lease(item.request.rev)

    def _fail(self, request_id: str, code: str, message: str) -> None:
        self._results.append(PoolResult(request_id, code=code, message=message))

    def _lora_bytes(self, rev: str) -> int:
        revision = self.residency.find(rev)
        return revision.manifest.true_bytes if revision else 0

    def _publish(self) -> PoolingFrame:
        results, self._results = tuple(self._results), []
        return PoolingFrame(
            results,
            tuple(self.residency.take_events()),
            tuple(self.residency.take_answers()),
        )

"""Requests for vectors and scores, from a name and texts to results.

Goes in: a `PoolAsk` or a `ScoreAsk`.  `PoolingService` resolves the name, has the reception let the
request in as one, however many inputs it has, tokenises in a worker pool, gives the engine a few
steps of them at once, and waits.  Comes out: `Answered` or `Scored`.  Every failure is a
LoradError, of all inputs together; cancelling takes back what still runs.  Knows no HTTP.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from engine.pooling.config import PoolingInfo
from engine.pooling.requests import PoolRequest, PoolResult
from lorad.errors import LoradError
from lorad.service.ask import Count
from lorad.service.live import Crowd, Live
from lorad.service.meter import Meter
from lorad.service.pool_ask import Answered, Endpoint, PoolAsk, ScoreAsk, Scored, Wish
from lorad.service.pool_inputs import Prepared, prepare
from lorad.service.reception import Guest, Reception
from lorad.service.scoring import Model, plan, score
from lorad.service.seams import Limits, TextFiles, await_text
from lorad.service.tenants import ANYBODY, Caller, account_of
from lorad.service.text_threads import TextThreads
from lorad.service.trace import PoolTrace
from lorad.text.pooling import PoolingText

T = TypeVar("T")
#: What is kept of the result of the input of a number.
Keep = Callable[[int, PoolResult], PoolResult]


def whole(number: int, result: PoolResult) -> PoolResult:
    """All of it."""
    return result


#: Given to the engine beyond its own deadline, so that it speaks first if it can.
DEADLINE_GRACE_SECONDS = 2.0
#: What the engine has of one request is so many of its steps at the most: whoever comes later waits
#: behind that, and not behind all the inputs of somebody with many.
STEPS_AHEAD = 4
#: Inputs that are given to the engine in one turn of the loop: streams go on in between.
LAUNCHED = 64


class PoolLink(Protocol):
    """Of EngineLink; `pool` raises LoradError, and cancelling it takes the input back."""

    def check(self) -> None: ...
    async def pool(self, request: PoolRequest) -> PoolResult: ...


class PoolLimits(Limits, Protocol):
    """The part of `[limits]` that concerns these requests."""

    @property
    def inputs(self) -> int: ...
    @property
    def token_vectors(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a model that pools.  `tasks` are what it is served for; `labels_of` tells a revision's own
    classes, () if its head is the base's, and `text_of` what its texts are read by, in a thread;
    `truncate` is what a request gets that does not say."""

    info: PoolingInfo
    text: PoolingText
    tasks: tuple[str, ...]
    truncate: bool = False
    labels_of: Callable[[str], tuple[str, ...]] = lambda rev: ()
    #: None: by the base's all of them.
    text_of: Callable[[str], PoolingText] | None = None


@dataclass(frozen=True, slots=True)
class PoolBackend:
    """`facts` None: the model only generates.  `files`: those that `Facts.text_of` reads."""

    link: PoolLink
    facts: Callable[[], Facts | None]
    files: TextFiles | None = None


class PoolingService:
    """`backends`: what is behind each model, by its name.  What was used is counted where all
    requests are: in `meter` and `crowd`; `trace` hears of each that has ended."""

    def __init__(
        self,
        reception: Reception,
        backends: Mapping[str, PoolBackend],
        *,
        limits: PoolLimits,
        meter: Meter,
        crowd: Crowd,
        threads: TextThreads | None = None,
        trace: Callable[[PoolTrace], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reception, self._backends = reception, dict(backends)
        self._limits, self._meter, self._crowd = limits, meter, crowd
        self._clock, self._threads = clock, threads or TextThreads()
        self._trace = trace or (lambda trace: None)

    def limit(self, limits: PoolLimits) -> None:
        """For requests that come from now on."""
        self._limits = limits

    # ----------------------------------------------------------------- what is asked
    async def run(self, ask: PoolAsk, caller: Caller = ANYBODY) -> Answered:
        """A result for each input, in order.  Raises LoradError."""

        async def work(unit: Unit) -> Answered:
            unit.model.check(ask)
            return await unit.pool(ask)

        return await self._counted(ask.wish, caller, work)

    async def score(self, ask: ScoreAsk, caller: Caller = ANYBODY) -> Scored:
        """A score for each second text.  Raises LoradError."""

        async def work(unit: Unit) -> Scored:
            planned = plan(ask, unit.model)
            compared = planned.compared
            answered = await unit.pool(planned.ask, compared.take if compared else whole)
            return await self._threads.run(0, partial(score, ask, planned, answered))

        return await self._counted(ask.wish, caller, work)

    # ----------------------------------------------------------------- one request
    async def _counted(
        self, wish: Wish, caller: Caller, work: "Callable[[Unit], Awaitable[T]]"
    ) -> T:
        trace = PoolTrace(wish, self._clock())
        try:
            return await self._let_in(wish, caller, trace, work)
        except BaseException as error:
            trace.error = error
            if isinstance(error, LoradError):
                self._meter.refused[error.code] += 1
                self._crowd.of(caller.tenant.name if caller.tenant else "").refused += 1
            raise
        finally:
            trace.ended = self._clock()
            self._trace(trace)

    async def _let_in(
        self,
        wish: Wish,
        caller: Caller,
        trace: PoolTrace,
        work: "Callable[[Unit], Awaitable[T]]",
    ) -> T:
        received = trace.received
        deadline = received + min(self._limits.deadline, wish.timeout or math.inf)
        self._reception.check_open()
        resolved = await self._reception.find(wish.model, caller, deadline)
        backend = self._backends[resolved.model]
        backend.link.check()
        facts = backend.facts()
        if facts is None:
            raise _generates(wish.model)
        account = account_of(resolved.name, wish.priority, resolved.priority, caller)
        trace.name, trace.rev, trace.tenant = resolved.name, resolved.rev, account.tenant.name
        trace.model = resolved.model
        guest = self._reception.admit(resolved, account, 1, deadline=deadline)
        try:
            facts = await self._read_by(backend, facts, guest.rev, deadline)
        except BaseException:
            guest.leave()
            raise
        unit = Unit(self, backend.link, wish.endpoint, facts, guest, deadline)
        self._crowd.enter(unit, Live(resolved.name, account, received, resolved.model))
        if guest.spending is not None:
            guest.spending.follow(lambda: unit.num_tokens)
        try:
            result = await self._until(deadline, guest, work(unit))
        finally:
            trace.num_inputs, trace.num_tokens = unit.num_results, unit.num_tokens
            self._crowd.leave(unit)
            guest.leave()
        self._meter.pooled(
            wish.endpoint,
            name=guest.name,
            model=guest.model,
            tenant=account.tenant.name,
            num_inputs=unit.num_results,
            num_tokens=unit.num_tokens,
            received=received,
        )
        return result

    async def _read_by(
        self, backend: PoolBackend, facts: Facts, rev: str | None, deadline: float
    ) -> Facts:
        """With what the texts of a revision are read by."""
        if rev is None or facts.text_of is None:
            return facts
        await await_text(backend.files, rev, deadline - self._clock())
        text = await self._threads.run(0, partial(facts.text_of, rev))
        return replace(facts, text=text)

    async def _until(self, deadline: float, guest: Guest, work: Awaitable[T]) -> T:
        """The result of `work`; deadline_exceeded, or the error that somebody ends it with."""
        task, errors = asyncio.ensure_future(work), list[LoradError]()

        def fail(error: LoradError) -> None:
            errors.append(error)
            task.cancel()

        guest.fail = fail
        late = LoradError("deadline_exceeded", "the request ran into its deadline")
        seconds = max(deadline + DEADLINE_GRACE_SECONDS - self._clock(), 0.0)
        timer = asyncio.get_running_loop().call_later(seconds, fail, late)
        try:
            return await task
        except asyncio.CancelledError:
            if errors:
                raise errors[0] from None
            raise
        finally:
            timer.cancel()
            guest.fail = None


class Unit:
    """One request that was let in: its inputs run together, or all of them end."""

    def __init__(
        self,
        service: PoolingService,
        link: PoolLink,
        endpoint: Endpoint,
        facts: Facts,
        guest: Guest,
        deadline: float,
    ) -> None:
        self.id, self.endpoint, self.rev = secrets.token_hex(12), endpoint, guest.rev
        self.num_tokens = self.num_cached = self.num_results = 0  # of results that are there
        self.model = Model(
            facts.info,
            facts.text.spec,
            facts.tasks,
            () if guest.rev is None else facts.labels_of(guest.rev),
            facts.text.asks is not None and facts.text.asks.takes_instruction,
        )
        self._service, self._link, self._facts, self._guest = service, link, facts, guest
        self._deadline = deadline
        self._flying = 0  # tokens that the engine has
        self._landed = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Is there a result?"""
        return self.num_results > 0

    @property
    def most_tokens(self) -> int | None:
        """Nothing is generated."""
        return 0

    @property
    def over(self) -> bool:
        """Nobody can end it any more."""
        return self._guest.fail is None

    def fail(self, error: LoradError) -> None:
        """End it now; its client is told."""
        if self._guest.fail is not None:
            self._guest.fail(error)

    def usage(self) -> Count:
        """Of results that are there."""
        return Count(prompt=self.num_tokens, completion=0, cached=self.num_cached)

    async def pool(self, ask: PoolAsk, keep: Keep = whole) -> Answered:
        """`keep` says what is kept of each result.  Raises LoradError for the first input that
        fails."""
        service, guest = self._service, self._guest
        work = partial(prepare, ask, self._facts, service._limits)
        prepared = await service._threads.run(ask.num_characters, work)
        results = await _together(self._jobs(ask, prepared, keep))
        return Answered(tuple(results), guest.name, guest.rev, self.model.labels)

    async def _jobs(
        self, ask: PoolAsk, prepared: Sequence[Prepared], keep: Keep
    ) -> AsyncGenerator[Coroutine[object, object, PoolResult], None]:
        """One for each, as soon as there is room ahead for it."""
        most = STEPS_AHEAD * self._facts.info.max_batch_tokens
        for number, one in enumerate(prepared):
            tokens = len(one.encoded.tokens)
            while self._flying and self._flying + tokens > most:
                self._landed.clear()
                await self._landed.wait()
            if number % LAUNCHED == LAUNCHED - 1:
                await asyncio.sleep(0)
            self._flying += tokens
            yield self._flight(ask, one, partial(keep, number))

    async def _flight(
        self, ask: PoolAsk, prepared: Prepared, keep: Callable[[PoolResult], PoolResult]
    ) -> PoolResult:
        try:
            return keep(await self._one(ask, prepared))
        finally:
            self._flying -= len(prepared.encoded.tokens)
            self._landed.set()

    async def _one(self, ask: PoolAsk, prepared: Prepared) -> PoolResult:
        service, guest = self._service, self._guest
        encoded = prepared.encoded
        request = PoolRequest(
            request_id=secrets.token_hex(8),
            tokens=encoded.tokens,
            types=encoded.types,
            task=ask.task,
            rev=guest.rev,
            normalize=ask.normalize,
            dimensions=ask.dimensions,
            prompt_tokens=encoded.prompt_tokens,
            unseen=encoded.unseen,
            truncate=False,  # that was done
            keeps=encoded.keeps,
            priority=guest.account.priority,
            cache_salt=guest.account.caller.salt(""),
            tenant=guest.account.tenant.name,
            weight=guest.account.tenant.weight,
            deadline_seconds=max(self._deadline - service._clock(), 0.001),
        )
        try:
            result = await self._link.pool(request)
        except LoradError as error:
            if error.code == "invalid_value" and error.param is None:
                error.param = prepared.param
            raise
        guest.place.leave()
        self.num_tokens += result.num_tokens
        self.num_cached += result.num_cached
        self.num_results += 1
        return _without(result, encoded.skipped)


def _without(result: PoolResult, rows: Sequence[int]) -> PoolResult:
    """Of the vectors of tokens, but for those of some."""
    if not rows or result.values is None:
        return result
    return replace(result, values=np.delete(result.values, rows, axis=0))


async def _together(jobs: AsyncGenerator[Coroutine[object, object, T], None]) -> list[T]:
    """All results in order.  The first failure, or being cancelled, ends every other job before it
    is told."""
    tasks: list[asyncio.Task[T]] = []
    failed = False

    def note(task: asyncio.Task[T]) -> None:
        nonlocal failed
        failed = failed or (not task.cancelled() and task.exception() is not None)

    try:
        async with contextlib.aclosing(jobs):
            async for job in jobs:
                tasks.append(asyncio.ensure_future(job))
                tasks[-1].add_done_callback(note)
                if failed:
                    break
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _generates(model: str) -> LoradError:
    return LoradError(
        "unsupported_parameter",
        f"model {model[:200]!r} generates text, and makes neither vectors nor scores",
        param="model",
        hint="POST /v1/chat/completions or /v1/completions",
    )

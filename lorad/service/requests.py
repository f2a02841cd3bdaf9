"""Generating requests, from a name and text to a running `Generation`.

Goes in: an `Ask`.  `RequestService.start` resolves the name, takes the lease that fixes the
revision for the whole request, tokenises in a worker pool, checks the context, and submits one
sequence for each answer.  Comes out: a `Generation`.  Every failure is a LoradError, and frees
what was taken.  Knows no HTTP.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from engine.messages import EngineInfo, SamplingParams, Submit
from lorad.errors import LoradError
from lorad.service.ask import Ask
from lorad.service.choice import Choice
from lorad.service.door import Door, Place
from lorad.service.gate import STOPPING, Gate
from lorad.service.generation import Generation, Owner
from lorad.service.live import Crowd, Live
from lorad.service.meter import Meter, Span
from lorad.service.plan import plan
from lorad.service.rates import Rates, Spending
from lorad.service.seams import Adapters, AsNamed, Finder, Guide, Limits, Link, Text
from lorad.service.tenants import ANYBODY, Account, Caller, Forbidden, Tenant, account_of
from lorad.service.trace import Trace
from lorad.spelling import is_reference

T = TypeVar("T")

#: Given to the engine beyond its own deadline, so that it speaks first if it can.
DEADLINE_GRACE_SECONDS = 2.0


class RequestService:
    """`text` picks tokenizer and template of a revision; `base_digest` names the base model.
    `trace` hears of every request when it has ended; None: traces are off, and cost nothing."""

    def __init__(
        self,
        adapters: Adapters,
        link: Link,
        text: Callable[[str | None], Text],
        *,
        limits: Limits,
        version: str,
        base_digest: str,
        pool: Executor | None = None,
        finder: Finder | None = None,
        gate: Gate | None = None,
        guide: Guide | None = None,
        trace: Callable[[Trace], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.aborted: Counter[str] = Counter()  # reason -> requests that ended before their end
        self.meter = Meter(clock)
        self._adapters, self._link, self._text = adapters, link, text
        self._limits, self._pool, self._clock = limits, pool, clock
        self._finder: Finder = finder or AsNamed()
        self._guide, self._trace = guide, trace
        self._fingerprint = f"lorad-{version}-{base_digest[:8]}"
        self.rates = Rates(clock)
        self.door = Door(limits, clock)  # sequences that the engine has not answered yet
        self._gate = gate or Gate()
        self._starting = 0
        self.crowd = Crowd()
        self._of: Counter[str | None] = Counter()  # requests by name
        self._fewer = asyncio.Event()  # set, and replaced, when one has ended

    def limit(self, limits: Limits) -> None:
        """For requests that come from now on."""
        self._limits = limits
        self.door.limit(limits)

    @property
    def active(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self.crowd) + self._starting

    @property
    def waiting(self) -> int:
        """Sequences that have had no answer from the engine yet."""
        return self.door.waiting

    # ----------------------------------------------------------------- one request
    async def start(self, ask: Ask, caller: Caller = ANYBODY) -> Generation:
        """Everything up to the engine; raises LoradError.  Cancelling it frees what it took."""
        received = self._clock()
        trace = None if self._trace is None else Trace(ask, received, self._trace)
        try:
            return await self._start(ask, caller, received, trace)
        except BaseException as error:
            if isinstance(error, LoradError):
                self.meter.refused[error.code] += 1
                self.crowd.of(caller.tenant.name if caller.tenant else "").refused += 1
            if trace is not None:
                trace.end(self._clock(), error)
            raise

    @property
    def tracing(self) -> bool:
        """Does anybody hear of whose trace a request is a part?"""
        return self._trace is not None

    async def _start(
        self, ask: Ask, caller: Caller, received: float, trace: Trace | None
    ) -> Generation:
        deadline = received + min(self._limits.deadline, ask.timeout or math.inf)
        self._gate.check_open()
        name = await self._find(_allowed(ask.model, caller), deadline)
        resolved, info = self._adapters.resolve(name), self.engine()
        rev = resolved.rev
        account = account_of(resolved.name, ask.priority, resolved.priority, caller)
        if trace is not None:
            trace.name, trace.rev, trace.tenant = resolved.name, rev, account.tenant.name
        _check_fallback(ask, account.tenant)
        self.rates.check(account.tenant)
        with contextlib.ExitStack() as undo:
            place = self.door.enter(
                (account.tenant.name, rev, account.priority),
                ask.num_sequences,
                seconds=deadline - self._clock(),
                starts_per_second=self._link.starts_per_second,
                most=account.tenant.queue,
            )
            undo.callback(place.close)
            spending = self.rates.begin(account.tenant)
            if spending is not None:
                undo.callback(spending.end)
            if rev is not None:
                self._adapters.lease(rev)
                undo.callback(self._adapters.release, rev)
            self._of[resolved.name] += 1
            undo.callback(self._leave, resolved.name)
            self._begin()
            undo.callback(self._end)
            text, prompts = await self._in_pool(partial(self._prepare, ask, rev))
            ends = _ends(ask, text, info)
            ask = await self._guided(ask, info)
            sampling = plan(ask, prompts, info, ends, self._limits.max_tokens)
            closed = partial(self._closed, spending, trace)
            generation = self._generation(ask, rev, place, closed, text, prompts, ends, deadline)
            self.crowd.enter(generation, Live(resolved.name, account, received))
            undo.pop_all()  # from here on the generation gives back
        self._starting -= 1
        if spending is not None:
            spending.follow(lambda: generation.usage().total)
        try:
            sequences = self._submit(
                generation, resolved.name, account, sampling, received, deadline
            )
            if trace is not None:
                trace.sequences = sequences
        except BaseException as error:
            if trace is not None:
                trace.end(self._clock(), error)
            generation.close()
            raise
        return generation

    # ----------------------------------------------------------------- beside generating
    def named(self, model: str) -> str:
        """The adapter's own name, where `model` is a reference to one that is here."""
        return self._finder.known(model)

    def resolve(self, model: str, caller: Caller = ANYBODY) -> str | None:
        """The revision that `model` means; raises what `start` would, which may pull it first."""
        return self._adapters.resolve(self.named(_allowed(model, caller))).rev

    def engine(self) -> EngineInfo:
        """The engine's facts; raises while it cannot take requests."""
        self._link.check()
        if self._link.info is None:
            raise LoradError("loading_base", "the base model is still loading")
        return self._link.info

    async def with_text(self, model: str, work: Callable[[Text], T], caller: Caller = ANYBODY) -> T:
        """`work` in a worker thread, on the text of what `model` means; the files that it reads
        stay until it has ended."""
        rev = self.resolve(await self._find(_allowed(model, caller)))
        if rev is None:
            return await self._in_pool(lambda: work(self._text(None)))
        self._adapters.lease(rev)
        try:
            return await self._in_pool(lambda: work(self._text(rev)))
        finally:
            self._adapters.release(rev)

    # ----------------------------------------------------------------- the daemon's hand
    def drain(self) -> None:
        """From now on new requests answer 503 `draining`; running ones go on."""
        self._gate.closed = STOPPING

    def running(self, name: str | None = None) -> int:
        """Requests of that adapter that have not ended; None: `active`."""
        return self.active if name is None else self._of[name]

    async def wait_idle(self, timeout: float) -> bool:
        """True once no request is left, False after `timeout` seconds."""
        return await self.wait_until_idle(timeout)

    async def wait_until_idle(self, seconds: float, name: str | None = None) -> bool:
        """The same, of one adapter."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.running(name):
                    await self._fewer.wait()
        return not self.running(name)

    def abort_all(self, code: str, message: str) -> None:
        """End every running request with an error that its client gets to see."""
        self.cancel(code, message)

    def cancel(self, code: str, message: str, name: str | None = None) -> int:
        """The same, of one adapter or None: of all; how many."""
        chosen = [g for g, its in self.crowd if name in (None, its.name)]
        for generation in chosen:
            self.meter.aborted_by_drain += code == "draining"
            generation.fail(LoradError(code, message))
        return len(chosen)

    # ----------------------------------------------------------------- accounts
    def _begin(self) -> None:
        self._starting += 1

    def _end(self) -> None:
        self._starting -= 1
        self._note_idle()

    def _closed(
        self, spending: Spending | None, trace: Trace | None, generation: Generation
    ) -> None:
        if trace is not None:
            trace.close(self._clock(), generation)
        if spending is not None:
            spending.end()
        self._leave(self.crowd.leave(generation).name)
        if generation.rev is not None:
            self._adapters.release(generation.rev)
        self._note_idle()

    def _leave(self, name: str | None) -> None:
        self._of[name] -= 1
        if not self._of[name]:
            del self._of[name]

    def _note_idle(self) -> None:
        fewer, self._fewer = self._fewer, asyncio.Event()
        fewer.set()

    # ----------------------------------------------------------------- steps of start
    async def _find(self, model: str, deadline: float | None = None) -> str:
        """The name behind a model.  Who waits for a pull counts as active, but stands in no queue:
        nobody who could run is kept out."""
        if not is_reference(model):
            return model
        seconds = self._limits.deadline if deadline is None else deadline - self._clock()
        self._begin()
        try:
            return await self._finder.find(model, seconds)
        finally:
            self._end()

    async def _in_pool(self, work: Callable[[], T]) -> T:
        """Tokenising takes milliseconds that belong to nobody else's stream."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _guided(self, ask: Ask, info: EngineInfo) -> Ask:
        """With the grammar of the format that it asks for."""
        if ask.format is None:
            return ask
        if self._guide is None:
            message = f"{ask.format.param} is not served here"
            raise LoradError("unsupported_parameter", message, param=ask.format.param)
        grammar = await self._guide.grammar(ask.format, info)
        return replace(ask, sampling=msgspec.structs.replace(ask.sampling, grammar=grammar))

    def _prepare(self, ask: Ask, rev: str | None) -> tuple[Text, list[tuple[int, ...]]]:
        """In a worker thread: the text of the revision, and the ids of every prompt."""
        text = self._text(rev)
        if ask.chat:
            rendered = text.render(ask.messages, ask.template_vars, ask.tools)
            return text, [tuple(text.encode(rendered, add_special=False))]
        return text, [
            tuple(text.encode(prompt, add_special=True)) if isinstance(prompt, str) else prompt
            for prompt in ask.prompts
        ]

    def _generation(
        self,
        ask: Ask,
        rev: str | None,
        place: Place,
        closed: Callable[[Generation], None],
        text: Text,
        prompts: list[tuple[int, ...]],
        ends: frozenset[int],
        deadline: float,
    ) -> Generation:
        unique = secrets.token_hex(8)
        choices = []
        for index in range(ask.num_sequences):
            prompt = prompts[index // ask.n]
            choices.append(
                Choice(
                    index,
                    f"{unique}-{index}",
                    text.detokenizer(prompt, ask.stop),
                    silent=ends,
                    keep=ask.max_tokens != 0,
                    echo_ids=prompt if ask.echo else (),
                    echo_text=_echo(ask, text, index // ask.n),
                )
            )
        generation = Generation(
            Owner(self._link.abort, place.leave, closed),
            ask,
            rev=rev,
            fingerprint=f"{self._fingerprint}-{rev[:8] if rev else 'base'}",
            text=text,
            prompts=prompts,
            choices=choices,
            seconds_left=deadline + DEADLINE_GRACE_SECONDS - self._clock(),
        )
        return generation

    def _submit(
        self,
        generation: Generation,
        name: str | None,
        account: Account,
        sampling: Sequence[SamplingParams],
        received: float,
        deadline: float,
    ) -> list[Span]:
        ask, spans = generation.ask, []
        for choice, params in zip(generation.choices, sampling, strict=True):
            submit = Submit(
                request_id=choice.request_id,
                prompt=list(generation.prompts[choice.index // ask.n]),
                sampling=params,
                rev=generation.rev,
                priority=account.priority,
                tenant=account.tenant.name,
                weight=account.tenant.weight,
                cache_salt=account.caller.salt(ask.cache_salt),
                alora_fallback=ask.alora_fallback,
                deadline_seconds=max(deadline - self._clock(), 0.001),
            )
            span = self.meter.span(
                choice,
                generation.deliver,
                name=name,
                rev=generation.rev,
                chat=ask.chat,
                num_prompt=len(submit.prompt),
                received=received,
                tenant=account.tenant.name,
            )
            spans.append(span)
            self._link.submit(submit, span)
        return spans


def _allowed(model: str, caller: Caller) -> str:
    """`model`, unless it is not for this caller: then it is as unknown as any other name, and takes
    as long to be, whether it exists or not."""
    if not caller.may(model):
        raise Forbidden(model, caller.who)
    return model


def _check_fallback(ask: Ask, tenant: Tenant) -> None:
    """Who may not ask the base model does not get its answers for a prompt that invokes nothing."""
    if ask.alora_fallback == "base" and not tenant.base:
        message = "alora_fallback: the base model is not served here"
        raise LoradError("invalid_value", message, param="alora_fallback")


def _ends(ask: Ask, text: Text, info: EngineInfo) -> frozenset[int]:
    """Ids that end the answer and are no part of its text; a turn's end is the end of a chat's."""
    ends = frozenset(ask.sampling.stop_token_ids)
    if not ask.sampling.ignore_eos:
        ends |= frozenset(info.eos_token_ids)
        ends |= text.chat_stop_ids if ask.chat else frozenset()
    return ends


def _echo(ask: Ask, text: Text, number: int) -> str:
    """The prompt as it was given, in front of its answer."""
    if not ask.echo:
        return ""
    prompt = ask.prompts[number]
    return prompt if isinstance(prompt, str) else text.decode(prompt)

"""Generating requests, from a name and text to a running `Generation`.

Goes in: an `Ask`.  `RequestService.start` resolves the name, takes the lease that fixes the
revision for the whole request, tokenises in a worker pool, checks the context, and submits one
sequence for each answer.  Comes out: a `Generation`.  Every failure is a LoradError, and frees
what was taken.  Knows no HTTP.
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from engine.messages import EngineInfo, SamplingParams, Submit
from lorad.errors import LoradError
from lorad.service.ask import Ask
from lorad.service.choice import Choice
from lorad.service.gate import Gate
from lorad.service.generation import Generation, Owner
from lorad.service.live import Crowd, Live, Running
from lorad.service.meter import Meter, Span
from lorad.service.plan import plan
from lorad.service.prompts import Prepared, echoes_of, ends_of, prepare
from lorad.service.reception import Guest, Reception
from lorad.service.seams import (
    Adapters,
    Backend,
    Finder,
    Limits,
    Resolved,
    Text,
    await_text,
)
from lorad.service.tenants import ANYBODY, Account, Caller, Tenant, account_of
from lorad.service.text_threads import TextThreads
from lorad.service.trace import Trace

T = TypeVar("T")

#: What a request is told that its gateway sends elsewhere.
SENT_ON = "another member has room for it"
#: Given to the engine beyond its own deadline, so that it speaks first if it can.
DEADLINE_GRACE_SECONDS = 2.0


class RequestService:
    """`backends`: what is behind each model, by its name.  `trace` hears of every request when it
    has ended; None: traces are off, and cost nothing."""

    def __init__(
        self,
        adapters: Adapters,
        backends: Mapping[str, Backend],
        *,
        limits: Limits,
        version: str,
        threads: TextThreads | None = None,
        finder: Finder | None = None,
        gate: Gate | None = None,
        trace: Callable[[Trace], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.aborted: Counter[str] = Counter()  # reason -> requests that ended before their end
        self.meter = Meter(clock, tuple(backends))
        self._backends, self._version = dict(backends), version
        self._limits, self._clock = limits, clock
        self.threads = threads or TextThreads()
        self._trace = trace
        self.reception = Reception(adapters, limits=limits, finder=finder, gate=gate, clock=clock)
        self.rates = self.reception.rates
        self.crowd = Crowd()

    def limit(self, limits: Limits) -> None:
        """For requests that come from now on."""
        self._limits = limits
        self.reception.limit(limits)

    @property
    def active(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.reception.active

    @property
    def waiting(self) -> int:
        """Sequences that have had no answer from the engine yet."""
        return self.reception.waiting

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
        self.reception.check_open()
        resolved = await self.reception.find(ask.model, caller, deadline)
        backend, info = self._backends[resolved.model], self.engine(resolved.model)
        _check_generates(ask.model, info)
        account = account_of(resolved.name, ask.priority, resolved.priority, caller)
        if trace is not None:
            trace.name, trace.rev, trace.tenant = resolved.name, resolved.rev, account.tenant.name
            trace.model = resolved.model
        _check_fallback(ask, account.tenant, resolved.model)
        guest = self.reception.admit(
            resolved,
            account,
            ask.num_sequences,
            deadline=deadline,
            starts_per_second=backend.link.starts_per_second,
        )
        try:
            await await_text(backend.files, guest.rev, deadline - self._clock())
            preparing = partial(prepare, ask, partial(backend.text, guest.rev))
            prepared = await self.threads.run(ask.num_characters, preparing)
            text, prompts = prepared.text, prepared.prompts
            ends = ends_of(ask, text, info)
            ask = await _guided(ask, backend, info, account.tenant.name, text)
            sampling = plan(ask, prompts, info, ends, self._limits.max_tokens, text.num_tokens)
            echoes: list[str] = []
            if ask.echo:
                num_tokens = sum(map(len, prompts))
                echoes = await self.threads.run(num_tokens, partial(echoes_of, ask, text))
            closed = partial(self._closed, guest, trace)
            generation = self._generation(
                ask, guest, backend, closed, prepared, echoes, ends, deadline
            )
        except BaseException:
            guest.leave()
            raise
        # From here on the generation gives back.
        self.crowd.enter(
            generation,
            Live(
                resolved.name,
                account,
                received,
                resolved.model,
                partial(_where, backend, generation),
            ),
        )
        guest.fail = generation.fail
        if guest.spending is not None:
            guest.spending.follow(lambda: generation.usage().total)
        try:
            sequences = self._submit(
                generation, backend, resolved, account, sampling, received, deadline
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
        return self.reception.named(model)

    def resolve(self, model: str, caller: Caller = ANYBODY) -> Resolved:
        """What `model` means; raises what `start` would, which may pull it first."""
        return self.reception.resolve(model, caller)

    def engine(self, model: str) -> EngineInfo:
        """The facts of a base's engine; raises while it cannot take requests."""
        link = self._backends[model].link
        link.check()
        if link.info is None:
            raise LoradError("loading_base", "the base model is still loading")
        return link.info

    def facts(self, model: str) -> EngineInfo | None:
        """The same where nobody waits for an answer of it: None while it is not there."""
        return self._backends[model].link.info

    async def with_text(
        self,
        model: str,
        work: Callable[[Text], T],
        caller: Caller = ANYBODY,
        num_characters: int = 0,
    ) -> tuple[T, str]:
        """`work` in a worker thread, on the text of what `model` means, which reads so many; the
        files stay until it has ended.  Its result, and the base's name."""
        found = await self.reception.find(model, caller)
        rev, backend = found.rev, self._backends[found.model]
        text = backend.text
        with self.reception.leased(rev):
            if backend.files is not None:
                await await_text(backend.files, rev, self._limits.deadline)
            done = await self.threads.run(num_characters, lambda: work(text(rev)))
            return done, found.model

    # ----------------------------------------------------------------- the daemon's hand
    def drain(self) -> None:
        """From now on new requests answer 503 `draining`; running ones go on."""
        self.reception.drain()

    def running(self, name: str | None = None) -> int:
        """Requests of that adapter that have not ended; None: `active`."""
        return self.reception.running(name)

    async def wait_idle(self, timeout: float) -> bool:
        """True once no request is left, False after `timeout` seconds."""
        return await self.wait_until_idle(timeout)

    async def wait_until_idle(self, seconds: float, name: str | None = None) -> bool:
        """The same, of one adapter."""
        return await self.reception.wait_until_idle(seconds, name)

    def abort_all(self, code: str, message: str) -> None:
        """End every running request with an error that its client gets to see."""
        self.cancel(code, message)

    def cancel(self, code: str, message: str, name: str | None = None) -> int:
        """The same, of one adapter or None: of all; how many."""
        count = self.reception.cancel(code, message, name)
        self.meter.aborted_by_drain += count if code == "draining" else 0
        return count

    def cancel_one(self, id: str, code: str, message: str) -> tuple[Running, Live, bool]:
        """The same, of the one that the board calls `id`; False: it is over, and only its reader
        has still to take the rest.  Raises not_found for one that is not there, or no more."""
        found = self.crowd.get(id)
        if found is None:
            hint = "the stream and the board of the admin socket name those that have not ended"
            raise LoradError("not_found", f"no request {id[:64]!r} runs or waits", hint=hint)
        running, live = found
        changed = not running.over
        # An SDK that tried again by itself would undo it.
        running.fail(LoradError(code, message, again=False))
        return running, live, changed

    def shed(self, most: int, queued: Mapping[str, int]) -> int:
        """Send on requests of which nobody has seen anything and no token was drawn, the newest
        first, until `most` sequences less are here; how many requests.  No more of a model than
        have no place in its engine, which is `queued`."""
        count, left = 0, Counter(queued)
        for running, live in reversed(list(self.crowd)):
            if most <= 0:
                break
            if not isinstance(running, Generation) or running.begun or running.over:
                continue
            if running.moves and left[live.model] > 0:
                running.fail(LoradError("draining", SENT_ON))
                most -= len(running.choices)
                left[live.model] -= len(running.choices)
                count += 1
        return count

    # ----------------------------------------------------------------- accounts
    def _closed(self, guest: Guest, trace: Trace | None, generation: Generation) -> None:
        if trace is not None:
            trace.close(self._clock(), generation)
        self.crowd.leave(generation)
        guest.leave()

    # ----------------------------------------------------------------- steps of start
    def _generation(
        self,
        ask: Ask,
        guest: Guest,
        backend: Backend,
        closed: Callable[[Generation], None],
        prepared: Prepared,
        echoes: list[str],
        ends: frozenset[int],
        deadline: float,
    ) -> Generation:
        unique, rev = secrets.token_hex(8), guest.rev
        choices = []
        for index in range(ask.num_sequences):
            prompt = prepared.prompts[index // ask.n]
            new_decoder = partial(prepared.decoder, prompt)
            choices.append(
                Choice(
                    index,
                    f"{unique}-{index}",
                    new_decoder(),
                    silent=ends,
                    keep=ask.max_tokens != 0,
                    echo_ids=prompt if ask.echo else (),
                    echo_text=echoes[index // ask.n] if ask.echo else "",
                    new_decoder=new_decoder,
                )
            )
        generation = Generation(
            Owner(backend.link.abort, guest.place.leave, closed),
            ask,
            rev=rev,
            fingerprint=f"lorad-{self._version}-{backend.digest[:8]}-{rev[:8] if rev else 'base'}",
            text=prepared.text,
            prompts=prepared.prompts,
            choices=choices,
            seconds_left=deadline + DEADLINE_GRACE_SECONDS - self._clock(),
        )
        return generation

    def _submit(
        self,
        generation: Generation,
        backend: Backend,
        resolved: Resolved,
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
                name=resolved.name,
                model=resolved.model,
                rev=generation.rev,
                chat=ask.chat,
                num_prompt=len(submit.prompt),
                received=received,
                tenant=account.tenant.name,
            )
            spans.append(span)
            backend.link.submit(submit, span)
        return spans


def _where(backend: Backend, generation: Generation) -> str:
    """The replicas that its answers are on."""
    found = {backend.link.where(choice.request_id) for choice in generation.choices}
    return ",".join(sorted(found - {""}))


async def _guided(ask: Ask, backend: Backend, info: EngineInfo, tenant: str, text: Text) -> Ask:
    """With the grammar of the format that it asks for."""
    if ask.format is None:
        return ask
    if backend.guide is None:
        message = f"{ask.format.param} is not served here"
        raise LoradError("unsupported_parameter", message, param=ask.format.param)
    grammar = await backend.guide.grammar(ask.format, info, tenant, text.vocabulary)
    return replace(ask, sampling=msgspec.structs.replace(ask.sampling, grammar=grammar))


def _check_generates(model: str, info: EngineInfo) -> None:
    if not info.generates:
        raise LoradError(
            "invalid_value",
            f"{model} makes vectors and scores, and generates nothing",
            param="model",
            hint="ask /v1/embeddings, /v1/rerank or /classify",
        )


def _check_fallback(ask: Ask, tenant: Tenant, model: str) -> None:
    """Who may not ask the base model does not get its answers for a prompt that invokes nothing."""
    if ask.alora_fallback == "base" and not tenant.may_base(model):
        message = "alora_fallback: the base model is not served here"
        raise LoradError("invalid_value", message, param="alora_fallback")

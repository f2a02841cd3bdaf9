"""Meter: what requests cost in time and tokens, counted as their deltas pass by.

Goes in: refusals, every delta of every sequence, and requests for vectors or scores as they end.
Comes out: plain counters by adapter and histograms by model and kind (`base` or `lora`), which only
grow.
Written on the event loop; another thread may copy them.  A delta costs 0.4 µs of the 15 that a
token costs in all (2 cores), so there is no lock and no label here.  Knows nothing of how they are
shown.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from engine.histogram import SECONDS, TOKENS, Histogram
from engine.messages import SequenceDelta
from lorad.service.choice import Choice

#: Whose counters those of the base model are; no adapter can be called so.
BASE = "__base__"
Kind = Literal["base", "lora"]
KINDS: tuple[Kind, ...] = ("base", "lora")
ENDPOINTS = ("chat_completions", "completions")


def base_key(model: str) -> str:
    """Whose counters those of one base among several are."""
    return f"{BASE}:{model}"


class NameCounts:
    """One adapter's, by the name that was asked for."""

    __slots__ = (
        *("ended", "finished", "generated_tokens", "pooled_tokens", "prompt_tokens", "sequences"),
    )

    def __init__(self) -> None:
        self.sequences = 0  # that were given to the engine
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.pooled_tokens = 0  # of those of prompts, inputs' of requests that were answered
        self.ended = 0  # sequences, for whatever reason
        self.finished: Counter[str] = Counter()  # finish reason -> sequences

    def end(self, reason: str, sequences: int = 1) -> None:
        """So many have ended."""
        self.finished[reason] += sequences
        self.ended += sequences


class KindCounts:
    """Histograms of all requests of one model with an adapter, or of all without."""

    def __init__(self) -> None:
        self.queue_seconds = Histogram(SECONDS)  # from receipt until the engine begins
        self.first_token_seconds = Histogram(SECONDS)  # from receipt
        self.inter_token_seconds = Histogram(SECONDS)
        self.prefill_seconds = Histogram(SECONDS)  # from the engine's beginning to the first token
        self.decode_seconds = Histogram(SECONDS)  # from the first token to the last
        #: Those for vectors and scores are there once somebody has asked for them.
        self.duration_seconds = {endpoint: Histogram(SECONDS) for endpoint in ENDPOINTS}
        self.prompt_tokens = Histogram(TOKENS)
        self.generated_tokens = Histogram(TOKENS)


class Meter:
    """One a daemon.  `models`: those that are served; of several, each base has counters."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, models: Sequence[str] = ()
    ) -> None:
        self.clock = clock
        self._bases = {m: base_key(m) for m in models} if len(models) > 1 else {}
        self.bases = tuple(self._bases.values()) or (BASE,)
        self.names: dict[str, NameCounts] = {base: NameCounts() for base in self.bases}
        #: By the account that a request ran on.  Written when a sequence ends.
        self.tenants: dict[str, NameCounts] = {}
        #: By model, and then by kind; of one alone, whatever its name.
        self.by_model: dict[str, dict[Kind, KindCounts]] = {
            model: {kind: KindCounts() for kind in KINDS} for model in self._bases or ("",)
        }
        self.refused: Counter[str] = Counter()  # error code -> requests that never began
        self.aborted_by_drain = 0
        self.drained: set[str] = set()  # revisions whose drain ended requests, until it is asked

    def span(
        self,
        choice: Choice,
        deliver: Callable[[Choice, SequenceDelta], None],
        *,
        name: str | None,
        rev: str | None,
        chat: bool,
        num_prompt: int,
        received: float,
        tenant: str = "",
        model: str = "",
    ) -> "Span":
        """What the engine's deltas of one sequence go through; `received`: of this clock."""
        counts = self._counts(name, model)
        counts.sequences += 1
        kind = self.kinds(model)["base" if rev is None else "lora"]
        return Span(self, choice, deliver, counts, kind, rev, chat, num_prompt, received, tenant)

    def pooled(
        self,
        endpoint: str,
        *,
        name: str | None,
        tenant: str,
        num_inputs: int,
        num_tokens: int,
        received: float,
        model: str = "",
    ) -> None:
        """A request for vectors or scores that was answered, a sequence for each input."""
        kind = self.kinds(model)["base" if name is None else "lora"]
        if (seconds := kind.duration_seconds.get(endpoint)) is None:
            seconds = kind.duration_seconds[endpoint] = Histogram(SECONDS)
        seconds.observe(self.clock() - received)
        whose = [self._counts(name, model)]
        if tenant:
            whose.append(self.tenants.setdefault(tenant, NameCounts()))
        for counts in whose:
            counts.sequences += num_inputs
            counts.prompt_tokens += num_tokens
            counts.pooled_tokens += num_tokens
            counts.end("stop", num_inputs)

    def kinds(self, model: str) -> dict[Kind, KindCounts]:
        """The histograms of one model."""
        return self.by_model[model if model in self._bases else next(iter(self.by_model))]

    def _counts(self, name: str | None, model: str) -> NameCounts:
        key = name or self._bases.get(model, self.bases[0])
        return self.names.setdefault(key, NameCounts())

    def keep_tenants(self, names: Iterable[str]) -> None:
        """Forget every tenant that is not among `names`."""
        kept = set(names)
        for name in [n for n in tuple(self.tenants) if n not in kept]:
            self.tenants.pop(name, None)

    def keep(self, names: Iterable[str]) -> None:
        """Forget every adapter that is not among `names`."""
        kept = {*self.bases, *names}
        for name in [n for n in tuple(self.names) if n not in kept]:
            self.names.pop(name, None)


class Span:
    """Called with each delta of one sequence, the last one included; hands it on.

    Its times are of the meter's clock, and there for a trace.
    """

    __slots__ = (
        *("_choice", "_counts", "_deliver", "_duration", "_kind", "_meter", "_num_prompt"),
        *("_received", "_rev", "_submitted", "_tenant", "begun", "first", "last", "tokens"),
    )

    def __init__(
        self,
        meter: Meter,
        choice: Choice,
        deliver: Callable[[Choice, SequenceDelta], None],
        counts: NameCounts,
        kind: KindCounts,
        rev: str | None,
        chat: bool,
        num_prompt: int,
        received: float,
        tenant: str,
    ) -> None:
        self._tenant = tenant
        self._meter, self._choice, self._deliver = meter, choice, deliver
        self._counts, self._rev, self._num_prompt = counts, rev, num_prompt
        self._kind, self._duration = kind, kind.duration_seconds[ENDPOINTS[0 if chat else 1]]
        self._received, self._submitted = received, meter.clock()
        self.begun: float | None = None  # when the engine did
        self.first = self.last = 0.0  # tokens
        self.tokens = 0

    def __call__(self, delta: SequenceDelta) -> None:
        now = self._meter.clock()
        if delta.queued_seconds is not None:
            self._begin(delta.queued_seconds)
        if delta.tokens:
            self._note_tokens(len(delta.tokens), now)
        self._deliver(self._choice, delta)
        if delta.finish_reason is not None:
            self._end(delta, now)

    def begin_anew(self) -> bool:
        """See Choice; what an engine that is gone has computed stays counted."""
        if not self._choice.begin_anew():
            return False
        self.begun, self.first, self.last, self.tokens = None, 0.0, 0.0, 0
        return True

    def _begin(self, queued: float) -> None:
        self.begun = self._submitted + queued
        self._kind.queue_seconds.observe(self.begun - self._received)
        self._kind.prompt_tokens.observe(self._num_prompt)
        self._counts.prompt_tokens += self._num_prompt

    def _note_tokens(self, count: int, now: float) -> None:
        self._counts.generated_tokens += count
        if self.tokens:
            self._kind.inter_token_seconds.observe((now - self.last) / count, count)
        else:
            self.first = now
            self._kind.first_token_seconds.observe(now - self._received)
            if self.begun is not None:
                self._kind.prefill_seconds.observe(max(now - self.begun, 0.0))
        self.last = now
        self.tokens += count

    def _end(self, delta: SequenceDelta, now: float) -> None:
        """A stop string ends an answer for its client before the engine hears of it."""
        reason = self._choice.finish or delta.finish_reason or "error"
        self._counts.end(reason)
        self._duration.observe(now - self._received)
        if self._tenant:
            self._charge(reason)
        if self.begun is not None:
            self._kind.generated_tokens.observe(self.tokens)
        elif reason == "error":
            self._meter.refused[delta.code or "internal_error"] += 1
        if self.tokens > 1:
            self._kind.decode_seconds.observe(self.last - self.first)
        if delta.finish_reason == "abort" and delta.code == "draining":
            self._meter.aborted_by_drain += 1
            if self._rev is not None:
                self._meter.drained.add(self._rev)

    def _charge(self, reason: str) -> None:
        """To its tenant, at its end: what belongs to one adapter is counted as it comes."""
        account = self._meter.tenants.setdefault(self._tenant, NameCounts())
        account.sequences += 1
        account.end(reason)
        account.generated_tokens += self.tokens
        account.prompt_tokens += self._num_prompt if self.begun is not None else 0

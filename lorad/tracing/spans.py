"""Spans: one ended request → a span of it, with its queueing, prefill and decode below.

Goes in: a `Trace` or a `PoolTrace`.  Comes out: spans of OpenTelemetry, given to a tracer with the
times that they had; whether they are kept is the sampler's word, or the client's where it sent a
`traceparent`.  Made when all is over, so that a request that runs pays for none of it.  Never holds
a prompt, an answer or a stop string; knows no exporter.
"""

import time
from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lorad.errors import LoradError
from lorad.service.ask import Ask
from lorad.service.meter import Span
from lorad.service.pool_ask import Wish
from lorad.service.trace import PoolTrace, Trace
from lorad.tracing import names

#: A request of more answers than this has its parts drawn for the first ones alone.
MOST_SEQUENCES = 16
#: Of a model's name that a client made up.
MOST_CHARACTERS = 200

_PROPAGATOR = TraceContextTextMapPropagator()


class Spans:
    """`base` is the base model's name, `clock` the one that the traces' times are of."""

    def __init__(self, tracer: Any, base: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer, self._base, self._clock = tracer, base, clock

    def draw(self, trace: Trace) -> None:
        """All spans of one request, ended."""
        at = self._wall()
        operation = names.CHAT if trace.ask.chat else names.COMPLETION
        base = trace.model or self._base
        known = trace.name or (base if trace.generation is not None else "")
        root = self._tracer.start_span(
            f"{operation} {known}".strip(),
            context=_parent(trace.ask),
            kind=SpanKind.SERVER,
            start_time=at(trace.received),
            attributes={**_asked(trace, operation), **_found(trace, known)},
        )
        if root.is_recording():
            root.set_attributes(_answered(trace))
            self._draw_parts(trace, root, at)
            _set_status(root, trace)
        root.end(at(trace.ended or trace.received))

    def draw_pooled(self, trace: PoolTrace) -> None:
        """The one span of a request for vectors or scores."""
        at, wish = self._wall(), trace.wish
        base = trace.model or self._base
        known = trace.name or (base if trace.num_inputs else "")
        attributes: dict[str, Any] = {
            names.OPERATION: wish.endpoint,
            names.PROVIDER: names.SERVICE,
            names.REQUEST_MODEL: wish.model[:MOST_CHARACTERS],
            names.INPUT_TOKENS: trace.num_tokens,
            names.INPUTS: trace.num_inputs,
        }
        root = self._tracer.start_span(
            f"{wish.endpoint} {known}".strip(),
            context=_parent(wish),
            kind=SpanKind.SERVER,
            start_time=at(trace.received),
            attributes={**attributes, **_found(trace, known)},
        )
        _set_status(root, trace)
        root.end(at(trace.ended))

    def _draw_parts(self, trace: Trace, root: Any, at: Callable[[float], int]) -> None:
        firsts = [span.first for span in trace.sequences if span.tokens]
        if firsts:
            root.set_attribute(names.FIRST_CHUNK_SECONDS, min(firsts) - trace.received)
            root.add_event(names.FIRST_TOKEN, timestamp=at(min(firsts)))
        context = set_span_in_context(root)
        for index, span in enumerate(trace.sequences[:MOST_SEQUENCES]):
            for name, begin, end, tokens in _parts(trace, span):
                attributes: dict[str, int] = {names.CHOICE: index}
                if tokens is not None:
                    attributes[names.TOKENS] = tokens
                part = self._tracer.start_span(
                    name, context=context, start_time=at(begin), attributes=attributes
                )
                part.end(at(end))

    def _wall(self) -> Callable[[float], int]:
        """The clock's seconds as nanoseconds of the epoch: a wall clock that was set meanwhile
        moves all of a request's spans, and none against another."""
        wall, now = time.time_ns(), self._clock()
        return lambda seconds: wall - int((now - seconds) * 1e9)


def _parts(trace: Trace, span: Span) -> list[tuple[str, float, float, int | None]]:
    """(name, begin, end, tokens) of what one sequence came to; its last part ends with it."""
    ended = trace.ended or trace.received
    if span.begun is None:
        return [(names.QUEUE, trace.received, ended, None)]
    begun = min(max(span.begun, trace.received), ended)
    parts: list[tuple[str, float, float, int | None]] = [(names.QUEUE, trace.received, begun, None)]
    if not span.tokens:
        return [*parts, (names.PREFILL, begun, ended, None)]
    parts.append((names.PREFILL, begun, max(begun, span.first), None))
    return [*parts, (names.DECODE, span.first, span.last, span.tokens)]


def _parent(asked: Ask | Wish) -> Context:
    """Of the client's trace; a root of its own where it named none, or none that can be read."""
    carrier = {"traceparent": asked.traceparent, "tracestate": asked.tracestate}
    context: Context = _PROPAGATOR.extract(carrier, context=Context())
    return context


def _asked(trace: Trace, operation: str) -> dict[str, Any]:
    ask, sampling = trace.ask, trace.ask.sampling
    asked: dict[str, Any] = {
        names.OPERATION: operation,
        names.PROVIDER: names.SERVICE,
        names.REQUEST_MODEL: ask.model[:MOST_CHARACTERS],
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
        names.OUTPUT_TYPE: "json" if _wants_json(trace) else "text",
    }
    rarely = {
        names.MAX_TOKENS: ask.max_tokens,
        names.TOP_K: sampling.top_k or None,
        names.SEED: sampling.seed,
        names.PRESENCE_PENALTY: sampling.presence_penalty or None,
        names.FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        names.CHOICES: ask.n if ask.n > 1 else None,
    }
    return asked | {name: value for name, value in rarely.items() if value is not None}


def _wants_json(trace: Trace) -> bool:
    return trace.ask.format is not None and trace.ask.format.kind.startswith("json")


def _found(trace: Trace | PoolTrace, known: str) -> dict[str, str]:
    found = {
        names.RESPONSE_MODEL: known,
        names.ADAPTER: trace.name or "",
        names.REV: trace.rev or "",
        names.TENANT: trace.tenant,
    }
    return {name: value for name, value in found.items() if value}


def _answered(trace: Trace) -> dict[str, Any]:
    generation = trace.generation
    if generation is None:
        return {}
    usage, kind = generation.usage(), "chatcmpl" if trace.ask.chat else "cmpl"
    last = "error" if trace.code else "stop"
    return {
        names.RESPONSE_ID: f"{kind}-{generation.id}",
        names.FINISH_REASONS: [choice.finish or last for choice in generation.choices],
        names.INPUT_TOKENS: usage.prompt,
        names.OUTPUT_TOKENS: usage.completion,
        names.CACHED_TOKENS: usage.cached,
    }


def _set_status(root: Any, trace: Trace | PoolTrace) -> None:
    """Whatever went wrong is named; an error of the span it is only where lorad is to blame."""
    if not trace.code:
        return
    root.set_attribute(names.ERROR, trace.code)
    error = trace.error
    if isinstance(error, Exception) and (not isinstance(error, LoradError) or error.status >= 500):
        root.set_status(Status(StatusCode.ERROR, trace.code))

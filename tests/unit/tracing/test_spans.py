"""What a request's trace says: names, times, tokens, and nothing that anybody wrote."""

import asyncio
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from engine.messages import SamplingParams
from lorad.errors import LoradError
from lorad.service.ask import Ask, Count, Format
from lorad.service.pool_ask import Wish
from lorad.service.trace import PoolTrace, Trace
from lorad.tracing import names
from lorad.tracing.spans import MOST_SEQUENCES, Spans

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SECRET = "the words of a prompt"


@pytest.fixture
def draw():
    """`draw(trace, sample=1.0)`: the spans by name, the parts in lists."""

    def run(trace, sample=1.0):
        kept = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sample)))
        provider.add_span_processor(SimpleSpanProcessor(kept))
        Spans(provider.get_tracer("t"), "tiny", clock=lambda: 110.0).draw(trace)
        found = {}
        for span in kept.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    return run


def asked(**more):
    sampling = SamplingParams(temperature=0.5, top_k=40, seed=7)
    given = {"model": "acme/sql", "chat": True, "sampling": sampling, "stop": (SECRET,)}
    return Ask(**given | {"messages": ({"role": "user", "content": SECRET},)} | more)


def sequence(begun=101.0, first=102.5, last=104.0, tokens=4):
    return SimpleNamespace(begun=begun, first=first, last=last, tokens=tokens)


def ended(ask=None, *sequences, error=None, over=True, finish=("stop",)):
    """A trace that came to its end, received at 100 and over at 105."""
    trace = Trace(ask or asked(), 100.0, lambda trace: None)
    trace.name, trace.rev, trace.tenant = "acme/sql", "a1" * 32, "acme"
    trace.sequences = list(sequences or [sequence()])
    choices = [SimpleNamespace(finish=word) for word in finish]
    usage = Count(prompt=20, completion=4, cached=16)
    generation = SimpleNamespace(
        id="77", choices=choices, usage=lambda: usage, error=error, over=over
    )
    trace.close(105.0, generation)
    return trace


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_its_queueing_prefill_and_decode_below(draw):
    spans = draw(ended())
    (root,) = spans["chat acme/sql"]
    parts = [spans[name][0] for name in (names.QUEUE, names.PREFILL, names.DECODE)]
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert all(part.parent.span_id == root.context.span_id for part in parts)
    assert seconds(root) == pytest.approx(5.0, abs=1e-6)
    assert [seconds(part) for part in parts] == pytest.approx([1.0, 1.5, 1.5], abs=1e-6)
    assert [part.start_time for part in parts[1:]] == [part.end_time for part in parts[:-1]]
    assert parts[2].attributes[names.TOKENS] == 4
    (event,) = root.events
    assert event.name == names.FIRST_TOKEN
    assert (event.timestamp - root.start_time) / 1e9 == pytest.approx(2.5, abs=1e-6)


def test_it_says_what_was_asked_and_what_was_answered(draw):
    (root,) = draw(ended())["chat acme/sql"]
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lorad",
        "gen_ai.request.model": "acme/sql",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 7,
        "gen_ai.output.type": "text",
        "gen_ai.response.id": "chatcmpl-77",
        "gen_ai.response.model": "acme/sql",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 2.5,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "lorad.adapter": "acme/sql",
        "lorad.rev": "a1" * 32,
        "lorad.tenant": "acme",
    }
    assert root.status.status_code is StatusCode.UNSET


def test_no_prompt_no_stop_string_and_no_schema_is_in_it(draw):
    form = Format("json_schema", SECRET, "response_format")
    ask = asked(format=form, template_vars={"x": SECRET}, cache_salt=SECRET)
    spans = draw(ended(ask))
    assert SECRET not in "".join(span.to_json() for group in spans.values() for span in group)
    assert spans["chat acme/sql"][0].attributes[names.OUTPUT_TYPE] == "json"


def test_it_is_a_part_of_the_clients_trace(draw):
    ask = asked(traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="vendor=1")
    (root,) = draw(ended(ask), sample=0.0)["chat acme/sql"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == CALLER
    assert root.context.trace_state.get("vendor") == "1"


def test_what_the_client_does_not_sample_is_not_kept(draw):
    assert draw(ended(asked(traceparent=f"00-{TRACE}-{CALLER}-00")), sample=1.0) == {}
    assert draw(ended(), sample=0.0) == {}


@pytest.mark.parametrize(
    "parent", ["", "x", f"00-{'0' * 32}-{CALLER}-01", f"ff-{TRACE}-{CALLER}-01", "\x00" * 9000]
)
def test_a_parent_that_has_no_such_form_is_none(draw, parent):
    (root,) = draw(ended(asked(traceparent=parent, tracestate="=;=," * 300)))["chat acme/sql"]
    assert root.parent is None


@pytest.mark.parametrize(
    ("error", "over", "code", "status"),
    [
        (LoradError("engine_restarting", "it died"), True, "engine_restarting", StatusCode.ERROR),
        (LoradError("invocation_missing", "none"), True, "invocation_missing", StatusCode.UNSET),
        (RuntimeError("a bug"), True, "internal_error", StatusCode.ERROR),
        (None, False, "client_gone", StatusCode.UNSET),
    ],
)
def test_what_went_wrong_is_named_and_an_error_only_where_lorad_is_to_blame(
    draw, error, over, code, status
):
    (root,) = draw(ended(None, error=error, over=over, finish=("",)))["chat acme/sql"]
    assert root.attributes[names.ERROR] == code
    assert root.attributes[names.FINISH_REASONS] == ("error",)
    assert root.status.status_code is status


def test_a_request_that_never_began_is_a_span_without_parts(draw):
    trace = Trace(asked(model="m" * 5000, chat=False), 100.0, lambda trace: None)
    trace.end(100.5, LoradError("model_not_found", "no such"))
    spans = draw(trace)
    (root,) = spans.pop("text_completion")  # no name that a client made up
    assert spans == {}
    assert root.attributes[names.ERROR] == "model_not_found"
    assert len(root.attributes[names.REQUEST_MODEL]) == 200
    assert names.RESPONSE_MODEL not in root.attributes


def test_one_whose_client_left_before_it_began_says_so(draw):
    trace = Trace(asked(), 100.0, lambda trace: None)
    trace.end(100.5, asyncio.CancelledError())
    (root,) = draw(trace)["chat"]
    assert root.attributes[names.ERROR] == "client_gone"


def test_parts_end_where_the_request_did(draw):
    waited, prefilled = sequence(None, 0.0, 0.0, 0), sequence(101.0, 0.0, 0.0, 0)
    spans = draw(ended(None, waited, prefilled, over=False, finish=("", "")))
    ends = {span.end_time for span in spans["chat acme/sql"]}
    assert names.DECODE not in spans
    assert [seconds(s) for s in spans[names.QUEUE]] == pytest.approx([5.0, 1.0], abs=1e-6)
    assert {spans[names.QUEUE][0].end_time, spans[names.PREFILL][0].end_time} == ends
    assert [s.attributes[names.CHOICE] for s in spans[names.QUEUE]] == [0, 1]


def test_a_request_of_very_many_answers_has_a_bounded_number_of_spans(draw):
    many = [sequence()] * (MOST_SEQUENCES * 4)
    spans = draw(ended(None, *many, finish=("stop",) * len(many)))
    assert len(spans[names.DECODE]) == MOST_SEQUENCES


def test_a_trace_is_told_once():
    told = []
    trace = Trace(asked(), 1.0, told.append)
    trace.end(2.0, LoradError("queue_full", "full"))
    trace.end(3.0, None)
    assert told == [trace]
    assert (trace.ended, trace.code) == (2.0, "queue_full")


def test_vectors_are_one_span_with_their_inputs_and_tokens():
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    spans = Spans(provider.get_tracer("t"), "tiny", clock=lambda: 110.0)
    parent = f"00-{TRACE}-{CALLER}-01"
    wish = Wish(model="acme/sql", endpoint="embeddings", traceparent=parent)
    trace = PoolTrace(wish, 100.0)
    trace.name, trace.num_inputs, trace.num_tokens, trace.ended = "acme/sql", 3, 21, 102.0
    spans.draw_pooled(trace)
    trace.error = LoradError("engine_restarting", SECRET)
    spans.draw_pooled(trace)
    one, two = kept.get_finished_spans()
    assert one.name == "embeddings acme/sql" and seconds(one) == pytest.approx(2.0, abs=1e-6)
    assert f"{one.context.trace_id:032x}" == TRACE
    assert one.attributes[names.INPUT_TOKENS] == 21 and one.attributes[names.INPUTS] == 3
    assert two.status.status_code is StatusCode.ERROR and SECRET not in two.to_json()

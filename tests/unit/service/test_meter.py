"""What a sequence counts for: its times, its tokens, and how it ended for its client."""

from types import SimpleNamespace

import pytest

from engine.messages import SequenceDelta
from lorad.service.meter import BASE, Meter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meter(clock):
    return Meter(clock)


@pytest.fixture
def choice():
    return SimpleNamespace(finish="")


def span_of(
    meter, choice, *, tenant="", name="sql", rev="r1", chat=False, received=99.5, deliver=None
):
    return meter.span(
        choice,
        deliver or (lambda choice, delta: None),
        name=name,
        rev=rev,
        chat=chat,
        num_prompt=7,
        received=received,
        tenant=tenant,
    )


def delta(*tokens, **fields):
    return SequenceDelta(request_id="r", tokens=tokens, **fields)


def test_the_parts_of_a_request_add_up(meter, clock, choice):
    span = span_of(meter, choice)  # submitted at 100, half a second after receipt
    clock.now = 103.0
    span(delta(5, queued_seconds=2.0))
    for now in (103.5, 104.5):
        clock.now = now
        span(delta(6))
    clock.now = 105.0
    span(delta(7, finish_reason="length"))
    k = meter.kinds("")["lora"]
    assert k.queue_seconds.total == pytest.approx(2.5)
    assert k.prefill_seconds.total == pytest.approx(1.0)
    assert k.decode_seconds.total == pytest.approx(2.0)
    assert k.first_token_seconds.total == pytest.approx(3.5)
    assert k.inter_token_seconds.total == pytest.approx(2.0)
    assert sum(k.inter_token_seconds.counts) == 3
    assert k.duration_seconds["completions"].total == pytest.approx(5.5)
    assert (k.prompt_tokens.total, k.generated_tokens.total) == (7, 4)
    counts = meter.names["sql"]
    assert (counts.sequences, counts.prompt_tokens, counts.generated_tokens) == (1, 7, 4)
    assert counts.finished == {"length": 1}
    assert not meter.names[BASE].finished


def test_the_base_model_has_a_kind_and_a_name_of_its_own(meter, choice):
    span_of(meter, choice, name=None, rev=None, chat=True)(delta(5, finish_reason="stop"))
    assert meter.names[BASE].finished == {"stop": 1}
    assert sum(meter.kinds("")["base"].duration_seconds["chat_completions"].counts) == 1
    assert sum(meter.kinds("")["lora"].first_token_seconds.counts) == 0


def test_tokens_that_come_together_share_the_time(meter, clock, choice):
    span = span_of(meter, choice)
    span(delta(1, queued_seconds=0.0))
    clock.now += 0.3
    span(delta(2, 3, 4))
    gaps = meter.kinds("")["lora"].inter_token_seconds
    assert sum(gaps.counts) == 3 and gaps.total == pytest.approx(0.3)


def test_a_stop_string_is_a_stop_though_the_engine_was_told_to_abort(meter, choice):
    def deliver(choice, delta):
        if delta.tokens:
            choice.finish = "stop"

    span = span_of(meter, choice, deliver=deliver)
    span(delta(1, queued_seconds=0.0))
    span(delta(finish_reason="abort"))
    assert meter.names["sql"].finished == {"stop": 1}


def test_what_the_engine_refuses_is_a_refusal_and_what_breaks_off_is_not(meter, choice):
    span_of(meter, choice)(delta(finish_reason="error", code="no_room", cached_tokens=0))
    begun = span_of(meter, choice)
    begun(delta(1, queued_seconds=0.0))
    begun(delta(finish_reason="error", code="engine_restarting"))
    assert meter.refused == {"no_room": 1}
    assert meter.names["sql"].finished == {"error": 2}
    assert meter.names["sql"].prompt_tokens == 7


def test_who_is_ended_by_a_drain_is_counted_with_the_revision(meter, choice):
    span = span_of(meter, choice)
    span(delta(1, queued_seconds=0.0))
    span(delta(finish_reason="abort", code="draining"))
    assert (meter.aborted_by_drain, meter.drained) == (1, {"r1"})
    span_of(meter, choice)(delta(finish_reason="abort"))
    assert meter.aborted_by_drain == 1, "a client that left is no drain"


def test_a_request_that_outlives_its_name_does_not_bring_it_back(meter, choice):
    span = span_of(meter, choice)
    meter.keep(["other"])
    span(delta(1, queued_seconds=0.0, finish_reason="stop"))
    assert set(meter.names) == {BASE}


def test_a_sequence_is_charged_to_whose_request_it_was_and_not_to_whose_adapter(meter, choice):
    span = span_of(meter, choice, tenant="rival", name="acme/sql")
    span(delta(5, queued_seconds=0.0))
    assert meter.tenants == {}, "at its end"
    choice.finish = "stop"
    span(delta(6, finish_reason="stop"))
    waited = span_of(meter, choice, tenant="rival", name="acme/sql")
    choice.finish = ""
    waited(delta(finish_reason="abort"))
    (account,) = meter.tenants.values()
    assert list(meter.tenants) == ["rival"]
    assert (account.sequences, account.prompt_tokens, account.generated_tokens) == (2, 7, 2)
    assert account.finished == {"stop": 1, "abort": 1}
    meter.keep_tenants(["acme"])
    assert meter.tenants == {}


def test_what_runs_on_nobodys_account_is_charged_to_none(meter, choice):
    span_of(meter, choice)(delta(5, finish_reason="stop"))
    assert meter.tenants == {}

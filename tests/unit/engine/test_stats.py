"""What steps were like: their kind, rows, adapters and bytes, and whose time is whose."""

import pytest

from engine.histogram import SECONDS, Histogram
from engine.messages import SamplingParams
from engine.sequence import Chunk, Doom, Sequence, StepWork
from engine.stats import Stats

BYTES = {"a": 1000, "b": 30}


def sequence(rev=None, prompt=4):
    return Sequence(
        request_id="r",
        tokens=list(range(prompt)),
        num_prompt=prompt,
        sampling=SamplingParams(),
        rev=rev,
        identity=rev or "base",
        salt="",
        priority=50,
        order=1,
    )


def work(*rows, samples=True):
    """A step of (revision, rows)."""
    return StepWork(tuple(Chunk(sequence(rev), 0, count, samples) for rev, count in rows))


@pytest.fixture
def stats():
    return Stats(lambda rev: BYTES.get(rev, 0))


def test_a_value_lands_at_or_below_its_bound_and_beyond_all_in_the_last():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(3.0, count=2)
    assert histogram.counts == [2, 2, 3]
    assert histogram.total == pytest.approx(20.0)


def test_a_step_counts_by_kind_each_adapter_once(stats):
    stats.note(work((None, 3)), 0.0, 1.0, waited=True)
    stats.note(work((None, 1), ("a", 2), ("a", 1), ("b", 4)), 1.0, 2.0, waited=True)
    base, lora = stats.base_steps, stats.lora_steps
    assert (base.batch_tokens.total, base.adapters.total, base.lora_bytes.total) == (3, 0, 0)
    assert (lora.batch_tokens.total, lora.adapters.total, lora.lora_bytes.total) == (8, 2, 1030)
    assert sum(base.adapters.counts) == sum(lora.adapters.counts) == 1
    assert base.adapters.counts[0] == 1  # none at all has a bucket of its own


def test_a_step_whose_adapter_has_gone_counts_without_its_bytes(stats):
    stats.note(work(("gone", 1)), 0.0, 1.0, waited=True)
    assert stats.lora_steps.lora_bytes.total == 0
    assert stats.lora_steps.adapters.total == 1


def test_a_step_that_was_launched_ahead_begins_when_the_one_before_it_ends(stats):
    stats.note(work((None, 1)), 0.0, 0.5, waited=True)
    stats.note(work(("a", 1)), 0.1, 0.7, waited=True)  # launched while the first one ran
    assert stats.base_steps.seconds.total == pytest.approx(0.5)
    assert stats.lora_steps.seconds.total == pytest.approx(0.2)


def test_steps_that_draw_nothing_share_the_time_of_the_next_that_does(stats):
    stats.note(work((None, 9), samples=False), 1.0, 1.001, waited=False)
    stats.note(work((None, 9), samples=False), 1.1, 1.101, waited=False)
    assert sum(stats.base_steps.seconds.counts) == 0
    stats.note(work((None, 1)), 1.2, 1.6, waited=True)
    assert sum(stats.base_steps.seconds.counts) == 3
    assert stats.base_steps.seconds.total == pytest.approx(0.6)
    fifth = next(n for n, bound in enumerate(SECONDS) if bound >= 0.2)
    assert stats.base_steps.seconds.counts[fifth] == 3


def test_rows_of_those_that_ended_meanwhile_make_no_tokens(stats):
    step = work(("a", 4))
    step.chunks[0].seq.doom = Doom("abort", "", "")
    stats.note(step, 0.0, 1.0, waited=True)
    assert (stats.generated_tokens, stats.prompt_tokens) == (0, 4)


def test_right_drafts_are_tokens_beside_the_one_of_every_step(stats):
    stats.note(work(("a", 1), (None, 1)), 0.0, 1.0, waited=True)
    stats.note_drafts("a", 4, 3)
    stats.note_drafts("a", 4, 0)
    assert stats.generated_tokens == 5 and stats.generated_by_rev == {"a": 4, None: 1}
    assert (stats.drafted_by_rev["a"], stats.accepted_by_rev["a"]) == (8, 3)
    stats.keep([])
    assert not stats.drafted_by_rev and not stats.accepted_by_rev


def test_pooled_rows_are_counted_by_revision_and_in_all_of_those_that_are_gone_too(stats):
    stats.note_pooled({"a": 5, None: 3}, 0.1)
    step = work(("a", 4), (None, 2), samples=False)
    step.chunks[0].seq.pooled = object()
    stats.note(step, 0.0, 1.0, waited=True)
    assert (stats.pooled_tokens, stats.prompt_tokens) == (12, 14)
    assert stats.pooled_by_rev == {"a": 9, None: 3}
    stats.keep([])
    assert stats.pooled_tokens == 12 and stats.pooled_by_rev == {None: 3}


def test_the_snapshot_tells_them_as_plain_numbers(stats):
    stats.note(work(("a", 4)), 0.0, 0.03, waited=True)
    told = stats.lora_steps.status()
    assert sum(told.seconds.counts) == 1
    assert told.seconds.total == pytest.approx(0.03)
    assert told.lora_bytes.total == 1000

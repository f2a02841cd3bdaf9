"""What a prompt token is said to cost, when steps are settled before they are computed."""

import pytest

from engine.prefill_clock import PrefillClock
from engine.sequence import Chunk, StepWork


def step(*lengths: int) -> StepWork:
    return StepWork(tuple(Chunk(None, 0, length, True) for length in lengths))


@pytest.fixture
def told() -> list[tuple[float, int]]:
    return []


@pytest.fixture
def clock(told) -> PrefillClock:
    return PrefillClock(lambda seconds, rows: told.append((seconds, rows)))


def test_a_prompt_in_chunks_costs_what_all_its_steps_took(clock, told) -> None:
    """Two steps sample nothing and are settled at once; the device takes ten seconds for each."""
    clock.settled(step(512), 100.0, 100.2, waited=False)
    clock.settled(step(512), 100.1, 100.3, waited=False)
    assert not told, "nobody knows yet how long they take"
    clock.settled(step(512), 100.2, 130.0, waited=True)
    assert told == [(pytest.approx(30.0), 1536)]


def test_rows_of_drafts_are_no_prompts(clock, told) -> None:
    drafts = Chunk(None, 0, 9, True, drafts=(1,) * 8)
    clock.settled(StepWork((drafts,)), 100.0, 105.0, waited=True)
    assert not told


def test_a_step_launched_ahead_began_when_the_one_before_it_ended(clock, told) -> None:
    clock.settled(step(1, 1), 100.0, 105.0, waited=True)
    clock.settled(step(64), 101.0, 107.0, waited=True)
    clock.settled(step(64), 120.0, 123.0, waited=True)  # after a pause
    assert told == [(pytest.approx(2.0), 64), (pytest.approx(3.0), 64)]


def test_decode_rows_of_a_mixed_step_carry_their_share(clock, told) -> None:
    clock.settled(step(1, 1, 1, 1, 12), 0.0, 8.0, waited=True)
    assert told == [(pytest.approx(8.0), 16)]


def test_steps_that_mostly_decode_teach_nothing(clock, told) -> None:
    clock.settled(step(1, 1, 1, 3), 0.0, 8.0, waited=True)
    clock.settled(step(1), 8.0, 9.0, waited=True)
    assert not told


def test_what_was_never_waited_for_is_forgotten_with_the_pause_behind_it(clock, told) -> None:
    """Its request was aborted: the next step comes an hour later."""
    clock.settled(step(512), 0.0, 0.1, waited=False)
    clock.forget()
    clock.settled(step(64), 3600.0, 3602.0, waited=True)
    assert told == [(pytest.approx(2.0), 64)]

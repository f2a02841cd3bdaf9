"""The benchmarks of the scheduler run, and what they print is what happened."""

import pytest
from scheduler import measure
from token_budget import simulate


@pytest.mark.parametrize("adapters", [0, 2])
def test_the_cost_of_a_step_has_both_halves(adapters):
    told = measure(streams=4, adapters=adapters, steps=30, prompts=1)
    assert 0 < told["schedule_p50_us"] <= told["schedule_p99_us"]
    assert 0 < told["settle_p50_us"] <= told["settle_p99_us"]
    assert told["both_p50_us"] >= max(told["schedule_p50_us"], told["settle_p50_us"])


def test_a_smaller_budget_makes_pauses_even_and_long_prompts_late():
    small, large = (simulate(rows, rate=20.0, longs=0.2, seconds=1.5) for rows in (128, 2048))
    assert small["begun"] and large["begun"]
    assert small["pause_p99_ms"] < large["pause_p99_ms"]
    assert small["long_p50_ms"] > large["long_p50_ms"]

"""Eviction in simulated time: what the policies find, and what damping does against thrash."""

from functools import cache

import pytest
from policies import measure, take_turns

#: Traffic of minutes, played through.
pytestmark = pytest.mark.late


@cache
def zipf(policy, window=60.0):
    return measure("zipf", policy, requests=2000, window=window)


@pytest.mark.parametrize("policy", ["cost", "lru"])
@pytest.mark.parametrize("clients", [1, 3])
def test_damping_serves_more_of_sixteen_adapters_in_room_for_eight_and_delays_nobody(
    clients, policy
):
    """Three clients: 599 requests a minute without, 1,277 (lru) and 1,554 (cost) with it."""
    without = take_turns(clients, policy, seconds=30.0, window=0.0)
    damped = take_turns(clients, policy, seconds=30.0)
    assert without["loads"] >= without["served"], "nobody was ever found"
    assert damped["served"] > 1.2 * without["served"]
    assert damped["loads"] < 0.8 * damped["served"]
    assert damped["ttft_max_ms"] <= without["ttft_max_ms"]
    assert damped["thrashes"] > 0 and without["thrashes"] == 0


def test_counting_uses_finds_more_than_going_by_the_last_one():
    found = {p: zipf(p)["gpu_rate"] for p in ("cost", "lfu", "lru")}
    assert found["cost"] > found["lru"] + 0.02 and found["lfu"] > found["lru"] + 0.02


def test_cost_keeps_more_of_the_small_ones_than_a_count_alone():
    cost, lfu = (measure("sizes", policy, requests=2000) for policy in ("cost", "lfu"))
    assert cost["gpu_rate"] > lfu["gpu_rate"] + 0.01


def test_damping_leaves_traffic_alone_that_mostly_finds_its_adapters():
    with_it, without = zipf("lru"), zipf("lru", 0.0)
    assert with_it["gpu_rate"] == without["gpu_rate"] and with_it["loads"] == without["loads"]

"""Replicas in simulated time: what the router's affinity is worth, and that it costs no balance."""

import pytest
from affinity import Case, Run

CASE = Case(adapters=200, replicas=4, seconds=40.0, slots=30, seats=16)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    policies = ("affinity", "consistent", "round-robin", "random")
    return {policy: Run(CASE, policy, seed=1).run() for policy in policies}


def test_requests_meet_their_adapter_much_oftener_than_by_turns_or_chance(found) -> None:
    ours, turns, chance = (found[p]["hits"] for p in ("affinity", "round-robin", "random"))
    assert ours > turns + 0.2
    assert ours > chance + 0.2


def test_it_is_about_as_often_as_where_every_adapter_has_one_fixed_place(found) -> None:
    assert found["affinity"]["hits"] > found["consistent"]["hits"] - 0.08


def test_no_replica_has_much_more_to_do_than_the_others(found) -> None:
    assert found["affinity"]["max_to_mean"] < 1.5
    assert found["affinity"]["max_to_mean"] < found["consistent"]["max_to_mean"]
    assert found["affinity"]["wait_p99_seconds"] < found["consistent"]["wait_p99_seconds"]


def test_there_are_far_fewer_loads(found) -> None:
    ours = found["affinity"]["loads_a_minute"]
    assert ours < 0.6 * found["round-robin"]["loads_a_minute"]
    assert ours < 0.6 * found["random"]["loads_a_minute"]


def test_the_loss_of_a_replica_is_seen_in_its_moment_and_mended_after(found) -> None:
    moments = found["affinity"]["moments"]
    assert min(moments[4:]) > moments[0] - 0.05
    assert moments[-1] > min(moments[3:7])


def test_the_same_seed_gives_the_same_numbers(found) -> None:
    assert Run(CASE, "affinity", seed=1).run() == found["affinity"]

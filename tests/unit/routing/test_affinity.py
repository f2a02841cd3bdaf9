"""The router: where a request goes, and what moves when a replica goes or comes back."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.routing.affinity import Replica, Router, Terms, ranking

NAMES = tuple("abcdefgh")
REVS = [f"rev-{i}" for i in range(400)]


def idle(name: str, *, alive: bool = True, **told: object) -> Replica:
    return Replica(**{"waiting": {}, "free_bytes": 1, **told}, name=name, alive=alive)


def fleet(lost: str = "", **by_name: dict[str, object]) -> list[Replica]:
    return [idle(n, alive=n not in lost, **by_name.get(n, {})) for n in NAMES]


def home_of(rev: str, replicas: list[Replica]) -> str:
    choice = Router().choose(rev, replicas, 0.0)
    assert choice is not None
    return choice.name


def test_an_adapter_always_goes_to_the_same_replica() -> None:
    router = Router()
    chosen = {router.choose("rev-1", fleet(), now) for now in range(50)}
    assert len(chosen) == 1
    assert chosen == {Router().choose("rev-1", list(reversed(fleet())), 99.0)}


def test_adapters_are_spread_over_all_replicas() -> None:
    counts = Counter(home_of(rev, fleet()) for rev in REVS)
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 2 * len(REVS) / len(NAMES)


def test_a_lost_replica_moves_its_own_adapters_alone_and_they_come_back() -> None:
    before = {rev: home_of(rev, fleet()) for rev in REVS}
    without = {rev: home_of(rev, fleet(lost="c")) for rev in REVS}
    assert {rev for rev in REVS if before[rev] != without[rev]} == {
        rev for rev in REVS if before[rev] == "c"
    }
    assert len({without[rev] for rev in REVS if before[rev] == "c"}) > 3  # not all to one other
    assert {rev: home_of(rev, fleet()) for rev in REVS} == before


def test_nobody_is_chosen_while_no_replica_takes_requests() -> None:
    assert Router().choose("rev-1", fleet(lost="abcdefgh"), 0.0) is None
    assert Router().choose(None, [], 0.0) is None


def test_the_base_goes_to_the_least_loaded_and_of_those_to_most_room() -> None:
    busy = {n: {"num_running": 3} for n in NAMES} | {
        "e": {"num_running": 1, "num_waiting": 1},
        "f": {"num_running": 2, "free_bytes": 9},
    }
    choice = Router().choose(None, fleet(**busy), 0.0)
    assert (choice.name, choice.reason) == ("f", "base")


def test_where_it_is_already_goes_before_a_home_that_is_no_less_loaded() -> None:
    home, other = ranking("rev-1", NAMES)[:2]
    there = {other: {"resident": {"rev-1"}, "num_running": 2}, home: {"num_running": 2}}
    choice = Router().choose("rev-1", fleet(**there), 0.0)
    assert (choice.name, choice.reason) == (other, "holder")
    there[home] = {"num_running": 1}
    choice = Router().choose("rev-1", fleet(**there), 0.0)
    assert (choice.name, choice.reason) == (home, "home")


@pytest.mark.parametrize("what", ["resident", "loading", "waiting"])
def test_resident_loading_and_queued_all_count_as_being_there(what: str) -> None:
    home, other = ranking("rev-1", NAMES)[:2]
    held = {what: {"rev-1": 1}}
    choice = Router().choose("rev-1", fleet(**{other: held, home: {}}), 0.0)
    assert choice.name == other


def test_a_full_home_is_passed_over_for_whoever_holds_it_or_comes_next() -> None:
    first, second, third = ranking("rev-1", NAMES)[:3]
    full = {first: {"num_running": 60, "resident": {"rev-1"}}}
    choice = Router().choose("rev-1", fleet(**full), 0.0)
    assert (choice.name, choice.reason) == (second, "spill")
    holds = full | {third: {"resident": {"rev-1"}, "num_running": 3}}
    assert Router().choose("rev-1", fleet(**holds), 0.0).name == third
    no_room = full | {second: {"free_bytes": 0}}
    assert Router().choose("rev-1", fleet(**no_room), 0.0).name == third


def test_a_home_without_room_leaves_the_load_to_who_has_some() -> None:
    first, second = ranking("rev-1", NAMES)[:2]
    tight = {n: {"free_bytes": 0} for n in NAMES}
    assert Router().choose("rev-1", fleet(**tight), 0.0).name == first
    roomy = tight | {second: {"free_bytes": 1}}
    assert Router().choose("rev-1", fleet(**roomy), 0.0).name == second
    there = roomy | {first: {"free_bytes": 0, "resident": {"rev-1"}}}
    assert Router().choose("rev-1", fleet(**there), 0.0).name == first


def test_who_only_looks_makes_no_adapter_hot() -> None:
    router, first = Router(), ranking("rev-1", NAMES)[0]
    assert router.look("rev-1", hot(99, first)).name == first
    assert router.homes("rev-1") == 1 and router.look(None, []) is None


def test_a_few_requests_more_than_the_others_have_are_no_reason_to_move() -> None:
    first = ranking("rev-1", NAMES)[0]
    few = {first: {"num_running": Terms().spare - 1, "resident": {"rev-1"}}}
    assert Router().choose("rev-1", fleet(**few), 0.0).name == first


def hot(queued: int, *homes: str) -> list[Replica]:
    """`queued` at each of `homes`; everybody is as busy, so that nobody is full."""
    told = {n: {"num_running": 100} for n in NAMES}
    for name in homes:
        told[name] = {"num_running": 100 - queued, "num_waiting": queued}
        told[name] |= {"waiting": {"rev-1": queued}, "resident": {"rev-1"}}
    return fleet(**told)


def test_a_hot_adapter_gets_a_second_home_and_loses_it_when_it_has_cooled() -> None:
    terms, router = Terms(), Router()
    first, second = ranking("rev-1", NAMES)[:2]
    router.choose("rev-1", hot(terms.hot_queue, first), 0.0)
    assert router.homes("rev-1") == 1
    router.choose("rev-1", hot(terms.hot_queue + 1, first), 1.0)
    assert router.homes("rev-1") == 2
    less = hot(5, first)
    less[NAMES.index(second)] = idle(second, num_running=90)
    assert router.choose("rev-1", less, 2.0).reason == "spread"
    assert router.choose("rev-1", less, 2.0).name == second
    # More than a cool queue keeps both, though it would not have made them.
    for now in range(3, 100):
        router.choose(None, hot(terms.cool_queue + 1, first, second), float(now))
    assert router.homes("rev-1") == 2
    router.choose(None, hot(terms.cool_queue, first, second), 99.0 + terms.cool_seconds - 0.1)
    assert router.homes("rev-1") == 2
    router.choose(None, hot(terms.cool_queue, first, second), 99.0 + terms.cool_seconds)
    assert router.homes("rev-1") == 1


def test_a_burst_does_not_spread_an_adapter_over_all_at_once() -> None:
    router, first = Router(), ranking("rev-1", NAMES)[0]
    for _ in range(50):
        router.choose("rev-1", hot(99, first), 5.0)
    assert router.homes("rev-1") == 2
    router.choose("rev-1", hot(99, first), 5.0 + Terms().settle_seconds)
    assert router.homes("rev-1") == 3


def test_a_lost_home_of_a_hot_adapter_is_replaced_by_the_next() -> None:
    router = Router()
    first, second, third = ranking("rev-1", NAMES)[:3]
    router.choose("rev-1", hot(99, first), 0.0)
    assert router.homes("rev-1") == 2
    lost = [idle(r.name, alive=r.name != first) for r in fleet()]
    busy = [idle(r.name, alive=r.alive, num_running=r.name != third) for r in lost]
    assert router.choose("rev-1", busy, 0.5).name == third
    assert second != third


replicas = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 80),
        st.dictionaries(st.sampled_from(REVS[:3]), st.integers(1, 40), max_size=3),
        st.sets(st.sampled_from(REVS[:3])),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=8,
)


@given(replicas, st.lists(st.sampled_from([None, *REVS[:3]]), min_size=1, max_size=20))
def test_whatever_the_replicas_are_like_the_chosen_one_is_alive_and_not_overfull(
    told: list[tuple[bool, int, dict[str, int], set[str], int]], asked: list[str | None]
) -> None:
    built = [
        idle(
            NAMES[i],
            alive=alive,
            num_running=running,
            waiting=waiting,
            num_waiting=sum(waiting.values()),
            resident=resident,
            free_bytes=free,
        )
        for i, (alive, running, waiting, resident, free) in enumerate(told)
    ]
    alive = {replica.name: replica for replica in built if replica.alive}
    router, again, terms = Router(), Router(), Terms()
    for now, rev in enumerate(asked):
        choice = router.choose(rev, built, float(now))
        assert choice == again.choose(rev, built, float(now))
        if not alive:
            assert choice is None
            continue
        assert choice.name in alive
        mean = (sum(replica.load for replica in alive.values()) + 1) / len(alive)
        full = max(terms.spare, math.ceil(terms.excess * mean))
        assert alive[choice.name].load < full
        assert router.homes(rev or "") <= len(alive)

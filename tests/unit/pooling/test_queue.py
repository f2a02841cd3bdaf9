"""Who goes with a step of the pooling core."""

from engine.pooling.queue import LOOKS_AHEAD, PATIENCE, Item, Queue
from engine.pooling.requests import PoolRequest


def fill(queue: Queue, *lengths: int, first: int = 0, rev: str | None = None, **more: int) -> None:
    for order, length in enumerate(lengths, first):
        request = PoolRequest(request_id=f"r{order}", tokens=[1] * length, rev=rev, **more)
        queue.add(Item(request, request.tokens, None, order))


def anybody(rev: str | None) -> bool:
    return True


def names(items: list[Item]) -> list[str]:
    return [item.request.request_id for item in items]


def test_those_go_who_came_first_as_many_as_fit() -> None:
    queue = Queue(10, 100)
    fill(queue, 4, 4, 2, 5)
    assert names(queue.take(anybody)) == ["r0", "r1", "r2"]
    assert names(queue.take(anybody)) == ["r3"]
    assert queue.take(anybody) == [] and len(queue) == 0


def test_no_more_go_than_a_step_takes() -> None:
    queue = Queue(1000, 2)
    fill(queue, 1, 1, 1)
    assert names(queue.take(anybody)) == ["r0", "r1"]


def test_one_that_is_longer_than_the_budget_goes_alone() -> None:
    queue = Queue(10, 100)
    fill(queue, 25, 1)
    assert names(queue.take(anybody)) == ["r0"]
    assert names(queue.take(anybody)) == ["r1"]


def test_a_higher_priority_goes_first() -> None:
    queue = Queue(10, 100)
    fill(queue, 6, 6)
    fill(queue, 6, first=2, priority=90)
    assert [names(queue.take(anybody)) for _ in range(3)] == [["r2"], ["r0"], ["r1"]]


def test_what_may_not_run_stays_and_holds_nobody_up() -> None:
    queue = Queue(10, 100)
    fill(queue, 9, rev="cold")
    fill(queue, 9, 1, first=1)
    assert names(queue.take(lambda rev: rev is None)) == ["r1", "r2"]
    assert queue.take(lambda rev: rev is None) == [] and "r0" in queue
    assert names(queue.take(anybody)) == ["r0"]


def test_a_long_one_is_passed_by_a_few_times_and_then_goes() -> None:
    """Ahead of it is always one of higher priority, which leaves room for a short one alone."""
    queue = Queue(10, 100)
    fill(queue, 8)
    steps = []
    for step in range(PATIENCE + 2):
        fill(queue, 7, first=100 + step, priority=90)
        fill(queue, 3, first=200 + step)
        steps.append(names(queue.take(anybody)))
    assert steps[:PATIENCE] == [[f"r{100 + i}", f"r{200 + i}"] for i in range(PATIENCE)]
    assert steps[PATIENCE:] == [[f"r{100 + PATIENCE + i}"] for i in range(2)]
    assert names(queue.take(anybody))[0] == "r0"


def test_a_queue_is_looked_through_so_far_and_no_further() -> None:
    queue = Queue(10, 100)
    fill(queue, 6, *[9] * LOOKS_AHEAD, 1)
    assert names(queue.take(anybody)) == ["r0"]


def test_a_step_may_be_given_fewer_rows_than_usual() -> None:
    queue = Queue(1000, 100)
    fill(queue, 4, 4, 4, 25, 1)
    assert names(queue.take(anybody, 8)) == ["r0", "r1"]
    assert names(queue.take(anybody, 8)) == ["r2", "r4"]
    assert names(queue.take(anybody, 8)) == ["r3"], "one that is longer goes alone all the same"

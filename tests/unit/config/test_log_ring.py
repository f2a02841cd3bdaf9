"""The last log lines, and those that follow, from any thread."""

import asyncio
import logging
import threading

import pytest

from lorad.log_ring import LONGEST, LogRing


@pytest.fixture
def ring():
    return LogRing(capacity=4)


@pytest.fixture
def say(ring):
    log = logging.Logger("lorad.x")
    log.addHandler(ring)
    return log.warning


def test_lines_are_numbered_and_the_oldest_go(ring, say):
    for number in range(6):
        say("line %d", number)
    assert [line.id for line in ring.newest(9)] == [3, 4, 5, 6]
    assert [line.message for line in ring.since(4)] == ["line 4", "line 5"]
    assert [line.id for line in ring.since(1 << 62)] == [3, 4, 5, 6], "of another daemon"
    assert ring.newest(0) == ()


def test_a_line_is_one_line_without_secrets_and_of_bounded_length(ring, say):
    say("a\nb %s", "Bearer abcdef")
    say("x" * 2 * LONGEST)
    first, second = ring.newest(2)
    assert (first.message, first.level, first.logger) == (r"a\nb Bearer ***", "warning", "lorad.x")
    assert len(second.message) == LONGEST


def test_a_follower_gets_lines_of_other_threads_and_ends_with_the_daemon(ring, say):
    async def follow():
        ring.attach(asyncio.get_running_loop())
        seen = []

        async def read():
            async for line in ring.follow():
                seen.append(line.message)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for number in range(3):
            thread = threading.Thread(target=say, args=(f"n{number}",))
            thread.start()
            async with asyncio.timeout(10):
                while len(seen) <= number:
                    await asyncio.sleep(0)
            thread.join()
        ring.shut()
        async with asyncio.timeout(10):
            await reader
        say("after the end")
        return seen

    assert asyncio.run(follow()) == ["n0", "n1", "n2"]

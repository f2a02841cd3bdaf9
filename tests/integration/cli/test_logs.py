"""`loractl logs`: the last lines, those above a level, and those that follow."""

import logging
import signal

import pytest


@pytest.fixture
def log(server):
    """Into the ring of the daemon."""
    ring = server.api.log_ring
    server.api.run(lambda: ring.attach(server.api.loop))
    logger = logging.Logger("lorad.test")
    logger.addHandler(ring)
    return logger


def test_the_last_lines_come_oldest_first_and_inert(server, loractl, log):
    for number in range(5):
        log.info("line %d \x1b", number)
    done = loractl("logs", "-n", "2")
    first, second = done.out.splitlines()
    assert first.endswith(r"INFO lorad.test: line 3 \x1b") and "line 4" in second
    document = loractl("logs", "-n", "1", "--json").json
    assert document["schema"] == "lorad/logs.v1"
    assert document["items"][0]["message"] == r"line 4 \x1b"


def test_a_level_leaves_out_what_is_below_and_a_traceback_comes_with_its_line(loractl, log):
    log.info("quiet")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("loud")
    lines = loractl("logs", "--level", "error").out.splitlines()
    assert lines[0].endswith("ERROR lorad.test: loud")
    assert lines[-1] == "    ValueError: why"
    assert not any("quiet" in line for line in lines)
    assert loractl("logs", "--level", "loud").exit == 2
    assert loractl("logs", "-f", "--json").exit == 2


def test_following_shows_what_comes(server, process, log):
    log.info("before")
    running = process("logs", "-f", "-n", "1", host=server.admin)
    assert running.stdout.readline().endswith(b"lorad.test: before\n")
    log.info("after")
    assert running.stdout.readline().endswith(b"lorad.test: after\n")
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130

"""The link to a daemon: it tries again, goes on where it was, and says what is wrong."""

import errno
import threading

import msgspec
import pytest

from lorad.caller import ApiError, Unreachable
from lorad.tui.feed import Feed, Live
from lorad.tui.messages import Changed, Ended, Happened, Lost, Whole
from lorad.wire import ErrorBody
from lorad.wire_stream import Delta


def refused():
    error = Unreachable("unix:///nowhere", "stale")
    error.__cause__ = OSError(errno.ECONNREFUSED, "refused")
    return error


class Daemon:
    """`lives`: what one connection after the other says; an exception is raised."""

    def __init__(self, *lives):
        self.lives, self.asked, self.waits = list(lives), [], []

    def open(self, last):
        self.asked.append(last)
        for item in self.lives.pop(0):
            if isinstance(item, Exception):
                raise item
            yield item

    def messages(self):
        """All that a Live says until the daemon has no life left."""
        stop = threading.Event()

        def wait(stop, seconds):
            self.waits.append(seconds)
            if not self.lives:
                stop.set()

        return list(Live("here", self.open, wait=wait).messages(stop))


def test_it_tries_again_after_one_to_ten_seconds_and_says_why():
    daemon = Daemon(*[[refused()]] * 7)
    said = daemon.messages()
    assert said == [Lost("ECONNREFUSED", wait) for wait in daemon.waits]
    assert daemon.waits == [1.0, 2.0, 4.0, 7.0, 10.0, 10.0, 10.0]


def test_after_a_while_that_went_well_it_is_quick_again(boards):
    board = ("i-1", boards.small())
    daemon = Daemon([refused()], [refused()], [board], [refused()])
    daemon.messages()
    assert daemon.waits == [1.0, 2.0, 1.0, 2.0]


def test_it_resumes_after_the_newest_that_it_saw(boards):
    event = boards.event(7, "slot.load")
    delta = Delta(sequence=2, time=boards.moment(1))
    daemon = Daemon([("i-6", boards.small()), ("i-7", event), ("i-7", delta)], [])
    said = daemon.messages()
    assert daemon.asked == ["", "i-7"]
    assert [type(message) for message in said] == [Whole, Happened, Changed, Lost, Lost]


def test_a_delta_that_was_lost_begins_the_stream_anew(boards):
    delta = Delta(sequence=4, time=boards.moment(3))
    daemon = Daemon([("i-6", boards.small()), ("i-6", delta)], [("i-6", boards.small())])
    said = daemon.messages()
    assert [type(message) for message in said] == [Whole, Lost, Whole, Lost]
    assert said[1].why == "gap: 2 messages were missed"


@pytest.mark.parametrize("status, final", [(401, True), (403, True), (404, True), (503, False)])
def test_who_is_not_let_in_does_not_knock_for_ever(status, final):
    error = ApiError(status, ErrorBody(message="no", type="x", code="forbidden"))
    said = Daemon([error]).messages()
    assert isinstance(said[0], Ended if final else Lost)
    assert said[0].why == "forbidden: no"


def test_another_version_of_the_stream_is_told_as_that():
    assert "another version" in Daemon([msgspec.ValidationError("x")]).messages()[0].why


def test_a_feed_wakes_once_for_what_nobody_took(boards):
    woken = threading.Semaphore(0)
    source = boards.Script()
    feed = Feed(source, woken.release)
    feed.start()
    for number in range(3):
        source.tell(Lost(str(number), 1.0))
    taken = []
    while len(taken) < 3:
        assert woken.acquire(timeout=30)
        taken += feed.take()
    assert [message.why for message in taken] == ["0", "1", "2"]
    feed.stop()
    source.tell(None)


def test_a_source_that_fails_is_the_end_and_not_a_traceback(boards):
    class Broken(boards.Script):
        def messages(self, stop):
            raise RuntimeError("a fault of ours")
            yield

    woken = threading.Event()
    feed = Feed(Broken(), woken.set)
    feed.start()
    assert woken.wait(30)
    assert feed.take() == [Ended("RuntimeError: a fault of ours")]

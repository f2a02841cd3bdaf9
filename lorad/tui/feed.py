"""The connection: in a thread of its own, patient, and never in the way of the screen.

Goes in: a source.  Comes out: its messages in a queue, and one call `wake` when there are some that
nobody took yet.  `Live` is the source that is a daemon: it tries again after 1 to 10 seconds, goes
on after the event that it saw last, and keeps the reason of a broken link.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import msgspec

from lorad.caller import ApiError, Unreachable
from lorad.tui.messages import Changed, Ended, Happened, Lost, Message, Source, Whole
from lorad.wire import EventItem
from lorad.wire_stream import Board, Delta

RETRY_SECONDS = (1.0, 2.0, 4.0, 7.0, 10.0)
#: Messages that wait for a screen that does not take them.  Then the source waits as well: what is
#: not read of a daemon's stream, the daemon does not keep.
MAX_WAITING = 20_000


class Feed:
    """Runs a source.  `take` from the thread of the screen, all else is its own business."""

    def __init__(self, source: Source, wake: Callable[[], None]) -> None:
        self._source, self._wake = source, wake
        self._waiting: deque[Message] = deque()
        self._room = threading.Event()
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorad-top-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """At once: a thread that sits in a read is left to die with the process."""
        self._stop.set()
        self._room.set()

    def take(self) -> list[Message]:
        """What came since the last call, oldest first."""
        self._woken.clear()
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        self._room.set()
        return taken

    def _run(self) -> None:
        try:
            for message in self._source.messages(self._stop):
                if self._stop.is_set():
                    return
                self._put(message)
        except Exception as error:  # the border of this thread: the screen has to say why
            self._put(Ended(f"{type(error).__name__}: {error}"))

    def _put(self, message: Message) -> None:
        while len(self._waiting) >= MAX_WAITING and not self._stop.is_set():
            self._room.clear()
            if len(self._waiting) >= MAX_WAITING:  # nobody took them in between
                self._room.wait()
        self._waiting.append(message)
        if not self._woken.is_set():
            self._woken.set()
            self._wake()


Opened = Iterator[tuple[str, Board | Delta | EventItem]]


class Live:
    """A daemon's stream, for ever.  `open` begins it after an event's id; it may raise Unreachable
    and ApiError, and its end is a broken link.  `wait(stop, seconds)` sleeps."""

    def __init__(
        self,
        title: str,
        open: Callable[[str], Opened],
        *,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self.title = title
        self._open, self._wait = open, wait

    def pace(self, seconds: float) -> None:
        """The daemon keeps its own pace; fewer pictures of it are shown."""

    def messages(self, stop: threading.Event) -> Iterator[Message]:
        last = ""
        waits: Iterator[float] = iter(())
        while not stop.is_set():
            why = "the daemon ended the stream"
            try:
                number = 0
                for at, body in self._open(last):
                    last = at
                    waits = iter(())
                    if isinstance(body, EventItem):
                        yield Happened(body)
                    elif isinstance(body, Board):
                        number = body.sequence
                        yield Whole(body)
                    elif body.sequence == number + 1:
                        number += 1
                        yield Changed(body)
                    else:
                        why = f"gap: {body.sequence - number - 1} messages were missed"
                        break
            except Unreachable as error:
                why = reason(error)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                why = "the daemon speaks another version of the stream"
            except ApiError as error:
                why = f"{error.code}: {error.message}"
                if error.status in (401, 403, 404):
                    yield Ended(why)
                    return
            wait = next(waits, None)
            if wait is None:
                waits = chain(RETRY_SECONDS[1:], repeat(RETRY_SECONDS[-1]))
                wait = RETRY_SECONDS[0]
            yield Lost(why, wait)
            self._wait(stop, wait)


def reason(error: Unreachable) -> str:
    """The errno's name, else what is known."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return errno.errorcode.get(cause.errno, str(cause.errno))
        cause = cause.__cause__ or cause.__context__
    return {"loading": "no answer", "lost": "connection broke"}.get(error.kind, error.kind)

"""LogRing: the last lines of the daemon's log, for `loractl logs`, numbered from 1.

Goes in: log records, from any thread.  Comes out: pages, and `follow`, which ends with `close`.
Lines are made by the same rules as those on stderr: on one line, without secrets.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

from lorad.logs import message_of, time_of, traceback_of
from lorad.wire_operate import LogLine

#: Of one line, characters that are kept; stderr has all of it.
LONGEST = 4000


class LogRing(logging.Handler):
    """The last `capacity` lines."""

    def __init__(self, capacity: int = 2000) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=capacity)
        self._last_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Followers wait in this loop."""
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """`logging` calls this, one record at a time."""
        self._last_id += 1
        self._lines.append(
            LogLine(
                id=self._last_id,
                time=time_of(record),
                level=record.levelname.lower(),
                logger=record.name,
                message=message_of(record)[:LONGEST],
                error=traceback_of(record)[-LONGEST:],
            )
        )
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def shut(self) -> None:
        """Followers get what there is, and end."""
        self._closed = True
        self._wake()
        self._loop = None

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ------------------------------------------------------------- reading, from the loop
    def newest(self, limit: int) -> tuple[LogLine, ...]:
        """The last `limit` lines, oldest first."""
        with self._held():
            return tuple(self._lines)[-limit:] if limit > 0 else ()

    def since(self, after: int, limit: int = 0) -> tuple[LogLine, ...]:
        """Lines with an id above `after`, oldest first; an id that is not ours yet means all."""
        with self._held():
            after = after if after <= self._last_id else 0
            fresh = (line for line in self._lines if line.id > after)
            return tuple(islice(fresh, limit or None))

    async def follow(self, after: int | None = None) -> AsyncIterator[LogLine]:
        """Every line after `after` (None: from now on), then each new one, until `shut`."""
        seen = self._last_id if after is None else after
        while True:
            changed = self._changed
            lines = self.since(seen)
            for line in lines:
                yield line
                seen = line.id
            if not lines:
                if self._closed:
                    return
                seen = min(seen, self._last_id)
                await changed.wait()

    def _held(self) -> "_Lock":
        return _Lock(self)


class _Lock:
    """A handler's own lock as a context: records come from other threads."""

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._handler.acquire()

    def __exit__(self, *exc: object) -> None:
        self._handler.release()

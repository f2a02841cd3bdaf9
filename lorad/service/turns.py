"""Turns: many messages at once when they wait already, and never at the cost of everybody else.

Goes in: a queue that somebody else fills.  Comes out: its items, one by one.  Those that are there
come within one turn of the event loop, so that each stream writes once for all of them and a daemon
that is behind catches up; after TURN_SECONDS of that, everything else that is ready has its turn.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")

#: A step of 64 tokens costs about 1 ms in all: a turn is several of them.
TURN_SECONDS = 0.005


class Turns(Generic[T]):
    """One reader's view of `queue`."""

    def __init__(self, queue: "asyncio.Queue[T]") -> None:
        self._queue = queue
        self._now = asyncio.get_running_loop().time
        self._ends = 0.0

    async def next(self) -> T:
        """The next item.  None is lost by a cancellation."""
        if self._queue.empty():
            item = await self._queue.get()
            self._ends = self._now() + TURN_SECONDS
            return item
        if self._now() >= self._ends:
            await asyncio.sleep(0)
            self._ends = self._now() + TURN_SECONDS
        return self._queue.get_nowait()

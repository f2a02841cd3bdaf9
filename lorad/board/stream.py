"""Stream: the board for one reader: whole at first, then what changed, and events as they come.

Goes in: how a board is painted, and the ring of events.  Comes out: messages, when they are asked
for.  Nothing waits for a reader: each is told what differs from what it was told last, however
long ago that was, so one that is slow gets fewer deltas and holds nothing but one board.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from lorad.board.delta import difference
from lorad.board_apply import MAX_EVENTS, apply
from lorad.service.events import EventRing
from lorad.wire import EventItem
from lorad.wire_stream import Board, Delta

#: Seconds between two deltas that a reader may ask for.
LEAST_SECONDS, MOST_SECONDS = 0.2, 10.0


@dataclass(frozen=True, slots=True)
class Message:
    """`id`: where to resume from after it, "" if that is not known."""

    name: Literal["board", "delta", "event"]
    value: Board | Delta | EventItem
    id: str


class Stream:
    """`paint` makes the board of now."""

    def __init__(
        self,
        paint: Callable[[], Board],
        events: EventRing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paint, self._events, self._clock = paint, events, clock

    async def follow(
        self, interval: float, after: int | None = None
    ) -> AsyncGenerator[Message, None]:
        """Until the daemon ends.  `after`: the event that the reader has seen last."""
        events = self._events
        seen = events.last_id if after is None else after
        known = self._first(interval, seen)
        due = self._clock() + interval
        yield Message("board", known, self._id(seen))
        while True:
            if events.last_id != seen:
                items, gap = events.since(seen)
                if gap:
                    yield Message("event", events.gap(seen), "")
                    seen = 0
                for item in items:
                    yield Message("event", item, self._id(item.id))
                    seen = item.id
                seen = seen if items else events.last_id
            left = due - self._clock()
            if events.closed and events.last_id == seen:
                return
            if left > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await events.beyond(seen)
                continue
            due = max(due + interval, self._clock())
            delta = difference(known, self._paint())
            known = apply(known, delta)
            yield Message("delta", delta, self._id(seen))

    def _first(self, interval: float, seen: int) -> Board:
        """With events up to `seen`: the others come as messages."""
        items = tuple(item for item in self._events.newest(MAX_EVENTS) if item.id <= seen)
        if seen > self._events.last_id:
            items = ()  # of another daemon: all of this one's come as messages
        return replace(self._paint(), sequence=1, interval_seconds=interval, events=items)

    def _id(self, seen: int) -> str:
        return f"{self._events.instance_id}-{seen}" if seen <= self._events.last_id else ""

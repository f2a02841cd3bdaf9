"""EventRing: what happened, newest last, numbered from 1 within one daemon.

Goes in: `publish`, from the daemon's loop only.  Comes out: pages by id, and `follow`, which ends
with the daemon (`close`) and tells a reader that fell behind by a `gap` item.  Readers hold no
queue: the ring is the only memory, so a slow reader costs nothing.  Knows neither HTTP nor the
registry.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Literal

from lorad.wire import EventItem

log = logging.getLogger("lorad.events")

Level = Literal["info", "warn", "error"]
_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


def rfc3339(moment: datetime) -> str:
    """UTC, with milliseconds: `2025-03-01T09:30:00.125Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_now() -> datetime:
    return datetime.now(UTC)


class EventRing:
    """The last `capacity` events.  Each is also a line of the log."""

    def __init__(
        self, capacity: int = 4096, *, now: Callable[[], datetime] = utc_now, instance_id: str = ""
    ) -> None:
        self.instance_id = instance_id
        self._items: deque[EventItem] = deque(maxlen=capacity)
        self._now = now
        self._changed = asyncio.Event()
        self._closed = False
        self.last_id = 0

    def publish(
        self,
        type: str,
        *,
        level: Level = "info",
        name: str = "",
        rev: str = "",
        cause: str = "",
        message: str = "",
        details: Mapping[str, str] | None = None,
        replica: str = "",
    ) -> EventItem:
        """Enter one event and wake every follower.  `replica`: of several engines of a model, the
        one that it happened on."""
        self.last_id += 1
        item = EventItem(
            id=self.last_id,
            time=rfc3339(self._now()),
            level=level,
            type=type,
            name=name,
            rev=rev,
            cause=cause,
            message=message,
            details=dict(details or {}),
            replica=replica,
        )
        self._items.append(item)
        where = f"replica {replica}" if replica else ""
        words = (type, name, rev[:12], where, cause, message)
        fields = {"event": type, "name": name, "rev": rev, "cause": cause, **(details or {})}
        fields |= {"replica": replica} if replica else {}
        line = " ".join(word for word in words if word)
        log.log(_LEVELS[level], "%s", line, extra={"fields": fields})
        self._wake()
        return item

    def close(self) -> None:
        """Followers get what there is, and end."""
        self._closed = True
        self._wake()

    def reopen(self) -> None:
        """It was closed too early: there are followers again."""
        self._closed = False

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def closed(self) -> bool:
        """Nothing more will come."""
        return self._closed

    async def beyond(self, after: int) -> None:
        """Until there is an event above `after`, or the ring is closed."""
        while self.last_id <= after and not self._closed:
            await self._changed.wait()

    def since(self, after: int, limit: int = 0) -> tuple[tuple[EventItem, ...], bool]:
        """Events with an id above `after`, oldest first, at most `limit` (0 = all); and: a gap?

        A gap: some that the reader has not seen are gone, or `after` is of another daemon.
        """
        first = self._items[0].id if self._items else self.last_id + 1
        gap = after + 1 < first or after > self.last_id
        fresh = (item for item in self._items if gap or item.id > after)
        return tuple(islice(fresh, limit or None)), gap

    def newest(self, limit: int) -> tuple[EventItem, ...]:
        """The last `limit` events, oldest first."""
        return tuple(self._items)[-limit:] if limit > 0 else ()

    def of(self, name: str, limit: int) -> tuple[EventItem, ...]:
        """The last `limit` events of one adapter, oldest first."""
        mine = (item for item in reversed(self._items) if item.name == name)
        return tuple(islice(mine, limit))[::-1]

    async def follow(self, after: int | None = None) -> AsyncIterator[EventItem]:
        """Every event after `after` (None: from now on), then each new one, until `close`."""
        seen = self.last_id if after is None else after
        while True:
            changed = self._changed
            items, gap = self.since(seen)
            if gap:
                yield self.gap(seen)
                seen = 0
            for item in items:
                yield item
                seen = item.id
            if not items:
                if self._closed:
                    return
                seen = self.last_id if gap else seen
                await changed.wait()

    def gap(self, seen: int) -> EventItem:
        """Not entered in the ring: it tells one reader what that reader missed."""
        return EventItem(
            id=seen,
            time=rfc3339(self._now()),
            level="warn",
            type="gap",
            message="some events are gone; read the state anew",
        )

"""Retiring: a revision that nobody means or uses any more leaves the engines, then the store.

Goes in: revisions that lost a name or a lease.  Comes out: RemoveRevision to every engine that
knows one, its files collected, `adapter.retired`.  Whatever was kept about it is forgotten last.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

from lorad.errors import LoradError
from lorad.service.catalog import Catalog
from lorad.service.events import EventRing
from lorad.service.shelf import Shelf
from lorad.service.tasks import Tasks

log = logging.getLogger("lorad.revisions")


class Engine(Protocol):
    """Of Revisions: what one engine knows."""

    async def leave(self, rev: str) -> None: ...
    def forget(self, rev: str) -> None: ...


class Retiring:
    """Of one model, whose `engines` are all that may know its revisions."""

    def __init__(
        self,
        engines: Collection[Engine],
        shelf: Shelf,
        catalog: Catalog,
        events: EventRing,
        tasks: Tasks,
    ) -> None:
        self.on_retired: Callable[[str], None] = lambda rev: None
        self.on_change: Callable[[], None] = lambda: None
        self._engines, self._shelf, self._catalog = engines, shelf, catalog
        self._events, self._tasks = events, tasks

    def consider(self, rev: str) -> None:
        """It lost a name, or a lease."""
        if not self._in_use(rev):
            self._tasks.spawn(self._retire(rev))

    async def _retire(self, rev: str) -> None:
        async with self._shelf.lock(rev):
            if self._in_use(rev):
                return
            # Side by side: one that hangs keeps no room on the others.
            await asyncio.gather(*(engine.leave(rev) for engine in self._engines))
            label = self._catalog.label(rev)
            self.on_retired(rev)
            try:
                await self._shelf.collect()
            except LoradError as error:  # a full disk, say; the housekeeper comes by later
                log.warning("the files of %s stay for now: %s", rev[:12], error.message)
            # Only now: its last transitions come after the engine's answer, and bear its name.
            for engine in self._engines:
                engine.forget(rev)
            self._catalog.forget(rev)
        self._events.publish("adapter.retired", name=label, rev=rev)
        self.on_change()

    def _in_use(self, rev: str) -> bool:
        return self._catalog.referenced(rev) or self._catalog.leases(rev) > 0

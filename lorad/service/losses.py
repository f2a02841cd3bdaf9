"""Losses: what names come to when stored files vanish or cannot be mended.

Goes in: revisions whose files are gone, or are damaged again after they were packed anew.  Comes
out: names that are missing or quarantined, in the registry first; word to whoever may have the
content still.  Brings nothing back itself.
"""

from collections.abc import Callable

from engine.adapters.states import State
from lorad.service.events import EventRing
from lorad.service.model_revisions import ModelRevisions
from lorad.service.names import Names


class Losses:
    """Hears of them from `revisions`, and from whoever looks at the store."""

    def __init__(self, names: Names, revisions: ModelRevisions, events: EventRing) -> None:
        self.on_lost: Callable[[str], None] = lambda name: None  # its source may have it still
        self._names, self._revisions, self._events = names, revisions, events
        revisions.tell_losses(self.mark_missing, self.mark_damaged)

    async def lose_files(self, rev: str) -> None:
        """The store lost `rev`.  A copy in memory serves on; without one its names are missing."""
        if self._revisions.tier(rev) is State.REGISTERED:
            return await self.mark_missing(rev)
        for name in self._names.catalog.names_of(rev):
            self.on_lost(name)

    async def mark_missing(self, rev: str) -> None:
        """The store lost `rev`: its names cannot be asked for until the content returns."""
        for name in self._names.catalog.names_of(rev):
            if await self._names.write(name, self._names.registry.mark_missing(name, rev)):
                self._events.publish(
                    "adapter.missing",
                    level="warn",
                    name=name,
                    rev=rev,
                    message="its files are gone from the store; add it again",
                )
                self.on_lost(name)
        self._revisions.consider_retiring(rev)  # the engine need not keep what nobody can ask for

    async def mark_damaged(self, rev: str, message: str) -> None:
        """Packed anew, and damaged again: its names are quarantined until it is added again."""
        for name in self._names.catalog.names_of(rev):
            condemned = self._names.registry.condemn(name, rev, "E_DAMAGED", message)
            if await self._names.write(name, condemned):
                self._events.publish(
                    "adapter.rejected",
                    level="error",
                    name=name,
                    rev=rev,
                    cause="E_DAMAGED",
                    message=message,
                )
        self._revisions.consider_retiring(rev)

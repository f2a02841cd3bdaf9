"""Standing: pin and priority of each revision, told to the engine as the names want them.

Goes in: what the catalog wants by now.  Comes out: SetRevision commands; a pin without room is an
event, and is tried again when room may be there.  Knows nothing of files.
"""

import logging
from collections.abc import Callable

from engine.messages import SetRevision
from lorad.errors import LoradError
from lorad.service.catalog import Catalog
from lorad.service.engine_link import EngineLink
from lorad.service.revision_news import RevisionNews

log = logging.getLogger("lorad.revisions")


class Standing:
    """Of revisions that the engine knows; `on_change` follows each that it took.  `wanted`: what
    this engine is to keep, the catalog's word unless it is one replica of several."""

    def __init__(
        self,
        link: EngineLink,
        catalog: Catalog,
        news: RevisionNews,
        on_change: Callable[[], None],
        wanted: Callable[[str], tuple[bool, int]] | None = None,
    ) -> None:
        self.unpinned: set[str] = set()  # wanted pinned, and the engine has no room for the pin
        self._link, self._news = link, news
        self._wanted = wanted or catalog.wanted
        self._on_change = on_change

    async def apply(self, rev: str) -> None:
        """Tell the engine pin and priority as the names want them now.

        Raises no_room for a pin that does not fit; its priority counts all the same.
        """
        if rev not in self._link.known:
            return
        pinned, priority = self._wanted(rev)
        command_id = self._link.next_id()
        await self._link.call(
            SetRevision(command_id=command_id, rev=rev, pinned=pinned, priority=priority)
        )
        self.unpinned.discard(rev)
        if not pinned:
            await self._retry_pins()
        self._on_change()

    async def follow(self, rev: str) -> None:
        """`apply` where nobody waits for the pin: without room it is an event, and waits itself."""
        try:
            await self.apply(rev)
        except LoradError as error:
            if error.code != "no_room":
                raise
            self.note_unpinned(rev, error)

    async def forget(self, rev: str) -> None:
        """It left the engine: whoever waits for a pin may have its room."""
        self.unpinned.discard(rev)
        await self._retry_pins()

    async def _retry_pins(self) -> None:
        """There may be room now for a pin that had none.  Who made it is not told what became of
        that: an engine that has died meanwhile, say, is told of all pins at its next start."""
        for rev in tuple(self.unpinned):
            if not self._wanted(rev)[0]:
                self.unpinned.discard(rev)
                continue
            try:
                await self.follow(rev)
            except LoradError as error:
                log.info("pinning %s waits: %s", rev[:12], error.message)
                return

    def note_unpinned(self, rev: str, error: LoradError) -> None:
        """It is served like any other, which is better than not at all."""
        if rev not in self.unpinned:
            self.unpinned.add(rev)
            self._news.publish("pin.refused", rev, "warn", error.code, error.message)

"""Revival: a new engine gets what the one before held on the GPU.

Goes in: what was resident when an engine died.  Comes out: loads, pinned adapters first, the rest
beside requests; what is not back when the next engine dies too is remembered still.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from lorad.errors import LoradError
from lorad.service.catalog import Catalog
from lorad.service.revision_news import RevisionNews
from lorad.service.tasks import Tasks

#: How many revisions are brought up side by side at a start.
PARALLEL_LOADS = 8


class Revival:
    """Of one engine.  `load` brings one revision to the GPU, or raises LoradError; `wanted` says of
    a revision whether this engine keeps it, and its priority."""

    def __init__(
        self,
        model: str,
        catalog: Catalog,
        news: RevisionNews,
        tasks: Tasks,
        load: Callable[[str], Awaitable[None]],
        wanted: Callable[[str], tuple[bool, int]] | None = None,
    ) -> None:
        self._wanted = wanted or catalog.wanted
        self._model, self._catalog, self._news = model, catalog, news
        self._tasks, self._load = tasks, load
        self._lost: dict[str, None] = {}  # on the GPU when an engine died, and not back yet

    def remember(self, revs: Iterable[str]) -> None:
        """These were resident."""
        self._lost |= dict.fromkeys(revs)

    def forget(self, rev: str) -> None:
        """It was evicted or retired: it need not come back."""
        self._lost.pop(rev, None)

    async def bring_up(self) -> None:
        """Give a new engine its pinned adapters; what else was resident follows by itself."""
        priority = {
            entry.rev: self._wanted(entry.rev)[1]
            for entry in self._catalog.of(self._model)
            if entry.pinned and entry.rev is not None and self._wanted(entry.rev)[0]
        }
        await self._load_all(sorted(priority, key=lambda rev: (-priority[rev], rev)), "pin")
        rest = [rev for rev in self._lost if self._catalog.names_of(rev)]
        self._lost = dict.fromkeys(rest)
        if rest:
            self._tasks.spawn(self._load_all(rest, "restart"))

    async def _load_all(self, revs: Iterable[str], cause: str) -> None:
        room = asyncio.Semaphore(PARALLEL_LOADS)

        async def one(rev: str) -> None:
            async with room:
                if cause == "restart" and rev not in self._lost:
                    return  # evicted or retired meanwhile
                try:
                    await self._load(rev)
                except LoradError as error:
                    self._news.publish("slot.load_failed", rev, "warn", cause, error.advised)
                    if error.code == "engine_restarting":
                        return
                self._lost.pop(rev, None)

        await asyncio.gather(*(one(rev) for rev in revs))

"""Shelf: which stored revisions must stay whatever the names say, and who is at one right now.

Goes in: revisions on their way into the registry, an operator's wish to keep files, leases through
the catalog.  Comes out: what a collection spares, and one lock a revision.  Knows no engine.
"""

import asyncio
import contextlib
import weakref
from collections import Counter
from collections.abc import AsyncIterator

from lorad.disk import writing
from lorad.registry.holdings import KEPT, marked
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog


class Shelf:
    """The store's revisions, as the daemon's loop uses them."""

    def __init__(self, registry: Registry, catalog: Catalog) -> None:
        self.store = registry.store
        self.kept = marked(self.store, KEPT)  # revisions whose files an operator wanted to keep
        self._registry, self._catalog = registry, catalog
        self._arriving: Counter[str] = Counter()  # on their way from the store to the registry
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def lock(self, rev: str) -> asyncio.Lock:
        """Held while a revision is prepared, changed or retired."""
        lock = self._locks.get(rev)
        if lock is None:
            lock = self._locks[rev] = asyncio.Lock()
        return lock

    def is_busy(self, rev: str) -> bool:
        """Somebody holds its lock, or is about to."""
        return self.lock(rev).locked() or rev in self._arriving

    @contextlib.asynccontextmanager
    async def hold(self, rev: str) -> AsyncIterator[None]:
        """Nothing collects or changes `rev` meanwhile."""
        self._arriving[rev] += 1
        try:
            async with self.lock(rev):
                yield
        finally:
            self._arriving[rev] -= 1
            if not self._arriving[rev]:
                del self._arriving[rev]

    def spared(self) -> set[str]:
        """What a collection leaves although no name may point to it.

        The catalog follows the registry by a moment: until then a request may yet take a lease on
        what a name has just stopped to mean.
        """
        return self._catalog.in_use() | self.kept | set(self._arriving)

    async def collect(self) -> tuple[str, ...]:
        """Drop what no name points to and nobody uses from the registry and the store."""
        return await asyncio.wrap_future(self._registry.collect(self.spared()))

    async def keep_files(self, rev: str, keep: bool) -> None:
        """Files that outlive their last name, across restarts too; or no longer.  Raises
        insufficient_storage, and nothing has changed."""
        mark = self.store.path(rev) / KEPT
        if keep and self.store.has(rev):
            with writing("mark files to be kept", mark.parent):
                await asyncio.to_thread(mark.touch)
            self.kept.add(rev)
        elif not keep and rev in self.kept:
            with writing("keep files no longer", mark.parent):
                await asyncio.to_thread(mark.unlink, missing_ok=True)
            self.kept.discard(rev)

"""Housekeeping: what lies in the store for nobody, found and removed.

Goes in: the store, the registry, leases.  Comes out: the garbage, listed or removed, each piece
with the reason; by itself at the start, when the engine has said its layout, and every ten minutes.
What `rm` and a replaced revision's last lease leave goes at once, in `Revisions`.  Garbage is

    revision   no name serves it or waits for it, and no request uses it
    unknown    a revision that the registry does not know
    packed     a packed file for another layout or another base than the engine's
    leftover   what a crash or a failed removal left half done
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from lorad import wire
from lorad.disk import CLOSED
from lorad.errors import LoradError, RegistryUnusable
from lorad.registry.holdings import Holding, holdings
from lorad.registry.records import Packing
from lorad.registry.registry import Registry
from lorad.registry.room import size_of, tree_bytes
from lorad.registry.store import Store, leftovers
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.shelf import Shelf

log = logging.getLogger("lorad.store")

#: Between two rounds; each looks into every folder of the store, on a thread.
ROUND_SECONDS = 600.0

_WHY = {
    "revision": "no name serves it, and no request uses it",
    "unknown": "the registry does not know it",
    "packed": "packed for another layout or base than the one that is served",
    "leftover": "left by a crash, or by a removal that failed",
}


class Housekeeping:
    """`links`: the engines of all models.  `make_room` brings the store under its budget:
    RoomMaker's `make`."""

    def __init__(
        self, registry: Registry, links: Sequence[EngineLink], shelf: Shelf, events: EventRing
    ) -> None:
        self.make_room: Callable[[int], Awaitable[None]] = _as_it_is
        #: Told of a revision that a name serves, and whose files are not in the store any more.
        self.on_lost: Callable[[str], Awaitable[None]] = _as_it_is
        self._registry, self._links, self._events = registry, links, events
        self._shelf = shelf
        self._store: Store = registry.store
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """For ever: a round now, one when the engine is there, one every ROUND_SECONDS."""
        await self._round()
        for link in self._links:
            await link.ready.wait()
        while True:
            await self._round()
            await asyncio.sleep(ROUND_SECONDS)

    async def gc(self, ask: wire.GcAsk, *, by_itself: bool = False) -> wire.Garbage:
        """What is garbage; without `dry_run` it is gone then.  Raises what the registry raises, and
        insufficient_storage where nothing can be removed.

        `by_itself`: a registry that was just recovered may have forgotten what it does not know.
        """
        async with self._turn:
            found = await self._find()
            if by_itself and self._registry.report.recovered:
                found = [item for item in found if item.kind != "unknown"]
            if not ask.dry_run:
                found = await self._gone(found)
        room = self._store.room
        used = await asyncio.to_thread(room.used_bytes)
        return wire.Garbage(
            items=tuple(found),
            num_bytes=sum(item.num_bytes for item in found),
            dry_run=ask.dry_run,
            used_bytes=used,
            budget_bytes=room.budget_bytes,
        )

    async def collect(self) -> None:
        """Remove all of it, without a word."""
        await self.gc(wire.GcAsk(), by_itself=True)

    async def _round(self) -> None:
        """A full disk or a busy registry is for the next round."""
        try:
            done = await self.gc(wire.GcAsk(), by_itself=True)
            if done.items:
                message = f"{len(done.items)} pieces, {done.num_bytes} bytes"
                self._events.publish("store.collected", message=message)
            for rev in await asyncio.to_thread(self._lost):
                await self.on_lost(rev)
            await self.make_room(0)  # the budget may have been lowered
        except (LoradError, RegistryUnusable, OSError) as error:
            log.warning("the store is not tidied now: %s", error)

    # ------------------------------------------------------------- finding
    async def _find(self) -> list[wire.GarbageItem]:
        spared = self._shelf.spared()
        infos = [link.info for link in self._links]
        told = [Packing.of(info, info.block_bytes).streams for info in infos if info is not None]
        streams = frozenset[str]().union(*told) if len(told) == len(infos) else None
        found = await asyncio.to_thread(self._look, spared, streams)
        arrived = self._shelf.spared() - spared
        return [item for item in found if item.kind == "packed" or item.rev not in arrived]

    def _look(self, spared: set[str], streams: frozenset[str] | None) -> list[wire.GarbageItem]:
        """In a thread.  `streams` None: which packed files are of use is not known yet."""
        here = list(holdings(self._store))
        known = self._registry.known_revs()  # after the look: what is registered was here before
        unused = self._registry.unused_revs(spared)
        found = []
        for holding in here:
            if holding.rev in unused:
                found.append(_item("revision", holding.rev, holding.num_bytes))
            elif holding.rev not in known:
                if holding.rev not in spared:
                    found.append(_item("unknown", holding.rev, holding.num_bytes))
            elif streams is not None:
                found += _stale(holding, streams)
        found += [_item("leftover", path.name, _bytes(path)) for path in leftovers(self._store)]
        return found

    def _lost(self) -> list[str]:
        """In a thread."""
        return sorted(self._registry.served_revs() - self._store.revs())

    # ------------------------------------------------------------- removing
    async def _gone(self, found: list[wire.GarbageItem]) -> list[wire.GarbageItem]:
        try:
            return await self._remove(found)
        except OSError as error:
            if error.errno not in CLOSED:
                raise
            where = self._store.directory
            raise LoradError(
                "insufficient_storage",
                f"cannot remove from the store: {os.strerror(error.errno)}: {where}",
                hint=f"make {where} writable for lorad; the next round removes the rest",
            ) from error

    async def _remove(self, found: list[wire.GarbageItem]) -> list[wire.GarbageItem]:
        """Only what still is garbage when its turn comes; returns what went."""
        gone = set(await self._shelf.collect())
        swept = await asyncio.to_thread(self._store.sweep)
        done = []
        for item in found:
            match item.kind:
                case "revision":
                    removed = item.rev in gone
                case "unknown":
                    removed = await self._remove_unknown(item.rev)
                case "packed":
                    removed = await self._remove_packed(item.rev, item.layout)
                case "leftover":
                    removed = swept > 0
            if removed:
                done.append(item)
        return done

    async def _remove_unknown(self, rev: str) -> bool:
        if self._shelf.is_busy(rev):
            return False
        async with self._shelf.lock(rev):  # free: whoever brings the same content waits for it
            if self._registry.revision(rev) is not None or rev in self._shelf.spared():
                return False
            return bool(await asyncio.to_thread(self._store.remove, (rev,)))

    async def _remove_packed(self, rev: str, layout: str) -> bool:
        """The engine reads no such file: nobody need be asked, but a packer that is at work."""
        if self._shelf.is_busy(rev):
            return False
        async with self._shelf.lock(rev):
            await asyncio.to_thread(self._store.drop_packed, rev, (layout,))
            await asyncio.wrap_future(self._registry.forget_packed(rev, (layout,)))
        return True


def _stale(holding: Holding, streams: frozenset[str]) -> list[wire.GarbageItem]:
    return [
        _item("packed", holding.rev, file.num_bytes, file.layout)
        for file in holding.packed
        if file.layout not in streams
    ]


def _item(kind: wire.GarbageKind, rev: str, num_bytes: int, layout: str = "") -> wire.GarbageItem:
    return wire.GarbageItem(kind=kind, rev=rev, layout=layout, num_bytes=num_bytes, why=_WHY[kind])


def _bytes(path: Path) -> int:
    return tree_bytes(path) if path.is_dir() else size_of(path)


async def _as_it_is(what: object) -> None:
    return None

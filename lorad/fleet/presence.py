"""Presence: which table each gateway goes by, so that a rollout is done when all of them know it.

Goes in: the catalog.  Comes out: a word of this gateway beside the table, again and again; whether
it may still go by its table; and when everybody goes by some generation.  A gateway that has not
been able to say so for `lease_seconds` stops by itself, and others wait so long for one that is
silent.  No two clocks are compared: each measures what it sees by its own.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from lorad.errors import LoradError
from lorad.fleet.catalog import Catalog

BEAT_SECONDS = 1.0
LEASE_SECONDS = 60.0
#: Clocks need not run equally fast.
_MARGIN = 1.1
_FOLDER = "gateways/"


class Word(Struct, frozen=True, kw_only=True):
    """Of one gateway; `generation` -1: it has just come, and answers nobody yet.  `lease`: so many
    seconds after it has fallen silent it stops."""

    beat: int
    generation: int
    lease: float = LEASE_SECONDS


class Presence:
    """Await `beat` once before anything is answered, then let `run` go on; `leave` at the end.
    `lease_seconds` 0: it never stops by itself, and nobody waits for who is silent for longer
    than the default."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog, self._lease, self._clock = catalog, lease_seconds, clock
        self.id = secrets.token_hex(6)
        self._beats = 0
        self._until = self._looked = float("-inf")
        self._renewing = asyncio.Lock()
        self._left, self._writing = False, threading.Lock()

    @property
    def fresh(self) -> bool:
        """Would everybody else still wait for this gateway?"""
        if self._left:
            return False
        return self._clock() < self._until or (self._lease <= 0 and self._beats > 0)

    def check(self) -> None:
        """Raises registry_busy where its table may be an old one."""
        if not self.fresh:
            why = self._catalog.trouble
            message = "this gateway has lost sight of the catalog of adapters"
            raise LoradError("registry_busy", f"{message}: {why}" if why is not None else message)

    async def beat(self) -> None:
        """Look at the table and say which it is.  Raises why the catalog cannot be used."""
        if not self._beats:
            # Before the first look: who writes a table after it waits for this gateway.
            await self._say(-1)
        began = self._clock()
        table = await self._catalog.look()
        await self._say(table.generation)
        self._until, self._looked = began + self._lease, began

    async def renew(self, since: float) -> None:
        """Let it be known what the table says that was read after `since`, on the clock; once for
        all who want that."""
        async with self._renewing:
            if self._looked <= since:
                await self.beat()

    def now(self) -> float:
        return self._clock()

    async def run(self) -> None:
        """Once a second, until it is cancelled."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                await self.beat()
            except LoradError:
                continue  # `check` says it

    async def leave(self) -> None:
        """Nobody need wait for it any more; it answers nobody from here on."""
        self._left = True
        await asyncio.to_thread(self._remove)

    async def all_at(self, generation: int) -> None:
        """Returns when every gateway goes by that generation or a later one, or has stopped."""
        await self.beat()
        seen: dict[str, tuple[Word, float]] = {}  # its last word, and since when
        while True:
            words = await asyncio.to_thread(self._words)
            now, behind = self._clock(), []
            for id, word in words.items():
                last, since = seen.get(id, (None, now))
                if last != word:
                    since = now
                seen[id] = (word, since)
                if word.generation < generation:
                    behind.append(id)
                    if now - since > word.lease * _MARGIN:
                        behind.pop()
                        await asyncio.to_thread(self._catalog.store.blobs.remove, self._key(id))
            if not behind:
                return
            await asyncio.sleep(BEAT_SECONDS / 4)

    # ------------------------------------------------------------- inside
    async def _say(self, generation: int) -> None:
        self._beats += 1
        lease = self._lease or LEASE_SECONDS
        word = Word(beat=self._beats, generation=generation, lease=lease)
        await asyncio.to_thread(self._put, msgspec.json.encode(word))

    def _put(self, word: bytes) -> None:
        """On a thread, which goes on when nobody waits for it any more: a word that came after the
        farewell would have others wait for a gateway that is gone."""
        with self._writing:
            if not self._left:
                self._catalog.store.blobs.put(self._key(self.id), word, rough=True)

    def _remove(self) -> None:
        with self._writing:
            self._catalog.store.blobs.remove(self._key(self.id))

    def _words(self) -> dict[str, Word]:
        found = {}
        for name in self._catalog.store.blobs.names(_FOLDER):
            id = name.removesuffix(".json")
            data = self._catalog.store.blobs.read(f"{_FOLDER}{name}")
            if data is None or id == self.id:
                continue
            try:
                found[id] = msgspec.json.decode(data, type=Word)
            except msgspec.DecodeError:
                found[id] = Word(beat=0, generation=-1)  # half a word is none
        return found

    def _key(self, id: str) -> str:
        return f"{_FOLDER}{id}.json"

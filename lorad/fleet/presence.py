"""Presence: which table each gateway goes by, so that a rollout is done when all of them know it.

Goes in: the catalog.  Comes out: a word of this gateway beside the table, again and again; whether
it may still go by its table; and when everybody goes by some generation.  A gateway that has not
been able to say so for `lease_seconds` stops by itself, and others wait so long for one that is
silent.  How long one has been silent every gateway watches all the time, so that an order waits no
longer for one that has been gone for a while.  No two clocks are compared: each measures what it
sees by its own.
"""

import asyncio
import contextlib
import itertools
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
#: Looks at the others' words while no order waits: each is a listing and a read for every gateway.
WATCH_BEATS = 5
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
        #: Of each other gateway its last word, and since when.
        self._seen: dict[str, tuple[Word, float]] = {}
        self._behind: dict[object, list[str]] = {}  # whom each order waits for

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
        if self._clock() - self._looked > (self._lease or LEASE_SECONDS):
            # At first, and where its word may have been swept away: before it looks, so that who
            # writes a table after that waits for this gateway.
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
        for beat in itertools.count():
            await asyncio.sleep(BEAT_SECONDS)
            with contextlib.suppress(LoradError):  # `check` says it
                await self.beat()
                if beat % WATCH_BEATS == 0:
                    await self.watch()

    async def leave(self) -> None:
        """Nobody need wait for it any more; it answers nobody from here on."""
        self._left = True
        await asyncio.to_thread(self._remove)

    async def watch(self) -> dict[str, Word]:
        """The words of the others, without those who have been silent for so long that they have
        stopped: their words are swept away."""
        before = self._clock()  # who has not spoken by then has been silent until then
        words = await asyncio.to_thread(self._words)
        after = self._clock()
        known = self._seen
        self._seen = {
            id: known[id] if id in known and known[id][0] == word else (word, after)
            for id, word in words.items()
        }
        for id, (word, since) in list(self._seen.items()):
            if before - since > word.lease * _MARGIN:
                del words[id]
                await asyncio.to_thread(self._sweep, id, word)
        return words

    async def all_at(self, generation: int) -> None:
        """Returns when every gateway goes by that generation or a later one, or has stopped."""
        await self.beat()
        order = object()
        try:
            while True:
                words = await self.watch()
                behind = [id for id, word in words.items() if word.generation < generation]
                if not behind:
                    return
                self._behind[order] = behind
                await asyncio.sleep(BEAT_SECONDS / 4)
        finally:
            self._behind.pop(order, None)

    def waits_for(self) -> str:
        """For people: whom orders wait for now, and how long that may take; "" if for nobody."""
        now, told = self._clock(), []
        for id in sorted({id for behind in self._behind.values() for id in behind}):
            if id in self._seen:
                word, since = self._seen[id]
                most = word.lease * _MARGIN
                told.append(f"gateway {id}, silent for {now - since:.0f} s (at most {most:.0f} s)")
        return " and ".join(told)

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

    def _sweep(self, id: str, word: Word) -> None:
        """Unless it has spoken meanwhile."""
        if self._word(id) == word:
            self._catalog.store.blobs.remove(self._key(id))

    def _words(self) -> dict[str, Word]:
        names = self._catalog.store.blobs.names(_FOLDER)
        ids = (name.removesuffix(".json") for name in names)
        found = ((id, self._word(id)) for id in ids if id != self.id)
        return {id: word for id, word in found if word is not None}

    def _word(self, id: str) -> Word | None:
        data = self._catalog.store.blobs.read(self._key(id))
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=Word)
        except msgspec.DecodeError:
            return Word(beat=0, generation=-1)  # half a word is none

    def _key(self, id: str) -> str:
        return f"{_FOLDER}{id}.json"

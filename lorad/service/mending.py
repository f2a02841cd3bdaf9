"""Mending: a packed file that is damaged is packed anew from its source, once.

Goes in: word from the engine that a revision's packed file is not what was packed, or that it was
read and is.  Comes out: a fresh packed file; and if that is damaged before it was ever whole, word
that the revision cannot be served.  Knows no names.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from lorad.errors import LoradError
from lorad.service.revision_news import RevisionNews
from lorad.service.tasks import Tasks

#: An answer may be here before the transition that tells why; both are on their way.
HEAR_SECONDS = 5.0


async def _nobody(rev: str, message: str) -> None:
    return None


class Mending:
    """Used from the daemon's loop.  `repack` writes a packed file anew, or raises LoradError."""

    def __init__(
        self, repack: Callable[[str], Awaitable[None]], news: RevisionNews, tasks: Tasks
    ) -> None:
        self.on_hopeless: Callable[[str, str], Awaitable[None]] = _nobody
        self._repack, self._news, self._tasks = repack, news, tasks
        self._mends: dict[str, asyncio.Task[bool]] = {}  # of those that were not whole since
        self._failed: dict[str, str] = {}  # why it could not be packed anew
        self._later: set[str] = set()  # of these, for a reason that may pass
        self._heard: Counter[str] = Counter()
        self._more = asyncio.Condition()

    def hear(self, rev: str, message: str) -> None:
        """The engine found it damaged."""
        self._heard[rev] += 1
        mend = self._mends.get(rev)
        if mend is None:
            self._mends[rev] = self._tasks.spawn(self._mend(rev, message))
        elif mend.done():
            self._mends[rev] = self._tasks.spawn(self._give_up(rev, message))
        self._tasks.spawn(self._tell())

    def whole(self, rev: str) -> None:
        """It was read, and is what was packed: damage from now on is new."""
        self._forget_failure(rev)
        mend = self._mends.get(rev)
        if mend is not None and mend.done():
            del self._mends[rev]

    def heard(self, rev: str) -> int:
        """How often it was found damaged."""
        return self._heard[rev]

    def failed(self, rev: str) -> str:
        """Why it could not be packed anew; "" if it was."""
        return self._failed.get(rev, "")

    def may_be_tried(self, rev: str) -> bool:
        """Nothing is known against its source: packing it anew failed for another reason."""
        return rev in self._later

    async def mended(self, rev: str, since: int) -> bool:
        """Whether it has been packed anew after more damage than `since` was heard of."""
        try:
            async with asyncio.timeout(HEAR_SECONDS), self._more:
                await self._more.wait_for(lambda: self._heard[rev] > since)
        except TimeoutError:
            return False
        mend = self._mends.get(rev)
        return mend is None or await asyncio.shield(mend)

    async def _tell(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def _mend(self, rev: str, message: str) -> bool:
        try:
            await self._repack(rev)
        except LoradError as error:
            self._failed[rev] = error.message
            if error.code in ("adapter_damaged", "adapter_invalid"):  # its source is no better
                return await self._give_up(rev, error.message)
            self._mends.pop(rev, None)
            self._later.add(rev)
            self._news.publish("adapter.unfinished", rev, "warn", error.code, error.advised)
            return False
        self._forget_failure(rev)
        self._news.publish("adapter.repacked", rev, "warn", "damaged", message)
        return True

    def _forget_failure(self, rev: str) -> None:
        self._failed.pop(rev, None)
        self._later.discard(rev)

    async def _give_up(self, rev: str, message: str) -> bool:
        self._later.discard(rev)
        await self.on_hopeless(rev, message)
        return False

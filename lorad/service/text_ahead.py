"""TextAhead: tokenizers of adapters' own are read at a daemon's start, before anybody streams.

Goes in: which revisions have one, the most wanted first, and whether engines still load their
weights.  Comes out: texts that the `TextService` of each model has in memory, and a line in the
log.  The library holds Python's lock while it makes a tokenizer, 0.3 s for 128k tokens of its own,
and every stream waits: but while engines load there is none.  What is left over is read with its
first request.  Knows no engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from lorad.errors import LoradError
from lorad.service.catalog import Catalog
from lorad.service.text import TextService

log = logging.getLogger("lorad.text")

#: As many as are kept: ten of 128k tokens of their own take 6 s of a core, 170 that have the base's
#: vocabulary 4, and 46 if their files write it otherwise.
SECONDS = 30.0
#: Waited for a core or the disk: whoever loads the weights has waited about as long for us.
WAITED_SECONDS = 1.0


class TextAhead:
    """`texts`: by model, of those that generate.  `wanted` is Registry.own_tokenizers; `loading`
    whether all engines still load their weights: from then on the loop has to do with them, and the
    lock would be in its way."""

    def __init__(
        self,
        texts: Mapping[str, TextService],
        catalog: Catalog,
        wanted: Callable[[], Sequence[str]],
        *,
        loading: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.thread_time,
    ) -> None:
        """`busy`: seconds that the thread has had a core, on any clock."""
        self._texts, self._catalog, self._wanted = texts, catalog, wanted
        self._loading, self._clock, self._busy = loading, clock, busy
        self._waited = 0.0

    async def run(self) -> None:
        """Once, on threads: the loop has its turn between two."""
        began = self._clock()
        revs = await asyncio.to_thread(self._wanted)
        asked = [(rev, text) for rev in revs if (text := self._text_of(rev)) is not None]
        read: list[tuple[str, TextService]] = []
        failed, why = 0, ""
        for rev, text in asked:
            if why := self._over(began):
                break
            if not text.fits(rev):
                continue
            try:
                await asyncio.to_thread(self._read, rev, text)
                read.append((rev, text))
            except LoradError as error:
                failed += 1
                label = self._catalog.label(rev)
                log.warning("%s: %s (its requests are refused; add it again)", label, error.message)
        for rev, text in reversed(read):
            text.held(rev)  # what is wanted most is what was asked for last: others go before it
        left = len(asked) - len(read) - failed
        if read or left:
            _tell(len(read), self._clock() - began, left, why or "no room for more")

    def _text_of(self, rev: str) -> TextService | None:
        """None where no name that is served means it, or its model only pools."""
        names = self._catalog.names_of(rev)
        return self._texts.get(self._catalog.model_of(rev) or "") if names else None

    def _read(self, rev: str, text: TextService) -> None:
        began, busy = self._clock(), self._busy()
        text(rev)
        self._waited += self._clock() - began - (self._busy() - busy)

    def _over(self, began: float) -> str:
        """Why no more is read, "" if more is."""
        if not self._loading():
            return "the weights are loaded"
        if self._waited > WAITED_SECONDS:
            return "others need the machine"
        return "it took long" if self._clock() - began > SECONDS else ""


def _tell(read: int, seconds: float, left: int, why: str) -> None:
    rest = f", {left} left for their first requests: {why}" if left else ""
    log.info("tokenizers of adapters: %d read in %.2f s%s", read, seconds, rest)

"""TextLook: whose tokenizer a registered revision has, for the base's files as they are now.

Goes in: revisions of one model, which the registry knows something of.  Comes out: the same with
facts that hold, found in the stored files where they were told beside other files of the base, or
before anybody asked for them; an event where that says something new.  Nobody is answered before.
All are looked at once behind a start, those that are wanted most first; who is asked for meanwhile
is looked at then.  An adapter whose files do not fit any more has its requests refused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from engine.errors import EngineError
from lorad.errors import LoradError, from_engine
from lorad.registry.records import RevisionRecord, TextFacts
from lorad.registry.registry import Registry
from lorad.service.revision_news import RevisionNews

log = logging.getLogger("lorad.text")

#: Written to the registry in one transaction.
AT_ONCE = 64
#: A look behind a start is followed by a rest of so many times as long: ten thousand in a row had
#: a core for themselves (9.6 of 10 s), and Python's lock with it.
REST = 3.0


class TextLook:
    """Of one model.  `look` reads a stored folder, and `base_text` what the base's files are; both
    run in threads, one at a time."""

    def __init__(
        self,
        registry: Registry,
        model: str,
        news: RevisionNews,
        *,
        base_text: Callable[[], str],
        look: Callable[[Path], TextFacts],
        alone: bool = True,
    ) -> None:
        """`alone`: no other model is served, so that all adapters are its."""
        #: Told of a revision of which something else was known.
        self.on_change: Callable[[str], None] = lambda rev: None
        self._registry, self._store, self._model, self._news = registry, registry.store, model, news
        self._read_base, self._read, self._alone = base_text, look, alone
        self._base = ""
        self._sure: set[str] = set()
        self._refused: dict[str, LoradError] = {}
        self._turn = asyncio.Lock()

    def is_sure(self, rev: str) -> bool:
        """Whether `sure` has nothing to do."""
        return rev in self._sure

    async def sure(self, record: RevisionRecord) -> RevisionRecord:
        """The same, of which all holds; its files are here.  Raises adapter_invalid for what does
        not fit the base."""
        if record.base_text == await self._base_now():
            self._sure.add(record.rev)
            return record
        async with self._turn:
            record = self._registry.revision(record.rev) or record  # somebody had a look meanwhile
            if record.base_text == self._base:
                self._sure.add(record.rev)
            if record.rev in self._sure:
                return record
            found = await self._look(record.rev)
            if isinstance(found, LoradError):
                raise found
            await self._note({record.rev: found})
        return replace(record, **asdict(found))

    async def run(self) -> None:
        """Once, behind a start."""
        base, model = await self._base_now(), None if self._alone else self._model
        revs = await asyncio.to_thread(self._registry.unlike, base, model)
        changed = refused = 0
        for first in range(0, len(revs), AT_ONCE):
            try:
                more, wrong = await self._look_at(revs[first : first + AT_ONCE])
            except LoradError as error:  # a full disk, say; each is looked at when it is asked for
                log.warning("whose tokenizers adapters have is not written now: %s", error.message)
                return
            changed, refused = changed + more, refused + wrong
        if revs:
            log.info(
                "tokenizers of %d adapters were held against that of %s: %d are others than was "
                "known, %d do not fit it",
                *(len(revs), self._model, changed, refused),
            )

    def forget(self, rev: str) -> None:
        """It has retired."""
        self._sure.discard(rev)
        self._refused.pop(rev, None)

    # ------------------------------------------------------------- inside
    async def _look_at(self, revs: Sequence[str]) -> tuple[int, int]:
        """How many are others than was known, and how many do not fit."""
        found: dict[str, TextFacts] = {}
        refused = 0
        for rev in revs:
            if rev in self._sure or rev in self._store.remote or not self._store.has(rev):
                continue
            began = time.perf_counter()
            async with self._turn:
                facts = await self._look(rev)
            await asyncio.sleep(REST * (time.perf_counter() - began))
            if isinstance(facts, TextFacts):
                found[rev] = facts
            elif rev in self._refused:  # else it was removed meanwhile
                refused += 1
        return await self._note(found), refused

    async def _look(self, rev: str) -> TextFacts | LoradError:
        """What its files say; what is wrong with them is said once more without a look."""
        if (known := self._refused.get(rev)) is not None:
            return known
        try:
            return await asyncio.to_thread(self._read, self._store.path(rev))
        except OSError as error:  # the disk's fault: it is looked at again when it is asked for
            why = error.strerror or type(error).__name__
            log.warning("%s: whose tokenizer it has is not known now: %s", rev[:8], why)
            message = f"its stored files cannot be read: {why}"
            return LoradError("adapter_damaged", message, hint="look at the disk, then ask again")
        except EngineError as error:
            refused = from_engine(error)
        if self._store.has(rev) and rev not in self._store.remote:
            self._refused[rev] = refused
            self._news.publish_unfit(rev, refused)
        return refused

    async def _note(self, found: Mapping[str, TextFacts]) -> int:
        """In the registry first, and then told."""
        changed = await asyncio.wrap_future(self._registry.note_texts(found)) if found else ()
        self._sure |= found.keys()
        for rev in changed:
            self.on_change(rev)
            message = f"its files were looked at again: {found[rev].told}"
            self._news.publish("adapter.tokenizer", rev, "info", "registry", message)
        return len(changed)

    async def _base_now(self) -> str:
        """As it was when it was first asked for: texts are read by that."""
        if not self._base:
            self._base = await asyncio.to_thread(self._read_base)
        return self._base

"""Finishing: what an earlier engine or an earlier run left undone.

Goes in: a new engine; an operator's word to try once more.  Comes out: pinned adapters on the GPU,
candidates that take their names, packed files for everybody else, behind and a little at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable

from engine.messages import EngineInfo
from lorad.errors import LoradError
from lorad.service.catalog import Entry
from lorad.service.model_revisions import ModelRevisions
from lorad.service.names import Names
from lorad.service.registration import LATER, Registration
from lorad.service.revival import Revival
from lorad.service.tasks import Tasks


class Finishing:
    """Of one model.  `refresh` makes what is shown next show a change."""

    def __init__(
        self,
        model: str,
        names: Names,
        revisions: ModelRevisions,
        registration: Registration,
        tasks: Tasks,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._model, self._names, self._revisions = model, names, revisions
        self._registration, self._tasks, self._refresh = registration, tasks, refresh

    async def raise_pinned(self) -> None:
        """Those that are pinned and not up, as after a pin that found no room: once more."""
        held = self._revisions.resident
        for entry in self._names.catalog.of(self._model):
            if entry.pinned and entry.rev is not None and not held(entry.rev):
                try:
                    await self._revisions.load(entry.rev)
                except LoradError as error:
                    self._revisions.news.publish(
                        "adapter.not_loaded", entry.rev, "warn", error.code, error.advised
                    )

    async def bring_up(self, info: EngineInfo, revival: Revival) -> None:
        """For a new engine, and what one before it held: pinned adapters and replacements now; what
        else is unfinished goes on behind.  Who was told that a name is replaced must not meet the
        old revision again."""
        ours = self._names.catalog.of(self._model)
        first = [entry for entry in ours if entry.pinned or entry.replaced]
        await asyncio.gather(*(self.finish(entry) for entry in first))
        await revival.bring_up()
        await self._refresh()
        self._tasks.spawn(self._finish_the_rest())

    async def _finish_the_rest(self) -> None:
        whole = await self._revisions.files.packed_already()
        for entry in self._names.catalog.of(self._model):
            if entry.candidate is not None or entry.rev not in whole:
                await self.finish(entry)
                await asyncio.sleep(0)  # thousands of looks at the registry, a request between two

    async def finish(self, entry: Entry) -> None:
        """A candidate that was cut short takes its name; a revision gets its packed file."""
        try:
            if entry.candidate is not None:
                async with self._names.lock(entry.name):
                    await self._registration.advance(entry.name, entry.candidate)
            elif entry.rev is not None:
                await self._revisions.files.pack_ahead(entry.rev)
        except LoradError as error:
            leaving = self._names.catalog.is_leaving(entry.name)
            if entry.rev is not None and error.code not in LATER and not leaving:
                self._revisions.news.publish(
                    "adapter.unfinished", entry.rev, "warn", error.code, error.advised
                )
                if entry.candidate is None:
                    self._names.catalog.unpacked[entry.rev] = error.message, error.hint

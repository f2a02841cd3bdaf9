"""Fetching: questions to sources and downloads from them, off the loop, so many at once.

Goes in: a reference and who asks.  Comes out: what it means there, and files in a staging folder.
No source takes the places of the others, and questions do not queue behind downloads.  Knows
neither names nor operations.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.registry.store import StagingDir
from lorad.service.intake import Intake
from lorad.service.threads import Rooms, on_thread
from lorad.sources.errors import Cancelled
from lorad.sources.fetch import Fetcher, Progress, Resolved
from lorad.sources.reference import Reference, parse_reference
from lorad.spelling import is_reference

#: At once from one source, and in all.
EACH_DOWNLOAD, ALL_DOWNLOADS = 4, 16
EACH_QUESTION, ALL_QUESTIONS = 4, 16
#: What may pass by itself: the half that is here is kept for the next try.
PASSING = ("source_unreachable", "source_busy", "source_offline")


class FetcherFor(Protocol):
    """`sources.choice.fetcher_for` with the settings given; may take a while."""

    def __call__(self, reference: Reference, /, *, token: str, offline: bool) -> Fetcher: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A reference, and with what right.  Lives in memory alone: it may hold secrets."""

    reference: Reference
    token: str = ""
    offline: bool = False


class Fetching:
    """One a daemon.  Every method raises FetchError."""

    def __init__(self, fetcher_for: FetcherFor) -> None:
        self._fetcher_for = fetcher_for
        self._downloads = Rooms(EACH_DOWNLOAD, ALL_DOWNLOADS)
        self._questions = Rooms(EACH_QUESTION, ALL_QUESTIONS)

    async def resolve(self, asked: Asked) -> Resolved:
        """What the reference means now."""
        async with self._questions.at(origin(asked.reference)):
            return await on_thread(lambda: self._fetcher(asked).resolve(asked.reference))

    def place(self, asked: Asked) -> AbstractAsyncContextManager[None]:
        """`async with` it around a `download`: its turn."""
        return self._downloads.at(origin(asked.reference))

    async def download(
        self,
        asked: Asked,
        resolved: Resolved,
        staging: StagingDir,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """Its files into the staging folder; raises Cancelled, too."""

        def fetch() -> None:
            self._fetcher(asked).fetch(resolved, staging.path, progress, cancelled)

        await on_thread(fetch)

    def _fetcher(self, asked: Asked) -> Fetcher:
        return self._fetcher_for(asked.reference, token=asked.token, offline=asked.offline)


class Refetch:
    """Brings back the files of a name that were sent away: `PackedFiles.refetch`.

    `stopping` says when the daemon stops.
    """

    def __init__(
        self,
        fetching: Fetching,
        registry: Registry,
        intake: Intake,
        *,
        stopping: Callable[[], bool],
    ) -> None:
        self._fetching, self._registry, self._intake = fetching, registry, intake
        self._stopping = stopping

    async def __call__(self, name: str) -> StagingDir:
        record = self._registry.get(name)
        if record is None or not is_reference(record.source):
            message = f"nobody knows where the files of {name} came from"
            raise LoradError("load_failed", message, hint=f"add {name} again")
        asked = Asked(parse_reference(record.source))
        resolved = await self._fetching.resolve(asked)
        folder = folder_of(resolved, f"again:{name}")
        staging = await self._intake.reopen(folder, resolved.total_bytes or 0)
        try:
            async with self._fetching.place(asked):
                await self._fetching.download(asked, resolved, staging, _unseen, self._stopping)
        except Cancelled:
            raise LoradError("draining", "lorad is shutting down") from None
        except LoradError as error:
            if error.code not in PASSING:
                await self._intake.discard(staging)
            raise
        return staging


def folder_of(resolved: Resolved, purpose: str) -> str:
    """The id of a staging folder: what was fetched of the same files is found there again."""
    digest = hashlib.sha256(msgspec.json.encode(resolved) + purpose.encode())
    return f"pull-{digest.hexdigest()[:40]}"


def origin(reference: Reference) -> str:
    """Who would be slow."""
    host = reference.text.partition("://")[2].partition("/")[0]
    return f"{reference.scheme}:{host}"


def _unseen(done: int, total: int | None) -> None:
    return None

"""Making room: what leaves the disk before an adapter is refused.

Goes in: bytes that are about to be written.  Comes out: room for them, under `[store] budget` and
on the disk, or insufficient_storage that says what holds it.  In this order, and no more than is
lacking: garbage; packed files of adapters that rest, those first that were not used for longest,
as they are packed again when asked for; all files of those whose source is pinned to one content,
if somebody can fetch it again.  What is on the GPU or in RAM, pinned, or used by a request stays.
"""

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

from engine.adapters.manifest import TEXT_FILES
from lorad import disk
from lorad.errors import LoradError
from lorad.registry.holdings import Holding, holdings
from lorad.registry.registry import Registry
from lorad.registry.store import Store
from lorad.service.model_revisions import ModelRevisions

log = logging.getLogger("lorad.store")

#: A source that gives the same content for ever: a Hub commit, or a checksum.
_PINNED = re.compile(r"hf:[^@\s]+@[0-9a-f]{40}|(?:s3|https)://\S+[@#](?:sha256[:=])[0-9a-f]{64}")
#: Largest adapters that a refusal names.
_NAMED = 3


class RoomMaker:
    """`of` has the revisions of the model that one is served on, None for what no model serves.
    `collect` removes garbage.  One at a time makes room, so that two do not free it twice."""

    def __init__(
        self,
        registry: Registry,
        of: Callable[[str], ModelRevisions | None],
        collect: Callable[[], Awaitable[object]],
    ) -> None:
        self._registry, self._of, self._collect = registry, of, collect
        self._store: Store = registry.store
        self._turn = asyncio.Lock()

    async def make(self, num_bytes: int, staged: int = 0) -> None:
        """Return when `num_bytes` more have room, of which `staged` lie on the disk already; raises
        insufficient_storage."""
        if not await self._lacking(num_bytes, staged):
            return
        async with self._turn:
            for step in (self._sweep, self._unpack, self._send_away):
                if not (lacking := await self._lacking(num_bytes, staged)):
                    return
                await step(lacking)
            if await self._lacking(num_bytes, staged):
                raise await asyncio.to_thread(self._refusal, num_bytes, staged)

    async def _lacking(self, num_bytes: int, staged: int) -> int:
        return await asyncio.to_thread(self._store.room.lacking, num_bytes, staged)

    # ------------------------------------------------------------- what may go
    async def _sweep(self, lacking: int) -> None:
        try:
            await self._collect()
        except LoradError as error:  # a full disk under the registry: the files below need no row
            log.warning("garbage stays for now: %s", error.message)

    async def _unpack(self, lacking: int) -> None:
        files = defaultdict[str, list[str]](list)
        for file in await asyncio.to_thread(self._registry.packed_by_use):
            files[file.rev].append(file.layout)
        for rev, layouts in files.items():
            if (revisions := self._of(rev)) is not None:
                lacking -= await revisions.unpack(rev, layouts)
            if lacking <= 0:
                return

    async def _send_away(self, lacking: int) -> None:
        for rev, layouts in await asyncio.to_thread(self._fetchable):
            revisions = self._of(rev)
            if revisions is not None and revisions.files.refetch is not None:
                lacking -= await revisions.unpack(rev, layouts, remote=True)
            if lacking <= 0:
                return

    def _fetchable(self) -> list[tuple[str, tuple[str, ...]]]:
        """Revisions all of whose names have a pinned source, with their packed files, those first
        that were not used for longest.  None that bring text files of their own: those are read
        before the engine is asked."""
        sources, used = defaultdict[str, list[str]](list), dict[str, float]()
        for name in self._registry.pointing():
            for rev in {name.serving_rev, name.candidate_rev} - {None}:
                assert rev is not None
                sources[rev].append(name.source)
                used[rev] = max(used.get(rev, 0.0), name.last_used_at or name.created_at)
        found = [
            holding
            for holding in holdings(self._store)
            if not holding.remote
            and holding.names.isdisjoint(TEXT_FILES)
            and sources[holding.rev]
            and all(map(is_pinned, sources[holding.rev]))
        ]
        found.sort(key=lambda holding: used[holding.rev])
        return [(h.rev, tuple(file.layout for file in h.packed)) for h in found]

    # ------------------------------------------------------------- what is told
    def _refusal(self, num_bytes: int, staged: int) -> LoradError:
        room = self._store.room
        own, packed, count = _sums(holdings(self._store))
        held = f"files of {count} adapters hold {own} bytes, packed files {packed}"
        used, budget = room.used_bytes(), room.budget_bytes
        if not budget or used + num_bytes <= budget:
            message = f"the store's disk is full: {held}"
            return disk.full(message, self._store.directory, num_bytes - staged)
        large = ", ".join(a.name for a in self._registry.list(sort="-size", limit=_NAMED).items)
        return LoradError(
            "insufficient_storage",
            f"[store] budget is {budget} bytes and full: {held}; {num_bytes} more are needed, and "
            "what is left is adapters' own files or in use",
            hint=f"loractl rm an adapter (the largest: {large or '-'}), or raise [store] budget",
            details={
                "budget_bytes": str(budget),
                "used_bytes": str(used),
                "file_bytes": str(own),
                "packed_bytes": str(packed),
                "needed_bytes": str(num_bytes),
            },
        )


def is_pinned(source: str) -> bool:
    """Whether `source` can only ever give what it gave before."""
    return _PINNED.fullmatch(source) is not None


def _sums(every: Iterable[Holding]) -> tuple[int, int, int]:
    """(own bytes, packed bytes, revisions)."""
    own = packed = count = 0
    for holding in every:
        own, packed, count = own + holding.file_bytes, packed + holding.packed_bytes, count + 1
    return own, packed, count

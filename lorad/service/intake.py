"""Intake: a folder of files becomes a revision in the store, packed for the engine.

Goes in: a StagingDir that somebody filled.  Comes out: what is in it (`Found`), then its place in
the store, then a packed file; or LoradError `adapter_invalid` with an E_ reason.  Blocking work
runs in threads, packing in a process of its own, each a few at a time and neither in the other's
way; what somebody waits for is packed before what nobody has asked for yet.  Knows neither names
nor the engine process.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from engine.adapters.peft import AdapterManifest
from engine.errors import EngineError
from engine.messages import PackedManifest
from lorad import disk
from lorad.errors import LoradError, from_engine
from lorad.registry.records import RevisionRecord
from lorad.registry.room import tree_bytes
from lorad.registry.store import StagingDir, Store
from lorad.service.line import Line

T = TypeVar("T")

#: How often room is made for one that others take it from.
TRIES = 3

#: (folder of the files, folder for the packed file) -> manifest; raises EngineError.
Pack = Callable[[Path, Path], Awaitable[PackedManifest]]
#: Facts that the registry keeps under the name that inspection gave them.
_SHARED = (
    *("rank", "ranks", "alpha", "rslora", "targets", "num_layers", "dtype", "file_bytes"),
    *("changes_kv", "modules", "alora_tokens", "num_tokens", "own_tokenizer", "base_text"),
    "warnings",
)


class Inspect(Protocol):
    """Folder -> manifest and digest, both torch-free; raises AdapterInvalid.  Runs in a thread."""

    def __call__(self, folder: Path, /) -> tuple[AdapterManifest, str]: ...


class MakeRoom(Protocol):
    """Awaited before bytes are written, of which `staged` are on the disk already; raises
    insufficient_storage when nothing makes way."""

    async def __call__(self, num_bytes: int, staged: int = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A staged folder that passed."""

    staging: StagingDir
    manifest: AdapterManifest
    rev: str


class Intake:
    """`inspect` and `pack` are given, so that tests can go without tensors and processes."""

    def __init__(self, store: Store, *, inspect: Inspect, pack: Pack, workers: int = 2) -> None:
        self.store = store
        self.make_room: MakeRoom = _as_it_is
        self._inspect = inspect
        self._pack = pack
        self._files = asyncio.Semaphore(workers)
        self._packers = Line(workers)

    def alike(self, *, inspect: Inspect, pack: Pack) -> "Intake":
        """For another model: it looks and packs otherwise, and shares store, workers and room."""
        other = Intake(self.store, inspect=inspect, pack=pack)
        other._files, other._packers = self._files, self._packers
        other.make_room = self._make_room
        return other

    async def _make_room(self, num_bytes: int, staged: int = 0) -> None:
        await self.make_room(num_bytes, staged)

    async def stage(self, expected_bytes: int = 0) -> StagingDir:
        """A new staging folder for so many bytes; insufficient_storage if they have no room."""
        await self.make_room(expected_bytes)
        return await asyncio.to_thread(self.store.stage, expected_bytes)

    async def reopen(self, id: str, expected_bytes: int = 0) -> StagingDir:
        """The staging folder of that id, as it was left, with room for what it still lacks."""
        there = await asyncio.to_thread(tree_bytes, self.store.staging_path(id))
        await self.make_room(max(0, expected_bytes - there))
        return await asyncio.to_thread(self.store.reopen, id, expected_bytes)

    async def fill(self, fill: Callable[[StagingDir], object]) -> StagingDir:
        """A new staging folder with what `fill` puts there; nothing is left if it raises."""

        def stage() -> StagingDir:
            staging = self.store.stage()
            try:
                fill(staging)
            except BaseException:
                self.store.discard(staging)
                raise
            return staging

        return await self._work(stage)

    async def find(self, staging: StagingDir) -> Found:
        """Inspect and hash; the staging folder stays the caller's."""
        manifest, rev = await self._work(lambda: self._inspect(staging.path))
        return Found(staging, manifest, rev)

    async def keep(self, found: Found, packed_bytes: int = 0) -> RevisionRecord:
        """Move it into the store, durably, where its packed file will have room too."""
        if not self.store.has(found.rev):
            own = await asyncio.to_thread(tree_bytes, found.staging.path)
            await self.make_room(own + packed_bytes, own)
        await self._work(lambda: self.store.commit(found.staging, found.rev))
        return RevisionRecord(
            rev=found.rev, **{name: getattr(found.manifest, name) for name in _SHARED}
        )

    async def give_up(self, rev: str) -> None:
        """Take away what was kept but could not be registered."""
        await self._work(lambda: self.store.remove((rev,)))

    def wanted(self, rev: str) -> contextlib.AbstractContextManager[None]:
        """`with` it around waiting for `rev` to be packed, by whomever: a folder of hundreds that
        was just copied into the inbox keeps packers busy for minutes."""
        return self._packers.wanted(rev)

    async def pack(
        self,
        rev: str,
        layouts: Sequence[str],
        num_bytes: int = 0,
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> PackedManifest:
        """Write the packed file of `rev`, of about `num_bytes`, beside its files, for one of
        `layouts`; recording it makes it last.  Unless it is `wanted` when its turn comes: then
        model_not_found."""
        folder = self.store.path(rev)
        async with self._packers.place(rev):
            if not wanted():
                raise LoradError("model_not_found", f"{rev[:12]} was removed before it was packed")
            try:
                with await self._reserved(num_bytes):
                    manifest = await self._pack(folder, folder)
                    # Its room is taken until it counts itself.
                    await asyncio.to_thread(self.store.room.recount, rev)
            except EngineError as error:
                if error.code == "no_room":  # on the disk, not in the arena
                    message = f"no room for the packed file of {rev[:12]}"
                    raise disk.full(message, folder, num_bytes, unchanged=False) from error
                raise from_engine(error) from error
            except OSError as error:  # no process to be had: that is no word on the content
                raise LoradError("internal_error", f"cannot pack {rev[:12]}: {error}") from error
        if manifest.rev != rev:
            message = f"the stored files of {rev[:12]} were changed: they are {manifest.rev[:12]}"
            raise LoradError("adapter_damaged", message, hint="add it again from its source")
        if manifest.layout not in layouts:
            wanted_layouts = " or ".join(layouts)
            raise LoradError("load_failed", f"packed for {manifest.layout}, not {wanted_layouts}")
        return manifest

    async def discard(self, staging: StagingDir) -> None:
        await asyncio.to_thread(self.store.discard, staging)

    async def _reserved(self, num_bytes: int) -> contextlib.ExitStack:
        """Room that is made and taken; somebody else may take it in between, so more than once."""
        for attempt in range(TRIES):
            await self.make_room(num_bytes)
            with contextlib.ExitStack() as taken:
                try:
                    taken.enter_context(self.store.room.reserve(num_bytes))
                except LoradError:
                    if attempt == TRIES - 1:
                        raise
                    continue
                return taken.pop_all()
        raise AssertionError("the last attempt returns or raises")

    async def _work(self, function: Callable[[], T]) -> T:
        async with self._files:
            try:
                return await asyncio.to_thread(function)
            except EngineError as error:
                raise from_engine(error) from error


async def _as_it_is(num_bytes: int, staged: int = 0) -> None:
    return None

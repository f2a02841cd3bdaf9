"""The registry as a whole: checked, copied out, told as lines and taken in again, while it serves.

Goes in: an operator's wishes.  Comes out: a verdict, the bytes of a consistent copy, entries, what
an import came to.  Changes go through AdapterService, one name after the other, as if each had been
asked for by itself.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from lorad import wire
from lorad.errors import LoradError
from lorad.registry import checking, sqlite
from lorad.registry.entries import entry_of, failed, outcome
from lorad.registry.registry import Registry
from lorad.registry.store import REMOTE
from lorad.service.adapters import AdapterService
from lorad.wire_registry import (
    Imported,
    RegistryCheck,
    RegistryEntry,
    RegistryExport,
    RegistryImport,
    RegistryImported,
)

_PAGE = 1000


class Ledger:
    """One registry and the service that changes it."""

    def __init__(self, registry: Registry, adapters: AdapterService) -> None:
        self._registry, self._adapters = registry, adapters

    async def check(self) -> RegistryCheck:
        """Reads every page of the database, on a thread."""
        registry = self._registry
        return await asyncio.to_thread(
            checking.check, registry.path, registry.store.directory, follows=True
        )

    async def backup(self) -> bytes:
        """A database of one moment, whatever is written meanwhile."""
        return await asyncio.to_thread(self._copy)

    async def export(self) -> RegistryExport:
        """Every name."""
        return RegistryExport(items=await asyncio.to_thread(self._entries))

    async def take_in(self, ask: RegistryImport) -> RegistryImported:
        """Settings of names that are here; names whose revision the store has, made anew."""
        items = [await self._take_one(item, ask.dry_run) for item in ask.items]
        return RegistryImported(items=tuple(items), dry_run=ask.dry_run)

    def _copy(self) -> bytes:
        path = self._registry.path
        with sqlite.translating(path), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            copy = Path(folder) / "copy.db"
            sqlite.backup(path, copy, lambda: None)
            return copy.read_bytes()

    def _entries(self) -> tuple[RegistryEntry, ...]:
        found: list[RegistryEntry] = []
        cursor = None
        while True:
            page = self._registry.list(limit=_PAGE, cursor=cursor)
            found += map(entry_of, page.items)
            cursor = page.cursor
            if cursor is None:
                return tuple(found)

    async def _take_one(self, item: RegistryEntry, dry_run: bool) -> Imported:
        before = await asyncio.to_thread(self._registry.get, item.name)
        told = outcome(item, before, creatable=before is None and self._has(item.rev))
        if dry_run or told.action in ("unchanged", "lacking"):
            return told
        try:
            if before is None:
                await self._create(item)
            else:
                labels: dict[str, str | None] = dict.fromkeys(before.labels)
                labels.update(item.labels)
                patch = wire.AdapterPatch(priority=item.priority, pinned=item.pinned, labels=labels)
                await self._adapters.patch(item.name, patch)
        except LoradError as error:
            return failed(item, error)
        return told

    def _has(self, rev: str | None) -> bool:
        """Its files are in the store, and not only the mark that they are elsewhere."""
        store = self._registry.store
        try:
            return bool(rev) and store.has(rev or "") and rev not in store.remote
        except ValueError:  # no revision's name
            return False

    async def _create(self, item: RegistryEntry) -> None:
        """From a copy of the revision's own files: it is looked at as if it came from outside."""
        folder = self._registry.store.path(item.rev or "")
        staging = await self._adapters.stage()
        try:
            await asyncio.to_thread(_copy_files, folder, staging.path)
        except OSError:
            await self._adapters.discard(staging)
            raise
        await self._adapters.add(
            staging,
            item.name,
            source=item.source or "import",
            model=item.model if self._adapters.models.get(item.model) else "",
            pin=item.pinned,
            priority=item.priority,
            labels=item.labels,
        )


def _copy_files(folder: Path, target: Path) -> None:
    """All but packed files and marks."""
    for file in folder.iterdir():
        if file.is_file() and file.name != REMOTE and not file.name.startswith("packed-"):
            shutil.copyfile(file, target / file.name)

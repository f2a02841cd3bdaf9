"""Packed files: one for each revision and the engine's present layout, whole, or packed now.

Goes in: revisions that are registered, the layout as the engine told it.  Comes out: manifests of
packed files that are there.  What is not is packed from the stored files, and those are fetched
first if they left.  Whoever asks holds the revision (`shelf.py`); the engine is told nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.adapters.checksums import path_of
from engine.messages import EngineInfo, PackedManifest
from lorad.errors import LoradError
from lorad.registry.records import Packing, RevisionRecord
from lorad.registry.registry import Registry
from lorad.registry.store import StagingDir
from lorad.service.catalog import Catalog
from lorad.service.intake import Intake
from lorad.service.revision_news import RevisionNews
from lorad.service.seams import Informed
from lorad.service.shelf import Shelf
from lorad.service.text_look import TextLook
from lorad.text.tokenizer import TOKENIZER_FILE


class PackedFiles:
    """`on_missing` hears of revisions whose stored files are gone."""

    def __init__(
        self,
        registry: Registry,
        link: Informed,
        intake: Intake,
        catalog: Catalog,
        shelf: Shelf,
        news: RevisionNews,
    ) -> None:
        self.on_missing: Callable[[str], Coroutine[Any, Any, None]] = _nobody
        #: Fetches a name's content anew from its source, into a staging folder; None: nobody can,
        #: and no revision's own files leave while a name means it.
        self.refetch: Callable[[str], Awaitable[StagingDir]] | None = None
        #: Whose tokenizer a revision has is found before anybody is told; None: as registered.
        self.look: TextLook | None = None
        self._registry, self._link, self._intake = registry, link, intake
        self._catalog, self._shelf, self._news = catalog, shelf, news

    async def packed(self, rev: str) -> PackedManifest:
        """The manifest of `rev` for the present layout; packs it first if need be."""
        info = self._link.info
        if info is None:
            raise LoradError("loading_base", "the base model is still loading")
        record = self._registry.revision(rev)
        if record is None:
            raise LoradError("model_not_found", f"{self._catalog.label(rev)} was removed meanwhile")
        if rev in self._intake.store.remote:
            await self._fetch_back(rev)
        if not self._intake.store.has(rev):
            await self.on_missing(rev)
            raise LoradError("load_failed", f"the files of {rev[:12]} are gone from the store")
        record = await self._looked_at(record)
        manifest = record.packed_manifest(info)
        if manifest is not None and _is_whole(manifest, info):
            return self._with_text(manifest, record)
        return await self.pack(record, info)

    def is_readable(self, rev: str) -> bool:
        """Whether a text may be read for it: its own files are here, and whose tokenizer it has is
        known."""
        sure = self.look is None or self.look.is_sure(rev)
        return sure and rev not in self._intake.store.remote

    async def readable(self, rev: str) -> None:
        """Bring that about.  Raises what a request is told."""
        store = self._intake.store
        with self._news.for_request(rev):
            if rev in store.remote:
                async with self._shelf.hold(rev):
                    if rev in store.remote:
                        await self._fetch_back(rev)
            record = self._registry.revision(rev)
            if record is not None and store.has(rev):
                await self._looked_at(record)

    async def _looked_at(self, record: RevisionRecord) -> RevisionRecord:
        return record if self.look is None else await self.look.sure(record)

    async def pack(self, record: RevisionRecord, info: EngineInfo) -> PackedManifest:
        """Write its packed file, and record it.  Which rows of an end are the adapter's own is told
        by the base: the packer's word on what the file holds counts, not that of the registration.
        """
        rev = record.rev
        wanted = partial(self._catalog.needed, rev)
        layouts = Packing.of(info, info.block_bytes).streams
        manifest = await self._intake.pack(rev, layouts, record.packed_bytes(info), wanted=wanted)
        recorded = self._registry.record_packed(
            rev,
            manifest.layout,
            num_blocks=manifest.num_blocks,
            true_bytes=manifest.true_bytes,
            modules=manifest.modules if manifest.modules != record.modules else None,
        )
        try:
            await asyncio.wrap_future(recorded)
        except OSError as error:  # a failing disk is this revision's trouble, and nobody else's
            message = f"cannot keep the packed file of {rev[:12]}: {error}"
            raise LoradError("internal_error", message) from error
        return self._with_text(manifest, record)

    def _with_text(self, manifest: PackedManifest, record: RevisionRecord) -> PackedManifest:
        """With its vocabulary, as it was registered: texts of requests are read by that."""
        path = self._intake.store.path(record.rev) / TOKENIZER_FILE
        own = str(path) if record.own_tokenizer and path.is_file() else ""
        return msgspec.structs.replace(manifest, num_tokens=record.num_tokens, tokenizer=own)

    async def packed_already(self) -> set[str]:
        """Revisions that need no packing: thousands are looked at, on a thread."""
        info = self._link.info
        return await asyncio.to_thread(self._whole, info) if info is not None else set()

    def _whole(self, info: EngineInfo) -> set[str]:
        streams, store = Packing.of(info, info.block_bytes).streams, self._intake.store
        files = self._registry.packed_files(streams)
        return {
            rev
            for rev, layout, blocks in files
            if is_whole(store.packed(rev, layout), blocks * info.block_bytes)
        }

    async def pack_ahead(self, rev: str) -> None:
        """Pack it before anybody asks for it, if that takes no room from others."""
        info, record = self._link.info, self._registry.revision(rev)
        if info is None or record is None or rev in self._intake.store.remote:
            return
        async with self._shelf.hold(rev):
            manifest = record.packed_manifest(info)
            if manifest is None or not _is_whole(manifest, info):
                room, size = self._intake.store.room, record.packed_bytes(info)
                if not await asyncio.to_thread(room.lacking, size):
                    await self.packed(rev)

    def has_lost(self, rev: str) -> bool:
        """Whether what the engine was to read is gone or cut, and can be packed anew."""
        info, record = self._link.info, self._registry.revision(rev)
        manifest = record.packed_manifest(info) if record is not None and info is not None else None
        if info is None or manifest is None or _is_whole(manifest, info):
            return False
        return self._intake.store.has(rev)

    async def _fetch_back(self, rev: str) -> None:
        """The content of a remote revision, from where it came."""
        names = self._catalog.names_of(rev) or (self._catalog.label(rev),)
        if self.refetch is None:
            message = f"the files of {names[0]} are not here, and nothing can fetch them"
            raise LoradError("load_failed", message, hint=f"add {names[0]} again")
        staging = await self.refetch(names[0])
        try:
            found = await self._intake.find(staging)
            if found.rev != rev:
                message = f"the source of {names[0]} holds other content now: {found.rev[:12]}"
                raise LoradError("load_failed", message, hint=f"add {names[0]} again")
            await self._intake.keep(found)
        finally:
            await self._intake.discard(staging)
        self._news.publish("adapter.fetched", rev, "info", "remote")


def _is_whole(manifest: PackedManifest, info: EngineInfo) -> bool:
    """A packed file that is gone or was cut short is packed anew: its source is beside it."""
    return is_whole(Path(manifest.path), manifest.num_blocks * info.packed_block_bytes)


def is_whole(path: Path, num_bytes: int) -> bool:
    """Whether a packed file of so many bytes is there, and its checksums."""
    try:
        return path.stat().st_size == num_bytes and path_of(path).is_file()
    except OSError:
        return False


async def _nobody(rev: str) -> None:
    return None

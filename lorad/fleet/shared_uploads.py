"""Shared uploads: an adapter that arrives file by file, each at another of several gateways.

Goes in: what `lorad.api.uploads` takes.  Comes out: the same, with the files in the catalog's place
until the commit, at whichever gateway, has them all in one folder.  What was not committed within
an hour goes when the next one opens.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad import disk, wire
from lorad.errors import LoradError
from lorad.fleet.blobs import Blobs
from lorad.fleet.catalog import FILES
from lorad.fleet.staging import Folder, Stage

#: Clocks of gateways may differ by less than this.
IDLE_SECONDS = 3600.0
_PLACE, _START = "uploads/", "start.json"


class Begun(Struct, frozen=True, kw_only=True):
    """What is known of an open one; `at` in seconds since the epoch."""

    start: wire.UploadStart
    owner: int | None
    at: float


class SharedUploads:
    """`max_bytes` bounds each file."""

    def __init__(
        self, blobs: Blobs, stage: Stage, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.max_bytes = max_bytes
        self._blobs, self._stage, self._clock = blobs, stage, clock

    async def open(self, start: wire.UploadStart, owner: int | None) -> str:
        """Begin one; its id."""
        id = secrets.token_hex(12)
        begun = msgspec.json.encode(Begun(start=start, owner=owner, at=self._clock()))
        await self._do(self._sweep)
        await self._do(lambda: self._blobs.put(f"{_PLACE}{id}/{_START}", begun))
        return id

    async def put(self, id: str, owner: int | None, file: str, body: AsyncIterator[bytes]) -> int:
        """One file; its size.  Raises as Uploads does."""
        await self._begun(id, owner)
        if file not in FILES:
            hint = f"adapters have {', '.join(sorted(FILES))}"
            raise LoradError("invalid_value", f"not a file of an adapter: {file[:80]!r}", hint=hint)
        staging = await self._stage.stage()
        try:
            path, size = staging.path / file, 0
            with disk.writing("store the upload", staging.path), path.open("wb") as out:
                async for piece in body:
                    size += len(piece)
                    if size > self.max_bytes:
                        message = f"{file} is more than {self.max_bytes} bytes"
                        hint = "watch.max_adapter_bytes in lorad.toml"
                        raise LoradError("payload_too_large", message, hint=hint)
                    await self._do(lambda: out.write(piece))  # noqa: B023
            await self._do(lambda: self._blobs.put_file(f"{_PLACE}{id}/{file}", path))
        finally:
            await self._stage.discard(staging)
        return size

    async def take(self, id: str, owner: int | None) -> tuple[wire.UploadStart, Folder]:
        """All of it in a folder of this gateway; it is closed from here on."""
        begun = await self._begun(id, owner)
        staging = await self._stage.stage()
        try:
            await self._do(lambda: self._collect(id, staging.path))
        except BaseException:
            await self._stage.discard(staging)
            raise
        return begun.start, staging

    async def drop(self, id: str, owner: int | None) -> None:
        await self._begun(id, owner)
        await self._do(lambda: self._forget(id))

    # ------------------------------------------------------------- inside
    async def _begun(self, id: str, owner: int | None) -> Begun:
        known = id.isascii() and id.isalnum()
        data = await self._do(lambda: self._blobs.read(f"{_PLACE}{id}/{_START}")) if known else None
        begun = None if data is None else msgspec.json.decode(data, type=Begun)
        if begun is None or begun.owner != owner:
            raise LoradError("not_found", "there is no such upload", hint="it may have expired")
        return begun

    def _collect(self, id: str, folder: Path) -> None:
        for name in self._blobs.names(f"{_PLACE}{id}/"):
            if name != _START:
                with disk.writing("stage an adapter", folder), (folder / name).open("wb") as out:
                    for piece in self._blobs.chunks(f"{_PLACE}{id}/{name}"):
                        out.write(piece)
        self._forget(id)

    def _forget(self, id: str) -> None:
        for name in (_START, *sorted(FILES)):
            self._blobs.remove(f"{_PLACE}{id}/{name}")

    def _sweep(self) -> None:
        for id in self._blobs.names(_PLACE):
            data = self._blobs.read(f"{_PLACE}{id}/{_START}")
            old = data is None
            if data is not None:
                begun = msgspec.json.decode(data, type=Begun)
                old = self._clock() - begun.at > IDLE_SECONDS
            if old:
                self._forget(id)

    async def _do(self, work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)

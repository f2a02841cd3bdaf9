"""Uploads: an adapter folder that arrives file by file, until it is committed or given up.

Goes in: the names of files and their bytes.  Comes out: a staging folder with only allowed names
and no more bytes than allowed, handed over once.  Uploads that nobody continues are discarded when
the next one opens.  Knows nothing of what the files mean.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from engine.adapters.manifest import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILES
from lorad import disk, wire
from lorad.errors import LoradError

T = TypeVar("T")

FILES = frozenset({CONFIG_FILE, *WEIGHTS_FILES, *TEXT_FILES})
MAX_OPEN = 16
IDLE_SECONDS = 600.0
#: When all are open, one whose client was silent for this long makes way: clients crash.
GIVEN_UP_SECONDS = 30.0
_WRITE_BYTES = 1 << 20


class Staging(Protocol):
    @property
    def path(self) -> Path: ...


class Stage(Protocol):
    """Of AdapterService: makes and removes staging folders."""

    async def stage(self, expected_bytes: int = 0) -> Staging: ...
    async def discard(self, staging: Staging) -> None: ...


@dataclass(slots=True)
class Upload:
    """One that is open.  `used_at` on the clock of `Uploads`."""

    id: str
    start: wire.UploadStart
    staging: Staging
    owner: int | None  # uid of who opened it: nobody else may go on with it
    used_at: float
    num_bytes: int = 0
    busy: set[str] = field(default_factory=set)  # files being written


class Uploads:
    """Owned by the event loop.  `max_bytes` bounds all files of one upload together.

    `vet(name, source)` raises what may be known to be wrong before a byte is sent.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        max_bytes: int,
        vet: Callable[[str, str], None] = lambda name, source: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self._stage, self._vet, self._clock = stage, vet, clock
        self._open: dict[str, Upload] = {}
        self._opening = 0  # counted before they are open, so that a crowd gets no more
        self._adding: set[asyncio.Task[Any]] = set()

    async def open(self, start: wire.UploadStart, owner: int | None) -> Upload:
        """Begin one; raises what `vet` raises, and queue_full when too many are open."""
        self._vet(start.name, start.source)
        await self._discard_stale()
        if len(self._open) + self._opening >= MAX_OPEN:
            message = f"{MAX_OPEN} uploads are open already"
            hint = f"one that nobody continues makes way after {GIVEN_UP_SECONDS:g} s"
            raise LoradError("queue_full", message, hint=hint)
        self._opening += 1
        try:
            upload = Upload(secrets.token_hex(12), start, await self._stage.stage(), owner, 0.0)
        finally:
            self._opening -= 1
        upload.used_at = self._clock()
        self._open[upload.id] = upload
        return upload

    async def put(
        self, upload_id: str, owner: int | None, file: str, body: AsyncIterator[bytes]
    ) -> int:
        """Write one file from its first byte to its last; returns its size.

        Raises invalid_value (a name that adapters do not have), conflict (being written already),
        payload_too_large, insufficient_storage.  A file that breaks off is removed.
        """
        upload = self._get(upload_id, owner)
        if file not in FILES:
            hint = f"adapters have {', '.join(sorted(FILES))}"
            raise LoradError("invalid_value", f"not a file of an adapter: {file[:80]!r}", hint=hint)
        if file in upload.busy:
            raise LoradError("conflict", f"{file} is being written by another request")
        upload.busy.add(file)
        try:
            return await self._write(upload, upload.staging.path / file, body)
        finally:
            upload.busy.discard(file)
            upload.used_at = self._clock()

    def take(self, upload_id: str, owner: int | None) -> Upload:
        """Hand the staging folder over; the upload is closed from here on."""
        upload = self._get(upload_id, owner)
        if upload.busy:
            raise LoradError("conflict", f"{', '.join(sorted(upload.busy))} is still being written")
        del self._open[upload_id]
        return upload

    def keep(self, adding: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let a commit run to its end though nobody may wait for it; a failure is an event."""
        task = asyncio.get_running_loop().create_task(adding)
        self._adding.add(task)
        task.add_done_callback(self._added)
        return task

    def _added(self, task: asyncio.Task[Any]) -> None:
        self._adding.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits raises it; else it becomes an event

    async def drop(self, upload_id: str, owner: int | None) -> None:
        """Give one up."""
        await self._stage.discard(self.take(upload_id, owner).staging)

    def _get(self, upload_id: str, owner: int | None) -> Upload:
        upload = self._open.get(upload_id)
        if upload is None or upload.owner != owner:
            raise LoradError("not_found", "there is no such upload", hint="it may have expired")
        upload.used_at = self._clock()
        return upload

    async def _discard_stale(self) -> None:
        now = self._clock()
        quiet = sorted((u for u in self._open.values() if not u.busy), key=lambda u: u.used_at)
        stale = [u for u in quiet if u.used_at < now - IDLE_SECONDS]
        if not stale and len(self._open) >= MAX_OPEN:
            stale = [u for u in quiet[:1] if u.used_at < now - GIVEN_UP_SECONDS]
        for upload in stale:  # all at once: while one is removed, others open, go on or end
            del self._open[upload.id]
        for upload in stale:
            await self._stage.discard(upload.staging)

    async def _write(self, upload: Upload, path: Path, body: AsyncIterator[bytes]) -> int:
        if path.exists():
            upload.num_bytes -= path.stat().st_size
        size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with disk.writing("store the upload", path.parent):
            fd = os.open(path, flags, 0o640)
        try:
            async for block in _blocks(body):
                size += len(block)
                upload.num_bytes += len(block)
                if upload.num_bytes > self.max_bytes:
                    message = f"the files are more than {self.max_bytes} bytes together"
                    hint = "raise watch.max_adapter_bytes in lorad.toml, and restart"
                    raise LoradError("payload_too_large", message, hint=hint)
                with disk.writing("store the upload", path.parent, len(block)):
                    await asyncio.to_thread(_write_all, fd, block)
        except BaseException:
            path.unlink(missing_ok=True)
            upload.num_bytes -= size
            raise
        finally:
            os.close(fd)
        return size


async def _blocks(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces that are worth a thread's while."""
    held = bytearray()
    async for piece in body:
        held += piece
        if len(held) >= _WRITE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _write_all(fd: int, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[os.write(fd, left) :]

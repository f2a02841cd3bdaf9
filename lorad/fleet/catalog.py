"""Catalog: the adapters of a whole cluster in one shared place: files by digest, and a table.

Goes in: folders, and changes of the table.  Comes out: both again, for every gateway and member.
Each generation of the table is a file of its own, created once by one of several writers, so that
the newest that is there is what holds, and those before it are how it came to that.  Files are
complete when their list is there, which is written last; whoever reads them holds them against it.
Methods of `Store` block; `Catalog` is for one event loop.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from engine.adapters.manifest import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILES
from lorad.config import Settings
from lorad.errors import LoradError
from lorad.fleet import table as tables
from lorad.fleet.blobs import CHUNK_BYTES, Blobs, open_blobs
from lorad.fleet.table import Entry, Table

FILES = frozenset({CONFIG_FILE, *WEIGHTS_FILES, *TEXT_FILES})
#: Generations that are kept.
KEPT_GENERATIONS = 50
#: A change is tried again so often when other gateways are faster.
ATTEMPTS = 20
_LIST = "files.json"


class File(Struct, frozen=True):
    name: str
    num_bytes: int
    sha256: str


class Listed(Struct, frozen=True, kw_only=True):
    """What belongs to one content, by name."""

    files: tuple[File, ...]


class Store:
    """Blocking, and of no thread in particular."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs

    # ------------------------------------------------------------- the table
    def newest(self, known: Table | None = None) -> Table:
        """The newest; `known` itself if there is none newer.  Raises source_corrupt for one that is
        damaged, as nobody guesses what names meant; source_unreachable where there was one."""
        generation = known.generation if known is not None else 0
        names = self.blobs.names("table/", _numbered(generation - 1) if generation else "")
        names = [name for name in names if name.endswith(".json")]
        if generation and not names:  # a folder that is not mounted is empty, too
            message = f"the catalog is gone: table {generation} is not there any more"
            raise LoradError("source_unreachable", message, hint="is its folder mounted here?")
        if known is not None and (not names or names[-1] == _numbered(generation)):
            return known
        if not names:
            return Table()
        key = f"table/{names[-1]}"
        data = self.blobs.read(key)
        if data is None:  # pruned, so there is a newer one by now
            return self.newest(known)
        return tables.decode(data, f"the catalog's {key}")

    def write(self, table: Table) -> bool:
        """False: somebody else wrote that generation."""
        return self.blobs.create(f"table/{_numbered(table.generation)}", tables.encode(table))

    def prune(self) -> None:
        """Old generations, and contents that none of those needs which are kept."""
        names = self.blobs.names("table/")
        for name in names[:-KEPT_GENERATIONS]:
            self.blobs.remove(f"table/{name}")

    # ------------------------------------------------------------- files
    def add(self, folder: Path) -> str:
        """Copy an adapter's files in; their digest.  What is there already stays."""
        files = tuple(_file(p) for p in sorted(folder.iterdir()) if p.name in FILES)
        listed = msgspec.json.encode(Listed(files=files))
        content = hashlib.sha256(listed).hexdigest()
        if self.blobs.read(f"content/{content}/{_LIST}") is None:
            for file in files:
                self.blobs.put_file(f"content/{content}/{file.name}", folder / file.name)
            self.blobs.put(f"content/{content}/{_LIST}", listed)
        return content

    def files(self, content: str) -> tuple[File, ...]:
        """What there is of it.  Raises source_not_found, source_corrupt."""
        data = self.blobs.read(f"content/{content}/{_LIST}")
        if data is None:
            message = f"the catalog has no files {content[:12]}"
            raise LoradError("source_not_found", message, hint="add the adapter again")
        if hashlib.sha256(data).hexdigest() != content:
            raise _bad_files(content, _LIST)
        return msgspec.json.decode(data, type=Listed).files

    def chunks(self, content: str, file: File) -> Iterator[bytes]:
        """Its bytes.  Raises source_corrupt in place of the last of them if any was not as it
        should be: who reads them must not use them before the end."""
        digest, size = hashlib.sha256(), 0
        held = b""
        for piece in self.blobs.chunks(f"content/{content}/{file.name}"):
            if held:
                yield held
            digest.update(piece)
            size += len(piece)
            held = piece
        if size != file.num_bytes or digest.hexdigest() != file.sha256:
            raise _bad_files(content, file.name)
        if held:
            yield held

    def drop(self, content: str) -> None:
        """Its files go; the list first, so that what is left is no content."""
        for name in (_LIST, *sorted(FILES)):
            self.blobs.remove(f"content/{content}/{name}")


class Catalog:
    """The table as it is known here, and how to change it.  `now`: a time as text."""

    def __init__(self, blobs: Blobs, *, author: str = "", now: Callable[[], str] | None = None):
        self.store = Store(blobs)
        self.table = Table()
        self.author = author or secrets.token_hex(6)
        self.trouble: LoradError | None = None  # of the last look
        self._now = now or _now
        self._looking = asyncio.Lock()

    async def look(self) -> Table:
        """The newest table, which is `table` from here on.  Raises why it cannot be had; what is
        known is not forgotten then."""
        async with self._looking:
            try:
                fresh = await asyncio.to_thread(self.store.newest, self.table)
            except LoradError as error:
                self.trouble = error
                raise
            self.trouble = None
            if fresh.generation > self.table.generation:
                self.table = fresh
            return self.table

    async def change(self, what: str, edit: Callable[[Table], Mapping[str, Entry]]) -> Table:
        """Write the next generation; `edit` gets the newest table, may be called again when
        somebody else was faster, and raises what there is against it then."""
        for _ in range(ATTEMPTS):
            before = await self.look()
            fresh = replace(
                before,
                generation=before.generation + 1,
                time=self._now(),
                author=f"{self.author}-{secrets.token_hex(4)}",
                what=what,
                entries=dict(edit(before)),
            )
            if await asyncio.to_thread(self.store.write, fresh):
                if fresh.generation > self.table.generation:
                    self.table = fresh
                if fresh.generation % KEPT_GENERATIONS == 0:
                    await asyncio.to_thread(self.store.prune)
                return fresh
        message = f"other gateways changed the catalog {ATTEMPTS} times meanwhile"
        raise LoradError("conflict", message, hint="again")

    async def add(self, folder: Path) -> str:
        return await asyncio.to_thread(self.store.add, folder)

    async def drop_unused(self, content: str) -> None:
        """Its files, unless a name means them, or meant them lately."""
        if content not in (await self.look()).contents():
            await asyncio.to_thread(self.store.drop, content)

    def now(self) -> str:
        return self._now()


def open_catalog(where: str, settings: Settings | None = None) -> Catalog:
    """Of `s3://bucket/prefix` or a folder's absolute path; reads nothing yet."""
    return Catalog(open_blobs(where, settings or Settings()))


def _numbered(generation: int) -> str:
    return f"{generation:012d}.json"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _file(path: Path) -> File:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
    return File(path.name, size, digest.hexdigest())


def _bad_files(content: str, name: str) -> LoradError:
    message = f"{name} of {content[:12]} in the catalog is not what was put there"
    return LoradError("source_corrupt", message, hint="add the adapter again")

"""Catalog: the adapters of a whole cluster in one shared place: files by digest, and a table.

Goes in: folders, and changes of the table.  Comes out: both again, for every gateway and member.
Each generation of the table is a file of its own, created once by one of several writers, so that
the newest that is there is what holds, and those before it are how it came to that.  Files are
complete when their list is there, which is written last; whoever reads them holds them against it.
Methods of `Store` block; `Catalog` is for one event loop.
"""

import asyncio
import hashlib
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
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

log = logging.getLogger("lorad.fleet")

FILES = frozenset({CONFIG_FILE, *WEIGHTS_FILES, *TEXT_FILES})
#: Generations that are kept.
KEPT_GENERATIONS = 50
#: A change is tried again so often when other gateways are faster.
ATTEMPTS = 20
#: Files that are to be added again.
DAMAGED = ("source_corrupt", "source_not_found")
_LIST = "files.json"
_NUMBER = re.compile(r"\d{12}\.json")


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
    def newest(self, known: Table | None = None, mark: str = "") -> tuple[Table, str]:
        """The newest, and its file's mark; `known` itself if there is none newer and its file is
        the one of that `mark`: after a damaged one was removed, or a backup brought back, there may
        be another of the same generation.  Raises source_corrupt for one that is damaged, as nobody
        guesses what names meant; source_unreachable where there was one."""
        generation = known.generation if known is not None else 0
        marks = self.blobs.marks("table/", _numbered(generation - 1) if generation else "")
        names = _numbers(marks)  # whatever else somebody has put there
        if generation and not names:  # a folder that is not mounted is empty, too
            message = f"the catalog is gone: table {generation} is not there any more"
            raise LoradError("source_unreachable", message, hint="is its folder mounted here?")
        if not names:
            return Table(), ""
        found = marks[names[-1]]
        if known is not None and (names[-1], found) == (_numbered(generation), mark):
            return known, mark
        key = f"table/{names[-1]}"
        data = self.blobs.read(key)
        if data is None:  # pruned, so there is a newer one by now
            return self.newest(known, mark)
        table = tables.decode(data, f"the catalog's {key}")
        if _numbered(table.generation) != names[-1]:
            raise tables.damaged(f"the catalog's {key}", f"it is table {table.generation}, renamed")
        return table, found

    def write(self, table: Table) -> bool:
        """False: somebody else wrote that generation."""
        return self.blobs.create(f"table/{_numbered(table.generation)}", tables.encode(table))

    def prune(self) -> None:
        """Old generations.  Contents go with the last name that knows them: see drop_unused."""
        names = _numbers(self.blobs.names("table/"))
        for name in names[:-KEPT_GENERATIONS]:
            self.blobs.remove(f"table/{name}")

    # ------------------------------------------------------------- files
    def add(self, folder: Path, *, anew: bool = False) -> str:
        """Copy an adapter's files in; their digest.  What is there already stays, unless `anew`."""
        files = tuple(_file(p) for p in sorted(folder.iterdir()) if p.name in FILES)
        listed = msgspec.json.encode(Listed(files=files))
        content = hashlib.sha256(listed).hexdigest()
        if anew or not self.has(content):
            for file in files:
                self.blobs.put_file(f"content/{content}/{file.name}", folder / file.name)
            self.blobs.put(f"content/{content}/{_LIST}", listed)
        return content

    def has(self, content: str) -> bool:
        """Is all of it there?  Looks at no byte of the files."""
        names = self.blobs.names(f"content/{content}/")
        try:
            return {file.name for file in self.files(content)} <= set(names)
        except LoradError as error:
            if error.code in DAMAGED:
                return False
            raise

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
        self._mark = ""  # of the table's file
        self._held: Counter[str] = Counter()  # contents that are on their way into the table
        self._looking = asyncio.Lock()

    async def look(self) -> Table:
        """The newest table, which is `table` from here on.  Raises why it cannot be had; what is
        known is not forgotten then."""
        async with self._looking:
            try:
                fresh, mark = await asyncio.to_thread(self.store.newest, self.table, self._mark)
            except LoradError as error:
                self.trouble = error
                raise
            self.trouble, self._mark = None, mark
            known = self.table
            if fresh.generation == known.generation and fresh.author != known.author:
                log.warning("table %d of the catalog is another one by now", fresh.generation)
                self.table = fresh
            elif fresh.generation > known.generation:
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

    async def add(self, folder: Path, *, anew: bool = False) -> str:
        return await asyncio.to_thread(lambda: self.store.add(folder, anew=anew))

    @asynccontextmanager
    async def holding(self, folder: Path) -> AsyncIterator[str]:
        """The digest of its files while the table comes to mean them.  They are there afterwards:
        whoever else added the same ones meanwhile, and did not come to an end, drops them."""
        await self.look()  # nothing is put where a folder is not mounted
        content = await self.add(folder)
        self._held[content] += 1
        try:
            yield content
            if not await asyncio.to_thread(self.store.has, content):
                await self.add(folder)
        finally:
            self._held[content] -= 1
            self._held += Counter()  # without the zeros

    async def drop_unused(self, content: str) -> None:
        """Its files, unless a name means them, or meant them lately, or will in a moment."""
        if content not in (await self.look()).contents() and not self._held[content]:
            await asyncio.to_thread(self.store.drop, content)

    def now(self) -> str:
        return self._now()


def open_catalog(where: str, settings: Settings | None = None) -> Catalog:
    """Of `s3://bucket/prefix` or a folder's absolute path; reads nothing yet."""
    return Catalog(open_blobs(where, settings or Settings()))


def _numbered(generation: int) -> str:
    return f"{generation:012d}.json"


def _numbers(names: Iterable[str]) -> list[str]:
    return sorted(filter(_NUMBER.fullmatch, names))


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

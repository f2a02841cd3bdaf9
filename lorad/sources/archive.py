"""Archives (.tar, .tar.gz, .zip), of which the adapter's files are taken and nothing else.

Goes in: an archive that lies whole on this disk.  Comes out: its adapter files, in a folder, under
their own names; or FetchError `source_corrupt`.  No name of the archive ever becomes a path, and an
archive that tries (absolute, `..`, links, devices) is refused as a whole, also where lorad would
not look at the entry.  What is counted is what entries say of themselves, before they are unpacked;
what they hold beyond that is an error.
"""

import gzip
import io
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from lorad.sources import disk, wanted
from lorad.sources.errors import FetchError
from lorad.sources.fetch import RemoteFile
from lorad.sources.patience import Meter

MAX_ENTRIES = 10_000
#: Of one header: tar's long names and attributes, zip's list of all entries.
MAX_HEADER_BYTES = 8 << 20
#: Of all headers of a tar.  They count as nobody's content, and the libraries keep them in memory:
#: 60 empty files with attributes of 7 MB each are an archive of 2 MB that took 440 MB to list.
MAX_HEADERS_BYTES = 32 << 20
MAX_NAME_CHARS = 1000

_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RecursionError),
    *(ValueError, OverflowError, NotImplementedError, RuntimeError, gzip.BadGzipFile),
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """`path`: parts below the archive's root, or below its one folder."""

    path: tuple[str, ...]
    size: int
    open: Callable[[], BinaryIO]


def unpack(archive: BinaryIO, folder: Path, max_bytes: int, meter: Meter) -> None:
    """Put the adapter's files of `archive` into `folder`.  `max_bytes` bounds everything that the
    archive would unpack to, wanted or not."""
    try:
        with _opened(archive) as (entries, plain):
            found = _counted(entries, max_bytes, meter)
            for entry in _choose(_stripped(found), max_bytes):
                _extract(entry, folder, meter)
        _read_out(plain, max_bytes, meter)
    except _BROKEN as error:
        raise _bad(f"cannot be unpacked: {_line(error)}") from None


# ----------------------------------------------------------------- formats
@contextmanager
def _opened(archive: BinaryIO) -> Iterator[tuple[Iterator[_Entry], gzip.GzipFile | None]]:
    """The entries, by what the archive is and not by what it is called; with the stream that they
    are unpacked from, if that has a checksum of the whole."""
    archive.seek(0)
    magic = archive.read(262)
    archive.seek(0)
    if magic[:4] in (b"PK\3\4", b"PK\5\6"):
        with zipfile.ZipFile(cast(BinaryIO, _Bounded(archive))) as zipped:
            yield map(lambda info: _of_zip(zipped, info), zipped.infolist()), None
    elif magic[:2] == b"\x1f\x8b" or magic[257:262] == b"ustar":
        plain = gzip.GzipFile(fileobj=archive) if magic[:2] == b"\x1f\x8b" else None
        bounded = _Bounded(plain or archive, MAX_HEADERS_BYTES)
        with tarfile.open(fileobj=cast(BinaryIO, bounded), mode="r:") as tar:
            yield _members(tar, bounded), plain
    else:
        raise _bad("is neither a tar (plain or gzip) nor a zip archive")


def _members(tar: tarfile.TarFile, file: "_Bounded") -> Iterator[_Entry]:
    for member in tar:
        yield _of_tar(tar, member)
        member.pax_headers = {}  # the library keeps each member until the end
    file.listed()


def _of_tar(tar: tarfile.TarFile, member: tarfile.TarInfo) -> _Entry:
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise _bad(f"holds {_shown(member.name)}, which is a link, a device or sparse")
    size = 0 if member.isdir() else member.size
    return _Entry(_parts(member.name), size, lambda: cast(BinaryIO, tar.extractfile(member)))


def _of_zip(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Entry:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _bad(f"holds {_shown(info.filename)}, which is a link or a device")
    if info.flag_bits & 1:
        raise _bad(f"holds {_shown(info.filename)}, which is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _bad(f"holds {_shown(info.filename)}, compressed in another way than deflate")
    size = 0 if info.is_dir() else info.file_size
    return _Entry(_parts(info.filename), size, lambda: cast(BinaryIO, zipped.open(info)))


class _Bounded(io.RawIOBase):
    """A file that refuses reads which only headers of absurd size ask for: the libraries would take
    them into memory.  `headers`: bytes that may be read until all is `listed`; 0 for any."""

    def __init__(self, file: "BinaryIO | gzip.GzipFile", headers: int = 0) -> None:
        self._file = file
        self._headers, self._read = headers, 0

    def listed(self) -> None:
        """What is read from here on is content."""
        self._headers = 0

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            here = self._file.tell()
            size = self._file.seek(0, 2) - here
            self._file.seek(here)
        self._read += size
        if size > MAX_HEADER_BYTES:
            raise _bad(f"has a header of {size} bytes, allowed are {MAX_HEADER_BYTES}")
        if self._headers and self._read > self._headers:
            raise _bad(f"has more than {self._headers} bytes of headers")
        try:
            return self._file.read(size)
        except gzip.BadGzipFile as error:  # an OSError, which whoever writes takes for the disk's
            raise _bad(f"cannot be unpacked: {_line(error)}") from None

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


# ----------------------------------------------------------------- choosing
def _counted(entries: Iterator[_Entry], max_bytes: int, meter: Meter) -> list[_Entry]:
    """All files, as long as they are not too many or too large together.  Lazily: the next header
    of a gzip'ed tar is reached by unpacking what lies before it."""
    found, total = [], 0
    for number, entry in enumerate(entries, 1):
        meter.check()
        total += entry.size
        if number > MAX_ENTRIES:
            raise _bad(f"holds more than {MAX_ENTRIES} entries")
        if total > max_bytes:
            raise wanted.too_big("the archive unpacks to more bytes than an adapter has", max_bytes)
        found.append(entry)
    return [entry for entry in found if entry.path and not _is_litter(entry.path)]


def _stripped(entries: list[_Entry]) -> list[_Entry]:
    """The entries below the archive's one folder, if it has just that."""
    tops = {entry.path[0] for entry in entries}
    if len(tops) == 1 and any(len(entry.path) > 1 for entry in entries):
        return [_Entry(e.path[1:], e.size, e.open) for e in entries if len(e.path) > 1]
    return entries


def _choose(entries: list[_Entry], max_bytes: int) -> Iterable[_Entry]:
    """The adapter's files, in the archive's order: a gzip'ed tar is read from its start once."""
    found = [RemoteFile(entry.path[0], entry.size) for entry in entries if len(entry.path) == 1]
    names = ["/".join(entry.path) for entry in entries]
    chosen = {file.name for file in wanted.choose(found, names, max_bytes)}
    if len({file.name for file in found}) < len(found):
        raise _bad("holds two entries of one name")
    return [entry for entry in entries if len(entry.path) == 1 and entry.path[0] in chosen]


def _extract(entry: _Entry, folder: Path, meter: Meter) -> None:
    target = folder / entry.path[0]  # one of the names that lorad reads
    with entry.open() as source:
        exact = RemoteFile(entry.path[0], entry.size)
        if not disk.copy_checked(source, target, exact, meter):
            raise _bad(f"holds {entry.path[0]} with another size than it says")


def _read_out(plain: gzip.GzipFile | None, max_bytes: int, meter: Meter) -> None:
    """To the end, behind the entries, where gzip holds what it unpacked against its checksum."""
    rest = max_bytes
    while plain is not None and (chunk := plain.read(disk.CHUNK_BYTES)):
        meter.check()
        rest -= len(chunk)
        if rest < 0:
            raise _bad(f"goes on for more than {max_bytes} bytes behind its last entry")


def _parts(name: str) -> tuple[str, ...]:
    """The name, which must stay below wherever it would be unpacked."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if (
        name.startswith("/")
        or ".." in parts
        or "\\" in name
        or re.match(r"[A-Za-z]:", name)
        or len(name) > MAX_NAME_CHARS
        or not name.isprintable()
    ):
        raise _bad(f"holds {_shown(name)}, a name that would lead elsewhere")
    return tuple(parts)


def _is_litter(path: tuple[str, ...]) -> bool:
    """What macOS adds."""
    return path[0] == "__MACOSX" or path[-1] == ".DS_Store" or path[-1].startswith("._")


# ----------------------------------------------------------------- errors
def _bad(what: str) -> FetchError:
    return FetchError(
        "source_corrupt",
        f"the archive {what}",
        hint="pack adapter_config.json and adapter_model.safetensors anew, as plain files",
    )


def _shown(name: str) -> str:
    text = name if len(name) <= 100 else name[:99] + "…"
    return repr(text)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

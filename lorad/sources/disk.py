"""Files on this side: partial ones that are gone on with, and whole ones that were checked.

Goes in: descriptors and bytes.  Comes out: files; FetchError where the disk is full or refuses.
A file gets its name when it is whole, so what has its name need not be looked at again.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from lorad.disk import mount_of
from lorad.sources.errors import FetchError
from lorad.sources.fetch import RemoteFile
from lorad.sources.patience import Meter

CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def part_of(target: Path) -> Path:
    """Where `target` grows until it is whole."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def growing(path: Path) -> Iterator[BinaryIO]:
    """`path`, made if it is not there, to be read and written; never through a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with writing(path.name), os.fdopen(os.open(path, flags, 0o640), "r+b", 0) as file:
        yield file


def write(file: BinaryIO, chunk: bytes) -> None:
    """All of `chunk`."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) or 0 :]


@contextmanager
def writing(name: str) -> Iterator[None]:
    """What the disk says, as FetchError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"no room for {name}: {error.strerror}"
            raise FetchError("insufficient_storage", message, hint="free some space") from None
        raise FetchError(
            "internal_error",
            f"cannot write {name}: {error.strerror or error}",
            hint="see that lorad may write to its store and to `[hf] cache_dir`",
        ) from None


def need_room(folder: Path, num_bytes: int | None) -> None:
    """Refuse at once what the disk of `folder` cannot hold."""
    free = shutil.disk_usage(folder).free
    if num_bytes is not None and num_bytes > free:
        raise FetchError(
            "insufficient_storage",
            f"the adapter has {num_bytes} bytes, and {mount_of(folder)} has {free} left",
            hint="free some there: `loractl rm` for the store, `hf cache` for the hub's cache",
        )


def copy_checked(source: BinaryIO, target: Path, file: RemoteFile, meter: Meter) -> bool:
    """Copy `source`, from where it stands, to `target`, which appears whole.  False, and no target,
    if it is not what `file` says: size, sha256, or the blob id of git."""
    digest, wanted = _digest(file)
    part = part_of(target)
    done = 0
    with growing(part) as out:
        out.truncate(0)
        while (file.size is None or done <= file.size) and (chunk := source.read(CHUNK_BYTES)):
            meter.check()
            write(out, chunk)
            digest.update(chunk)
            done += len(chunk)
    if (file.size is not None and done != file.size) or (wanted and digest.hexdigest() != wanted):
        part.unlink()
        return False
    with writing(target.name):
        os.replace(part, target)
    return True


def matches(source: BinaryIO, file: RemoteFile, meter: Meter) -> bool:
    """Whether all of `source` is what `file` says."""
    digest, wanted = _digest(file)
    done = 0
    source.seek(0)
    while chunk := source.read(CHUNK_BYTES):
        meter.check()
        done += len(chunk)
        if wanted:
            digest.update(chunk)
    return (file.size is None or done == file.size) and (not wanted or digest.hexdigest() == wanted)


def discard(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _digest(file: RemoteFile) -> tuple[_Hash, str]:
    """A hash, and what it must come to; "" if nothing is known.  A git blob's is over its length
    and its content."""
    if file.sha256:
        return hashlib.sha256(), file.sha256
    if file.size is not None and file.blob_id:
        return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False), file.blob_id
    return hashlib.sha256(), ""

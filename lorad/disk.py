"""A disk that is full, or not to be written to, in words: which one, how much is free and needed.

Goes in: an OSError and the path that was being written.  Comes out: insufficient_storage, always
with the file system, its free bytes and the next step.  Knows nothing of what was written.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorad.errors import LoradError

#: EFBIG is a file size limit: no more room for this file, whatever the disk says.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def free_bytes(path: Path) -> int:
    """Free for us on the file system of `path`; OSError if it cannot be asked."""
    return shutil.disk_usage(path).free


@contextmanager
def writing(doing: str, path: Path, num_bytes: int = 0) -> Iterator[None]:
    """Say insufficient_storage where the system says that it is full, or not to be written to.

    `num_bytes` is what is to be written below `path`, 0 if that is not known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (*FULL, *CLOSED):
            raise
        raise refused(doing, path, error, num_bytes) from error


def refused(doing: str, path: Path, error: OSError, num_bytes: int = 0) -> LoradError:
    """`error` of writing below `path` as a caller is told it."""
    cause = os.strerror(error.errno or 0)
    if error.errno in CLOSED:
        return LoradError(
            "insufficient_storage",
            f"cannot {doing}: {cause}: {path}",
            hint=f"make {path} writable for lorad, then repeat; nothing was changed",
        )
    return full(f"cannot {doing}: {cause}", path, num_bytes)


def full(message: str, path: Path, num_bytes: int = 0, *, unchanged: bool = True) -> LoradError:
    """507: the same call works once there is room on the disk of `path`; nothing was changed,
    unless `unchanged` says otherwise."""
    needed = f", {num_bytes} bytes are needed" if num_bytes else ""
    return LoradError(
        "insufficient_storage",
        f"{message}; {_standing(path)}{needed}",
        hint=f"free space on {mount_of(path)}, then repeat"
        + ("; nothing was changed" if unchanged else ""),
    )


def mount_of(path: Path) -> Path:
    """Where the file system of `path` is mounted."""
    here = Path(os.path.realpath(path))
    while not os.path.ismount(here) and here != here.parent:
        here = here.parent
    return here


def _standing(path: Path) -> str:
    mount = mount_of(path)
    try:
        return f"the file system {mount} has {free_bytes(mount)} bytes free"
    except OSError:
        return f"on the file system {mount}"

"""The checksums of a packed file, block by block, in a small file beside it.

Goes in: a packed file that has just been written.  Comes out: `packed-<layout>.sums`: a CRC-32 for
each block, little-endian, and one over all of these.  A length says nothing of a bit that flipped
on the disk since; these do, and say in which block.  CRC-32 finds accidents, not intent: the store
is only the daemon's to write.  Torch-free.
"""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CHUNK_BYTES = 1 << 20


def path_of(packed: str | Path) -> Path:
    """Where the checksums of `packed` lie."""
    return Path(packed).with_suffix(".sums")


def sums_of(fd: int, block_bytes: int) -> list[int]:
    """The CRC-32 of each block of an open file."""
    return [_crc(fd, start, block_bytes) for start in range(0, os.fstat(fd).st_size, block_bytes)]


def write(path: Path, sums: Sequence[int]) -> None:
    """Put the file in place, whole and on disk.  Raises OSError, and leaves nothing then."""
    body = np.array(sums, "<u4").tobytes()
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(staged, "wb") as file:
            file.write(body + zlib.crc32(body).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        staged.rename(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def read(packed: str | Path, num_blocks: int) -> list[int]:
    """The checksums of `packed`.  Raises OSError, or ValueError if they are damaged themselves."""
    path = path_of(packed)
    raw = path.read_bytes()
    body, own = raw[:-4], raw[-4:]
    if len(body) != 4 * num_blocks or zlib.crc32(body).to_bytes(4, "little") != own:
        raise ValueError(f"{path.name}: its checksums are damaged")
    return [int(word) for word in np.frombuffer(body, "<u4")]


def _crc(fd: int, start: int, size: int) -> int:
    crc, at, end = 0, start, start + size
    while at < end and (piece := os.pread(fd, min(CHUNK_BYTES, end - at), at)):
        crc, at = zlib.crc32(piece, crc), at + len(piece)
    return crc

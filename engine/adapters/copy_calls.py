"""Copies to the device as calls of the CUDA driver: by addresses, past torch.

Goes in: where an adapter lies in host memory, where the arena begins, and which blocks go where.
Comes out: copies queued on a stream, and the driver's result.  Knows nothing of revisions, fences
and events.

A copy through torch is two views and a dispatch for what the driver needs three numbers for.  Next
to a model's steps all of that is cold in the processor's caches each time that a load comes: on an
H200 it took 236 us of the step loop for 80 MiB in ten pieces, 454 in forty; a call of the driver a
piece takes 87 and 144, one for all of them 81 and 90.  A call a piece is what every driver has, and
what is served; the other is its rival in `benchmarks/copy_calls.py`.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

#: The driver, which torch has loaded already.
LIBRARY = "libcuda.so.1"
#: The batched copy in order of preference, and whether it has a place for the index of what failed.
BATCHES = (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True))
#: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: host memory is read when the stream comes to it.
IN_STREAM_ORDER = 1

#: (index, first block, count): blocks of the source from `index` on go to blocks in a row.
Piece = tuple[int, int, int]


class CopyCalls(Protocol):
    """Queues the copies of one load.  Used from the step loop's thread only."""

    def queue(
        self, target: int, source: int, pieces: Sequence[Piece], block_bytes: int, stream: int
    ) -> int:
        """0, or what the driver says is wrong; then some of the pieces may be queued.

        `target` and `source` are addresses of block 0, `stream` a handle, not the legacy stream's.
        """
        ...


class EachPiece:
    """A call a piece."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy: Any = library.cuMemcpyHtoDAsync_v2
        self._copy.restype = ctypes.c_int
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def queue(
        self, target: int, source: int, pieces: Sequence[Piece], block_bytes: int, stream: int
    ) -> int:
        copy = self._copy
        for index, block, count in pieces:
            result: int = copy(
                target + block * block_bytes,
                source + index * block_bytes,
                count * block_bytes,
                stream,
            )
            if result:
                return result
        return 0


class _Location(ctypes.Structure):
    """CUmemLocation; zeros are no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class OneBatch:
    """One call for all pieces: drivers of CUDA 12.8 and later.  Not served, see above."""

    def __init__(self, library: ctypes.CDLL, flags: int = 0) -> None:
        name, tells_failed = next(known for known in BATCHES if hasattr(library, known[0]))
        self._copy: Any = getattr(library, name)
        self._copy.restype = ctypes.c_int
        void, size = ctypes.c_void_p, ctypes.c_size_t
        failed = [void] if tells_failed else []
        self._copy.argtypes = [void, void, void, size, void, void, size, *failed, void]
        self._attributes = _Attributes(source_order=IN_STREAM_ORDER, flags=flags)
        self._first, self._failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        #: How every piece is copied, up to the stream.
        self._how: tuple[int, ...] = (
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
        )
        if tells_failed:
            self._how = (*self._how, ctypes.addressof(self._failed))

    def queue(
        self, target: int, source: int, pieces: Sequence[Piece], block_bytes: int, stream: int
    ) -> int:
        if not pieces:  # which the driver would refuse
            return 0
        targets = array("Q", [target + block * block_bytes for _, block, _ in pieces])
        sources = array("Q", [source + index * block_bytes for index, _, _ in pieces])
        sizes = array("Q", [count * block_bytes for _, _, count in pieces])
        result: int = self._copy(
            targets.buffer_info()[0],
            sources.buffer_info()[0],
            sizes.buffer_info()[0],
            len(pieces),
            *self._how,
            stream,
        )
        return result


def each_piece(library: str = LIBRARY) -> EachPiece | None:
    """None where there is no such driver, or one without the call."""
    loaded = _load(library)
    if loaded is None or not hasattr(loaded, "cuMemcpyHtoDAsync_v2"):
        return None
    return EachPiece(loaded)


def one_batch(library: str = LIBRARY, flags: int = 0) -> OneBatch | None:
    """None where the driver is missing, or older."""
    loaded = _load(library)
    if loaded is None or not any(hasattr(loaded, name) for name, _ in BATCHES):
        return None
    return OneBatch(loaded, flags)


def _load(library: str) -> ctypes.CDLL | None:
    """With the interpreter's lock kept: a call takes microseconds, and who lets go of the lock for
    that may wait for thousands until another thread gives it back."""
    try:
        return ctypes.PyDLL(library)
    except OSError:
        return None

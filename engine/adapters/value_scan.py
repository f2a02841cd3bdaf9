"""A look at every value of a tensor, in the bytes, before anything computes with it.

Goes in: a descriptor and a tensor's place.  Comes out: whether all values are zero, or
AdapterInvalid for NaN, infinity, and what becomes infinity in the dtype that is served.  Reads in
chunks: a tensor of a gigabyte costs a megabyte here.  Torch-free.
"""

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from engine.adapters.manifest import TensorRef
from engine.adapters.reasons import refuse, shown

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Bits:
    """A float dtype as unsigned integers: without its sign, bits order as the values do."""

    word: DTypeLike
    magnitude: int  # mask of all but the sign
    infinity: int  # this and above: infinity, then NaN


_BITS = {
    "F32": _Bits("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "BF16": _Bits("<u2", 0x7FFF, 0x7F80),
    "F16": _Bits("<u2", 0x7FFF, 0x7C00),
}
#: (in the file, served) -> the smallest magnitude that rounds to infinity: halfway beyond the
#: largest finite value, where round-to-nearest-even goes up.
_OVERFLOWS = {
    ("F32", "float16"): 0x477F_F000,  # 65520.0
    ("BF16", "float16"): 0x4780,  # 65536.0, the first above 65520
    ("F32", "bfloat16"): 0x7F7F_8000,
}


class Scanner:
    """Scans tensors of one open file; keeps one buffer for all of them."""

    def __init__(self, fd: int, served_dtype: str) -> None:
        self._fd = fd
        self._served = served_dtype
        self._buffer = bytearray(CHUNK_BYTES)

    def is_zero(self, ref: TensorRef) -> bool:
        """Whether all values of a float tensor are zero.  Raises AdapterInvalid as said above."""
        bits = _BITS[ref.dtype]
        largest = 0
        for at in range(ref.begin, ref.end, CHUNK_BYTES):
            words = np.frombuffer(self._read(at, min(CHUNK_BYTES, ref.end - at)), bits.word)
            largest = max(largest, int((words & bits.magnitude).max()))
        if largest >= bits.infinity:
            raise refuse(
                "E_NONFINITE",
                f"{shown(ref.name)} holds NaN or infinity",
                "the training run diverged: use an earlier checkpoint",
            )
        if largest >= _OVERFLOWS.get((ref.dtype, self._served), bits.infinity):
            raise refuse(
                "E_OVERFLOW",
                f"{shown(ref.name)} holds values that are infinite in {self._served}",
                "serve the base in bfloat16 or float32: `[[models]] dtype`",
            )
        return largest == 0

    def _read(self, at: int, size: int) -> memoryview:
        return read_exactly(self._fd, at, memoryview(self._buffer)[:size])


def read_exactly(fd: int, at: int, into: memoryview) -> memoryview:
    """Fill `into` from the file's byte `at`, or refuse the file as truncated."""
    done = 0
    while done < len(into):
        try:
            count = os.preadv(fd, [into[done:]], at + done)
        except OSError as error:
            raise refuse(
                "E_UNREADABLE", f"the weights cannot be read: {error.strerror}", "check the disk"
            ) from None
        if count == 0:
            raise refuse(
                "E_TRUNCATED",
                f"the weights ended at byte {at + done} while it was read",
                "the file changed meanwhile: copy it again",
            )
        done += count
    return into

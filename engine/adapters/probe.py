"""The probe: inputs, and what an adapter must make of them, in a file.

Goes in: rows of x for each fused group, and for each (layer, group) the rows that y starts from and
ends with, computed elsewhere from the adapter's own files.  Comes out: a file that the engine reads
without knowing how any of it was come by.  Numbers are float32, little-endian, where the header
says; the header is msgpack behind its own length.  Torch-free.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Rows of x: of few, all might be nearly orthogonal to a row of A, and the rest is rounding.
ROWS = 8
#: Largest difference from the expected y that arithmetic in a dtype makes, over the largest |y| of
#: the module: A, B, h and y are rounded once each, to 8, 11 and 24 bits, and their errors add up.
TOLERANCE = {"float32": 1e-4, "float16": 2.5e-3, "bfloat16": 2e-2}
#: Outputs below this are lost in the dtype, or nearly.
FLOOR = {"float32": 1e-30, "float16": 1e-5, "bfloat16": 1e-30}


class ProbeModule(Struct, frozen=True):
    """One module of a group: `at` is where its expected rows begin, in floats."""

    module: str
    width: int
    at: int


class ProbeItem(Struct, frozen=True):
    """One (layer, group).  `modules` are those of the group, in its order, that the adapter has."""

    layer: int
    group: str
    x: int  # where (ROWS, d_in) begins, in floats
    d_in: int
    modules: tuple[ProbeModule, ...]
    y: int  # where the (ROWS, sum of widths) that the group's output starts from begins


class ProbeHeader(Struct, frozen=True, kw_only=True):
    """What the rest of the file is."""

    rev: str
    dtype: str  # x and the y to start from are exact in it
    num_floats: int
    items: tuple[ProbeItem, ...]


class ProbeFile:
    """A probe that is open for reading.  ValueError or OSError if it is not one, or cut short."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "rb") as file:
            raw = file.read(int.from_bytes(file.read(8), "little"))
            start = _aligned(file.tell())
        self.header = msgspec.msgpack.decode(raw, type=ProbeHeader)
        self._floats: Floats = np.memmap(
            path, "<f4", "r", offset=start, shape=(self.header.num_floats,)
        )

    def rows(self, at: int, width: int) -> Floats:
        """(ROWS, width)."""
        return self._floats[at : at + ROWS * width].reshape(ROWS, width)


class ProbeWriter:
    """Collects arrays; `write` puts header and arrays into a file."""

    def __init__(self) -> None:
        self._arrays: list[Floats] = []
        self.num_floats = 0

    def add(self, rows: Floats) -> int:
        """Take (ROWS, width); where they begin."""
        at, self.num_floats = self.num_floats, self.num_floats + rows.size
        self._arrays.append(np.ascontiguousarray(rows, "<f4"))
        return at

    def write(self, file: IO[Any], rev: str, dtype: str, items: tuple[ProbeItem, ...]) -> None:
        header = ProbeHeader(rev=rev, dtype=dtype, num_floats=self.num_floats, items=items)
        raw = msgspec.msgpack.encode(header)
        file.write((len(raw).to_bytes(8, "little") + raw).ljust(_aligned(8 + len(raw)), b"\0"))
        for array in self._arrays:
            file.write(array.tobytes())


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def checked(items: tuple[ProbeItem, ...]) -> Iterator[tuple[int, str]]:
    """(layer, module) of everything that is probed."""
    for item in items:
        for module in item.modules:
            yield item.layer, module.module

"""Tensors of an adapter's file as the rows that the packed stream holds.

Goes in: the open weights file, a module's tensors and its place.  Comes out: its A rows and its
B-wide rows, (rows, width), in the arena's dtype, bfloat16 as its bits.  One module is in memory at
a time.  Torch-free; knows nothing of where rows lie.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from engine.adapters.fused_base import base_rows, whole_rows
from engine.adapters.gain import Floats, gain
from engine.adapters.manifest import FLOAT_DTYPES, AdapterManifest, PairTensors, TensorRef
from engine.adapters.reasons import refuse, shown
from engine.adapters.value_scan import read_exactly
from engine.layout import BlockLayout, PlacedModule
from engine.models.base_files import BaseFiles
from engine.models.bases import BaseSpec

Words = NDArray[Any]
#: rows(first, last) of a weight.
RowsOf = Callable[[int, int], Floats]

_FILE_WORDS = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}
_WORDS = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}


class BaseRows:
    """Rows of the base's modules, by our names."""

    def __init__(self, files: BaseFiles, spec: BaseSpec) -> None:
        self._files = files
        self._spec = spec
        self.id = files.id()

    def of(self, layer: int, module: str) -> RowsOf:
        """rows(first, last) of the module's weight, (last - first, d_in)."""
        name, start = base_rows(layer, module, self._spec)
        if name not in self._files.tensors:
            name, start = whole_rows(layer, module, self._spec)
        return lambda first, last: self._files.rows(name, start + first, start + last)

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self._spec.vocab_size


class AdapterRows:
    """Rows of one adapter; `base` is needed where a module has a gain."""

    def __init__(
        self, fd: int, layout: BlockLayout, base: BaseRows | None, manifest: AdapterManifest
    ) -> None:
        self._fd = fd
        self.layout = layout
        self._base = base
        modules = zip(manifest.modules, manifest.tensors, strict=True)
        self._replaced = {m.module: (m, tensors) for m, tensors in modules if m.replaces}

    def a(self, placed: PlacedModule, tensors: PairTensors) -> Words:
        """(rank, d_in); on the embedding with zeros for tokens that the adapter does not know."""
        d_in, _ = self._dims(placed)
        if tensors.rows:
            return self._picked(tensors, tensors.rows, self.layout.dtype)
        if len(tensors.a.shape) == 1:  # of a head: as many rows as hold it
            vector = self._served(tensors.a, tensors.a.shape)
            return np.pad(vector, (0, placed.rank * d_in - len(vector))).reshape(placed.rank, d_in)
        known = tensors.a.shape[1] if placed.module == "embed_tokens" else d_in
        return _widened(self._served(tensors.a, (placed.rank, known)), d_in, tensors.a)

    def b(self, placed: PlacedModule, tensors: PairTensors) -> Words:
        """(rank and what lies behind it, d_out); on the head with zeros, as `a` has them."""
        _, d_out = self._dims(placed)
        if tensors.b is None:
            return np.empty((0, d_out), np.float32)
        known = tensors.b.shape[0] if placed.module == "lm_head" else d_out
        rows = [self._served(tensors.b, (known, placed.rank)).T]
        if tensors.bias is not None:
            rows.append(self._served(tensors.bias, (known,))[None])
        if tensors.magnitude is not None:
            rows.append(self._gain(placed, tensors, tensors.magnitude, known))
        return _widened(np.concatenate(rows) if len(rows) > 1 else rows[0], d_out, tensors.b)

    def _gain(
        self, placed: PlacedModule, tensors: PairTensors, magnitude: TensorRef, d_out: int
    ) -> Words:
        """Two rows of which the second is what the first lost in rounding, (2, d_out)."""
        assert tensors.b is not None
        d_in, _ = self._dims(placed)
        dtype = self.layout.dtype
        exact = gain(
            self._float32(magnitude, (d_out,)),
            self._adapted(placed),
            self._float32(tensors.a, (placed.rank, d_in)),
            self._float32(tensors.b, (d_out, placed.rank)),
            placed.scaling,
        )
        with np.errstate(over="ignore"):
            high = convert(exact.astype(np.float32), "float32", dtype)
        kept = convert(high, dtype, "float32")
        if not np.isfinite(kept).all():
            row = int(np.flatnonzero(~np.isfinite(kept))[0])
            raise refuse(
                "E_DORA",
                f"{shown(magnitude.name)} over the norm of the adapted weight is"
                f" {exact[row]:.3g} in row {row}, which {dtype} does not hold",
                "it was probably trained on another base: serve it on that one",
            )
        low = convert((exact - kept).astype(np.float32), "float32", dtype)
        return np.stack((high, low))

    def _adapted(self, placed: PlacedModule) -> RowsOf:
        """The weight that a gain is of: the base's, but for rows that the adapter replaces."""
        assert self._base is not None, "a gain needs the base's weights"
        theirs, known = self._base.of(placed.layer, placed.module), self._base.vocab_size
        module, tensors = self._replaced.get(f"{placed.module}.rows", (None, None))
        if module is None or tensors is None:
            return theirs
        places = tensors.rows or range(module.rank)
        ids = np.array(module.tokens or range(module.rank))

        def rows(first: int, last: int) -> Floats:
            found = np.zeros((last - first, tensors.a.shape[1]), np.float32)
            if first < known:
                found[: known - first] = theirs(first, min(last, known))
            begin, end = np.searchsorted(ids, (first, last))
            found[ids[begin:end] - first] = self._picked(tensors, places[begin:end], "float32")
            return found

        return rows

    def _picked(self, tensors: PairTensors, rows: Sequence[int], dtype: str) -> Words:
        """Some rows of A, and of what is counted behind it, (len(rows), d_in)."""
        count, width = tensors.a.shape
        found = np.empty((len(rows), width), _WORDS[dtype])
        starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for at, end in pairwise(starts):
            ref, first = tensors.a, rows[at]
            if first >= count:
                assert tensors.more is not None
                ref, first = tensors.more, first - count
            stretch = _stretch(ref, first, end - at)
            words = self._words(stretch, stretch.shape)
            found[at:end] = convert(words, FLOAT_DTYPES[ref.dtype], dtype)
        return found

    def _served(self, ref: TensorRef, shape: tuple[int, ...]) -> Words:
        return convert(self._words(ref, shape), FLOAT_DTYPES[ref.dtype], self.layout.dtype)

    def _float32(self, ref: TensorRef, shape: tuple[int, ...]) -> Floats:
        return convert(self._words(ref, shape), FLOAT_DTYPES[ref.dtype], "float32")

    def _words(self, ref: TensorRef, shape: tuple[int, ...]) -> Words:
        """One tensor as it is in the file; bfloat16 as its bits."""
        if ref.shape != shape:
            raise refuse(
                "E_SHAPE",
                f"{shown(ref.name)} is {list(ref.shape)}, the layout wants {list(shape)}",
                "pack with the base model that the adapter was inspected for",
            )
        data = read_exactly(self._fd, ref.begin, memoryview(bytearray(ref.end - ref.begin)))
        words: Words = np.frombuffer(data, _FILE_WORDS[ref.dtype])
        if ref.transposed:
            return words.reshape(shape[1], -1).T[ref.first : ref.first + shape[0]]
        return words.reshape(shape)

    def _dims(self, placed: PlacedModule) -> tuple[int, int]:
        return self.layout.shapes.of(placed.module)


def _stretch(ref: TensorRef, first: int, rows: int) -> TensorRef:
    """So many rows of a tensor, as a tensor."""
    row_bytes = (ref.end - ref.begin) // ref.shape[0]
    begin = ref.begin + first * row_bytes
    end = begin + rows * row_bytes
    return structs.replace(ref, shape=(rows, *ref.shape[1:]), begin=begin, end=end)


def _widened(rows: Words, width: int, ref: TensorRef) -> Words:
    """(rows, width), with zeros behind what there is."""
    lacking = width - rows.shape[1]
    if lacking < 0:
        raise refuse(
            "E_SHAPE",
            f"{shown(ref.name)} is {list(ref.shape)}, the layout has {width} tokens",
            "pack with the base model that the adapter was inspected for",
        )
    return np.pad(rows, ((0, 0), (0, lacking))) if lacking else rows


def convert(words: Words, source: str, target: str) -> Words:
    """Round once, to nearest, ties to even.  bfloat16 is carried as uint16.  Values are finite:
    inspection refused the others."""
    if source == target:
        return words
    if source == "bfloat16":
        single = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        single = words.astype(np.float32)
    if target == "bfloat16":
        bits = single.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return single if target == "float32" else single.astype(np.float16)

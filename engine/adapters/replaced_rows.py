"""Rows of the embedding and the head that an adapter replaces: those in which what its file holds
of the two differs from the base, and those that the base lacks.

Goes in: the tensors of both ends, the pairs, the open file and the base's folder.  Comes out:
modules of their own.  Torch-free; reads some MiB at a time, in calls that leave the interpreter to
others.

A resized vocabulary brings 128k rows of which two are new: so only rows that differ are packed,
each with its id, ids ascending.  From half of them on an end is packed whole: that is at most twice
the bytes, and its ids need no search.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.adapters.end_tensors import End, Ends, twice
from engine.adapters.manifest import PairTensors, TensorRef
from engine.adapters.peft_keys import Pair
from engine.adapters.reasons import shown
from engine.adapters.value_scan import read_exactly
from engine.messages import PackedModule
from engine.models.base_files import ITEMSIZE, BaseFiles, as_float32
from engine.models.bases import BaseSpec, namer

#: Elements that are compared at a time.
CHUNK = 1 << 20

Floats = NDArray[np.float32]
#: rows(first, last) of a matrix.
Rows = Callable[[int, int], Floats]


@dataclass(slots=True)
class Replaced:
    """In stream order, behind every pair.  `equal`: ends of which the adapter has weights of its
    own that are the base's."""

    modules: list[tuple[PackedModule, PairTensors]] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def replaced_rows(
    ends: Ends, pairs: tuple[Pair, ...], spec: BaseSpec, fd: int, base: Path | None
) -> Replaced:
    """All rows, where no base is given.  Raises AdapterInvalid for an end that has trained rows and
    a pair, and for tensors that stand for the same and are not equal; ConfigError if the base
    cannot be read."""
    found = Replaced()
    with ExitStack() as stack:
        files = None
        if base is not None and any(end.whole for end in ends.values()):
            files = stack.enter_context(BaseFiles(base, namer(spec)))
        # Both ends of a tied base may have the same rows, in a file of gigabytes.
        compared: dict[tuple[TensorRef, str], NDArray[np.int64]] = {}
        for name in sorted(ends):
            end = ends[name]
            _refuse_two(name, end, pairs, fd)
            differing = None
            if end.whole:
                ref, weight = end.whole[0], _base_weight(name, spec, files)
                if (ref, weight) not in compared:
                    theirs = _of_base(files, weight, spec)
                    compared[ref, weight] = _differing(fd, ref, theirs, spec.vocab_size)
                    if theirs is not None and not end.own:
                        found.warnings += _doubt(ref, compared[ref, weight], spec)
                differing = compared[ref, weight]
            if tensors := _chosen(end, differing, spec):
                found.modules.append(_made(name, *tensors, spec))
            elif end.own:
                found.equal.append(name)
    return found


def _chosen(
    end: End, differing: NDArray[np.int64] | None, spec: BaseSpec
) -> tuple[tuple[int, ...], PairTensors] | None:
    """Token ids, () = all, and where their rows are; None for no rows."""
    trained = dict(zip(end.ids, range(len(end.ids)), strict=True)) if end.trained else {}
    if differing is None:
        if end.trained is None:
            return None
        ids = sorted(trained)
        return tuple(ids), PairTensors(end.trained, None, rows=tuple(trained[i] for i in ids))
    ref = end.whole[0]
    count = ref.shape[0]
    if not trained and count >= spec.vocab_size and 2 * len(differing) > count:
        return (), PairTensors(ref, None)
    at = {token: token for token in differing.tolist()}
    at |= {token: count + row for token, row in trained.items()}
    ids = sorted(at)
    rows = tuple(at[token] for token in ids)
    return (tuple(ids), PairTensors(ref, None, rows=rows, more=end.trained)) if ids else None


def _made(
    name: str, ids: tuple[int, ...], tensors: PairTensors, spec: BaseSpec
) -> tuple[PackedModule, PairTensors]:
    rank = len(ids) or tensors.a.shape[0]
    return PackedModule(spec.num_layers, f"{name}.rows", rank, 1.0, tokens=ids), tensors


def _doubt(ref: TensorRef, differing: NDArray[np.int64], spec: BaseSpec) -> list[str]:
    """Of a copy of the base that was not listed to be trained."""
    known = min(ref.shape[0], spec.vocab_size)
    others = int((differing < known).sum())
    if 2 * others <= known:
        return []
    said = f"{shown(ref.name)} differs from the base in {others} of {known} rows"
    return [f"{said}: served as it is; if they were not trained, it is of another base"]


def _refuse_two(name: str, end: End, pairs: tuple[Pair, ...], fd: int) -> None:
    """PEFT has either factors or rows of an end's own; factors stand on what it was trained on."""
    trained = end.own[0] if end.own else end.trained
    for pair in pairs:
        if pair.module == name and trained is not None:
            raise twice(pair.tensors.a, trained, name)
    for other in end.whole[1:]:
        count, width = other.shape
        one, another = _of_file(fd, end.whole[0]), _of_file(fd, other)
        for first, last in _steps(count, width):
            if not np.array_equal(one(first, last), another(first, last)):
                raise twice(end.whole[0], other, name)


def _differing(fd: int, ref: TensorRef, base: Rows | None, known: int) -> NDArray[np.int64]:
    """Rows of `ref` that are not the base's to the last bit of their value, and those that it does
    not have (it has `known`), ascending."""
    count, width = ref.shape
    if base is None:
        return np.arange(count)
    own, known = _of_file(fd, ref), min(count, known)
    found = [np.arange(known, count)]
    for first, last in _steps(known, width):
        other = (own(first, last) != base(first, last)).any(axis=1)
        found.append(np.flatnonzero(other) + first)
    return np.sort(np.concatenate(found))


def _steps(count: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // width)
    return ((first, min(first + step, count)) for first in range(0, count, step))


def _of_file(fd: int, ref: TensorRef) -> Rows:
    row_bytes = ref.shape[1] * ITEMSIZE[ref.dtype]

    def rows(first: int, last: int) -> Floats:
        data = bytearray((last - first) * row_bytes)
        read_exactly(fd, ref.begin + first * row_bytes, memoryview(data))
        return as_float32(data, ref.dtype).reshape(last - first, ref.shape[1])

    return rows


def _base_weight(name: str, spec: BaseSpec, files: BaseFiles | None) -> str:
    tied = spec.tied or (files is not None and "lm_head.weight" not in files.tensors)
    return "embed_tokens.weight" if tied else f"{name}.weight"


def _of_base(files: BaseFiles | None, weight: str, spec: BaseSpec) -> Rows | None:
    """None where there is nothing to compare with."""
    tensor = files.tensors.get(weight) if files is not None else None
    wanted = (spec.vocab_size, spec.hidden_size)
    if files is None or tensor is None or tensor.shape != wanted or tensor.dtype not in ITEMSIZE:
        return None
    return lambda first, last: files.rows(weight, first, last)

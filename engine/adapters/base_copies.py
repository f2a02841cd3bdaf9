"""Copies of the base's own weights in an adapter's file, which PEFT saves in several cases.

Goes in: the file's tensors, and the base's folder.  Comes out: the tensors without those that equal
the base's to the last bit of their value: they say nothing.  A copy that differs stays, for whoever
reads the names to refuse.  Torch-free; reads some MiB at a time.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.adapters.manifest import FLOAT_DTYPES, TensorRef
from engine.adapters.value_scan import CHUNK_BYTES, read_exactly
from engine.models.base_files import ITEMSIZE, BaseFiles, BaseTensor, as_float32
from engine.models.hf_config import text_name

#: What PEFT puts between a module's name and its tensor's, besides an adapter's name.
_BETWEEN = frozenset(("base_layer", "original_module", "modules_to_save", "token_adapter"))


def without_copies(
    refs: tuple[TensorRef, ...],
    fd: int,
    base: Path | None,
    rename: Callable[[str], str] = text_name,
) -> tuple[TensorRef, ...]:
    """`refs` without equal copies; all of them where no base is given.  Raises ConfigError if the
    base cannot be read, AdapterInvalid if the adapter's file was cut meanwhile."""
    suspects = [ref for ref in refs if _may_be_a_copy(ref)]
    if base is None or not suspects:
        return refs
    with BaseFiles(base, rename) as files:
        equal = {ref.name for ref in suspects if _is_copy(ref, fd, files, rename)}
    return tuple(ref for ref in refs if ref.name not in equal)


def modules_without(refs: tuple[TensorRef, ...], kept: tuple[TensorRef, ...]) -> frozenset[str]:
    """Modules whose own weights are in `refs` and no more in `kept`, by their names in the file.
    A LoRA layer's `base_layer` is none: PEFT saves it whatever modules_to_save lists."""
    gone = {ref.name for ref in refs} - {ref.name for ref in kept}
    return frozenset(name.rpartition(".")[0].removesuffix(".modules_to_save") for name in gone)


def _may_be_a_copy(ref: TensorRef) -> bool:
    return ref.name.endswith((".weight", ".bias")) and "lora_" not in ref.name


def _is_copy(ref: TensorRef, fd: int, files: BaseFiles, rename: Callable[[str], str]) -> bool:
    name = rename(_base_name(ref.name))
    theirs = files.tensors.get(name)
    if theirs is None and name == "lm_head.weight":  # a tied base has no other
        theirs = files.tensors.get("embed_tokens.weight")
    return (
        theirs is not None
        and theirs.shape == ref.shape
        and {theirs.dtype, ref.dtype} <= ITEMSIZE.keys()
        and _equal(ref, fd, theirs, files)
    )


def _base_name(name: str) -> str:
    segments = name.split(".")
    while segments[:2] == ["base_model", "model"]:
        del segments[:2]
    return ".".join(s for s in segments if s not in _BETWEEN)


def _equal(ref: TensorRef, fd: int, theirs: BaseTensor, files: BaseFiles) -> bool:
    assert ref.dtype in FLOAT_DTYPES
    size, step = (ref.end - ref.begin) // ITEMSIZE[ref.dtype], CHUNK_BYTES
    for first in range(0, size, step):
        last = min(first + step, size)
        place = ref.begin + first * ITEMSIZE[ref.dtype]
        data = bytearray((last - first) * ITEMSIZE[ref.dtype])
        read_exactly(fd, place, memoryview(data))
        if not np.array_equal(as_float32(data, ref.dtype), files.values(theirs, first, last)):
            return False
    return True

"""The base's weights as they lie in its files, for those who need a few of them without a model.

Goes in: a Hugging Face folder.  Comes out: tensors by their published name, rows of them as
float32, and an id of all of them together.  Torch-free; nothing is held but the headers.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import index as index_of
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import FETCH_AGAIN, OTHER_FILES, ConfigError, ModelUnsupported
from engine.models.hf_config import MALFORMED, MAX_HEADER_BYTES, short, text_name, weight_files

#: The dtypes that are read, and bytes an element.
ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2}
#: Of every tensor this much, from its middle, goes into the id: a page is what a disk reads.
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """Where one tensor lies; bytes from the start of its file."""

    file: int  # index into the folder's weight files
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether its bytes are as many as its shape wants, where the dtype is one that is read."""
        size = ITEMSIZE.get(self.dtype)
        return size is None or math.prod(self.shape) * size == self.end - self.begin


class BaseFiles:
    """A base's weight files, open; use as a context manager.  `rename` leads from published names
    to the engine's.  Raises ConfigError for files that are missing or broken."""

    def __init__(self, folder: Path, rename: Callable[[str], str] = text_name) -> None:
        self._rename = rename
        self._paths = weight_files(folder)
        self._fds: list[int] = []
        try:
            for path in self._paths:
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            self.tensors = self._read_headers()
        except OSError as error:
            self._close()
            raise ConfigError(f"{folder} cannot be read: {error}", hint=FETCH_AGAIN) from None
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "BaseFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of the matrix `name`, (rows, width).  ModelUnsupported if there is
        no such matrix of a float dtype."""
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in ITEMSIZE:
            raise ModelUnsupported(
                f"the base has no matrix {name} of a float dtype", hint=OTHER_FILES
            )
        width = tensor.shape[1]
        return self.values(tensor, first * width, last * width).reshape(last - first, width)

    def values(self, tensor: BaseTensor, first: int, last: int) -> NDArray[np.float32]:
        """Elements [first, last) of a tensor of one of the dtypes of ITEMSIZE, (last - first,)."""
        size = ITEMSIZE[tensor.dtype]
        start, end = tensor.begin + first * size, tensor.begin + last * size
        assert end <= tensor.end, f"there is no element {last - 1}"
        return as_float32(self._read(tensor.file, start, end - start), tensor.dtype)

    def id(self) -> str:
        """Twelve hex digits of the weights: of every tensor its name, dtype and shape, and a
        sample of its bytes.  However they are cut into files, and wherever these lie."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            size = min(_SAMPLE_BYTES, tensor.end - tensor.begin)
            middle = tensor.begin + (tensor.end - tensor.begin - size) // 2
            digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
            digest.update(self._read(tensor.file, middle, size))
        return digest.hexdigest()[:12]

    def _read(self, file: int, at: int, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = os.preadv(self._fds[file], [view], at)
            if count == 0:
                raise self._cut(file, at)
            view, at = view[count:], at + count
        return data

    def _cut(self, file: int, at: int) -> ConfigError:
        return ConfigError(f"{self._paths[file]} ends at byte {at}", hint=FETCH_AGAIN)

    def _read_headers(self) -> dict[str, BaseTensor]:
        found: dict[str, BaseTensor] = {}
        for index, path in enumerate(self._paths):
            try:
                found |= dict(self._entries(index))
            except MALFORMED as error:
                raise ConfigError(
                    f"{path} has no readable safetensors header: {error}", hint=FETCH_AGAIN
                ) from None
        return found

    def _entries(self, index: int) -> Iterator[tuple[str, BaseTensor]]:
        room = os.fstat(self._fds[index]).st_size
        size = int.from_bytes(self._read(index, 0, 8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"it says it has {size} bytes")
        header: dict[str, Any] = json.loads(self._read(index, 8, size))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + size + index_of(offset) for offset in entry["data_offsets"])
                shape = tuple(index_of(length) for length in entry["shape"])
                tensor = BaseTensor(index, str(entry["dtype"]), shape, begin, end)
                if not 8 + size <= begin <= end or not tensor.is_whole:
                    raise ValueError(f"{short(name)} does not lie in the file as it says")
                if end > room:
                    raise self._cut(index, room)
                yield self._rename(name), tensor

    def _close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def base_id(folder: Path, rename: Callable[[str], str] = text_name) -> str:
    """`BaseFiles.id` of a folder."""
    with BaseFiles(folder, rename) as files:
        return files.id()


def as_float32(data: bytearray, dtype: str) -> NDArray[np.float32]:
    """Bytes of F32, BF16 or F16 as numbers; each has its place in float32."""
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32, copy=False)

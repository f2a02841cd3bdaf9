"""What the driver says of the GPU, through its own library: no process is started for it.

Goes in: a GPU's UUID.  Comes out: bytes used and in all, and how busy it was.  Without the library,
the card or the right to ask there is nothing, and no error.  The library's functions and their
structures are those of NVML's C interface, which does not change.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sample in which a kernel ran, or memory was moved."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class GpuUse:
    """`busy` from 0 to 1; None where the card does not say (a slice of one does not)."""

    used_bytes: int
    total_bytes: int
    busy: float | None


def has_card(library: str = LIBRARY) -> bool:
    """Whether the driver shows this process a card; `CUDA_VISIBLE_DEVICES` may hide all of them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and shown.strip() in ("", "-1"):
        return False
    return Nvml(library).count() > 0


class Nvml:
    """Opened at the first question.  Not for several threads at once."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library
        self._library: Any = None
        self._tried = False
        self._handles: dict[str, ctypes.c_void_p] = {}

    def count(self) -> int:
        """Cards of this machine; 0 too where nothing can be known."""
        found = ctypes.c_uint(0)
        if self._open() and self._library.nvmlDeviceGetCount_v2(ctypes.byref(found)) == _SUCCESS:
            return found.value
        return 0

    def look(self, uuid: str) -> GpuUse | None:
        """None if nothing can be known."""
        handle = self._handle(uuid)
        memory = _Memory()
        if handle is None or self._call("nvmlDeviceGetMemoryInfo", handle, memory) != _SUCCESS:
            return None
        busy = _Utilization()
        told = self._call("nvmlDeviceGetUtilizationRates", handle, busy) == _SUCCESS
        return GpuUse(memory.used, memory.total, busy.gpu / 100 if told else None)

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        if not uuid or not self._open():
            return None
        if uuid not in self._handles:
            handle = ctypes.c_void_p()
            find = self._library.nvmlDeviceGetHandleByUUID
            if find(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
                return None
            self._handles[uuid] = handle
        return self._handles[uuid]

    def _open(self) -> bool:
        if not self._tried:
            self._tried = True
            try:
                library = ctypes.CDLL(self._name)
            except OSError:
                return False
            if library.nvmlInit_v2() == _SUCCESS:
                self._library = library
        return self._library is not None

    def _call(self, name: str, handle: ctypes.c_void_p, into: ctypes.Structure) -> int:
        return int(getattr(self._library, name)(handle, ctypes.byref(into)))

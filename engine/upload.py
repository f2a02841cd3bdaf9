"""Pinned memory between host and device: arrays on their way up, results on their way down.

Goes in: numpy arrays, or one device tensor.  Comes out: tensors at fixed device addresses, or, when
their event has passed, a numpy array.  Nothing is allocated after construction unless somebody
asks for more than was planned, and nothing waits for the device but `Arrival.wait`.  On the CPU the
host's buffer is the device's, and nothing is copied.  Knows nothing of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Buffers of one kind in flight; each is used again only after its own copy.
RING = 3

Words = npt.NDArray[np.int64]


class UploadRing:
    """Host buffers of `words` int64, copied to the front of one device buffer of that size."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        count = RING if self._cuda else 1  # a CPU step has read its buffer when it is filled again
        self._hosts = [
            torch.zeros(words, dtype=torch.int64, pin_memory=self._cuda) for _ in range(count)
        ]
        self._events = [_event() for _ in self._hosts] if self._cuda else []
        self._turn = 0
        #: (words,) int64; its address never changes.
        self.device_words = self._hosts[0]
        if self._cuda:
            self.device_words = torch.zeros(words, dtype=torch.int64, device=device)

    def next(self) -> Words:
        """The buffer to fill; waits only if the device is RING uploads behind."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._cuda:
            self._events[self._turn].synchronize()
        array: Words = self._hosts[self._turn].numpy()
        return array

    def send(self, end: int, first: int = 0) -> None:
        """Start the copy of the words [first, end) of the buffer that was filled."""
        if not self._cuda:
            return
        part = slice(first, end)
        self.device_words[part].copy_(self._hosts[self._turn][part], non_blocking=True)
        self._events[self._turn].record(torch.cuda.current_stream(self.device_words.device))


class Parcel:
    """Several arrays in one upload; what `send` returns is valid until the next one."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._device = device
        self._words = words
        self._ring = UploadRing(words, device) if device.type == "cuda" else None

    def send(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[Tensor]:
        """The arrays (of four- or eight-byte items) as tensors on the device, in order."""
        sizes = [-(-a.nbytes // 8) for a in arrays]
        if self._ring is None or sum(sizes) > self._words:  # too large: by the slow way
            return [torch.from_numpy(a).to(self._device) for a in arrays]
        host, tensors, start = self._ring.next(), [], 0
        for array, size in zip(arrays, sizes, strict=True):
            part = host[start : start + size].view(array.dtype)[: array.size]
            part[:] = array
            there = self._ring.device_words[start : start + size]
            tensors.append(there.view(torch.from_numpy(array[:0]).dtype)[: array.size])
            start += size
        self._ring.send(start)
        return tensors


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result on its way down."""

    host: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> npt.NDArray[np.float64]:
        """The values, once they are there; valid until RING - 1 later ones have been fetched."""
        if self.event is not None:
            self.event.synchronize()
        array: npt.NDArray[np.float64] = self.host.cpu().numpy()
        return array


class DownloadRing:
    """Brings fp64 tensors of at most `size` items to the host, one copy each."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        count = RING if self._cuda else 0
        self._hosts = [
            torch.empty(size, dtype=torch.float64, pin_memory=True) for _ in range(count)
        ]
        self._events = [_event() for _ in range(count)]
        self._size = size
        self._turn = 0

    def fetch(self, values: Tensor) -> Arrival:
        """Start the copy of `values` (n,) fp64."""
        if not self._cuda or len(values) > self._size:
            return Arrival(values, None)  # too large: copied when it is waited for
        self._turn = (self._turn + 1) % len(self._hosts)
        host, event = self._hosts[self._turn][: len(values)], self._events[self._turn]
        host.copy_(values, non_blocking=True)
        event.record(torch.cuda.current_stream(values.device))
        return Arrival(host, event)


def to_device(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy there of what is uploaded once and kept, which nobody waits for."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]

"""Recording forward passes as CUDA graphs, and which of them are worth the pause that it takes.

Goes in: what computes a step from buffers that never move.  Comes out: a Replayable.  All graphs of
a Recorder share one memory pool: they run one after the other.  Knows no steps and no models.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Protocol

import torch

from engine.kernels.lora_meta import LoraClass
from engine.ladder import LATE_GRAPHS

#: How often a class has to come before it is worth the pause of a capture.
WORTH_IT = 3


class Replayable(Protocol):
    """A forward pass that reads its numbers from where they lay when it was recorded."""

    def replay(self) -> None: ...


class Recorder:
    """Records on a stream of its own.  Of no use but on a card."""

    def __init__(self, device: torch.device) -> None:
        self._has_run: set[object] = set()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None], parts: AbstractSet[object]) -> Replayable:
        """A graph of what `compute` launches.

        `parts` are what its kernels hang on, as `parts_of` tells them: with any that is new, a
        first run is due outside of the capture, where kernels are compiled and loaded.
        """
        current = torch.cuda.current_stream(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if not parts <= self._has_run:
                compute()
                self._stream.synchronize()
            self._has_run |= parts
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            compute()
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph


class Regulars:
    """Whose steps come back so often that they are worth a graph, as long as there is room."""

    def __init__(self, most: int = LATE_GRAPHS) -> None:
        self._left = most
        self._seen: dict[object, int] = {}

    def came(self, key: object) -> bool:
        """A step without a graph; True: capture one now."""
        if not self._left:
            return False
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] < WORTH_IT:
            return False
        self._left -= 1
        return True

    def start_over(self) -> None:
        """Forget every step so far, which were a rehearsal."""
        self._seen.clear()


def parts_of(rung: object, kind: LoraClass | None) -> set[object]:
    """What is loaded hangs on the sizes and on the tiles, and not on how many items there are."""
    parts: set[object] = {rung}
    while kind is not None:
        parts.add(kind.tiles)
        kind = kind.short
    return parts

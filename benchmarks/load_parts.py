"""Where the host time of a load goes: methods of the engine, timed from outside.

Goes in: a core.  Comes out: for each method that a load passes through, the microseconds of one
load that are its own, without those of the others that it calls.  A timed call takes a microsecond
more.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.core import EngineCore

Self = dict[str, float]
#: What steps call too, for their own sake: counted only within the others.
SHARED = {"allocate", "take_fences", "refresh", "evict_idle"}


class Parts:
    """Timed while `timing`, and noted from `begin_load` to `end_load`."""

    def __init__(self, core: EngineCore) -> None:
        residency = core.residency
        moves, loader, room = residency._moves, residency._loader, residency._room
        self._methods: list[tuple[Any, str]] = [
            (residency, "evict_idle"),
            *((moves, name) for name in ("_raise", "end_copy", "leave_gpu", "refresh")),
            *((loader, name) for name in ("hopeless", "copy", "end_copy", "leave_gpu")),
            *((room, name) for name in ("take_adapter", "_take_adapter", "give_back", "note_load")),
            *(
                (residency._copier, name)
                for name in ("start", "poll", "_queue", "_copy", "_called")
            ),
            *((core.pool, name) for name in ("allocate", "take_fences")),
            *((residency.slots, name) for name in ("claim", "free")),
            *((residency.host, name) for name in ("poll", "hold", "let_go", "touch", "ready")),
        ]
        self._own: Self = {}
        self._inner: list[float] = []
        self._loads: list[Self] = []

    def begin_load(self) -> None:
        self._own = {}

    def end_load(self) -> None:
        self._loads.append(self._own)

    @contextmanager
    def timing(self) -> Iterator[None]:
        timed = [(owner, name) for owner, name in self._methods if hasattr(owner, name)]
        for owner, name in timed:
            key = f"{type(owner).__name__}.{name}"
            setattr(owner, name, self._timed(key, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in timed:
                delattr(owner, name)

    def median(self) -> dict[str, float]:
        """Of all loads, the dearest first."""
        names = {name for load in self._loads for name in load}
        told = [
            (1e6 * statistics.median(load.get(name, 0.0) for load in self._loads), name)
            for name in names
        ]
        return {name: round(took, 1) for took, name in sorted(told, reverse=True)}

    def _timed(self, key: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            if not self._inner and plain.__name__ in SHARED:
                return plain(*args, **more)
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return plain(*args, **more)
            finally:
                took = time.perf_counter() - started
                self._own[key] = self._own.get(key, 0.0) + took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed

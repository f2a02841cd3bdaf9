"""PoolingEngine: the library face of an engine that pools.  One process, one thread, no daemon.

Goes in: token ids, revisions.  Comes out: vectors and scores.  Knows nothing of text, names or
sockets.

    engine = PoolingEngine(PoolingConfig(model="path/to/model"))
    rev = engine.add_folder("path/to/adapter", store="packed")
    [one, two] = engine.embed([ids, ids], revs=[None, rev])
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine.library import Library
from engine.pooling.calls import PoolingCalls, in_order, requests_of
from engine.pooling.config import PoolingConfig, PoolingInfo
from engine.pooling.core import PoolingCore
from engine.pooling.requests import PoolingTask, PoolResult


class PoolingEngine(Library[PoolingCore], PoolingCalls):
    """A pooling engine in this process.  Use it from one thread; `close` it, or use `with`."""

    def __init__(
        self,
        config: PoolingConfig,
        *,
        progress: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        core = PoolingCore(config, progress=progress)
        super().__init__(
            core,
            folder=core.machine.folder,
            block_size=0,
            dtype=core.info.dtype,
            max_rank=core.config.max_rank,
            purpose="pool",
        )

    @property
    def info(self) -> PoolingInfo:
        """What `auto` became, and how the model pools."""
        return self._core.info

    def pool(
        self,
        task: PoolingTask,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        types: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Run all inputs together.  Raises EngineError for the first that ends in an error."""
        names = [f"library-{next(self._ids)}" for _ in inputs]
        for request in requests_of(names, task, inputs, revs, types, **options):
            self._core.take(request)
        found: dict[str, PoolResult] = {}
        while len(found) < len(names):
            for result in self._core.step().results:
                found[result.request_id] = result
            if len(found) < len(names) and self._core.idle:
                self._core.wait()
        return in_order(names, found)

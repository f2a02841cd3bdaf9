"""PoolingEngine: the library face of an engine that pools.  One process, one thread, no daemon.

Goes in: token ids, revisions.  Comes out: vectors and scores.  Knows nothing of text, names or
sockets.

    engine = PoolingEngine(PoolingConfig(model="path/to/model"))
    rev = engine.add_folder("path/to/adapter", store="packed")
    [one, two] = engine.embed([ids, ids], revs=[None, rev])
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.library import Library
from engine.pooling.calls import PoolingCalls, in_order, requests_of
from engine.pooling.config import PoolingConfig, PoolingInfo
from engine.pooling.core import PoolingCore
from engine.pooling.requests import PoolingTask, PoolRequest, PoolResult
from engine.pooling_messages import GiveWay


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
        inputs: Iterable[Sequence[int]],
        revs: Iterable[str | None] | None = None,
        types: Iterable[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Run all inputs together.  Raises EngineError for the first that ends in an error."""
        requests = requests_of(self._names(), task, inputs, revs, types, **options)
        names: list[str] = []
        found: dict[str, PoolResult] = {}
        coming = True
        try:
            while coming or len(found) < len(names):
                coming = coming and self._give(requests, names)
                for result in self._core.step().results:
                    found[result.request_id] = result
                if len(found) < len(names) and self._core.idle:
                    self._core.wait()
        except BaseException:
            self._core.abandon()
            self._core.step()  # what runs still is told of to nobody
            raise
        return in_order(names, found)

    def give_way(self, share: float) -> None:
        """From now on take no more than `share` of the device's time, above 0; 1: all of it."""
        self._core.take(GiveWay(share))

    def _give(self, requests: Iterator[PoolRequest], names: list[str]) -> bool:
        """Requests until a step's are waiting, their names to `names`; False: there are no more."""
        core, rows, count = self._core, 0, 0
        enough = core.config.max_batch_tokens + core.config.max_length  # one may not fit
        while (
            core.queue.rows + rows < enough and core.num_waiting + count < core.config.max_num_seqs
        ):
            request = next(requests, None)
            if request is None:
                return False
            core.take(request)
            names.append(request.request_id)
            rows, count = rows + len(request.tokens), count + 1
        return True

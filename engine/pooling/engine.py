"""PoolingEngine: the library face of an engine that pools.  One process, one thread, no daemon.

Goes in: token ids, revisions.  Comes out: vectors and scores.  Knows nothing of text, names or
sockets.

    engine = PoolingEngine(PoolingConfig(model="path/to/model"))
    rev = engine.add_folder("path/to/adapter", store="packed")
    [one, two] = engine.embed([ids, ids], revs=[None, rev])
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import error_of
from engine.library import Library
from engine.pooling.config import PoolingConfig, PoolingInfo
from engine.pooling.core import PoolingCore
from engine.pooling.requests import Floats, PoolingTask, PoolRequest, PoolResult


class PoolingEngine(Library[PoolingCore]):
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
        )

    @property
    def info(self) -> PoolingInfo:
        """What `auto` became, and how the model pools."""
        return self._core.info

    def embed(
        self,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[Floats]:
        """One vector (width,) for each input of token ids, in order.

        `revs` None is the base model throughout.  `options` are fields of PoolRequest, the same for
        all.  Raises EngineError for the first input that ends in an error.
        """
        return [_values(result) for result in self.pool("embed", inputs, revs, **options)]

    def embed_tokens(
        self,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[Floats]:
        """A vector for each token, (tokens, hidden)."""
        return [_values(result) for result in self.pool("tokens", inputs, revs, **options)]

    def classify(
        self,
        inputs: Sequence[Sequence[int]],
        revs: Sequence[str | None] | None = None,
        types: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Scores (labels,) in `values`, what to sort by in `logits`.

        `types`, one list an input, tell the two texts of a pair apart where the model wants it.
        """
        return self.pool("classify", inputs, revs, types, **options)

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
        nobody: list[None] = [None] * len(inputs)
        for name, tokens, rev, kinds in zip(
            names, inputs, revs or nobody, types or nobody, strict=True
        ):
            request = PoolRequest(
                request_id=name,
                tokens=list(tokens),
                task=task,
                rev=rev,
                types=None if kinds is None else list(kinds),
                **options,
            )
            self._core.take(request)
        found: dict[str, PoolResult] = {}
        while len(found) < len(names):
            for result in self._core.step().results:
                found[result.request_id] = result
            if len(found) < len(names) and self._core.idle:
                self._core.wait()
        for name in names:
            if found[name].code:
                raise error_of(found[name].code, found[name].message)
        return [found[name] for name in names]


def _values(result: PoolResult) -> Floats:
    assert result.values is not None
    return result.values

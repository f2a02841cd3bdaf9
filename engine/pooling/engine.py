"""PoolingEngine: the library face of an engine that pools.  One process, one thread, no daemon.

Goes in: token ids, revisions.  Comes out: vectors and scores.  Knows nothing of text, names or
sockets.

    engine = PoolingEngine(PoolingConfig(model="path/to/model"))
    rev = engine.add_folder("path/to/adapter", store="packed")
    [one, two] = engine.embed([ids, ids], revs=[None, rev])
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.adapters.orders import AdapterCommand
from engine.adapters.pack import pack_into
from engine.errors import error_of
from engine.messages import AddRevision, Answer, Evict, Load, PackedManifest, RemoveRevision
from engine.pooling.config import PoolingConfig, PoolingInfo
from engine.pooling.core import PoolingCore
from engine.pooling.requests import Floats, PoolingTask, PoolRequest, PoolResult


class PoolingEngine:
    """A pooling engine in this process.  Use it from one thread; `close` it, or use `with`."""

    def __init__(
        self,
        config: PoolingConfig,
        *,
        progress: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        self._core = PoolingCore(config, progress=progress)
        self._ids = itertools.count(1)

    @property
    def core(self) -> PoolingCore:
        """The step loop, for who takes its steps himself; not while a method here runs."""
        return self._core

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

    def add_adapter(
        self, manifest: PackedManifest, *, pinned: bool = False, priority: int = 50
    ) -> None:
        """Make a packed revision known; it is loaded when an input needs it, or by `load`."""
        self._call(
            AddRevision(
                command_id=next(self._ids), manifest=manifest, pinned=pinned, priority=priority
            )
        )

    def add_folder(
        self, folder: str | Path, store: str | Path, *, pinned: bool = False, priority: int = 50
    ) -> str:
        """Pack a PEFT adapter's folder into the folder `store`, and make it known: its revision.

        Raises AdapterInvalid, naming what is wrong; OSError if the packed file cannot be written.
        """
        manifest = pack_into(
            Path(folder),
            self._core.machine.folder,
            Path(store),
            block_size=0,
            dtype=self.info.dtype,
            max_rank=self._core.config.max_rank,
        )
        self.add_adapter(manifest, pinned=pinned, priority=priority)
        return manifest.rev

    def load(self, rev: str) -> None:
        """Bring a revision to the device and wait for it.  Raises NoRoom, LoadFailed."""
        self._call(Load(command_id=next(self._ids), rev=rev))

    def evict(self, rev: str) -> None:
        """Take a revision off the device.  Raises UnknownRevision."""
        self._call(Evict(command_id=next(self._ids), rev=rev))

    def remove_adapter(self, rev: str) -> None:
        """Forget a revision and its copies."""
        self._call(RemoveRevision(next(self._ids), rev))

    def close(self) -> None:
        """End the engine's threads."""
        self._core.close()

    def __enter__(self) -> "PoolingEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, command: AdapterCommand) -> Answer:
        self._core.take(command)
        while True:
            for answer in self._core.step().answers:
                if answer.code:
                    raise error_of(answer.code, answer.message)
                return answer
            if self._core.idle:
                self._core.wait()


def _values(result: PoolResult) -> Floats:
    assert result.values is not None
    return result.values

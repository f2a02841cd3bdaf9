"""Engine: the library face.  One process, one thread, no daemon.

Goes in: token ids, sampling parameters, revisions.  Comes out: token ids.
Knows nothing of text, names or sockets.

    engine = Engine(EngineConfig(model="path/to/model"))
    rev = engine.add_folder("path/to/adapter", store="packed")
    [one, two] = engine.generate([ids, ids], SamplingParams(temperature=0.0), revs=[None, rev])
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import error_of
from engine.library import Library
from engine.messages import (
    EngineInfo,
    FinishReason,
    GetSnapshot,
    SamplingParams,
    SequenceDelta,
    Submit,
    TokenLogprobs,
)
from engine.pooling.calls import PoolingCalls, in_order, requests_of
from engine.pooling.requests import PoolingTask, PoolResult, unpacked
from engine.status_messages import EngineSnapshot


@dataclass(slots=True)
class Generation:
    """What became of one prompt."""

    tokens: list[int]
    finish_reason: FinishReason
    cached_tokens: int
    logprobs: list[TokenLogprobs]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


class Engine(Library[EngineCore], PoolingCalls):
    """An engine in this process.  Use it from one thread; `close` it, or use `with`.  One whose
    configuration says how makes vectors and scores too.

    `lookahead` None: on a card, unless deterministic.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[str, float], None] = lambda *_: None,
        lookahead: bool | None = None,
    ) -> None:
        core = EngineCore(config, progress=progress, lookahead=lookahead)
        now = core.config  # nothing is `auto` any more
        super().__init__(
            core,
            folder=Path(now.model),
            block_size=now.block_size,
            dtype=core.info.dtype,
            max_rank=now.max_rank,
            purpose=core.info.purpose,
            draft_bytes=core.info.draft_block_bytes,
            ranks=now.tensor_parallel,
            extra_vocab=now.extra_vocab,
        )

    @property
    def info(self) -> EngineInfo:
        """What `auto` became, and the layout that packed adapters need."""
        return self._core.info

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        revs: Sequence[str | None] | None = None,
    ) -> list[Generation]:
        """Run all prompts together and return their tokens in order.

        One `sampling` serves all prompts, or there is one a prompt; `revs` None is the base model
        throughout.  Raises EngineError for the first prompt that ends in an error.
        """
        every = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        names = [f"library-{next(self._ids)}" for _ in prompts]
        for name, prompt, params, rev in zip(
            names, prompts, every, revs or [None] * len(prompts), strict=True
        ):
            self._core.take(Submit(request_id=name, prompt=list(prompt), sampling=params, rev=rev))
        told: dict[str, list[SequenceDelta]] = {name: [] for name in names}
        left = set(names)
        while left:
            for delta in self._core.step().deltas:
                told[delta.request_id].append(delta)
                if delta.finish_reason is not None:
                    left.discard(delta.request_id)
            if left and self._core.idle:
                self._core.wait()
        return [_gather(told[name]) for name in names]

    def pool(
        self,
        task: PoolingTask,
        inputs: Iterable[Sequence[int]],
        revs: Iterable[str | None] | None = None,
        types: Iterable[Sequence[int]] | None = None,
        **options: Any,
    ) -> list[PoolResult]:
        """Run all inputs together.  Raises EngineError for the first that ends in an error."""
        names = []
        for request in requests_of(self._names(), task, inputs, revs, types, **options):
            names.append(request.request_id)
            self._core.take(request)
        found: dict[str, PoolResult] = {}
        while len(found) < len(names):
            for result in self._core.step().pooled:
                found[result.request_id] = unpacked(result)
            if len(found) < len(names) and self._core.idle:
                self._core.wait()
        return in_order(names, found)

    def snapshot(self) -> EngineSnapshot:
        """One consistent picture of everything."""
        self._core.take(GetSnapshot(next(self._ids)))
        snapshot = self._answer().snapshot
        assert snapshot is not None
        return snapshot


def _gather(deltas: Sequence[SequenceDelta]) -> Generation:
    last = deltas[-1]
    if last.finish_reason is None or last.finish_reason == "error":
        raise error_of(last.code, last.message)
    prompt = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs), ())
    cached = next((d.cached_tokens for d in deltas if d.cached_tokens is not None), 0)
    return Generation(
        tokens=[token for d in deltas for token in d.tokens],
        finish_reason=last.finish_reason,
        cached_tokens=cached,
        logprobs=[one for d in deltas for one in d.logprobs],
        prompt_logprobs=prompt,
    )

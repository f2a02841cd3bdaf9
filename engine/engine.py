"""Engine: the library face.  One process, one thread, no daemon.

Goes in: token ids, sampling parameters, revisions.  Comes out: token ids.
Knows nothing of text, names or sockets.

    engine = Engine(EngineConfig(model="path/to/model"))
    rev = engine.add_folder("path/to/adapter", store="packed")
    [one, two] = engine.generate([ids, ids], SamplingParams(temperature=0.0), revs=[None, rev])
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine.adapters.pack import pack_into
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import error_of
from engine.messages import (
    AddRevision,
    Answer,
    Command,
    EngineInfo,
    EngineSnapshot,
    Evict,
    FinishReason,
    GetSnapshot,
    Load,
    PackedManifest,
    RemoveRevision,
    SamplingParams,
    SequenceDelta,
    Submit,
    TokenLogprobs,
)


@dataclass(slots=True)
class Generation:
    """What became of one prompt."""

    tokens: list[int]
    finish_reason: FinishReason
    cached_tokens: int
    logprobs: list[TokenLogprobs]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


class Engine:
    """An engine in this process.  Use it from one thread; `close` it, or use `with`.

    `lookahead` None: on a card, unless deterministic.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[str, float], None] = lambda *_: None,
        lookahead: bool | None = None,
    ) -> None:
        self._core = EngineCore(config, progress=progress, lookahead=lookahead)
        self._ids = itertools.count(1)

    @property
    def core(self) -> EngineCore:
        """The step loop, for who takes its steps himself; not while `generate` runs."""
        return self._core

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

    def add_adapter(
        self, manifest: PackedManifest, *, pinned: bool = False, priority: int = 50
    ) -> None:
        """Make a packed revision known; it is loaded when a prompt needs it, or by `load`."""
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
        config = self._core.config
        manifest = pack_into(
            Path(folder),
            Path(config.model),
            Path(store),
            block_size=config.block_size,
            dtype=self.info.dtype,
            max_rank=config.max_rank,
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
        """Forget a revision, its copies and its cached keys and values."""
        self._call(RemoveRevision(next(self._ids), rev))

    def snapshot(self) -> EngineSnapshot:
        """One consistent picture of everything."""
        snapshot = self._call(GetSnapshot(next(self._ids))).snapshot
        assert snapshot is not None
        return snapshot

    def close(self) -> None:
        """End the engine's threads and free its memory."""
        self._core.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, command: Command) -> Answer:
        assert not isinstance(command, Submit)
        self._core.take(command)
        while True:
            for answer in self._core.step().answers:
                if answer.code:
                    raise error_of(answer.code, answer.message)
                return answer
            if self._core.idle:
                self._core.wait()


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

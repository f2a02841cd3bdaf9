"""Beside: vectors and scores of an engine that generates, out of the steps that it runs anyway.

Goes in: PoolRequests, and each step's hidden states.  Comes out: sequences that draw nothing, for
the scheduler, and one Pooled for each when it has ended.  An input is a prompt like any other:
in chunks, on its adapter's slot, among the rows of those who generate.  Where nothing but the last
row is read, it begins with what the prefix cache holds.  Knows nothing of turns and of memory.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.adapters.plan import StepPlanner
from engine.config import EngineConfig, PoolsToo
from engine.messages import PackedManifest, SamplingParams, SequenceDelta, Submit
from engine.models.decoder import Decoder
from engine.models.head_spec import DECODER_HEAD
from engine.models.spec import ModelSpec
from engine.pooling.admission import Admission
from engine.pooling.answers import Answers, Computed, Told, num_read
from engine.pooling.batch import array_of
from engine.pooling.chunks import PooledSoFar, TokensSoFar
from engine.pooling.config import PoolingConfig, PoolingInfo
from engine.pooling.fit import read_model
from engine.pooling.head import Head
from engine.pooling.pooler import Pooler
from engine.pooling.requests import PoolRequest, PoolResult, packed
from engine.pooling.spec import PoolingSpec
from engine.pooling.token_scores import TokenScores, head_rows
from engine.pooling_messages import Pooled
from engine.sequence import POOLED, Chunk, PooledInput
from engine.startup import Machine

NOTHING = SamplingParams(max_tokens=0)
SCORE = "score.weight.rows"
DeltaT = TypeVar("DeltaT", bound=SequenceDelta)


@dataclass(slots=True)
class Landing:
    """Of one input that a step has ended: on its way to the host."""

    chunk: Chunk
    told: Told


@dataclass(slots=True)
class Landings:
    """`there`: when all of them have arrived; None on the CPU, where they have."""

    of: list[Landing]
    there: torch.cuda.Event | None = None

    def __bool__(self) -> bool:
        return bool(self.of)


class Beside:
    """Used from the step loop's thread.  Raises ConfigError or ModelUnsupported for a way of
    pooling that the model has not."""

    def __init__(self, machine: Machine, planner: StepPlanner) -> None:
        config, wish = machine.config, machine.config.pools
        assert wish is not None
        told = pooling_config(config, wish)
        folder, spec, pooling = read_model(told)
        assert isinstance(spec, ModelSpec), "an encoder generates nothing"
        spec = dataclasses.replace(spec, extra_vocab=machine.spec.extra_vocab)
        self._spec, self._device = spec, machine.device
        self.config = replace(told, max_length=_length(config, spec, pooling))
        pooler = Pooler(
            pooling,
            Path(told.model),
            hidden_size=spec.hidden_size,
            device=machine.device,
            deterministic=config.deterministic,
        )
        model = machine.model
        head = Head(DECODER_HEAD, model.classifier, eps=0.0, deterministic=config.deterministic)
        words = _words(folder, spec, pooling, model, deterministic=config.deterministic)
        self._answers = Answers(spec, pooler, head, words, planner)
        self._admission = Admission(self.config, spec, pooler, head, scores_words=words is not None)
        self._orders = itertools.count()
        self._done: dict[str, PoolResult] = {}  # by the sequence's id, until that is told
        self.info = _describe(machine, self.config, pooler, words)

    def admit(
        self, request: PoolRequest, manifest: PackedManifest | None
    ) -> tuple[Submit, PooledInput]:
        """What the scheduler is given.  Raises RequestInvalid, UnknownRevision."""
        item = self._admission.admit(request, manifest, next(self._orders), time.monotonic())
        tokens = item.tokens
        if request.task == "classify" and self._has_head(manifest):
            tokens = tokens[: num_read(tokens, self._spec.pad_token_id)]
        submit = Submit(
            request_id=POOLED + request.request_id,
            prompt=tokens.tolist(),
            sampling=NOTHING,
            rev=request.rev,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline_seconds=request.deadline_seconds,
            tenant=request.tenant,
            weight=request.weight,
        )
        pooled = PooledInput(request, len(item.tokens), item.num_cut, reuses=self._reuses(request))
        return submit, pooled

    def launch(self, chunks: Sequence[Chunk], hidden: Tensor) -> Landings:
        """Read what a step has computed, (T, hidden), and start what has ended on its way."""
        ended, computed, row = [], [], 0
        for chunk in chunks:
            seq, rows = chunk.seq, hidden[row : row + chunk.length]
            row += chunk.length
            if seq.pooled is None:
                continue
            self._keep(chunk, rows)
            if chunk.start + chunk.length == len(seq.tokens):
                ended.append(chunk)
                computed.append(Computed(seq.pooled.request, seq.slot, self._whole(chunk, rows)))
        if not ended:
            return Landings([])
        told = self._answers.of(computed)
        landings = [Landing(c, _leave(t)) for c, t in zip(ended, told, strict=True)]
        there = None
        if self._device.type == "cuda":
            there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(torch.cuda.current_stream(self._device))
        return Landings(landings, there)

    def collect(self, landings: object) -> None:
        """Take in what `launch` has started; waits for it."""
        assert isinstance(landings, Landings)
        if landings.there is not None:
            landings.there.synchronize()
        for landing in landings.of:
            seq, told = landing.chunk.seq, landing.told
            assert seq.pooled is not None
            self._done[seq.request_id] = PoolResult(
                request_id=seq.pooled.request.request_id,
                num_tokens=seq.pooled.num_tokens,
                num_cut=seq.pooled.num_cut,
                num_cached=seq.cached_tokens or 0,
                values=array_of(told.values),
                logits=None if told.logits is None else array_of(told.logits),
            )

    def tell(self, deltas: Iterable[DeltaT]) -> tuple[list[DeltaT], list[Pooled]]:
        """Deltas of those who generate, and what the ends of the others are."""
        generated, ended = [], []
        for delta in deltas:
            if not delta.request_id.startswith(POOLED):
                generated.append(delta)
                continue
            done = self._done.pop(delta.request_id, None)
            request_id = delta.request_id.removeprefix(POOLED)
            if delta.finish_reason == "stop":
                assert done is not None, f"{request_id}: it has ended without a result"
                ended.append(packed(done))
            elif delta.code:  # else it was taken back
                ended.append(Pooled(request_id=request_id, code=delta.code, message=delta.message))
        return generated, ended

    # ------------------------------------------------------------- one level down
    def _has_head(self, manifest: PackedManifest | None) -> bool:
        """Of its adapter's, or of the base where no words score."""
        modules = manifest.modules if manifest is not None else ()
        return self._answers.words is None or any(m.module == SCORE for m in modules)

    def _reads_last(self, request: PoolRequest) -> bool:
        """And no other row."""
        last = self._answers.pooler.spec.kinds == ("last",)
        return request.task == "classify" or (request.task == "embed" and last)

    def _reuses(self, request: PoolRequest) -> bool:
        return self.config.prefix_cache != "off" and self._reads_last(request)

    def _keep(self, chunk: Chunk, rows: Tensor) -> None:
        """Of inputs of which more than the last row is read."""
        pooled = chunk.seq.pooled
        assert pooled is not None
        request = pooled.request
        if self._reads_last(request):
            return
        if chunk.start == 0:  # for the first time, or anew after it gave way
            spec, length = self._answers.pooler.spec, len(chunk.seq.tokens)
            left_out = 0 if spec.include_prompt else min(request.prompt_tokens, length - 1)
            embeds = request.task == "embed"
            pooled.kept = PooledSoFar(spec.kinds, length, left_out) if embeds else TokensSoFar()
        assert isinstance(pooled.kept, PooledSoFar | TokensSoFar), "it began behind its first row"
        pooled.kept.add(rows, chunk.start)

    def _whole(self, chunk: Chunk, rows: Tensor) -> Tensor:
        """What `Computed` wants of an input whose last chunk this is."""
        pooled = chunk.seq.pooled
        assert pooled is not None
        kept, pooled.kept = pooled.kept, None
        if isinstance(kept, PooledSoFar | TokensSoFar):
            return kept.vector()
        last = rows[-1:]
        return last if pooled.request.task == "classify" else last[0].float()


def pooling_config(config: EngineConfig, wish: PoolsToo) -> PoolingConfig:
    """The same as an engine that pools alone is told.  Raises ConfigError."""
    return PoolingConfig(
        model=wish.root,
        device=config.device,
        dtype=config.dtype,
        truncate=wish.truncate,
        pooling=wish.pooling,  # type: ignore[arg-type]
        score_tokens=wish.score_tokens,
        prefix_cache=wish.prefix_cache,  # type: ignore[arg-type]
        chunked_prefill=wish.chunked_prefill,  # type: ignore[arg-type]
        generates_too=not wish.alone,
        max_batch_tokens=config.max_batch_tokens,
        deterministic=config.deterministic,
    )


def _length(config: EngineConfig, spec: ModelSpec, pooling: PoolingSpec) -> int:
    """Tokens of an input: as the model's files say, and no more than the engine has room for."""
    if config.purpose == "pool":
        return config.max_model_len  # it is of inputs alone
    return min(pooling.max_length or spec.default_length, config.max_model_len)


def _words(
    folder: Path, spec: ModelSpec, pooling: PoolingSpec, model: Decoder, *, deterministic: bool
) -> TokenScores | None:
    tokens = pooling.score_tokens
    if not tokens:
        return None
    rows = head_rows(folder, spec, model.embedding.data, tokens)
    return TokenScores(spec, tokens, rows, deterministic=deterministic)


def _describe(
    machine: Machine, config: PoolingConfig, pooler: Pooler, words: TokenScores | None
) -> PoolingInfo:
    info, pooling = machine.info, pooler.spec
    return PoolingInfo(
        device=info.device,
        dtype=info.dtype,
        layout=info.layout,
        base=info.base,
        block_bytes=info.block_bytes,
        max_length=config.max_length,
        max_batch_tokens=info.max_batch_tokens,
        width=pooler.width,
        kinds=pooling.kinds,
        pooling_origin=pooling.origin,
        normalizes=pooling.normalizes,
        num_labels=machine.spec.num_labels if words is None else 1,
        labels=machine.spec.labels if words is None else ("LABEL_0",),
        score_tokens=() if words is None else words.tokens,
        weight_bytes=info.weight_bytes,
        adapter_bytes=info.arena_bytes,
        kv_bytes=info.arena_bytes,
    )


def _leave(told: Told) -> Told:
    """Start its way to the host: the next step overwrites what it was made of."""
    return Told(_to_host(told.values), None if told.logits is None else _to_host(told.logits))


def _to_host(x: Tensor) -> Tensor:
    x = x.float()
    if x.device.type == "cpu":
        return x.clone()
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return there.copy_(x, non_blocking=True)

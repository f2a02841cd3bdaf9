"""The desk: commands as they arrive, and what can be said to them without a step.

Goes in: commands, between two steps.  Comes out: each with the owner that it is for; answers and
refusals, for the next frame.  Runs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.adapters.residency import Residency
from engine.arrivals import refused
from engine.errors import EngineError
from engine.explain import Explainer
from engine.guides import Guides
from engine.messages import (
    Abort,
    Answer,
    Command,
    Explain,
    GetSnapshot,
    PackedManifest,
    SequenceDelta,
    Shutdown,
    Submit,
)
from engine.pooling.beside import Beside
from engine.pooling_messages import NO_GENERATION, AbortPool, GiveWay, Pooled, PoolRequest
from engine.sampling_plan import problem
from engine.scheduler import Scheduler
from engine.sequence import POOLED
from engine.status_messages import EngineSnapshot
from engine.verifier import Verifier
from engine.verify_messages import VerifyRevision
from engine.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Said:
    """To commands that no step is needed for."""

    answers: list[Answer]
    refused: list[SequenceDelta]
    unpooled: list[Pooled]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Whom commands are for.  `pooling` None: nothing is pooled here."""

    scheduler: Scheduler
    residency: Residency
    guides: Guides
    verifier: Verifier
    explainer: Explainer
    pooling: Beside | None
    snapshot: Callable[[], EngineSnapshot]


class Desk:
    """`alone`: no other rank has a part of the model."""

    def __init__(
        self, owners: Owners, *, vocabulary: Vocabulary, generates: bool, alone: bool
    ) -> None:
        self._to, self._vocabulary = owners, vocabulary
        self._generates, self._alone = generates, alone
        self._commands: list[Command] = []
        self._said = Said([], [], [])

    def take(self, command: Command) -> None:
        """Queue it for `carry_out`."""
        self._commands.append(command)

    @property
    def busy(self) -> bool:
        """Somebody waits for `carry_out`."""
        return bool(self._commands)

    def carry_out(self) -> None:
        """All that has arrived, in its order."""
        commands, self._commands = self._commands, []
        for command in commands:
            match command:
                case Submit():
                    self._submit(command)
                case Abort():
                    self._to.scheduler.abort(command.request_id)
                case GetSnapshot():
                    told = Answer(command_id=command.command_id, snapshot=self._to.snapshot())
                    self._said.answers.append(told)
                case Explain():
                    self._said.answers.append(self._explain(command))
                case VerifyRevision() if not self._alone:
                    self._said.answers.append(_no_verifying(command.command_id))
                case VerifyRevision():
                    self._to.verifier.command(command)
                case PoolRequest():
                    self._pool(command)
                case AbortPool():
                    self._to.scheduler.abort(POOLED + command.request_id)
                case GiveWay():
                    pass  # who computes in parts has small steps, and no pace of its own yet
                case Shutdown():
                    raise AssertionError("the loop's owner carries out Shutdown")
                case _:
                    self._to.residency.command(command)

    def take_said(self) -> Said:
        """Since the last call."""
        said, self._said = self._said, Said([], [], [])
        return said

    # ------------------------------------------------------------- one kind each
    def _submit(self, submit: Submit) -> None:
        wrong = self._wrong(submit) if self._generates else NO_GENERATION
        if wrong is not None:
            self._said.refused.append(refused(submit.request_id, "invalid_value", wrong))
            return
        seq = self._to.scheduler.add(submit)
        if seq is not None and submit.sampling.grammar:
            manifest = self._manifest(seq.rev)
            self._to.guides.enter(seq, manifest.tokenizer if manifest is not None else "")

    def _wrong(self, submit: Submit) -> str | None:
        """What of its token ids the base has none of, or the revision.  One in a prompt would end
        the whole process inside the embedding: it is refused here."""
        manifest = self._manifest(submit.rev)
        if manifest is None and submit.rev is not None:
            return None  # the scheduler says so
        held = self._vocabulary.held(manifest)
        if submit.prompt and not 0 <= min(submit.prompt) <= max(submit.prompt) < held:
            foreign = next(token for token in submit.prompt if not 0 <= token < held)
            return f"the prompt holds a token id outside 0..{held - 1}: {foreign}"
        limit = self._vocabulary.limit(manifest)
        if submit.alora_fallback:  # it may come to run on the base
            limit = min(limit, self._vocabulary.limit(None))
        return problem(submit.sampling, limit)

    def _manifest(self, rev: str | None) -> PackedManifest | None:
        """None of the base, or of a revision that is not known."""
        known = rev is not None and self._to.residency.knows(rev)
        return self._to.residency.manifest(rev) if known and rev is not None else None

    def _pool(self, request: PoolRequest) -> None:
        pooling = self._to.pooling
        if pooling is None:
            self._said.unpooled.append(_no_pooling(request.request_id))
            return
        try:
            self._to.scheduler.add(*pooling.admit(request, self._manifest(request.rev)))
        except EngineError as error:
            told = Pooled(request_id=request.request_id, code=error.code, message=error.message)
            self._said.unpooled.append(told)

    def _explain(self, command: Explain) -> Answer:
        told = self._to.explainer.explain(command.rev)
        if told is None:
            message = f"revision {command.rev[:12]} is unknown"
            return Answer(command_id=command.command_id, code="model_not_found", message=message)
        return Answer(command_id=command.command_id, explanation=told)


def _no_verifying(command_id: int) -> Answer:
    text = (
        "tensor_parallel is above 1: every GPU has a part alone, which no file says the result of"
    )
    return Answer(command_id=command_id, code="conflict", message=text)


def _no_pooling(request_id: str) -> Pooled:
    text = "this engine generates, and makes no vectors and scores"
    return Pooled(request_id=request_id, code="invalid_value", message=text)

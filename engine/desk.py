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
    SequenceDelta,
    Shutdown,
    Submit,
    VerifyRevision,
)
from engine.pooling.beside import Beside
from engine.pooling_messages import NO_GENERATION, AbortPool, GiveWay, Pooled, PoolRequest
from engine.sampling_plan import problem
from engine.scheduler import Scheduler
from engine.sequence import POOLED
from engine.status_messages import EngineSnapshot
from engine.verifier import Verifier


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
    """`num_ids`: token ids that the embedding has a row for; `vocab_size` those that are drawn;
    `alone`: no other rank has a part of the model."""

    def __init__(
        self, owners: Owners, *, num_ids: int, vocab_size: int, generates: bool, alone: bool
    ) -> None:
        self._to = owners
        self._num_ids, self._vocab_size = num_ids, vocab_size
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
        """A foreign id would end the whole process inside the embedding: it is refused here."""
        wrong = problem(submit.sampling, self._vocab_size)
        if not self._generates:
            wrong = NO_GENERATION
        if submit.prompt and not 0 <= min(submit.prompt) <= max(submit.prompt) < self._num_ids:
            wrong = f"the prompt holds a token id outside 0..{self._num_ids - 1}"
        if wrong is not None:
            self._said.refused.append(refused(submit.request_id, "invalid_value", wrong))
            return
        seq = self._to.scheduler.add(submit)
        if seq is not None and submit.sampling.grammar:
            self._to.guides.enter(seq)

    def _pool(self, request: PoolRequest) -> None:
        pooling, residency = self._to.pooling, self._to.residency
        if pooling is None:
            self._said.unpooled.append(_no_pooling(request.request_id))
            return
        known = request.rev is not None and residency.knows(request.rev)
        manifest = residency.manifest(request.rev) if known and request.rev else None
        try:
            self._to.scheduler.add(*pooling.admit(request, manifest))
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

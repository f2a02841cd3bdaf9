"""Verifier: holds what is on the device against what the adapter's own files say, between steps.

Goes in: VerifyRevision commands, and a call of `advance` in every step.  Comes out: one Answer a
command, with a report.  A step does at most one slice of it: one (layer, group) of the LoRA
correction on a few rows of probe, through the kernels of decode rows and the slot table of all, or
one block copied back.  Files and comparisons are the worker's.  The revision is held on the
device meanwhile, as by a running request; if it has to leave, verification ends.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.adapters.plan import StepPlanner
from engine.adapters.residency import Residency
from engine.adapters.slots import SlotRow
from engine.kernels.lora import lora_apply
from engine.layout import GROUPS, MODULE_ID
from engine.memory.arena import Arena
from engine.messages import Answer, PackedManifest
from engine.verify_messages import VerifyReport, VerifyRevision
from engine.verify_worker import Block, Buffers, Probe, Slice, Subject, VerifyWorker


@dataclass(slots=True)
class _Job:
    """A verification under way; it holds a lease and a slot reference."""

    command: VerifyRevision
    row: SlotRow
    slices: int = 0


class Verifier:
    """Everything that it will ever allocate is allocated here.  Used from the step loop's thread.

    `rows`: steps have no more.  `wake` is called from the worker's thread.
    """

    def __init__(
        self,
        arena: Arena,
        planner: StepPlanner,
        residency: Residency,
        *,
        rows: int,
        deterministic: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._arena = arena
        self._planner = planner
        self._residency = residency
        self._deterministic = deterministic
        self._cuda = arena.device.type == "cuda"
        self._buffers = Buffers(arena.layout, rows, pinned=self._cuda)
        self._x = self._buffers.x.to(arena.device)
        self._y = self._buffers.y.to(arena.device)
        self._worker = VerifyWorker(arena.layout, self._buffers, wake=wake)
        self._queue: deque[VerifyRevision] = deque()
        self._job: _Job | None = None
        self._event: torch.cuda.Event | None = None
        if self._cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copying = False  # the event has not passed
        self._answers: list[Answer] = []

    def command(self, command: VerifyRevision) -> None:
        """Queue a verification; one after another."""
        self._queue.append(command)

    @property
    def in_flight(self) -> bool:
        """The device works on a slice: nobody rings when it has done."""
        return self._copying

    @property
    def waiting(self) -> bool:
        """Verifications that the next `advance` begins."""
        return self._job is None and bool(self._queue)

    def take_answers(self) -> list[Answer]:
        """Answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def advance(self) -> None:
        """One slice at most.  Never waits."""
        if self._job is None:
            if self._queue:
                self._begin(self._queue.popleft())
            return
        if self._copying:
            assert self._event is not None
            self._copying = not self._event.query()  # type: ignore[no-untyped-call]
            if not self._copying:
                self._worker.go_on()
            return
        following = self._worker.take()
        if following is None:
            return
        if isinstance(following, VerifyReport):
            self._end(self._job, report=replace(following, slices=self._job.slices))
        elif isinstance(following, str):
            self._end(self._job, "load_failed", following)
        elif self._job.row.draining:
            self._end(self._job, "conflict", "it had to leave the GPU meanwhile")
        else:
            self._do(self._job, following)

    def rehearse(self, rows: Mapping[int, SlotRow], manifest: PackedManifest) -> None:
        """Every kind of slice once, on slot 0 of `rows`: a card compiles nothing after it."""
        with self._planner.pretending(rows, lambda rev: manifest):
            for group, names in GROUPS.items():
                dims = [self._arena.layout.shapes.dims[MODULE_ID[name]] for name in names]
                self._probe(Probe(0, group, dims[0][0], sum(d for _, d in dims)), 0)
            self._bring(rows[0].blocks[0])

    def close(self) -> None:
        """End the worker's thread."""
        self._worker.close()

    # ------------------------------------------------------------- one level down
    def _begin(self, command: VerifyRevision) -> None:
        rev, residency = command.rev, self._residency
        if not residency.knows(rev) or not residency.can_acquire(rev):
            code = "conflict" if residency.knows(rev) else "model_not_found"
            message = f"revision {rev[:12]} is not on the GPU"
            self._answers.append(Answer(command_id=command.command_id, code=code, message=message))
            return
        residency.lease(rev, 0)
        residency.acquire(rev)
        row = residency.slots.find(rev)
        assert row is not None
        self._job = _Job(command, row)
        self._worker.begin(Subject(residency.manifest(rev), command.probe))

    def _end(
        self, job: _Job, code: str = "", message: str = "", report: VerifyReport | None = None
    ) -> None:
        self._residency.release(job.command.rev)
        self._residency.end_lease(job.command.rev)
        self._job = None
        self._answers.append(
            Answer(command_id=job.command.command_id, code=code, message=message, report=report)
        )

    @torch.inference_mode()
    def _do(self, job: _Job, following: Slice) -> None:
        job.slices += 1
        match following:
            case Probe():
                self._probe(following, job.row.slot)
            case Block(index):
                self._bring(job.row.blocks[index])
        if self._event is None:
            self._worker.go_on()
        else:
            self._event.record(torch.cuda.current_stream(self._arena.device))
            self._copying = True

    @torch.inference_mode()
    def _probe(self, probe: Probe, slot: int) -> None:
        """x and y up, the correction, y down."""
        rows = self._buffers.rows
        x, y = _part(self._x, rows, probe.d_in), _part(self._y, rows, probe.width)
        told, answer = (
            _part(self._buffers.x, rows, probe.d_in),
            _part(self._buffers.y, rows, probe.width),
        )
        x.copy_(told, non_blocking=self._cuda)
        y.copy_(answer, non_blocking=self._cuda)
        names = GROUPS[probe.group]
        lora_apply(
            y,
            x,
            layer=probe.layer,
            modules=names,
            splits=[self._arena.layout.shapes.dims[MODULE_ID[name]][1] for name in names],
            meta=self._planner.alone(slot, rows),
            deterministic=self._deterministic,
        )
        answer.copy_(y, non_blocking=self._cuda)

    def _bring(self, block: int) -> None:
        self._buffers.block.copy_(self._arena.bytes[block], non_blocking=self._cuda)


def _part(buffer: Tensor, rows: int, width: int) -> Tensor:
    return buffer[: rows * width].view(rows, width)

"""ServedPooling: a PoolingCore as the engine process serves it, with the face of EngineCore.

Goes in: the daemon's commands.  Comes out: a StepFrame from every `step`, whose results are bytes.
What only a model that generates can do is refused here, in one line each.  Knows no socket.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from engine.explain import Explainer
from engine.memory.budget import shown_row, shown_size
from engine.messages import (
    Abort,
    Answer,
    Command,
    EngineInfo,
    Explain,
    GetSnapshot,
    SequenceDelta,
    Shutdown,
    StepFrame,
    Submit,
)
from engine.pooling.config import PoolingConfig
from engine.pooling.core import PoolingCore
from engine.pooling.requests import PoolResult, packed
from engine.pooling_messages import NO_GENERATION
from engine.snapshot import Painter, Traffic
from engine.stats import Stats
from engine.status_messages import EngineSnapshot
from engine.verifier import Verifier
from engine.verify_messages import VerifyRevision

#: As between two looks of a generating engine at its card.
COPYING_SECONDS = 0.0005


class ServedPooling:
    """Takes steps on the calling thread.  Raises as PoolingCore does.

    `alive` is called before each layer of a step: on a CPU, one long input may take as long as a
    step that hangs.
    """

    #: Requests are weighed by their tokens, and nobody's wait is foretold.
    starts_per_second = 0.0

    def __init__(
        self,
        config: PoolingConfig,
        *,
        progress: Callable[[str, float], None] = lambda *_: None,
        bell: threading.Event | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = core = PoolingCore(config, progress=progress, bell=bell)
        for layer in core.machine.backbone.layers:
            layer.register_forward_pre_hook(lambda *_: alive())
        self.info = _info(core)
        machine = core.machine
        self._painter = Painter(
            pool=machine.pool,
            prefix=core.prefix,
            slots=core.slots,
            host=machine.host,
            residency=core.residency,
            stats=core.stats,
            block_size=0,
            block_bytes=machine.layout.block_bytes,
        )
        self._explainer = Explainer(
            residency=core.residency,
            memory=core.reclaimer,
            scheduler=_Line(core),
            clock=time.monotonic,
            block_bytes=machine.layout.block_bytes,
        )
        self._verifier = Verifier(
            machine.arena,
            core.planner,
            core.residency,
            rows=core.config.max_batch_tokens,
            deterministic=core.config.deterministic,
            wake=core.bell.set,
        )
        self._answers: list[Answer] = []
        self._refused: list[SequenceDelta] = []

    @property
    def stats(self) -> Stats:
        """Of the steps so far."""
        return self.core.stats

    def take(self, command: Command) -> None:
        """Queue a command for the next step; what only asks is answered with it."""
        match command:
            case GetSnapshot():
                self._answers.append(
                    Answer(command_id=command.command_id, snapshot=self.snapshot())
                )
            case Explain():
                self._answers.append(self._explain(command))
            case VerifyRevision():
                self._verifier.command(command)
            case Submit():
                self._refused.append(_no_generation(command.request_id))
            case Abort():
                pass  # of a Submit: it has ended
            case Shutdown():
                raise AssertionError("the loop's owner carries out Shutdown")
            case _:
                self.core.take(command)

    def step(self) -> StepFrame:
        """One turn of the core."""
        frame = self.core.step()
        self._verifier.advance()
        answers, self._answers = self._answers, []
        refused, self._refused = self._refused, []
        return StepFrame(
            step=self.stats.steps,
            deltas=tuple(refused),
            adapters=frame.adapters,
            answers=(*answers, *frame.answers, *self._verifier.take_answers()),
            pooled=tuple(map(packed, frame.results)),
        )

    @property
    def idle(self) -> bool:
        """The last step ran nothing: `wait` before the next one."""
        return self.core.idle and not self._verifier.waiting

    def wait(self) -> None:
        """Sleep until there may be something to do."""
        if self._verifier.in_flight:  # nobody rings when a card has done a slice
            self.core.bell.wait(COPYING_SECONDS)
        else:
            self.core.wait()

    def close(self) -> None:
        """End all threads.  It cannot be used after it."""
        self._verifier.close()
        self.core.close()

    def shutdown(self) -> StepFrame:
        """End every request with the error `draining`, and tell so."""
        text = "the engine is shutting down"
        ended = [
            packed(PoolResult(request_id, code="draining", message=text))
            for request_id in self.core.abandon()
        ]
        frame = self.step()
        return StepFrame(
            step=frame.step,
            deltas=frame.deltas,
            adapters=frame.adapters,
            answers=frame.answers,
            pooled=(*ended, *frame.pooled),
        )

    def snapshot(self) -> EngineSnapshot:
        """One consistent picture.  Whoever the device computes runs, all others wait."""
        core = self.core
        running = core.running
        picture = self._painter.paint(
            now=time.monotonic(),
            everybody=Traffic(len(running), len(core.queue)),
            base=Traffic(running.count(None), core.queue.waiting_for(None)),
            preemptions=0,
            late_masks=0,
            passes=self.stats.steps,
        )
        return replace(picture, share=core.share)

    def memory_table(self) -> str:
        """What is held on the device, in several lines."""
        info, layout = self.core.info, self.core.machine.layout
        rows = [
            ("weights", info.weight_bytes, ""),
            ("kv", info.kv_bytes, "of one layer and one step" if info.kv_bytes else "none is kept"),
            *([("graphs", info.graph_bytes, "at the most")] if info.graph_bytes else ()),
            (
                "adapters",
                info.adapter_bytes,
                f"{self.info.num_blocks:,} blocks of {shown_size(layout.block_bytes)}",
            ),
        ]
        return "\n".join([f"memory plan of {info.device}", *(shown_row(*row) for row in rows)])

    def _explain(self, command: Explain) -> Answer:
        told = self._explainer.explain(command.rev)
        if told is None:
            message = f"revision {command.rev[:12]} is unknown"
            return Answer(command_id=command.command_id, code="model_not_found", message=message)
        return Answer(command_id=command.command_id, explanation=told)


@dataclass(frozen=True, slots=True)
class _Line:
    """The queue, as the explainer asks a scheduler."""

    core: PoolingCore

    @property
    def limits(self) -> PoolingConfig:
        return self.core.config

    def turn_of(self, rev: str | None) -> tuple[int, int]:
        return self.core.queue.turn_of(rev)

    def tokens_left(self, rev: str) -> int:
        """Nobody runs longer than a step."""
        return 0


def _no_generation(request_id: str) -> SequenceDelta:
    return SequenceDelta(
        request_id=request_id,
        cached_tokens=0,
        finish_reason="error",
        code="invalid_value",
        message=NO_GENERATION,
    )


def _info(core: PoolingCore) -> EngineInfo:
    """The facts of any engine; of KV and of ends there are none."""
    machine, info, config = core.machine, core.info, core.config
    device = machine.device
    cuda = device.type == "cuda"
    return EngineInfo(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if cuda else "cpu",
        dtype=info.dtype,
        layout=info.layout,
        base=info.base,
        block_bytes=info.block_bytes,
        block_size=0,
        num_blocks=machine.pool.num_blocks,
        max_model_len=info.max_length,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=info.max_batch_tokens,
        num_layers=machine.layout.shapes.num_layers,
        module_dims=machine.layout.shapes.dims,
        num_ids=machine.layout.shapes.vocab,
        vocab_size=machine.spec.vocab_size,
        eos_token_ids=(),
        weight_bytes=info.weight_bytes,
        arena_bytes=info.adapter_bytes,
        ram_cache_bytes=machine.host.limit_bytes,
        pid=os.getpid(),
        card_bytes=torch.cuda.mem_get_info(device)[1] if cuda else 0,
        device_uuid=f"GPU-{torch.cuda.get_device_properties(device).uuid}" if cuda else "",
        pooling=info,
        generates=False,
    )

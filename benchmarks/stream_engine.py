"""An engine process without a model: every running sequence gets one token a step, at a given rate.

    python benchmarks/stream_engine.py FD CONFIG     (spawned by the daemon of benchmarks/stream.py)

The process is the engine's own (`engine.process`: inbox, sender, heartbeat, frames); only the core
is made up.  STREAM_RATE is steps a second, 0 as fast as the daemon reads.  STREAM_STAMPS names a
file of doubles, `MAX_TOKENS` a stream: when the n-th token of the request with that seed was told.
STREAM_VOCAB is the number of words, of which any may come.
"""

import mmap
import os
import random
import sys
import threading
import time
from types import SimpleNamespace

from engine import process
from engine.messages import (
    Abort,
    Answer,
    Command,
    EngineInfo,
    GetSnapshot,
    SequenceDelta,
    StepFrame,
    Submit,
)
from engine.status_messages import EngineSnapshot, PoolStatus, RevisionStatus

MAX_TOKENS = 1 << 16
#: Ids below are bytes, as every byte-level vocabulary begins; words follow.
FIRST_WORD = 256
CONTEXT = 1 << 17
INFO = EngineInfo(
    device="none",
    device_name="a made-up engine",
    dtype="float32",
    layout="none",
    block_bytes=1 << 20,
    block_size=16,
    num_blocks=1 << 16,
    max_model_len=CONTEXT,
    max_num_seqs=4096,
    max_batch_tokens=1 << 16,
    num_layers=1,
    module_dims=((8, 8),) * 7,
    num_ids=1 << 17,
    vocab_size=1 << 17,
    eos_token_ids=(0,),
    weight_bytes=1,
    arena_bytes=1,
    ram_cache_bytes=1,
    pid=os.getpid(),
)


class _Sequence:
    """One request: what is left of it, and where its times are noted."""

    def __init__(self, submit: Submit) -> None:
        self.request_id = submit.request_id
        self.left = submit.sampling.max_tokens
        self.told = 0
        seed = submit.sampling.seed
        self.stamp = None if seed is None else seed * MAX_TOKENS


class PacedCore:
    """The face that `engine.process.serve` steps."""

    info = INFO
    starts_per_second = 0.0

    def __init__(self, bell: threading.Event) -> None:
        self.stats = SimpleNamespace(steps=0)
        self._bell = bell
        self._rate = float(os.environ.get("STREAM_RATE", "0"))
        self._words = int(os.environ["STREAM_VOCAB"])
        with open(os.environ["STREAM_STAMPS"], "r+b") as file:
            self._stamps = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self._running: dict[str, _Sequence] = {}
        self._answers: list[Answer] = []
        self._ended: list[SequenceDelta] = []
        self._next = time.monotonic()
        rng = random.Random(0)
        # A long tail, as words have: most tokens are of a few hundred kinds.
        self._draws = [FIRST_WORD + int(self._words ** rng.random()) - 1 for _ in range(1 << 16)]

    @property
    def idle(self) -> bool:
        return not self._running and not self._answers

    def wait(self) -> None:
        self._bell.wait(1.0)
        self._bell.clear()

    def take(self, command: Command) -> None:
        match command:
            case Submit():
                self._running[command.request_id] = _Sequence(command)
            case Abort(request_id):
                if self._running.pop(request_id, None):
                    gone = SequenceDelta(request_id=request_id, finish_reason="abort")
                    self._ended.append(gone)
            case GetSnapshot(command_id):
                self._answers.append(Answer(command_id=command_id, snapshot=self._snapshot()))
            case _:
                self._answers.append(Answer(command_id=command.command_id))

    def step(self) -> StepFrame:
        if self._rate and self._running:
            self._pace()
        self.stats.steps += 1
        step, draws = self.stats.steps, self._draws
        deltas, self._ended = self._ended, []
        for number, sequence in enumerate(list(self._running.values())):
            token = draws[(step * 131 + number * 7919) & 0xFFFF]
            deltas.append(self._tell(sequence, token))
        answers, self._answers = tuple(self._answers), []
        now = time.monotonic()
        for sequence in self._running.values():
            if sequence.stamp is not None:
                self._stamps[sequence.stamp + (sequence.told - 1) % MAX_TOKENS] = now
        for delta in deltas:
            if delta.finish_reason is not None:
                self._running.pop(delta.request_id, None)
        return StepFrame(step=step, deltas=tuple(deltas), answers=answers)

    def shutdown(self) -> StepFrame:
        for request_id in list(self._running):
            self.take(Abort(request_id))
        return StepFrame(step=self.stats.steps, deltas=tuple(self._ended))

    def _pace(self) -> None:
        """Steps that were missed are not made up for: neither does a GPU."""
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
            self._next += 1 / self._rate
        else:
            self._next = now + 1 / self._rate

    def _tell(self, sequence: _Sequence, token: int) -> SequenceDelta:
        sequence.told += 1
        sequence.left -= 1
        return SequenceDelta(
            request_id=sequence.request_id,
            tokens=(token,),
            cached_tokens=0 if sequence.told == 1 else None,
            finish_reason=None if sequence.left else "length",
        )

    def _snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            step=self.stats.steps,
            running=len(self._running),
            waiting=0,
            pool=PoolStatus(
                total=INFO.num_blocks,
                free=INFO.num_blocks,
                kv_active=0,
                kv_cached=0,
                adapter_active=0,
                adapter_idle=0,
                block_bytes=INFO.block_bytes,
                block_size=INFO.block_size,
            ),
            slots_total=8,
            slots_used=0,
            ram_used_bytes=0,
            ram_limit_bytes=1,
            revisions=(),
            base=RevisionStatus(rev="", state="active"),
        )


def main() -> None:
    process._build = lambda config, inbox, outbox, pulse: PacedCore(inbox.bell)  # type: ignore[assignment,return-value]
    process.run()


if __name__ == "__main__":
    sys.exit(main())

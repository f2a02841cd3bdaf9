"""The engine in this process as a driver of `serve.py`: what it can do without a daemon.

Goes in: requests.  Comes out: the time of every token, when the frame that holds it was made.  A
feeder thread hands requests over when they are due, as the inbox thread does in a daemon's engine.
"""

import gc
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from rig import Rig
from streams import Move, Request, Run, Stream, check

from engine.config import EngineConfig
from engine.messages import Abort, StepFrame, Submit


class OfflineDriver:
    """See `streams.Driver`."""

    mode = "offline"

    def __init__(self, config: EngineConfig, scratch: Path, *, files: int = 1) -> None:
        self.rig = Rig(config, scratch, files=files)
        gc.collect()
        gc.freeze()  # as the engine's process does when it is ready
        core = self.rig.core
        spec = core.machine.spec
        info = core.info
        self.vocab = core.machine.vocab_size
        self.table = core.machine.memory.table()
        table_rows = 0 if spec.tied else spec.vocab_size
        itemsize = core.machine.layout.itemsize
        self.facts: dict[str, object] = {
            "device": info.device_name,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_batch_tokens": info.max_batch_tokens,
            "mixed_tokens": info.mixed_tokens,
            "lookahead": core.lookahead,
            # a decode step reads all weights but the embeddings of other tokens
            "weight_bytes": info.weight_bytes - table_rows * spec.hidden_size * itemsize,
            "kv_token_bytes": info.block_bytes // info.block_size,
        }
        self._names = itertools.count(1)

    def run(
        self, background: Sequence[Request], arrivals: Sequence[Request], seconds: float | None
    ) -> Run:
        session = _Session(self.rig, self._names)
        try:
            return session.run(background, arrivals, seconds)
        except Exception:  # not what ends the process: that may have come within a step
            session.end()
            raise

    def settle(self, adapters: Iterable[int], tier: str) -> None:
        {"gpu": self.rig.load, "ram": self.rig.load_ram, "disk": self.rig.evict}[tier](adapters)

    def pin(self, adapters: Iterable[int], on: bool) -> None:
        self.rig.pin(adapters, on)

    def close(self) -> None:
        gc.unfreeze()
        self.rig.close()


class _Session:
    """One run of the step loop."""

    def __init__(self, rig: Rig, names: "itertools.count[int]") -> None:
        self.core = rig.core
        self.rig = rig
        self.names = names
        self.live: dict[str, Stream] = {}
        self.inbox: queue.SimpleQueue[tuple[Submit, Stream]] = queue.SimpleQueue()
        self.loads = self.reads = 0
        self.moves: list[Move] = []
        self.stopped = threading.Event()  # the feeder gives up
        self.feeder: threading.Thread | None = None

    def run(
        self, background: Sequence[Request], arrivals: Sequence[Request], seconds: float | None
    ) -> Run:
        prepared = [(r, self._submit(r)) for r in arrivals]  # registers the adapters
        before = time.monotonic()
        behind = [self._start(self._submit(r), before) for r in background]
        self._step_until(lambda: all(s.times or s.error for s in behind))
        check(behind)
        self.loads = self.reads = 0
        self.moves.clear()
        busy, start = time.process_time(), time.monotonic()
        come = [Stream(due=start + r.at, sent=start + r.at) for r, _ in prepared]
        until = None if seconds is None else start + seconds
        self._feed([(s, submit) for s, (_, submit) in zip(come, prepared, strict=True)], until)

        def over() -> bool:
            if until is not None:
                return time.monotonic() >= until
            return all(s.ended is not None for s in come)

        self._step_until(over)
        end = time.monotonic()
        cpu = {"engine": round((time.process_time() - busy) / (end - start), 3)}
        self.end()
        streams = [*behind, *come]
        check(streams)
        for stream in streams:
            stream.tokens = len(stream.times)
        return Run(behind, come, start, end, self.loads, self.reads, cpu, self.moves)

    def end(self) -> None:
        """Abort what still runs, and wait until it is gone."""
        self.stopped.set()
        if self.feeder is not None:
            self.feeder.join()
        self._take_in()
        for name in self.live:
            self.core.take(Abort(name))
        cut = list(self.live.values())
        self._step_until(lambda: not self.live)
        for stream in cut:
            stream.ended, stream.error = None, ""
        while not self.core.idle:
            self.core.step()

    # ------------------------------------------------------------- the loop
    def _step_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._take_in()
            self._note(self.core.step())
            if self.core.idle and not done():
                self.core.wait()

    def _note(self, frame: StepFrame) -> None:
        now = time.monotonic()
        for delta in frame.deltas:
            stream = self.live[delta.request_id]
            stream.times += [now] * len(delta.tokens)
            if delta.finish_reason is not None:
                stream.ended = now
                del self.live[delta.request_id]
                if delta.finish_reason in ("error", "abort"):
                    stream.error = delta.message or delta.code or delta.finish_reason
        for event in frame.adapters:
            self.reads += (event.before, event.after) == ("registered", "loading")
            self.loads += (event.before, event.after) == ("loading", "idle")
            if event.before == "loading" and event.after in ("ram", "idle"):
                kind: Literal["read", "copy"] = "read" if event.after == "ram" else "copy"
                self.moves.append(Move(kind, now - event.seconds, now, event.num_bytes))

    def _take_in(self) -> None:
        while not self.inbox.empty():
            submit, stream = self.inbox.get()
            stream.sent = time.monotonic()
            stream.tier = self.rig.tier(submit.rev)
            self.live[submit.request_id] = stream
            self.core.take(submit)

    # ------------------------------------------------------------- arriving
    def _submit(self, request: Request) -> Submit:
        name = f"r{next(self.names)}"
        return self.rig.submit(request.prompt, request.max_tokens, request.adapter, name)

    def _start(self, submit: Submit, now: float) -> Stream:
        stream = Stream(due=now, sent=now)
        self.inbox.put((submit, stream))
        return stream

    def _feed(self, coming: list[tuple[Stream, Submit]], until: float | None) -> None:
        """Hand each over when it is due, from a thread, and ring; ring once more at the end."""

        def feed() -> None:
            for stream, submit in coming:
                if self.stopped.wait(max(0.0, stream.due - time.monotonic())):
                    return
                self.inbox.put((submit, stream))
                self.core.bell.set()
            if until is not None and not self.stopped.wait(max(0.0, until - time.monotonic())):
                self.core.bell.set()

        self.feeder = threading.Thread(target=feed, name="feeder", daemon=True)
        self.feeder.start()

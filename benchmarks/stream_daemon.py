"""The lorad daemon as it is, on the engine of stream_engine.py, with a watch on its event loop.

    python benchmarks/stream_daemon.py --config lorad.toml     (spawned by benchmarks/stream.py)

SIGUSR2 begins a measurement, the next one ends it and writes STREAM_REPORT as JSON: how late the
loop ran what was due (`lag_ms`), pauses of the garbage collector, and with STREAM_PROFILE the
functions that were on the stack when the process's CPU time was sampled.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import lorad.daemon
import lorad.engines
from engine.client import EngineClient
from lorad.cli.serve import app

LAG_EVERY = 0.005
SAMPLE_EVERY = 0.001


class PacedClient(EngineClient):
    program = (str(Path(__file__).with_name("stream_engine.py")),)


class Watch:
    """Everything that is measured inside the daemon."""

    def __init__(self) -> None:
        self.on = False
        self.lags: list[float] = []
        self.pauses: list[float] = []
        self.own: Counter[str] = Counter()
        self.within: Counter[str] = Counter()
        self._collecting = 0.0
        gc.callbacks.append(self._collected)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, self._switch)
        due = loop.time()
        while True:
            due = max(due, loop.time()) + LAG_EVERY
            woken = asyncio.Event()
            loop.call_at(due, woken.set)
            await woken.wait()
            if self.on:
                self.lags.append(loop.time() - due)

    def _switch(self) -> None:
        profile = os.environ.get("STREAM_PROFILE")
        if not self.on:
            self.on = True
            if profile:
                signal.signal(signal.SIGPROF, self._sample)
                signal.setitimer(signal.ITIMER_PROF, SAMPLE_EVERY, SAMPLE_EVERY)
            return
        self.on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        report = Path(os.environ["STREAM_REPORT"])
        report.with_suffix(".new").write_text(json.dumps({"lags": self.lags, "gc": self.pauses}))
        report.with_suffix(".new").rename(report)
        if profile:
            Path(profile).write_text(self._profile())

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        elif self.on:
            self.pauses.append(time.thread_time() - self._collecting)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        names = []
        while frame is not None:
            code = frame.f_code
            names.append(f"{Path(code.co_filename).name}:{code.co_name}")
            frame = frame.f_back
        self.own[names[0]] += 1
        self.within.update(set(names))

    def _profile(self) -> str:
        total = sum(self.own.values()) or 1
        lines = [f"{total} samples"]
        for title, counts in (("own", self.own), ("with callees", self.within)):
            lines.append(f"-- {title}")
            lines += [f"{n / total:6.1%}  {name}" for name, n in counts.most_common(45)]
        return "\n".join(lines) + "\n"


class WatchedDaemon(lorad.daemon.Daemon):
    def _build(self) -> None:
        super()._build()
        self.services.tasks.spawn(Watch().run())


if __name__ == "__main__":
    lorad.engines.EngineClient = PacedClient  # type: ignore[misc]
    lorad.daemon.Daemon = WatchedDaemon  # type: ignore[misc]
    sys.exit(app())

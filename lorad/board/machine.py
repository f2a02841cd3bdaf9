"""Machine: what the daemon, the engine, the host and the GPU are busy with.

Goes in: process ids and the GPU's UUID.  Comes out: a `wire_stream.Machine`.  The system is asked
in a thread, and only while somebody looks: the loop never waits for a driver.
"""

import os
import time
from collections.abc import Callable, Sequence

import psutil

from lorad.metrics.nvml import Nvml
from lorad.wire_stream import Machine


class Sampler:
    """Not for several threads at once.  CPU shares are of the time since the last sample, and at
    first of the process's life."""

    def __init__(
        self, nvml: Nvml | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml or Nvml()
        self._clock = clock
        self._spent: dict[int, tuple[float, float]] = {}  # pid -> when, CPU seconds until then

    def sample(self, engine_pids: Sequence[int], gpu: str) -> Machine:
        """All engines together.  `gpu`: its UUID, "" for none.  None where nothing can be known;
        never raises OSError."""
        use = self._nvml.look(gpu) if gpu else None
        memory = psutil.virtual_memory()
        daemon_cpu, daemon_rss = self._process(os.getpid())
        engines = [self._process(pid) for pid in engine_pids]
        return Machine(
            gpu_busy=use.busy if use else None,
            gpu_used_bytes=use.used_bytes if use else None,
            gpu_total_bytes=use.total_bytes if use else None,
            daemon_cpu=daemon_cpu,
            daemon_rss_bytes=daemon_rss,
            engine_cpu=round(sum(cpu for cpu, _ in engines), 3),
            engine_rss_bytes=sum(rss for _, rss in engines),
            host_used_bytes=memory.total - memory.available,
            host_total_bytes=memory.total,
        )

    def _process(self, pid: int) -> tuple[float, int]:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                spent, rss = times.user + times.system, process.memory_info().rss
                began = self._clock() - (time.time() - process.create_time())
        except psutil.Error:
            return 0.0, 0
        now = self._clock()
        before, spent_before = self._spent.get(pid, (began, 0.0))
        self._spent[pid] = now, spent
        passed = now - before
        share = max(spent - spent_before, 0.0) / passed if passed > 0 else 0.0
        return round(share, 3), int(rss)

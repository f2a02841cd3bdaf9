"""A daemon under random traffic for long: does anything that it holds grow?

    python benchmarks/soak.py --model DIR [--minutes 20] [--within SECONDS]

On a card 5 minutes are enough.  --within bounds all of it, the start too: traffic has what is left.
SIGTERM ends the traffic, and the verdict is of what there was; while it starts, it ends all.

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  Clients stream completions on any adapter and give up some; an operator loads,
evicts, pins, replaces, removes and adds again, and tidies the store, without an end.  The daemon is
as it is served but for a signal that has it tell its counts, and for a short ring of events.

JSON lines on stdout: `sample` every --every seconds (bytes, counts; `daemon_` and `engine_` are the
processes'), `idle` before the traffic and after it, and a `verdict`.  For each measure the verdict
has what it would grow by over the time after the warm-up, by the median of the slopes between
samples, and the growth that is let pass.  Exit status 1: something grew, or was not given back when
all was quiet again, or somebody heard what nobody should.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import psutil  # type: ignore[import-untyped]
from daemon_rig import MODEL_NAME, RANK, DaemonRig
from soak_traffic import Traffic
from streams import Failed, Line

from lorad.wire_status import PoolPicture

MIB = 1 << 20
#: Of the run, before it counts: caches fill, arenas grow to their size, pools of threads start.
WARM_SHARE = 0.34
#: Most samples that slopes are taken between: all pairs of them are.
MOST = 240
#: What a measure may grow by after the warm-up: so much, or this share of its median.
PASSES: dict[str, tuple[float, float]] = {
    "daemon_rss": (8 * MIB, 0.03),
    "engine_rss": (16 * MIB, 0.02),
    "daemon_fds": (4, 0.0),
    "engine_fds": (2, 0.0),
    "daemon_threads": (2, 0.0),
    "engine_threads": (2, 0.0),
    "daemon_tasks": (6, 0.0),
    "daemon_objects": (2000, 0.05),
    "engine_objects": (2000, 0.05),
    "vram_allocated": (2 * MIB, 0.0),
    "vram_reserved": (2 * MIB, 0.0),
    "pinned_allocated": (0, 0.0),
    "lost_blocks": (0, 0.0),
}
#: What is left when all is quiet again may differ from before the traffic by this.
QUIET = {"daemon_fds": 6, "engine_fds": 2, "engine_threads": 2, "daemon_tasks": 4}
#: Entries of the prefix cache whose blocks have left, and that a ranking names until it is read.
STALE = 64
#: What both processes tell.
SHARED = ("objects", "cache_entries", "tasks", "types")
REPORT_PATIENCE = 20.0
QUIET_PATIENCE = 60.0
#: After the last request: connections that were kept alive end, and their tasks with them.
SETTLE_SECONDS = 2.0
#: What is kept of --within for the last requests, for quiet and for the daemon's end.
END_SECONDS = 25.0


class Probe:
    """Counts of both processes, from outside and by their own word."""

    def __init__(self, daemon: DaemonRig, reports: Path) -> None:
        self.daemon, self._reports = daemon, reports
        self._started = time.monotonic()

    def sample(self) -> Line:
        """One picture of all; Failed if the engine is another than before or does not answer."""
        status, processes = self.daemon.status(), self.daemon.processes()
        line: Line = {"t": round(time.monotonic() - self._started, 2)}
        for role, process in processes.items():
            told = self._ask(role, process)
            with process.oneshot():
                line[f"{role}_rss"] = process.memory_info().rss
                line[f"{role}_fds"] = process.num_fds()
                line[f"{role}_threads"] = process.num_threads()
            for name, value in told.items():
                line[f"{role}_{name}" if name in SHARED else name] = value
        pool = status.pool
        return line | {
            "kv_blocks": pool.kv_active + pool.kv_cached,
            "kv_active": pool.kv_active,
            "adapter_blocks": pool.adapter_active + pool.adapter_idle,
            "free_blocks": pool.free,
            "lost_blocks": pool.total - pool.free - _used(pool),
            "ram_used": status.ram_used_bytes,
            "running": status.running,
            "waiting": status.waiting,
            "restarts": status.engine_restarts,
            "children": len(processes["daemon"].children()),
        }

    def quiet(self) -> Line:
        """A sample when nothing runs any more."""
        deadline = time.monotonic() + QUIET_PATIENCE
        while (status := self.daemon.status()).running or status.waiting or status.pool.kv_active:
            if time.monotonic() > deadline:
                raise Failed(f"{status.running} run and {status.waiting} wait with no client left")
            time.sleep(0.1)
        time.sleep(SETTLE_SECONDS)
        return self.sample()

    def _ask(self, role: str, process: psutil.Process) -> dict[str, Any]:
        report = self._reports / f"{role}.json"
        report.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + REPORT_PATIENCE
        while not report.exists():
            if time.monotonic() > deadline:
                raise Failed(f"the {role} does not report")
            time.sleep(0.01)
        told: dict[str, Any] = json.loads(report.read_text())
        return told


def _used(pool: PoolPicture) -> int:
    return pool.kv_active + pool.kv_cached + pool.adapter_active + pool.adapter_idle


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """By how much `values` grow over all of `times`: the median slope between any two samples."""
    step = -(-len(times) // MOST)
    points = list(zip(times, values, strict=True))[::step]
    slopes = [(v - u) / (t - s) for (s, u), (t, v) in combinations(points, 2) if t > s]
    return statistics.median(slopes) * (times[-1] - times[0]) if slopes else 0.0


def verdict(samples: Sequence[Line], before: Line, after: Line, wrong: Sequence[str]) -> Line:
    """`flat` if all is well; what is not is in `failed`."""
    first = float(str(samples[0]["t"]))
    last = float(str(samples[-1]["t"]))
    kept = [s for s in samples if float(str(s["t"])) >= first + WARM_SHARE * (last - first)]
    times = [float(str(s["t"])) for s in kept]
    told: dict[str, Line] = {}
    failed = list(dict.fromkeys(wrong))[:10]
    for name, (least, share) in PASSES.items():
        if any(name not in sample for sample in kept):
            continue
        values = [float(str(sample[name])) for sample in kept]
        grew, limit = growth(times, values), max(least, share * statistics.median(values))
        told[name] = {"median": statistics.median(values), "growth": round(grew, 1)}
        told[name] |= {"limit": round(limit, 1), "flat": grew <= limit}
        if grew > limit:
            failed.append(f"{name} grew by {grew:.0f} of {limit:.0f}")
    for name, most in QUIET.items():
        left = int(str(after[name])) - int(str(before[name]))
        if left > most:
            failed.append(f"{name}: {left} more than before the traffic")
    if any(sample["lost_blocks"] for sample in (*samples, after)):
        failed.append("blocks belong to nobody")
    if int(str(after["engine_cache_entries"])) > int(str(after["kv_blocks"])) + STALE:
        entries, blocks = after["engine_cache_entries"], after["kv_blocks"]
        failed.append(f"the prefix cache has {entries} entries for {blocks} blocks")
    if after["restarts"]:
        failed.append(f"the engine ended {after['restarts']} times")
    return {"flat": not failed, "failed": failed, "samples": len(kept), "measures": told}


def run(options: argparse.Namespace, scratch: Path) -> Iterator[Line]:
    reports = scratch / "reports"
    reports.mkdir()
    script = Path(__file__).with_name("soak_daemon.py")
    environment = os.environ | {"SOAK_REPORTS": str(reports), "SOAK_TYPES": str(options.types)}
    began = time.monotonic()
    program = (str(script),)
    daemon = DaemonRig(options.model, _settings(options), scratch, program, environment, apart=True)
    try:
        daemon.wait_ready()
        print(f"ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        traffic = Traffic(daemon, options.adapters, options.clients, options.seed)
        traffic.prepare()
        probe = Probe(daemon, reports)
        before = probe.quiet()
        print(f"traffic after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        yield {"kind": "idle"} | before
        samples = []
        early = _end_early()
        started = time.monotonic()
        until = started + 60 * options.minutes
        if options.within:
            until = min(until, began + options.within - END_SECONDS)
        traffic.start()
        try:
            while (time.monotonic() < until and not early.is_set()) or len(samples) < 4:
                time.sleep(options.every)
                samples.append(probe.sample())
                yield {"kind": "sample"} | samples[-1]
        finally:
            traffic.stop()
        lasted = time.monotonic() - started
        after = probe.quiet()
        yield {"kind": "idle"} | after
        done: Line = {"kind": "verdict", "minutes": round(lasted / 60, 2)}
        done |= {"done": dict(sorted(traffic.counts.items()))}
        yield done | verdict(samples, before, after, traffic.wrong)
    finally:
        daemon.close()


def _end_early() -> threading.Event:
    """From now on SIGTERM ends the traffic, and nothing else."""
    early = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: early.set())
    return early


def _settings(options: argparse.Namespace) -> str:
    """Slots for half of the adapters, host memory for a third, and a pool that cached KV fills in
    the warm-up: what the prefix cache knows of it grows until then."""
    from starting import adapter_bytes

    from engine.models.spec import read_spec

    size = adapter_bytes(read_spec(options.model), options.device)
    slots = max(2, options.adapters // 2)
    return (
        f"[[models]]\nbase = {json.dumps(str(options.model.absolute()))}\n"
        f'name = "{MODEL_NAME}"\ndevice = "{options.device}"\nmax_model_len = 512\n'
        f"max_num_seqs = {max(4, options.clients // 2)}\ncpu_pool = {options.pool}\n"
        f"gpu_memory_utilization = {options.utilization}\n"
        # As many kernels and graphs as this traffic meets: a card's minutes are for the soak.
        f"graph_tokens = 64\n[lora]\nmax_rank = {RANK}\n"
        f"slots = {slots}\nram_cache = {size * max(2, options.adapters // 3)}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--within", type=float, default=0.0, metavar="SECONDS", help="[no bound]")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples [2]")
    parser.add_argument("--adapters", type=int, default=12)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pool", type=int, default=16 * MIB, help="arena bytes on a CPU [16 MiB]")
    parser.add_argument("--utilization", type=float, default=0.2, help="of a card's memory [0.2]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", type=int, default=0, help="of objects, to show in samples [0]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--scratch", type=Path, help="where the daemon's folders lie [a tempdir]")
    options = parser.parse_args(argv)
    if options.device == "auto":
        options.device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    from random_model import ensure_model

    ensure_model(options.model)
    machine: Line = {"benchmark": "soak", "model": options.model.name, "device": options.device}
    flat = False
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="soak-") as scratch:
        try:
            for line in run(options, Path(scratch)):
                print(json.dumps(machine | line), flush=True)
                flat = bool(line.get("flat", False))
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0 if flat else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemon is ended on the way out
    sys.exit(main())

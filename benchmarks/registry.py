"""A registry and an inbox of thousands: start, pages, traffic, collections, rescans, and pauses.

    python benchmarks/registry.py [--adapters 10000] [--dir DIR]

JSON lines on stdout, one a case.  All of them need no card.  `stall_ms` is the longest that the
daemon's loop let a health check wait meanwhile, asked every few milliseconds from another process;
the machine's other work is in it.  Bars: a start under 10 s (the base model's is in it, a tiny
one), a page of 100 rows under 200 ms.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import checkout
import psutil  # type: ignore[import-untyped]
from daemon_rig import DaemonRig
from full_registry import fill, name_of
from random_model import SHAPES, write
from registry_traffic import traffic

from lorad import wire
from lorad.client import LoradClient
from lorad.watch.look import scan
from lorad.watch.watcher import InboxWatcher

START_BAR_SECONDS, PAGE_BAR_MS = 10.0, 200.0
PAGES = 60
PROBE_SECONDS = 0.003
SETTLE_SECONDS = 1.0
#: How long a quiet daemon is looked at; a quiet watcher twice as long.
PAUSE_SECONDS = 10.0
SETTINGS = """
[[models]]
base = {base}
name = "tiny"
device = "cpu"
dtype = "float32"
cpu_pool = "64MiB"
max_model_len = 1024
threads = 1

[lora]
slots = 64
ram_cache = "16MiB"
"""


def say(case: str, **figures: object) -> None:
    print(json.dumps({"case": case, **figures}), flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ----------------------------------------------------------------- the loop's pauses
def _probe(admin: str, pipe: Connection) -> None:
    """Ask until told to end; answers with the longest wait of each stretch."""
    with LoradClient(admin) as client:
        longest = 0.0
        while True:
            began = time.perf_counter()
            client.ping()
            longest = max(longest, time.perf_counter() - began)
            if pipe.poll(PROBE_SECONDS):
                if pipe.recv() == "end":
                    return
                pipe.send(longest)
                longest = 0.0


class Probe:
    """`stretch()` yields a function that gives the longest wait since, in milliseconds."""

    def __init__(self, admin: Path) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_probe, args=(f"unix://{admin}", theirs))
        self._process.start()

    def take(self) -> float:
        self._pipe.send("take")
        return round(1000 * float(self._pipe.recv()), 1)

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join()


@contextmanager
def measured(
    case: str, probe: Probe, daemon: psutil.Process, **more: object
) -> Iterator[dict[str, Any]]:
    """Print wall time, the daemon's CPU time and the longest pause of its loop."""
    probe.take()
    cpu, began = _cpu(daemon), time.perf_counter()
    figures: dict[str, Any] = {}
    yield figures
    seconds = round(time.perf_counter() - began, 3)
    busy = round(_cpu(daemon) - cpu, 3)
    say(case, seconds=seconds, cpu_seconds=busy, stall_ms=probe.take(), **more, **figures)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ----------------------------------------------------------------- cases
def start(rig: DaemonRig, count: int) -> None:
    rig.wait_ready()
    seconds = time.perf_counter() - rig.started_at
    daemon = psutil.Process(rig.process.pid)
    say(
        "start",
        adapters=count,
        seconds=round(seconds, 2),
        cpu_seconds=round(_cpu(daemon), 2),
        rss_mib=round(daemon.memory_info().rss / 2**20),
        bars={"start_s": _bar(seconds, START_BAR_SECONDS)},
    )


def pages(rig: DaemonRig) -> None:
    """First pages, pages behind a cursor, and filters; p50 and the slowest."""
    wishes: dict[str, dict[str, Any]] = {
        "by name": {},
        "by size": {"sort": "-size"},
        "by last use": {"sort": "-last_used"},
        "registered": {"state": "registered"},
        "of a tenant": {"tenant": "tenant-3"},
        "with a word": {"q": "-000"},
    }
    daemon = psutil.Process(rig.process.pid)
    for what, wish in wishes.items():
        times, cursor, cpu = list[float](), None, _cpu(daemon)
        for _ in range(PAGES):
            began = time.perf_counter()
            page = rig.client.adapters(limit=100, cursor=cursor, **wish)
            times.append(1000 * (time.perf_counter() - began))
            assert page.items, what
            cursor = page.cursor
        slowest = max(times)
        say(
            "page",
            what=what,
            total=page.total,
            p50_ms=round(statistics.median(times), 1),
            max_ms=round(slowest, 1),
            cpu_ms=round(1000 * (_cpu(daemon) - cpu) / PAGES, 1),
            bars={"page_ms": _bar(slowest, PAGE_BAR_MS)},
        )


def command_line(rig: DaemonRig) -> None:
    """`loractl ls`, as a person waits for it: with the interpreter's start."""
    for words in (["ls", "--limit", "100"], ["ls"], ["show", name_of(5)], ["status"]):
        command = [sys.executable, "-m", "lorad.cli.app", "-H", f"unix://{rig.admin}", *words]
        env = os.environ | {"PYTHONPATH": str(checkout.ROOT)}
        began = time.perf_counter()
        lines = subprocess.run(command, env=env, check=True, capture_output=True).stdout
        seconds = time.perf_counter() - began
        say("loractl", words=" ".join(words), seconds=round(seconds, 2), lines=lines.count(b"\n"))


def changes(rig: DaemonRig, count: int) -> None:
    """One change at a time: what an operator waits for."""
    for what, do in (
        ("set", lambda n: rig.client.patch(name_of(n), wire.AdapterPatch(priority=n % 100))),
        ("load", lambda n: rig.client.load(name_of(n))),
        ("rm", lambda n: rig.client.remove(name_of(count - 1 - n))),
    ):
        times = []
        for number in range(20):
            began = time.perf_counter()
            do(number)
            times.append(1000 * (time.perf_counter() - began))
        say(
            "change",
            what=what,
            p50_ms=round(statistics.median(times), 1),
            max_ms=round(max(times), 1),
        )


# ----------------------------------------------------------------- the inbox alone
def watcher(inbox: Path, mode: str, pause: float) -> None:
    """In this process, without a daemon: the first look, its memory, and a quiet time."""
    process = psutil.Process()
    before, found = process.memory_info().rss, 0

    def count(folder: object) -> None:
        nonlocal found
        found += 1

    known = {folder: signature for folder, signature in scan(inbox).found.items()}
    for what, remembered in (("new", {}), ("known", known)):
        found = 0
        began, cpu = time.perf_counter(), _cpu(process)
        watched = InboxWatcher(
            inbox,
            settle=SETTLE_SECONDS,
            rescan=60.0,
            mode=mode,  # type: ignore[arg-type]
            known=remembered,
            on_folder=count,
            on_gone=count,
        )
        watched.start()
        watched.scanned.wait()
        looked = time.perf_counter() - began
        while what == "new" and found < len(known):
            time.sleep(0.01)
        settled = time.perf_counter() - began
        busy = _cpu(process) - cpu
        cpu = _cpu(process)
        time.sleep(2 * pause)
        say(
            "watcher",
            mode=watched.mode,
            folders=len(known),
            what=what,
            scanned_seconds=round(looked, 2),
            reported_seconds=round(settled, 2),
            cpu_seconds=round(busy, 2),
            idle_cpu_share=round((_cpu(process) - cpu) / (2 * pause), 4),
            grown_mib=round((process.memory_info().rss - before) / 2**20),
        )
        watched.stop()


# ----------------------------------------------------------------- all of it
def _bar(value: float, limit: float) -> dict[str, object]:
    return {"value": round(value, 2), "limit": limit, "met": value < limit}


def run(count: int, parent: Path | None, pause: float, rates: list[float]) -> None:
    root = Path(tempfile.mkdtemp(prefix="lorad-model-", dir=parent))
    model = root / "tiny"
    write(model, SHAPES["tiny"])
    began = time.perf_counter()

    def prepare(rig: DaemonRig) -> None:
        fill(
            model,
            model_name="tiny",
            store_dir=rig.root / "store",
            state_dir=rig.root / "state",
            inbox=rig.inbox,
            count=count,
            progress=lambda done: note(f"{done} made, {time.perf_counter() - began:.0f} s"),
        )

    rig = DaemonRig(model, SETTINGS.format(base=json.dumps(str(model))), parent, prepare=prepare)
    try:
        _cases(rig, count, pause, rates)
        watched = rig.root / "inbox"
        rig.process.send_signal(signal.SIGTERM)
        rig.process.wait()
        for mode in ("inotify", "polling"):
            watcher(watched, mode, pause)
    finally:
        rig.close()
        shutil.rmtree(root, ignore_errors=True)


def _cases(rig: DaemonRig, count: int, pause: float, rates: list[float]) -> None:
    start(rig, count)
    daemon, probe = psutil.Process(rig.process.pid), Probe(rig.admin)
    try:
        with measured("first seconds after ready", probe, daemon):
            time.sleep(pause)
        with measured("idle", probe, daemon):
            time.sleep(pause)
        with measured("all pages", probe, daemon):
            pages(rig)
        command_line(rig)
        for rate in rates:
            with measured("traffic", probe, daemon) as figures:
                figures |= traffic(rig, [name_of(n) for n in range(count)], rate, 2 * pause)
                figures["rss_mib"] = round(daemon.memory_info().rss / 2**20)
        with measured("rescan of the inbox", probe, daemon):
            rig.process.send_signal(signal.SIGHUP)
            time.sleep(pause / 3)
        with measured("collection", probe, daemon) as figures:
            figures["pieces"] = len(rig.client.gc(dry_run=True).items)
        with measured("changes", probe, daemon):
            changes(rig, count)
        say("memory", rss_mib=round(daemon.memory_info().rss / 2**20))
    finally:
        probe.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument(
        "--dir", type=Path, help="where it puts its files; a disk in memory is fast"
    )
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="of quiet, seconds")
    parser.add_argument(
        "--rates",
        type=lambda text: [float(rate) for rate in text.split(",")],
        default=[100.0, 500.0],
        help="requests a second over all names, one run each",
    )
    options = parser.parse_args(arguments)
    run(options.adapters, options.dir, options.pause, options.rates)


if __name__ == "__main__":
    main()

"""What the step loop pays for the copies of one load, by who makes them, and if they are right.

    python benchmarks/copy_calls.py [--blocks 40] [--repeat 60]

Needs a card.  A load is --blocks blocks of 2 MiB from page-locked memory into scattered places of
an arena, in runs of 1, 2 and 4 blocks.  Each way copies it --repeat times, in turn with the others:

    torch       two views, a stream's context and `copy_` a run
    each        a call of the driver a run
    batch       one call of the driver for all; `overlap` with the flag that prefers copy engines

JSON lines on stdout: `host_us` of queueing with its event (median, and the worst tenth), `cold_us`
the same after the processor's caches were swept, as a model's step sweeps them; `ms` until the last
byte is there; `upload_us`, how long a step's own small upload, queued right behind on another
stream, then takes (`alone` for comparison); `right`, whether all bytes are.  The batched call is
tried in a process of its own first: a driver that dies of it is told of, and not asked again.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence

import checkout  # noqa: F401
import torch

from engine.adapters.copier import runs
from engine.adapters.copy_calls import CopyCalls, each_piece, one_batch
from engine.adapters.host import pin

BLOCK = 2 << 20
#: CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE.
OVERLAP = 1
UPLOAD = 64 << 10
SWEPT = 64 << 20


def ways(*, batched: bool) -> dict[str, CopyCalls | None]:
    """None is torch; what this driver lacks is left out."""
    found: dict[str, CopyCalls | None] = {"each": each_piece()}
    if batched:
        found |= {"batch": one_batch(), "overlap": one_batch(flags=OVERLAP)}
    return {"torch": None} | {name: calls for name, calls in found.items() if calls is not None}


def scattered(blocks: int, run: int) -> list[int]:
    """Places in runs of `run` blocks, with a gap of as many behind each."""
    return [2 * run * (n // run) + n % run for n in range(blocks)]


class Bench:
    """Loads of at most `most` blocks."""

    def __init__(self, most: int) -> None:
        self.arena = torch.zeros(2 * most + 8, BLOCK, dtype=torch.uint8, device="cuda")
        self.host = torch.randint(0, 256, (most, BLOCK), dtype=torch.uint8)
        pin(self.host)
        self.stream, self.other = torch.cuda.Stream(), torch.cuda.Stream()
        self.words = torch.zeros(UPLOAD, dtype=torch.uint8, pin_memory=True)
        self.target = torch.zeros(UPLOAD, dtype=torch.uint8, device="cuda")
        self.swept = torch.zeros(SWEPT, dtype=torch.uint8)
        torch.cuda.synchronize()

    def queue(self, calls: CopyCalls | None, places: Sequence[int]) -> torch.cuda.Event:
        pieces = runs(places, 4)
        if calls is None:
            with torch.cuda.stream(self.stream):
                for i, block, count in pieces:
                    target = self.arena[block : block + count]
                    target.copy_(self.host[i : i + count], non_blocking=True)
        else:
            target, source = self.arena.data_ptr(), self.host.data_ptr()
            result = calls.queue(target, source, pieces, BLOCK, self.stream.cuda_stream)
            assert result == 0, f"the driver said {result}"
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def is_right(self, calls: CopyCalls | None, places: Sequence[int]) -> bool:
        self.arena.fill_(7)
        torch.cuda.synchronize()
        self.queue(calls, places).synchronize()
        there = self.arena.cpu()
        others = sorted(set(range(len(there))) - set(places))
        return bool(
            (there[list(places)] == self.host[: len(places)]).all() and (there[others] == 7).all()
        )

    def upload(self) -> float:
        """Seconds until a step's upload is there, as the host sees it."""
        started = time.perf_counter()
        with torch.cuda.stream(self.other):
            self.target.copy_(self.words, non_blocking=True)
        self.other.synchronize()
        return time.perf_counter() - started

    def once(self, calls: CopyCalls | None, places: Sequence[int], *, cold: bool) -> list[float]:
        """Seconds: queueing, until all is there."""
        if cold:
            self.swept.add_(1)
        started = time.perf_counter()
        event = self.queue(calls, places)
        queued = time.perf_counter()
        event.synchronize()
        return [queued - started, time.perf_counter() - started]

    def beside(self, calls: CopyCalls | None, places: Sequence[int]) -> float:
        event = self.queue(calls, places)
        took = self.upload()
        event.synchronize()
        return took


def measure(
    bench: Bench, known: dict[str, CopyCalls | None], blocks: int, run: int, repeat: int
) -> None:
    places = scattered(blocks, run)
    right = {name: bench.is_right(calls, places) for name, calls in known.items()}
    hot: dict[str, list[list[float]]] = {name: [] for name in known}
    cold: dict[str, list[list[float]]] = {name: [] for name in known}
    uploads: dict[str, list[float]] = {name: [] for name in known}
    for _ in range(repeat):
        for name, calls in known.items():
            hot[name].append(bench.once(calls, places, cold=False))
            cold[name].append(bench.once(calls, places, cold=True))
            uploads[name].append(bench.beside(calls, places))
    alone = [bench.upload() for _ in range(repeat)]
    for name in known:
        queued, whole = zip(*hot[name], strict=True)
        line = {"way": name, "blocks": blocks, "run": run, "right": right[name]}
        line |= {"calls": 1 if "torch" != name != "each" else len(runs(places, 4))}
        line |= {"host_us": us(queued), "host_worst_us": us(queued, 0.9)}
        line |= {"cold_us": us([q for q, _ in cold[name]]), "ms": us(whole) / 1e3}
        line |= {"upload_us": us(uploads[name]), "upload_worst_us": us(uploads[name], 0.9)}
        print(json.dumps(line | {"alone_us": us(alone)}), flush=True)


def us(seconds: Sequence[float], share: float = 0.5) -> float:
    ordered = sorted(seconds)
    return round(1e6 * ordered[int(share * (len(ordered) - 1))], 1)


def probe() -> int:
    """In a process of its own: each way is right, and goes on to be."""
    bench = Bench(40)
    for name, calls in ways(batched=True).items():
        for _ in range(200):
            bench.queue(calls, scattered(40, 1))
        for run in (1, 4):
            assert bench.is_right(calls, scattered(40, run)), f"{name}: other bytes"
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", default="40,20,11", help="of a load [40,20,11]")
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # what sweeps the caches is this thread
    if options.probe:
        return probe()
    tried = subprocess.run([sys.executable, __file__, "--probe"], timeout=60, check=False)
    known = ways(batched=tried.returncode == 0)
    machine = {"benchmark": "copy_calls", "device": torch.cuda.get_device_name()}
    machine |= {"torch": torch.__version__, "ways": list(known), "probe": tried.returncode}
    print(json.dumps(machine), flush=True)
    sizes = [int(size) for size in options.blocks.split(",")]
    bench = Bench(max(sizes))
    for blocks in sizes:
        for run in (1, 2, 4):
            measure(bench, known, blocks, run, options.repeat)
    return tried.returncode


if __name__ == "__main__":
    sys.exit(main())

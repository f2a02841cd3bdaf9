"""Requests over all the names of a full registry, while somebody looks: pages, metrics, the board.

Goes in: a daemon and the names.  Comes out: how many of the requests that were due were answered
and how long they took, and how long the operator's questions took meanwhile.  Names are drawn by
Zipf's law, so most requests ask for a few adapters and most adapters are asked for hardly ever;
arrivals are Poisson's.  The requests are sent by `generator.py`, a process of its own.
"""

import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from daemon_rig import DaemonRig

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
#: What is not answered by then is cut off and counted as such.
PATIENCE_SECONDS = 5.0
LOOK_SECONDS = 0.1


def arrivals(names: Sequence[str], rate: float, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Requests a second for so long, each of one token."""
    draw = random.Random(seed)
    order = list(names)
    draw.shuffle(order)
    weights = [1 / (place + 1) for place in range(len(order))]
    times = []
    at = draw.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += draw.expovariate(rate)
    drawn = draw.choices(order, weights, k=len(times))
    ask = {"prompt": PROMPT, "max_tokens": 1}
    return [{**ask, "model": n, "at": t} for n, t in zip(drawn, times, strict=True)]


class Generator:
    """One job of `generator.py`; `result()` waits for its end."""

    def __init__(self, socket: Path, asked: list[dict[str, Any]], seconds: float) -> None:
        script = str(Path(__file__).with_name("generator.py"))
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        job = {"socket": str(socket), "background": [], "arrivals": asked, "seconds": seconds}
        self._say(json.dumps(job))
        self._hear()  # armed
        self._say(f"start {time.monotonic()}")
        self._hear()  # started
        self._say(f"go {time.monotonic()}")

    def result(self) -> dict[str, Any]:
        self._hear()  # done
        found: dict[str, Any] = self._hear()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        return found

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Looks:
    """Ask what an operator asks, in turn, until `end()`; milliseconds of each."""

    def __init__(self, rig: DaemonRig) -> None:
        client = rig.client
        self._cursor: str | None = None
        self.metrics_bytes = 0

        def page() -> None:
            self._cursor = client.adapters(limit=100, cursor=self._cursor).cursor

        def metrics() -> None:
            self.metrics_bytes = max(self.metrics_bytes, len(client.metrics().encode()))

        self._asked: dict[str, Callable[[], object]] = {
            "page": page,
            "metrics": metrics,
            "board": client.board,
        }
        self.times: dict[str, list[float]] = {name: [] for name in self._asked}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for name in self._turns():
            began = time.perf_counter()
            self._asked[name]()
            self.times[name].append(1000 * (time.perf_counter() - began))

    def _turns(self) -> Iterator[str]:
        while True:
            for name in self._asked:
                if self._ended.wait(LOOK_SECONDS):
                    return
                yield name

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def traffic(rig: DaemonRig, names: Sequence[str], rate: float, seconds: float) -> dict[str, Any]:
    """Figures of one run; see the module."""
    asked = arrivals(names, rate, seconds, seed=26)
    generator = Generator(rig.inference, asked, seconds + PATIENCE_SECONDS)
    looks = Looks(rig)
    try:
        result = generator.result()
    finally:
        looks.end()
    streams = result["arrivals"]
    answered = [s for s in streams if s["ended"] is not None and not s["error"]]
    errors = Counter(s["error"] for s in streams if s["error"])
    waits = sorted(1000 * (s["ended"] - s["due"]) for s in answered)
    return {
        "rate": rate,
        "due": len(asked),
        "names": len({a["model"] for a in asked}),
        "answered": len(answered),
        "refused": sum(errors.values()),
        "refusals": dict(errors.most_common(3)),
        "cut_off": len(streams) - len(answered) - sum(errors.values()),
        "answer_p50_ms": round(statistics.median(waits), 1) if waits else None,
        "answer_p99_ms": round(waits[int(0.99 * (len(waits) - 1))], 1) if waits else None,
        "generator_share": round(result["cpu"], 2),
        **{f"{k}_p50_ms": round(statistics.median(v), 1) for k, v in looks.times.items() if v},
        **{f"{k}_max_ms": round(max(v), 1) for k, v in looks.times.items() if v},
        "metrics_kib": round(looks.metrics_bytes / 1024),
    }

"""A daemon behind its socket as a driver of `serve.py`: what an application sees.

Goes in: requests.  Comes out: the time of every token, when a load generator received the event
that holds it.  The generators are processes of their own (`generator.py`), and get requests in
turn.  Torch-free.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from daemon_rig import MODEL_NAME, DaemonRig
from streams import Failed, Request, Run, Stream, check

#: From the word to the first request: every generator has read it by then.
HEADSTART_SECONDS = 0.03
QUIET_PATIENCE = 30.0


class SocketDriver:
    """See `streams.Driver`.  `facts` are the engine's, as far as the daemon tells them."""

    mode = "socket"

    def __init__(self, daemon: DaemonRig, vocab: int, workers: int) -> None:
        self.daemon = daemon
        self.vocab = vocab
        script = str(Path(__file__).with_name("generator.py"))
        self._workers = [
            subprocess.Popen(
                [sys.executable, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for _ in range(workers)
        ]
        self._processes = daemon.processes()
        status = daemon.status()
        self.facts: dict[str, object] = {
            "device": status.device_name or status.device,
            "dtype": status.dtype,
            "max_model_len": status.max_model_len,
            "workers": workers,
        }

    def run(
        self, background: Sequence[Request], arrivals: Sequence[Request], seconds: float | None
    ) -> Run:
        used = [r.adapter for r in (*background, *arrivals) if r.adapter is not None]
        self.daemon.register(max(used, default=-1) + 1)
        since = self.daemon.last_event()
        for number, worker in enumerate(self._workers):
            mine = slice(number, None, len(self._workers))
            _say(worker, self._job(background[mine], arrivals[mine], seconds))
        self._hear("armed")
        self._say_all(f"start {time.monotonic() + HEADSTART_SECONDS}")
        self._hear("started")
        busy = {name: _cpu_seconds(process) for name, process in self._processes.items()}
        start = time.monotonic() + HEADSTART_SECONDS
        self._say_all(f"go {start}")
        self._hear("done")
        elapsed = time.monotonic() - start
        cpu = {k: (_cpu_seconds(p) - busy[k]) / elapsed for k, p in self._processes.items()}
        results = [_listen(worker) for worker in self._workers]
        cpu["generator"] = max(r["cpu"] for r in results)
        behind = gather([r["background"] for r in results])
        come = gather([r["arrivals"] for r in results])
        check([*behind, *come])
        self._wait_quiet()
        loads, reads = self.daemon.movements(since)
        end = max(r["end"] for r in results)
        shares_of_a_core = {name: round(share, 3) for name, share in cpu.items()}
        return Run(behind, come, start, end, loads, reads, shares_of_a_core)

    def settle(self, adapters: Iterable[int], tier: str) -> None:
        wanted = list(adapters)
        self.daemon.register(max(wanted, default=-1) + 1)
        if tier == "gpu":
            self.daemon.wish("load", wanted)
            return
        self.daemon.wish("evict", wanted)
        self.daemon.wish("load", wanted, tier="ram")  # packs what was never used before
        if tier == "disk":
            self.daemon.wish("evict", wanted, to="disk")

    def pin(self, adapters: Iterable[int], on: bool) -> None:
        self.daemon.wish("pin" if on else "unpin", adapters)

    def close(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.close()
            worker.wait()
            worker.stdout.close()
        self.daemon.close()

    # ------------------------------------------------------------- inside
    def _job(
        self, background: Sequence[Request], arrivals: Sequence[Request], seconds: float | None
    ) -> Mapping[str, object]:
        return {
            "socket": str(self.daemon.inference),
            "background": [self._plain(r) for r in background],
            "arrivals": [self._plain(r) for r in arrivals],
            "seconds": seconds,
        }

    def _plain(self, request: Request) -> dict[str, object]:
        adapter = request.adapter
        return {
            "model": MODEL_NAME if adapter is None else self.daemon.name(adapter),
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "at": request.at,
        }

    def _say_all(self, line: str) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(line + "\n")
            worker.stdin.flush()

    def _hear(self, word: str) -> None:
        for worker in self._workers:
            said = _listen(worker)
            assert said == word, f"{said} where {word} was due"

    def _wait_quiet(self) -> None:
        """What was cut off ends within a few steps; the next run begins after that."""
        deadline = time.monotonic() + QUIET_PATIENCE
        while (status := self.daemon.status()).running or status.waiting:
            if time.monotonic() > deadline:
                raise Failed(f"{status.running} requests still run {QUIET_PATIENCE:.0f} s later")
            time.sleep(0.02)


def _say(worker: "subprocess.Popen[str]", value: object) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(value, separators=(",", ":")) + "\n")
    worker.stdin.flush()


def _listen(worker: "subprocess.Popen[str]") -> Any:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise Failed(f"a load generator ended with status {worker.wait()}")
    return json.loads(line)


def gather(shares: Sequence[Sequence[dict[str, Any]]]) -> list[Stream]:
    """Back into the order in which the requests were dealt out."""
    count, width = sum(map(len, shares)), len(shares)
    streams = [Stream(**shares[n % width][n // width]) for n in range(count)]
    for stream in streams:
        stream.tokens = stream.tokens or len(stream.times)
    return streams


def _cpu_seconds(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)

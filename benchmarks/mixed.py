"""Pauses between tokens while prompts arrive, by `mixed_tokens`: what prompts do to streams.

    python benchmarks/mixed.py --model DIR [--budgets 0,128,192,256,2048] [--adapters 0,8,64]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  --streams streams decode all the time, on --adapters adapters of rank 16 in
turn.  Beside them a prompt of --prompt random tokens on one of the same adapters arrives every
--every seconds and wants one token.  A budget is `mixed_tokens`; 0 is the engine's own choice.

One JSON line a case on stdout; a pause is what passes between two tokens of the same streams:
  quiet_ms, quiet_p99_ms   pauses while no prompt is there: median, 99th percentile
  pause_ms, pause_p99_ms   the same while prompts arrive
  even                     pause_p99_ms / pause_ms: at most 1.3 is the bar
  against_quiet            pause_p99_ms / quiet_ms
  mixed_share              part of the steps that had rows of a prompt
  first_ms, first_p99_ms   from a prompt's arrival to its token
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from decode import RANK, Rig

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Abort, SamplingParams, Submit

#: Steps before anything is measured: kernels are compiled, and rarer graphs captured.
WARM_STEPS = 200
#: Seats for prompts beside the streams.
GUESTS = 32


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))]


class Street:
    """Streams on one core that never end by themselves, and prompts that pass."""

    def __init__(self, core: EngineCore, revs: list[str], streams: int, prompt: int) -> None:
        self._core = core
        self._revs: list[str | None] = list(revs) or [None]
        self._prompt = prompt
        self._names = count()
        self._random = random.Random(0)
        self._arrived: dict[str, float] = {}
        self._rows = 0
        self.first: list[float] = []  # seconds from arrival to token
        self.streams = [self._submit(n, prompt, 1 << 20) for n in range(streams)]
        started: set[str] = set()
        while len(started) < streams:
            started |= {d.request_id for d in core.step().deltas if d.tokens}

    def walk(self, steps: int, every: float | None) -> tuple[list[float], float]:
        """(seconds of each pause, share of steps with a prompt); `every` None: no prompts."""
        self.first = []
        pauses: list[float] = []
        mixed = 0
        before = time.perf_counter()
        due = before
        streams = set(self.streams)
        while len(pauses) < steps:
            if every is not None and time.perf_counter() >= due:
                name = self._submit(next(self._names), self._prompt, 1)
                self._arrived[name] = time.perf_counter()
                due += every
            waiting = bool(self._arrived)
            told = [d for d in self._core.step().deltas if d.tokens]
            now = time.perf_counter()
            for delta in told:
                if delta.request_id in self._arrived:
                    self.first.append(now - self._arrived.pop(delta.request_id))
            if streams & {delta.request_id for delta in told}:
                pauses.append(now - before)
                before = now
                mixed += waiting
        while self._arrived:
            for delta in self._core.step().deltas:
                self._arrived.pop(delta.request_id, None)
        return pauses, mixed / steps

    def end(self) -> None:
        for name in self.streams:
            self._core.take(Abort(name))
        self._core.step()
        while not self._core.idle:
            self._core.step()

    def _submit(self, number: int, length: int, tokens: int) -> str:
        size = self._core.machine.spec.vocab_size
        name = f"{id(self)} {next(self._names)}"
        ids = [self._random.randrange(size) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        rev = self._revs[number % len(self._revs)]
        self._core.take(Submit(request_id=name, prompt=ids, sampling=sampling, rev=rev))
        return name


def measure(rig: Rig, adapters: int, budget: int, options: argparse.Namespace) -> dict[str, Any]:
    scheduler = rig.core.scheduler
    chosen = budget or rig.core.config.mixed_tokens
    scheduler.limits = replace(scheduler.limits, mixed_tokens=chosen)
    street = Street(rig.core, rig.revs[:adapters], options.streams, options.prompt)
    street.walk(WARM_STEPS, options.every)
    quiet, _ = street.walk(options.steps // 2, None)
    pauses, mixed = street.walk(options.steps, options.every)
    street.end()
    quiet_ms, pause_ms, p99_ms = (
        1e3 * percentile(*which) for which in ((quiet, 0.5), (pauses, 0.5), (pauses, 0.99))
    )
    return {
        "mixed_tokens": chosen,
        "quiet_ms": round(quiet_ms, 3),
        "quiet_p99_ms": round(1e3 * percentile(quiet, 0.99), 3),
        "pause_ms": round(pause_ms, 3),
        "pause_p99_ms": round(p99_ms, 3),
        "even": round(p99_ms / pause_ms, 3),
        "against_quiet": round(p99_ms / quiet_ms, 3),
        "mixed_share": round(mixed, 3),
        "prompts": len(street.first),
        "first_ms": round(1e3 * percentile(street.first, 0.5), 2),
        "first_p99_ms": round(1e3 * percentile(street.first, 0.99), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--budgets", default="0")
    parser.add_argument("--adapters", default="0,8,64")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--every", type=float, default=0.1, help="seconds")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    counts = [int(n) for n in options.adapters.split(",")]
    if not (options.model / "config.json").exists():
        from random_model import SHAPES, write

        write(options.model, SHAPES["llama3-8b"])
    tokens = WARM_STEPS + 2 * options.steps + 500  # of a stream, from its first to its abort
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        max_num_seqs=options.streams + GUESTS,
        max_model_len=options.prompt + tokens,
        slots=max(*counts, 1),
        max_rank=RANK,
    )
    rig = Rig(config, lookahead=None)
    print(rig.core.machine.memory.table(), file=sys.stderr, flush=True)
    machine = {
        "benchmark": "mixed",
        "device": rig.core.info.device_name,
        "dtype": rig.core.info.dtype,
        "torch": torch.__version__,
        "model": options.model.name,
        "streams": options.streams,
        "prompt": options.prompt,
        "every_s": options.every,
    }
    with tempfile.TemporaryDirectory() as scratch:
        if max(counts):
            rig.add_adapters(max(counts), Path(scratch))
        for adapters in counts:
            for budget in (int(n) for n in options.budgets.split(",")):
                case = {"adapters": adapters} | measure(rig, adapters, budget, options)
                print(json.dumps(machine | case), flush=True)
    rig.core.close()


if __name__ == "__main__":
    main()

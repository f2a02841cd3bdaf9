"""Milliseconds a decode step of the engine, base alone and with adapters, and how idle the GPU is.

    python benchmarks/decode.py --model DIR [--cases 1:0,16:0,64:0,1:1,64:1,16:8,64:8,64:64]
                                [--joined on|off] [--profile FILE] [--extra-vocab N] [--own N]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  A case is batch:adapters; adapters are of rank 16 on all projections, random,
and all rows use one in turn.  Every stream has a prompt of --prompt + 1 random tokens and makes
--tokens new ones, so that a step has about prompt + tokens / 2 tokens of context a stream.  Prompts
are computed before, and found in the prefix cache: all streams begin together.

One JSON line a case on stdout:
  step_ms             median over the steps in which all streams make a token (wall clock)
  forward_ms          the forward pass of one such step, from the middle of the run, again and again
                      (CUDA events): what a step would take if nothing else had to be done
  idle_share          part of the profiled steps, from the same middle, in which no kernel ran
  idle_between_share  the part of it in gaps of more than 5 us: between steps, not between kernels
  added_ms            step_ms less the base's at the same batch, if the run measured that before
  bars                on an H200: figures against what lorad wants to reach with Llama-3-8B's shape
--extra-vocab is lora.extra_vocab; with --own each adapter has so many token ids of its own.
--joined is for `tiles.JOINED`: one launch of LoRA beside each product, or two around it.
With --profile, FILE gets a JSON object with a list of kernels for every case, by name: launches a
step, time a step, and the idle time before a launch (see `kernel_table.py`).
A case that fails prints its error, the others go on, and the exit status is 1.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch
from kernel_table import Kernel, Table, tabulate
from random_model import ensure_model
from rig import RANK, DeviceClock, Rig, random_prompt
from streams import bars_of

from engine.config import EngineConfig
from engine.kernels import tiles

#: Token ids, and the number of an adapter.
Prompt = tuple[list[int], int | None]

CASES = "1:0,16:0,64:0,1:1,64:1,16:8,64:8,64:64"
#: Tokens of a first run, enough for all streams to decode together for a while: kernels are
#: compiled, and a rare plan's graph is captured when it comes back.
WARM_TOKENS = 40
#: Steps before the middle is measured, and steps that are profiled.
SETTLING, PROFILED = 6, 16
#: Tokens of the streams that the middle is measured on: they outlive both.
MIDDLE_TOKENS = SETTLING + PROFILED + 20
REPLAYS = 30


#: Milliseconds on an H200: a base step by batch, and what adapters may add to it, by their number.
BASE_BARS = {1: 4.5, 64: 6.2}
ADDED_BARS = {1: 0.45, 8: 0.7, 64: 1.7}
IDLE_BAR = 0.03  # between steps, at batch 64


class Bench:
    """A rig, and streams that are all alike."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.core = rig, rig.core
        self.graphs = rig.core.runner.graphs
        self._ids = count(1)
        self._random = np.random.default_rng(0)
        self._forward: float | None = None
        self._armed = False
        if self.graphs is not None:
            self._run = self.graphs.run
            self.graphs.run = self._timed  # type: ignore[method-assign,assignment]

    def prompts(self, batch: int, adapters: int, length: int) -> list[Prompt]:
        """Prompts that are in the prefix cache but for their last token."""
        vocab = self.core.machine.vocab_size
        made: list[Prompt] = [
            (random_prompt(self._random, length + 1, vocab), n % adapters if adapters else None)
            for n in range(batch)
        ]
        self.run(made, 1)
        return made

    def submit(self, prompts: Sequence[Prompt], tokens: int) -> None:
        for ids, adapter in prompts:
            self.core.take(self.rig.submit(ids, tokens, adapter, f"r{next(self._ids)}"))

    def step(self) -> tuple[int, int]:
        """(tokens made, streams ended); RuntimeError if one ended in an error."""
        frame = self.core.step()
        for delta in frame.deltas:
            if delta.finish_reason == "error":
                raise RuntimeError(delta.message or delta.code)
        ended = sum(delta.finish_reason is not None for delta in frame.deltas)
        made = sum(len(delta.tokens) for delta in frame.deltas)
        if not made and self.core.idle:
            self.core.wait()
        return made, ended

    def run(self, prompts: Sequence[Prompt], tokens: int) -> list[tuple[float, int]]:
        """(when, tokens made) of every step that made some."""
        self.submit(prompts, tokens)
        left, steps = len(prompts), []
        while left:
            made, ended = self.step()
            left -= ended
            if made:
                steps.append((time.perf_counter(), made))
        self._come_to_rest()
        return steps

    def middle(self, prompts: Sequence[Prompt]) -> tuple[float | None, list[Kernel]]:
        """Seconds of a step's forward pass alone, and the kernels of PROFILED whole steps.

        Both of steps in which all streams make a token.  None where steps are not padded, no
        kernels where there is no card.
        """
        self.submit(prompts, MIDDLE_TOKENS)
        left = len(prompts)
        made = 0
        while made < len(prompts) == left:
            made, ended = self.step()
            left -= ended
        for _ in range(SETTLING):
            left -= self.step()[1]
        self._armed = self.graphs is not None
        left -= self.step()[1]
        self._armed = False
        kernels, ended = self._profiled()
        left -= ended
        if left < len(prompts):
            raise RuntimeError("a stream ended before all others were measured beside it")
        while left:
            left -= self.step()[1]
        self._come_to_rest()
        return self._forward, kernels

    def _profiled(self) -> tuple[list[Kernel], int]:
        """The kernels of exactly PROFILED steps: what was launched before has ended by then."""
        ended = 0
        if self.core.machine.device.type != "cuda":
            return [], ended
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(PROFILED):
                ended += self.step()[1]
            torch.cuda.synchronize()
        kernels = [
            (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ]
        return kernels, ended

    def _timed(self, *arguments: Any) -> torch.Tensor | None:
        """A padded step's forward pass; when armed, REPLAYS times, which writes the same again."""
        logits = self._run(*arguments)
        if self._armed:
            self._armed = False
            clock = DeviceClock(self.core.machine.device)
            for _ in range(REPLAYS):
                logits = self._run(*arguments)
            self._forward = clock.seconds() / REPLAYS
        return logits

    def _come_to_rest(self) -> None:
        while not self.core.idle:
            self.core.step()


def step_seconds(steps: list[tuple[float, int]], batch: int) -> list[float]:
    """What passed between two steps that made a token for every stream."""
    return [b - a for (a, _), (b, made) in pairwise(steps) if made == batch][1:]


def measure(
    bench: Bench, batch: int, adapters: int, prompt: int, tokens: int
) -> tuple[dict[str, Any], Table | None]:
    """The figures of one case, and the table of its kernels."""
    prompts = bench.prompts(batch, adapters, prompt)
    bench.run(prompts, min(WARM_TOKENS, tokens))
    graphs = bench.graphs
    before = graphs.num_replays if graphs else 0
    gaps = step_seconds(bench.run(prompts, tokens), batch)
    ordered = sorted(gaps)
    case: dict[str, Any] = {
        "step_ms": round(1e3 * statistics.median(gaps), 3),
        "step_p99_ms": round(1e3 * ordered[int(0.99 * (len(gaps) - 1))], 3),
        "steps": len(gaps),
        "graph_steps": (graphs.num_replays if graphs else 0) - before,
        "tokens_per_s": round(batch / statistics.median(gaps), 1),
    }
    forward, kernels = bench.middle(bench.prompts(batch, adapters, prompt + tokens // 2))
    if forward is not None:
        case["forward_ms"] = round(1e3 * forward, 3)
    table = tabulate(kernels) if kernels else None
    if table is not None:
        case["idle_share"] = round(table.idle / table.span, 4)
        case["idle_between_share"] = round(table.between / table.span, 4)
    return case, table


def bars(case: dict[str, Any]) -> dict[str, object]:
    """What can be held against a limit."""
    batch, adapters = case["batch"], case["adapters"]
    held: dict[str, tuple[float, float]] = {}
    if not adapters and batch in BASE_BARS:
        held["step_ms"] = case["step_ms"], BASE_BARS[batch]
    if adapters in ADDED_BARS and "added_ms" in case:
        held["added_ms"] = case["added_ms"], ADDED_BARS[adapters]
    if batch == 64 and "idle_between_share" in case:
        held["idle_between_share"] = case["idle_between_share"], IDLE_BAR
    return bars_of(**held)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--lookahead", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--joined", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("--extra-vocab", type=int, default=0)
    parser.add_argument("--own", type=int, default=0)
    options = parser.parse_args(argv)
    cases = [tuple(map(int, case.split(":"))) for case in options.cases.split(",")]
    if options.profile and not torch.cuda.is_available():
        print("error: --profile needs a CUDA card\n  try: leave it out", file=sys.stderr)
        return 2
    if options.joined != "auto":
        tiles.JOINED = options.joined == "on"
    ensure_model(options.model)
    started = time.perf_counter()
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        max_num_seqs=max(batch for batch, _ in cases),
        max_model_len=1 + options.prompt + max(options.tokens, options.tokens // 2 + MIDDLE_TOKENS),
        slots=max(1, *(adapters for _, adapters in cases)),
        max_rank=RANK,
        ram_cache=1 << 30,
        extra_vocab=options.extra_vocab,
    )
    ahead = {"auto": None, "on": True, "off": False}[options.lookahead]
    failed, tables, base = False, [], {}
    with tempfile.TemporaryDirectory() as scratch:
        rig = Rig(config, Path(scratch), lookahead=ahead, own=options.own)
        core, bench = rig.core, Bench(rig)
        print(core.machine.memory.table(), file=sys.stderr, flush=True)
        machine = {
            "benchmark": "decode",
            "device": core.info.device_name,
            "dtype": core.info.dtype,
            "torch": torch.__version__,
            "model": options.model.name,
            "lookahead": core.lookahead,
            "joined": tiles.JOINED,
            "prompt": options.prompt,
            "tokens": options.tokens,
            "extra_vocab": options.extra_vocab,
            "own": options.own,
        }
        ready = round(time.perf_counter() - started, 1)
        graphs = bench.graphs.num_graphs if bench.graphs else 0
        print(json.dumps(machine | {"ready_s": ready, "graphs": graphs}), flush=True)
        for batch, adapters in cases:
            case: dict[str, Any] = {"batch": batch, "adapters": adapters}
            try:
                rig.load(range(adapters))
                figures, table = measure(bench, batch, adapters, options.prompt, options.tokens)
                case |= figures
                if not adapters:
                    base[batch] = case["step_ms"]
                elif batch in base:
                    case["added_ms"] = round(case["step_ms"] - base[batch], 3)
                if "H200" in core.info.device_name:
                    case["bars"] = bars(case)
                if table is not None:
                    tables.append(case | table.a_step(PROFILED))
            except Exception as error:  # a benchmark's border: the other cases go on
                traceback.print_exc()
                case["error"] = f"{type(error).__name__}: {error}"
                failed = True
            print(json.dumps(machine | case), flush=True)
        rig.close()
    if options.profile:
        options.profile.write_text(json.dumps(machine | {"cases": tables}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

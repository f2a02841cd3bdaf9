"""Milliseconds a decode step of the engine, base alone and with adapters, and how idle the GPU is.

    python benchmarks/decode.py --model DIR [--cases 1:0,16:0,64:0,1:1,64:1,16:8,64:8,64:64]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  A case is batch:adapters; adapters are of rank 16 on all projections, random,
and all rows use one in turn.  Every stream has a prompt of --prompt random tokens and makes
--tokens new ones, so that a step has about prompt + tokens / 2 tokens of context a stream.

One JSON line a case on stdout:
  step_ms             median over the steps in which all streams make a token (wall clock)
  forward_ms          the same forward pass alone, again and again (CUDA events)
  idle_share          part of the profiled steps in which no kernel ran
  idle_between_share  the part of it in gaps of more than 5 us: between steps, not between kernels
A case that fails prints its error, the others go on, and the exit status is 1.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.layout import MODULES, place, stream_order
from engine.memory.arena import DTYPES
from engine.messages import (
    AddRevision,
    Load,
    PackedManifest,
    PackedModule,
    SamplingParams,
    Submit,
)

CASES = "1:0,16:0,64:0,1:1,64:1,16:8,64:8,64:64"
RANK = 16
#: Tokens of a first run, enough for all streams to decode together for a while: kernels are
#: compiled, and a rare plan's graph is captured when it comes back.
WARM_TOKENS = 40
PROFILED_TOKENS = 24
REPLAYS = 30
GAP_SECONDS = 5e-6


class Rig:
    """A core with adapters on the device, and a way to run streams on it."""

    def __init__(self, config: EngineConfig, *, lookahead: bool | None) -> None:
        self.core = EngineCore(config, lookahead=lookahead)
        self.revs: list[str] = []
        self._ids = count(1)
        self._random = random.Random(0)
        self.last_forward: tuple[Any, ...] | None = None
        decode = self.core.runner.decode
        if decode is not None:
            run = decode.run

            def noted(*arguments: Any) -> torch.Tensor:
                self.last_forward = arguments
                return run(*arguments)

            decode.run = noted  # type: ignore[method-assign]

    def add_adapters(self, number: int, folder: Path) -> None:
        """One packed file of noise, loaded `number` times into blocks of its own."""
        layout = self.core.machine.layout
        modules = stream_order(
            PackedModule(layer, module, RANK, 1.0)
            for layer in range(layout.shapes.num_layers)
            for module in MODULES
        )
        placement = place(modules, layout)
        path = folder / "adapter.bin"
        numbers = placement.num_blocks * layout.block_bytes // layout.itemsize
        noise = torch.randn(numbers, generator=torch.Generator().manual_seed(1)) * 0.01
        path.write_bytes(noise.to(DTYPES[layout.dtype]).view(torch.uint8).numpy().tobytes())
        for n in range(number):
            manifest = PackedManifest(
                rev=f"{n:064x}",
                path=str(path),
                layout=layout.id,
                num_blocks=placement.num_blocks,
                true_bytes=placement.true_bytes,
                max_rank=RANK,
                changes_kv=True,
                modules=modules,
            )
            self._call(lambda i, m=manifest: AddRevision(command_id=i, manifest=m))
            self._call(lambda i, m=manifest: Load(command_id=i, rev=m.rev))
            self.revs.append(manifest.rev)

    def run(self, batch: int, adapters: int, prompt: int, tokens: int) -> list[tuple[float, int]]:
        """(when, tokens made) of every step that made some."""
        vocab = self.core.machine.spec.vocab_size
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for n in range(batch):
            ids = [self._random.randrange(vocab) for _ in range(prompt)]
            rev = self.revs[n % adapters] if adapters else None
            name = f"r{next(self._ids)}"
            self.core.take(Submit(request_id=name, prompt=ids, sampling=sampling, rev=rev))
        left, steps = batch, []
        while left:
            frame = self.core.step()
            made = sum(len(delta.tokens) for delta in frame.deltas)
            left -= sum(delta.finish_reason is not None for delta in frame.deltas)
            if any(delta.finish_reason == "error" for delta in frame.deltas):
                raise RuntimeError(next(d.message for d in frame.deltas if d.message))
            if made:
                steps.append((time.perf_counter(), made))
            elif self.core.idle:
                self.core.wait()
        while not self.core.idle:
            self.core.step()
        return steps

    def _call(self, make: Callable[[int], AddRevision | Load]) -> None:
        command = make(next(self._ids))
        self.core.take(command)
        while True:
            for answer in self.core.step().answers:
                if answer.code:
                    raise RuntimeError(f"{answer.code}: {answer.message}")
                return
            if self.core.idle:
                self.core.wait()


def step_seconds(steps: list[tuple[float, int]], batch: int) -> list[float]:
    """What passed between two steps that made a token for every stream."""
    return [b - a for (a, _), (b, made) in pairwise(steps) if made == batch][1:]


def forward_seconds(rig: Rig) -> float | None:
    """The last decode step's forward pass by itself; None where there is no card."""
    decode, arguments = rig.core.runner.decode, rig.last_forward
    if decode is None or arguments is None:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        for _ in range(3):
            decode.run(*arguments)
        start.record()
        for _ in range(REPLAYS):
            decode.run(*arguments)
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS / 1e3


def idle_shares(kernels: list[tuple[float, float]]) -> tuple[float, float]:
    """(all, in gaps between steps) of the span of `kernels`, (start, end) in seconds."""
    kernels.sort()
    begin, busy_until = kernels[0]
    idle = between = 0.0
    for start, end in kernels:
        gap = start - busy_until
        if gap > 0:
            idle += gap
            between += gap if gap > GAP_SECONDS else 0.0
        busy_until = max(busy_until, end)
    span = busy_until - begin
    return idle / span, between / span


def profiled(rig: Rig, batch: int, adapters: int, prompt: int) -> tuple[float, float] | None:
    """Idle shares of decode steps under the profiler; None where there is no card."""
    if rig.core.machine.device.type != "cuda":
        return None
    vocab = rig.core.machine.spec.vocab_size
    rng = random.Random(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=PROFILED_TOKENS + 8, ignore_eos=True)
    for n in range(batch):
        rev = rig.revs[n % adapters] if adapters else None
        ids = [rng.randrange(vocab) for _ in range(prompt)]
        rig.core.take(Submit(request_id=f"profiled {n}", prompt=ids, sampling=sampling, rev=rev))
    ends = tokens = 0
    while tokens < batch:  # until the last prompt has been taken in
        tokens = sum(len(delta.tokens) for delta in rig.core.step().deltas)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_TOKENS // 2):
            ends += sum(d.finish_reason is not None for d in rig.core.step().deltas)
        torch.cuda.synchronize()
    while ends < batch:
        ends += sum(d.finish_reason is not None for d in rig.core.step().deltas)
    while not rig.core.idle:
        rig.core.step()
    kernels = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return idle_shares(kernels) if kernels else None


def measure(rig: Rig, batch: int, adapters: int, prompt: int, tokens: int) -> dict[str, Any]:
    rig.run(batch, adapters, prompt, min(WARM_TOKENS, tokens))
    decode = rig.core.runner.decode
    before = decode.num_replays if decode else 0
    gaps = step_seconds(rig.run(batch, adapters, prompt, tokens), batch)
    ordered = sorted(gaps)
    case: dict[str, Any] = {
        "step_ms": round(1e3 * statistics.median(gaps), 3),
        "step_p99_ms": round(1e3 * ordered[int(0.99 * (len(gaps) - 1))], 3),
        "steps": len(gaps),
        "graph_steps": (decode.num_replays if decode else 0) - before,
        "tokens_per_s": round(batch / statistics.median(gaps), 1),
    }
    forward = forward_seconds(rig)
    if forward is not None:
        case["forward_ms"] = round(1e3 * forward, 3)
    shares = profiled(rig, batch, adapters, prompt)
    if shares is not None:
        case["idle_share"], case["idle_between_share"] = (round(share, 4) for share in shares)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--lookahead", choices=("auto", "on", "off"), default="auto")
    options = parser.parse_args()
    cases = [tuple(map(int, case.split(":"))) for case in options.cases.split(",")]
    if not (options.model / "config.json").exists():
        from random_model import SHAPES, write

        write(options.model, SHAPES["llama3-8b"])
    most = max(adapters for _, adapters in cases)
    started = time.perf_counter()
    rig = Rig(
        EngineConfig(
            model=str(options.model),
            device=options.device,
            max_num_seqs=max(batch for batch, _ in cases),
            max_model_len=options.prompt + max(options.tokens, PROFILED_TOKENS + 8),
            slots=max(most, 1),
            max_rank=RANK,
            ram_cache=1 << 30,
        ),
        lookahead={"auto": None, "on": True, "off": False}[options.lookahead],
    )
    core = rig.core
    print(core.machine.memory.table(), file=sys.stderr, flush=True)
    machine = {
        "benchmark": "decode",
        "device": core.info.device_name,
        "dtype": core.info.dtype,
        "torch": torch.__version__,
        "model": options.model.name,
        "lookahead": core.lookahead,
        "prompt": options.prompt,
        "tokens": options.tokens,
    }
    ready = time.perf_counter() - started
    graphs = core.runner.decode.num_graphs if core.runner.decode else 0
    print(json.dumps(machine | {"ready_s": round(ready, 1), "graphs": graphs}), flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for batch, adapters in cases:
            case: dict[str, Any] = {"batch": batch, "adapters": adapters}
            try:
                if adapters and not rig.revs:
                    rig.add_adapters(most, Path(scratch))
                case |= measure(rig, batch, adapters, options.prompt, options.tokens)
            except Exception as error:  # a benchmark's border: the other cases go on
                traceback.print_exc()
                case["error"] = f"{type(error).__name__}: {error}"
                failed = True
            print(json.dumps(machine | case), flush=True)
    core.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()

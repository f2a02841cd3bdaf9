"""Milliseconds of one forward pass by its rows, its adapters and its chunk: graph and eager.

    python benchmarks/step_sizes.py --model DIR [--seqs 96] [--steps 64+128:8,0+512:1,...]
                                    [--rules FILE] [--quick] [--profile FILE]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  A step is decode+chunk:adapters: so many decode rows, on as many adapters of
rank 16 in turn (0: the base model), beside a chunk of a prompt on the first of them, or with
`:adapters+` on one more.  Decode rows have --context tokens before them, and so has the chunk.
--rules: with the tiles that a run of gemm.py found best; --quick: nothing is compiled or
captured ahead.

JSON lines on stdout, two kinds:
  rung   a padded size with nothing but padding in it: what rows and sequences cost by themselves
  step   rung, padded LoRA items, and
         graph_ms  the forward pass alone, again and again (CUDA events); none if it has no graph
         eager_ms  the same without its graph (wall clock): what the interpreter makes of it
         pack_ms   host time to lay the step out, plan it and start its upload
With --profile, FILE gets each step's kernels, as `decode.py --profile` writes them.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from kernel_table import tabulate
from random_model import ensure_model
from rig import RANK, Rig, start_quickly

from engine.config import EngineConfig
from engine.kernels import gemm_tiles
from engine.kernels.lora_meta import LoraMeta
from engine.ladder import Rung
from engine.messages import SamplingParams
from engine.sequence import Chunk, Sequence, StepWork
from engine.upload import Words

STEPS = (
    "0+64:0,0+192:0,0+512:0,64+128:0,64+448:0,0+64:1,0+192:1,0+512:1,"
    "64+128:1,64+128:8,64+128:64,64+448:1,64+448:8,64+448:64"
)
REPLAYS, EAGER, PROFILED = 30, 10, 8


class Steps:
    """Makes steps of any mix on a rig's core, and times their forward pass."""

    def __init__(self, rig: Rig, context: int) -> None:
        self.core, self.runner = rig.core, rig.core.runner
        self.context = context
        self._block = 0

    def work(self, decode: int, chunk: int, adapters: int, *, apart: bool = False) -> StepWork:
        """Rows of one slot stand together; the chunk is on the first, or on one of its own."""
        rows = [row.slot for row in self.core.slots.rows.values()]
        slots = rows[:adapters] or [-1]
        chunks = [self._chunk(1, slots[n % len(slots)]) for n in range(decode)]
        if chunk:
            chunks.append(self._chunk(chunk, rows[adapters] if apart else slots[0]))
        chunks.sort(key=lambda c: (c.seq.slot, c.length > 1))
        return StepWork(tuple(chunks))

    def _chunk(self, length: int, slot: int) -> Chunk:
        total = self.context + length
        count = -(-total // self.core.config.block_size)
        most = self.core.config.num_blocks
        blocks = [(self._block + n) % most for n in range(count)]
        self._block += count
        seq = Sequence(
            request_id=f"r{self._block}",
            tokens=[1] * total,
            num_prompt=total,
            sampling=SamplingParams(),
            rev=None,
            identity="base",
            salt="",
            priority=0,
            order=0,
            blocks=blocks,
            slot=slot,
        )
        return Chunk(seq, self.context, length, True)

    def measure(self, work: StepWork) -> dict[str, Any]:
        runner, graphs = self.runner, self.runner.graphs
        batcher, planner = runner._batcher, runner._planner
        plans: list[LoraMeta | None] = []

        def plan(words: Words, rung: Rung | None) -> int:
            plans.append(planner.meta(work, words, rung, graphs.kinds(rung) if rung else ()))
            return planner.words_of(plans[-1])

        packing = []
        with torch.inference_mode():
            for _ in range(REPLAYS):
                torch.cuda.synchronize()
                started = time.perf_counter()
                batch = batcher.pack(work, plan=plan)
                packing.append(time.perf_counter() - started)
            kind = plans[-1].device.kind if plans[-1] and plans[-1].device else None
            told: dict[str, Any] = {
                "rung": batch.rung,
                "tiles": kind.tiles.name if kind else None,
                "items": [kind.shrink_items, kind.expand_items] if kind else None,
                "pack_ms": round(1e3 * statistics.median(packing), 3),
            }
            if batch.rung is None:
                return told | {"eager_ms": wall_ms(lambda: runner.launch(work))}
            before = graphs.num_replays
            for _ in range(3):
                graphs.run(batch, plans[-1])
            if graphs.num_replays > before:
                told["graph_ms"] = device_ms(lambda: graphs.run(batch, plans[-1]))
            graphs.use_graphs = False
            told["eager_ms"] = wall_ms(lambda: graphs.run(batch, plans[-1]))
            graphs.use_graphs = True
        return told

    def kernels(self, work: StepWork) -> dict[str, object]:
        """Where the time of a step's graph goes, by kernel."""
        runner, graphs = self.runner, self.runner.graphs
        plans: list[LoraMeta | None] = []

        def plan(words: Words, rung: Rung | None) -> int:
            plans.append(
                runner._planner.meta(work, words, rung, graphs.kinds(rung) if rung else ())
            )
            return runner._planner.words_of(plans[-1])

        with torch.inference_mode():
            batch = runner._batcher.pack(work, plan=plan)
            graphs.run(batch, plans[-1])
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for _ in range(PROFILED):
                    graphs.run(batch, plans[-1])
                torch.cuda.synchronize()
        ran = [
            (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in seen.events()
            if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ]
        return tabulate(ran).a_step(PROFILED)

    def padding(self, rung: Rung) -> float:
        """Milliseconds of the base model's graph with nothing in it."""
        batch = self.runner._batcher.blank(rung)
        with torch.inference_mode():
            return device_ms(lambda: self.runner.graphs.run(batch, None))


def take_rules(found: Path) -> None:
    """Put the `rule` lines of gemm.py in place of the table's for as many rows."""
    names = {"Rule": gemm_tiles.Rule, "Tile": gemm_tiles.Tile, "_ANY": 1 << 30}
    lines = [json.loads(line) for line in found.read_text().splitlines() if line.startswith("{")]
    told = [line["rule"].rstrip(",") for line in lines if line.get("kind") == "rule"]
    fresh: list[gemm_tiles.Rule] = [eval(rule, {"__builtins__": {}}, names) for rule in told]
    # A rule for any size is no smaller one's: the narrowest come first.
    fresh.sort(key=lambda rule: (rule.rows, rule.d_in, rule.d_out))
    rows = {rule.rows for rule in fresh}
    kept = [rule for rule in gemm_tiles.RULES if rule.rows not in rows]
    gemm_tiles.RULES = tuple(sorted((*fresh, *kept), key=lambda rule: rule.rows))


def device_ms(act: Callable[[], Any]) -> float:
    """Median of the device's time of `act`."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for start, end in pairs:
        start.record()
        act()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(start.elapsed_time(end) for start, end in pairs), 3)


def wall_ms(act: Callable[[], Any]) -> float:
    """Milliseconds of `act`, one after the other, the device included."""
    act()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(EAGER):
        act()
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - started) / EAGER, 3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seqs", type=int, default=96, help="max_num_seqs")
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--graph-tokens", type=int, default=512)
    parser.add_argument("--rules", type=Path, metavar="FILE", help="tiles of products, of gemm.py")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: graphs need a CUDA card\n  try: a machine that has one", file=sys.stderr)
        return 2
    ensure_model(options.model)
    if options.rules:
        take_rules(options.rules)
    if options.quick:
        start_quickly()
    cases = []
    for step in options.steps.split(","):
        rows, _, adapters = step.partition(":")
        decode, _, chunk = rows.partition("+")
        on, apart = int(adapters.rstrip("+") or 0), adapters.endswith("+")
        cases.append((step, int(decode), int(chunk or 0), on, apart))
    most = max(on + apart for *_, on, apart in cases)
    config = EngineConfig(
        model=str(options.model),
        device="cuda",
        max_num_seqs=options.seqs,
        max_model_len=options.context + max(chunk for _, _, chunk, *_ in cases) + 1,
        slots=max(1, most),
        max_rank=RANK,
        graph_tokens=options.graph_tokens,
    )
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        rig = Rig(config, Path(scratch))
        graphs = rig.core.runner.graphs
        assert graphs is not None
        machine = {
            "benchmark": "step_sizes",
            "device": rig.core.info.device_name,
            "torch": torch.__version__,
            "model": options.model.name,
            "context": options.context,
            "rules": str(options.rules or ""),
        }
        ready = round(time.perf_counter() - started, 1)
        print(json.dumps(machine | {"ready_s": ready, "graphs": graphs.num_graphs}), flush=True)
        print(rig.core.machine.memory.table(), file=sys.stderr, flush=True)
        steps, tables = Steps(rig, options.context), []
        for rung in sorted({rung for rung, _ in rig.core.runner.usual()}):
            line = {"kind": "rung", "rung": rung, "graph_ms": steps.padding(rung)}
            print(json.dumps(machine | line), flush=True)
        rig.load(range(most))
        for name, decode, chunk, adapters, apart in cases:
            told = steps.measure(steps.work(decode, chunk, adapters, apart=apart))
            print(json.dumps(machine | {"kind": "step", "step": name} | told), flush=True)
            if options.profile and told["rung"]:
                profile = steps.kernels(steps.work(decode, chunk, adapters, apart=apart))
                tables.append({"batch": decode, "adapters": adapters, "step": name} | profile)
        rig.close()
    if options.profile:
        options.profile.write_text(json.dumps(machine | {"cases": tables}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

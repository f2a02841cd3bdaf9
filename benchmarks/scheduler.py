"""Microseconds of CPU that the scheduler takes of a step: `schedule`, then `settle`.

    python benchmarks/scheduler.py [--cases 64:0,64:64,256:0,256:256] [--prompts 0]

A case is streams:adapters.  All streams decode, with one step of lookahead, on adapters that take
turns; memory, residency and fairness are the real ones, only reads, copies and the model are not.
--prompts prompts of 512 tokens arrive at every tenth step.  One JSON line a case on stdout: median
and 99th percentile of either half, and of both together.
"""

import argparse
import gc
import json
import platform
import random
import time
from collections.abc import Sequence

import checkout  # noqa: F401

from engine.adapters.residency import HostDone, Residency
from engine.adapters.slots import SlotTable
from engine.memory.pool import BlockPool
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer
from engine.messages import AddRevision, Load, PackedManifest, SamplingParams, Submit
from engine.scheduler import Sampled, Scheduler, SchedulerLimits, StepWork

CASES = "64:0,64:64,256:0,256:256"
BLOCK, BLOCK_BYTES, ADAPTER_BLOCKS = 16, 2 << 20, 40
PROMPT, BUDGET = 512, 192


class Ready:
    """Host memory that has everything, and a copier that is done at once."""

    limit_bytes = used_bytes = 1 << 40

    def __init__(self) -> None:
        self.started: list[str] = []

    def want(self, rev: str, path: str, num_bytes: int) -> bool:
        return True

    def ready(self, rev: str) -> bool:
        return True

    def protect(self, rev: str, on: bool) -> None: ...

    def appraise(self, rev: str, worth: int) -> None: ...

    def touch(self, rev: str) -> None: ...

    def drop(self, rev: str) -> None: ...

    def start(self, rev: str, blocks: Sequence[int]) -> None:
        self.started.append(rev)

    def busy(self, rev: str) -> bool:
        return rev in self.started

    def cancel(self, rev: str) -> None: ...


class Host(Ready):
    def take_lost(self) -> list[str]:
        return []

    def poll(self) -> list[HostDone]:
        return []


class Copier(Ready):
    def poll(self) -> list[str]:
        done, self.started = self.started, []
        return done


def scheduler(streams: int, adapters: int, num_blocks: int = 0, **limited: int) -> Scheduler:
    """One with room for `streams`, unless it is said how much, and with all adapters resident;
    `limited`: limits that are not as usual."""
    pool = BlockPool(num_blocks or (streams + 64) * 128 + adapters * ADAPTER_BLOCKS)
    prefix = PrefixIndex(pool, BLOCK, time.monotonic)
    memory = Reclaimer(pool, prefix)
    residency = Residency(
        slots=SlotTable(1024),
        host=Host(),
        copier=Copier(),
        room=memory,
        clock=time.monotonic,
        block_bytes=BLOCK_BYTES,
        bytes_in_flight=1 << 40,
    )
    for n in range(adapters):
        manifest = PackedManifest(
            rev=f"{n:064x}",
            path="",
            layout="",
            num_blocks=ADAPTER_BLOCKS,
            true_bytes=1,
            max_rank=16,
            changes_kv=True,
            modules=(),
        )
        residency.command(AddRevision(command_id=2 * n, manifest=manifest))
        residency.command(Load(command_id=2 * n + 1, rev=manifest.rev))
    for _ in range(4):
        residency.advance()
    usual = {"max_batch_tokens": 2048, "mixed_tokens": BUDGET, "max_model_len": 4096}
    limits = SchedulerLimits(block_size=BLOCK, max_num_seqs=streams + 32, **usual | limited)
    return Scheduler(memory=memory, residency=residency, limits=limits, clock=time.monotonic)


def submit(to: Scheduler, number: int, length: int, tokens: int, adapters: int) -> None:
    draw = random.Random(number)
    to.add(
        Submit(
            request_id=f"r{number}",
            prompt=[draw.randrange(50_000) for _ in range(length)],
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
            rev=f"{number % adapters:064x}" if adapters else None,
        )
    )


def drawn(work: StepWork) -> dict[str, Sampled]:
    return {chunk.seq.request_id: Sampled(7) for chunk in work.chunks if chunk.samples}


def measure(streams: int, adapters: int, steps: int, prompts: int) -> dict[str, float]:
    one = scheduler(streams, adapters)
    for n in range(streams):
        submit(one, n, 64, 4000, adapters)
    scheduling, settling = [], []
    flying: StepWork | None = None
    arrived = streams
    gc.collect()
    for step in range(steps + 200):
        if step % 10 == 0:
            for _ in range(prompts):
                submit(one, arrived, PROMPT, 1, adapters)
                arrived += 1
        before = time.thread_time()
        work = one.schedule()
        between = time.thread_time()
        sampled = drawn(flying) if flying else {}
        ready = time.thread_time()
        if flying:
            one.settle(flying, sampled)
        after = time.thread_time()
        flying = work
        if step >= 200:
            scheduling.append(between - before)
            settling.append(after - ready)
    both = [a + b for a, b in zip(scheduling, settling, strict=True)]
    told = {}
    for name, seconds in (("schedule", scheduling), ("settle", settling), ("both", both)):
        seconds.sort()
        for share in (50, 99):
            place = int(share / 100 * (len(seconds) - 1))
            told[f"{name}_p{share}_us"] = round(1e6 * seconds[place], 1)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=0)
    options = parser.parse_args()
    machine = {"benchmark": "scheduler", "python": platform.python_version()}
    for case in options.cases.split(","):
        streams, adapters = map(int, case.split(":"))
        told = measure(streams, adapters, options.steps, options.prompts)
        case_is = {"streams": streams, "adapters": adapters, "prompts": options.prompts}
        print(json.dumps(machine | case_is | told), flush=True)


if __name__ == "__main__":
    main()

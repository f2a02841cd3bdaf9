"""Time of a draw on one card, from logits to tokens on their way down, and the host's part in it.

    python benchmarks/sampler.py [--rows 1,16,64,256] [--cases greedy,top_k,...] [--seconds 200]
                                 [--tiles] [--torch]

A vocabulary of 128,256, sequences of 576 tokens.  One JSON line a case:

- `device_us`: the whole draw on the device (CUDA events): upload, kernels, download.  It is queued
  behind a kernel that sleeps, so that no launch is waited for; the median of --repeats.
- `host_us`: what `Sampler.launch` takes of the step loop; the median.
- `kernels`: microseconds a draw by the name of the kernel or copy, from a profile.
- `differ`: rows whose token is not the CPU's, of `rows`.  Above one in a hundred the case fails.

`logits` says what the rows are like: `peaked` as a trained model's (half of the weight on one
token), `flat` as an untrained one's.  Logits rotate among so many buffers that what was written
last is not what is read next.  --tiles tries rival tiles on 64 rows; --torch draws by plain torch
on the card, for scale.  A case that fails prints its error and the others go on; the exit code is 1
if any did.  Cases that the time no longer allows print `left_out`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401
import torch
from torch import Tensor

from engine.kernels.sample_device import DeviceOps, Tiles
from engine.kernels.sample_filter import FilterTile
from engine.kernels.sample_race import RaceTile
from engine.kernels.sample_reference import ReferenceOps
from engine.kernels.sample_tell import TellTile
from engine.messages import SamplingParams
from engine.sampler import Ops, Sampler, SamplerLimits
from engine.sequence import Sequence as Row

VOCAB, EOS, PROMPT, LENGTH = 128256, 2, 500, 576
#: Cycles of the kernel that the draws queue behind: about a millisecond.
SLEEP = 2_000_000
PROFILED = 10

CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "temperature": ({"temperature": 0.8},),
    "top_k": ({"top_k": 50},),
    "top_p": ({"top_p": 0.9},),
    "top_k_top_p": ({"top_k": 50, "top_p": 0.9},),
    "large_top_k": ({"top_k": 10000},),
    "min_p": ({"min_p": 0.05},),
    "penalties": ({"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.2},),
    "logprobs": ({"temperature": 0.0, "logprobs": 5},),
    "logprobs_20": ({"temperature": 0.0, "logprobs": 20},),
    "mask": ({"temperature": 0.0, "allowed_token_ids": tuple(range(0, VOCAB, 3))},),
    "mixed": ({"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 50}),
    "everything": (
        {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 5, "min_tokens": 9999},
    ),
}
RIVALS: dict[str, list[Tiles]] = {
    "greedy": [Tiles(race=RaceTile(*t)) for t in ((4096, 4), (8192, 8), (2048, 4), (16384, 16))],
    "temperature": [
        Tiles(race=RaceTile(*t)) for t in ((4096, 4), (8192, 16), (2048, 4), (4096, 16))
    ],
    "top_k_top_p": [
        Tiles(filter=FilterTile(*t))
        for t in ((8192, 4096, 16), (16384, 4096, 32), (4096, 2048, 16), (8192, 2048, 32))
    ],
    "top_p": [
        Tiles(filter=FilterTile(*t))
        for t in ((8192, 4096, 16), (16384, 4096, 32), (4096, 2048, 16), (8192, 8192, 32))
    ],
    "logprobs": [Tiles(tell=TellTile(*t)) for t in ((4096, 4), (2048, 4), (8192, 8))],
}


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    logits: str
    tiles: Tiles | None = None
    by_torch: bool = False

    def line(self) -> dict[str, object]:
        found: dict[str, object] = {"case": self.name, "rows": self.rows, "logits": self.logits}
        if self.tiles is not None:
            found["tiles"] = repr(self.tiles)
        if self.by_torch:
            found["by"] = "torch"
        return found

    def seqs(self) -> list[Row]:
        generator = torch.Generator().manual_seed(1)
        wishes = CASES[self.name]
        return [
            Row(
                request_id=str(n),
                tokens=torch.randint(3, VOCAB, (LENGTH,), generator=generator).tolist(),
                num_prompt=PROMPT,
                sampling=SamplingParams(seed=n, **wishes[n % len(wishes)]),
                rev=None,
                identity="base",
                salt="",
                priority=50,
                order=n,
            )
            for n in range(self.rows)
        ]


def make_logits(case: Case) -> Tensor:
    """(rows, VOCAB) fp32 on the host."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(case.rows, VOCAB, generator=generator)
    if case.logits == "peaked":
        logits *= 2
        likely = torch.randint(VOCAB, (case.rows, 200), generator=generator)
        steps = torch.empty(case.rows, 200).exponential_(generator=generator)
        logits.scatter_(1, likely, 9 + 1.6 * steps)
    return logits


@torch.inference_mode()
def measure(case: Case, repeats: int) -> dict[str, Any]:
    limits = SamplerLimits(VOCAB, (EOS,))
    device = torch.device("cuda")
    ops: Ops = ReferenceOps(VOCAB)
    if not case.by_torch:
        ops = DeviceOps(device, rows=case.rows, vocab=VOCAB, tiles=case.tiles)
    sampler = Sampler(limits, device=device, max_rows=case.rows, kernels=ops)
    master, seqs = make_logits(case), case.seqs()
    ids = torch.zeros(case.rows, dtype=torch.int64, device=device)

    want = [one.token for one in Sampler(limits).sample(master.clone(), seqs)]
    master = master.to(device)
    got = [one.token for one in sampler.finish(sampler.launch(master.clone(), seqs, tokens=ids))]
    differ = sum(a != b for a, b in zip(got, want, strict=True))
    if differ > case.rows / 100:
        raise ValueError(f"{differ} of {case.rows} tokens are not the CPU's: {got} {want}")

    copies = max(2, -(-(200 << 20) // master.nbytes))
    buffers = [master.clone() for _ in range(min(copies, 64))]
    device_times, host_times = [], []
    for turn in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        logits = buffers[turn % len(buffers)]
        torch.cuda._sleep(SLEEP)
        start.record()
        begun = time.perf_counter()
        drawn = sampler.launch(logits, seqs, tokens=ids)
        host_times.append(time.perf_counter() - begun)
        end.record()
        sampler.finish(drawn)
        end.synchronize()
        device_times.append(start.elapsed_time(end) * 1e3)
        logits.copy_(master)  # what a draw has changed
    return {
        "device_us": round(statistics.median(device_times[3:]), 1),
        "host_us": round(statistics.median(host_times[3:]) * 1e6, 1),
        "differ": differ,
        "kernels": profile(sampler, buffers, seqs, ids),
    }


def profile(
    sampler: Sampler, buffers: Sequence[Tensor], seqs: list[Row], ids: Tensor
) -> dict[str, float]:
    """Microseconds a draw, by name."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as told:
        for turn in range(PROFILED):
            sampler.finish(sampler.launch(buffers[turn % len(buffers)], seqs, tokens=ids))
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in told.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
            name = event.name[:60]
            times[name] = times.get(name, 0.0) + event.time_range.elapsed_us() / PROFILED
    return {name: round(us, 1) for name, us in sorted(times.items(), key=lambda x: -x[1])}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    names = options.cases.split(",") if options.cases else list(CASES)
    for rows in map(int, options.rows.split(",")):
        for name in names:
            yield Case(name, rows, "peaked")
    for name in ("top_p", "top_k_top_p", "temperature"):
        if name in names:
            yield Case(name, 64, "flat")
    if options.tiles:
        for name, rivals in RIVALS.items():
            for tiles in rivals:
                if name in names:
                    yield Case(name, 64, "peaked", tiles)
    if options.torch:
        for name in names:
            yield Case(name, 64, "peaked", by_torch=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="64,1,16,256")
    parser.add_argument("--cases", default="", help="of: " + ", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    unknown = set(filter(None, options.cases.split(","))) - CASES.keys()
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not torch.cuda.is_available():
        print("no card: this measures one", file=sys.stderr)
        return 1
    end, failed = time.monotonic() + options.seconds, False
    for case in cases(options):
        line = case.line()
        if time.monotonic() > end:
            line["left_out"] = True
        else:
            try:
                line |= measure(case, options.repeats)
            except Exception as error:  # one case's failure must not cost the others' numbers
                failed = True
                line["failed"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

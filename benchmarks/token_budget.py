"""What the token budget does to streams and prompts, on a model of a step's time.  Needs no card.

    python benchmarks/token_budget.py [--budgets 128,192,256,2048] [--traffic 10:0.1,30:0,5:0.3]

The real scheduler is fed with Poisson arrivals; a step takes what an 8B model on an H200 would: 15
GB of weights are read or 16 GFLOP a row computed, whichever takes longer, and 2.8 ms for all else.
Traffic is requests a second : share of long prompts; prompts are of 256 or 8,192 tokens, answers
of 200.  One JSON line a case on stdout: pauses between tokens, and times to the first token of
short and of long prompts, medians and 99th percentiles in milliseconds.  It compares budgets and
policies; absolute times are the model's.
"""

import argparse
import json
import random

from scheduler import drawn, scheduler, submit

SHORT, LONG, ANSWER = 256, 8192, 200
STREAMS = 64


def step_seconds(rows: int) -> float:
    return 2.8e-3 + max(15.01e9 / 4.06e12, rows * 16.06e9 / 650e12)


def percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(1e3 * ordered[int(share * (len(ordered) - 1))], 1) if ordered else None


def simulate(budget: int, rate: float, longs: float, seconds: float) -> dict[str, object]:
    longest = LONG + 2 * ANSWER
    one = scheduler(STREAMS, 0, num_blocks=60_000, mixed_tokens=budget, max_model_len=longest)
    draw = random.Random(1)
    now = due = 0.0
    lengths: list[int] = []
    arrived: list[float] = []
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    pauses: list[float] = []
    while now < seconds:
        while due <= now:
            lengths.append(LONG if draw.random() < longs else SHORT)
            arrived.append(due)
            submit(one, len(lengths) - 1, lengths[-1], ANSWER, 0)
            due += draw.expovariate(rate)
        work = one.schedule()
        if work is None:
            now = due
            continue
        one.settle(work, drawn(work))
        now += step_seconds(sum(chunk.length for chunk in work.chunks))
        for chunk in work.chunks:
            number = int(chunk.seq.request_id[1:])
            if chunk.samples and number in last:
                pauses.append(now - last[number])
            if chunk.samples:
                first.setdefault(number, now)
                last[number] = now
    told: dict[str, object] = {"requests": len(lengths), "begun": len(first)}
    waits = {n: first[n] - arrived[n] for n in first}
    kinds = (("short", SHORT), ("long", LONG))
    groups = {name: [w for n, w in waits.items() if lengths[n] == size] for name, size in kinds}
    for name, values in (("pause", pauses), *groups.items()):
        told |= {f"{name}_p{p}_ms": percentile(values, p / 100) for p in (50, 99)}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budgets", default="128,192,256,2048")
    parser.add_argument("--traffic", default="10:0.1,30:0,5:0.3")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the model's time")
    options = parser.parse_args()
    for traffic in options.traffic.split(","):
        rate, longs = map(float, traffic.split(":"))
        for budget in map(int, options.budgets.split(",")):
            case = {"benchmark": "token_budget", "mixed_tokens": budget, "rate": rate}
            case |= {"longs": longs}
            print(json.dumps(case | simulate(budget, rate, longs, options.seconds)), flush=True)


if __name__ == "__main__":
    main()

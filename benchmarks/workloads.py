"""The cases of `serve.py`, each written once for every driver.

Goes in: a driver (the engine in this process, or a daemon behind its socket) and the sizes of the
run.  Comes out: lines of figures, with the bars that they can be held against.  Every case runs
once unmeasured first, so that kernels are compiled.  Prompts are random, so that nothing comes from
the prefix cache; only bystanders' prompts are computed before and found there, so that all begin to
decode together.  Adapters are of rank 16 on all projections.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Literal

import numpy as np
from streams import (
    Driver,
    Failed,
    Line,
    Request,
    Run,
    bars_of,
    decode_rate,
    median,
    spread,
    token_gaps,
)

Mix = Literal["skew90", "zipf", "uniform", "distinct"]

#: Of what runs unmeasured first, at the most.
WARM_TOKENS, WARM_SECONDS = 24, 1.0
#: Prompt tokens that wait together, in the case `prefill`.
QUEUED_TOKENS = 16384


@dataclass(frozen=True)
class Sizes:
    """What all cases share.  `room`: tokens of the longest sequence.  Times in seconds."""

    prompt: int
    tokens: int
    room: int
    slots: int
    seconds: float
    every: float  # between two newcomers
    streams: int  # bystanders of `mixed`
    rate: float  # requests a second of `mix`


class Workloads:
    """`seed` makes two runs ask for the same."""

    def __init__(self, driver: Driver, sizes: Sizes, seed: int = 0) -> None:
        self.driver, self.sizes = driver, sizes
        self.rng = np.random.default_rng(seed)

    # ------------------------------------------------------------- throughput
    def throughput(self, batch: int, adapters: int) -> Iterator[Line]:
        """Waves of `batch` requests that come at once; each wave ends before the next begins."""
        sizes = self.sizes
        self.driver.settle(range(adapters), "gpu")
        self._wave(batch, adapters, min(WARM_TOKENS, sizes.tokens))
        waves: list[Run] = []
        spent = 0.0
        while len(waves) < 3 or spent < sizes.seconds:
            waves.append(self._wave(batch, adapters, sizes.tokens))
            spent += _seconds(waves[-1])
        streams = [stream for wave in waves for stream in wave.arrivals]
        made = [sum(s.tokens for s in wave.arrivals) / _seconds(wave) for wave in waves]
        rates = [rate for wave in waves if (rate := decode_rate(wave.arrivals)) is not None]
        decode = median(rates) if rates else None  # None: some end before the last begins
        yield {
            "case": "throughput",
            "batch": batch,
            "adapters": adapters,
            "prompt": sizes.prompt,
            "tokens": sizes.tokens,
            "waves": len(waves),
            "tokens_per_s": round(median(made), 1),
            "decode_tokens_per_s": decode and round(decode, 1),
            "step_ms": decode and round(1e3 * batch / decode, 3),
            **spread([s.ttft for s in streams], "ttft"),
            **spread(token_gaps(streams), "itl", most=True),
            "cpu": _mean([wave.cpu for wave in waves]),
        }

    def _wave(self, batch: int, adapters: int, tokens: int) -> Run:
        return self.driver.run([], self._requests(batch, adapters, tokens), None)

    # ------------------------------------------------------------- steady decode
    def steady(self, batch: int, adapters: int) -> Iterator[Line]:
        """`batch` streams decode on and on: tokens of the measured seconds."""
        behind = self.bystanders(batch, adapters)
        self.warm(behind, [])
        run = self.beside(behind, [], self.sizes.seconds)
        made = sum(run.start < t <= run.end for stream in run.background for t in stream.times)
        rate = made / (run.end - run.start)
        yield {
            "case": "steady",
            "batch": batch,
            "adapters": adapters,
            "prompt": self.sizes.prompt,
            "context": round(self.sizes.prompt + _made_by_middle(run) / batch),
            "tokens_per_s": round(rate, 1),
            "step_ms": round(1e3 * batch / rate, 3),
            **spread(self.gaps(run), "itl", most=True),
            "cpu": run.cpu,
        }

    # ------------------------------------------------------------- mixed steps
    def mixed(self, adapters: int) -> Iterator[Line]:
        """Streams decode while prompts arrive, each for one token; first without, then with."""
        sizes = self.sizes
        behind = self.bystanders(sizes.streams, adapters)
        self.warm(behind, self._prompts(adapters))
        quiet = self.beside(behind, [], sizes.seconds)
        busy = self.beside(behind, self._prompts(adapters), sizes.seconds)
        without, among = self.gaps(quiet), self.gaps(busy)
        told = spread(among, "itl", most=True)
        ratio = told["itl_p99_ms"] / told["itl_p50_ms"]
        yield {
            "case": "mixed",
            "adapters": adapters,
            "streams": sizes.streams,
            "prompt": sizes.prompt,
            "every_ms": 1e3 * sizes.every,
            **told,
            "p99_over_median": round(ratio, 3),
            "p99_over_quiet_median": round(told["itl_p99_ms"] / (1e3 * median(without)), 3),
            **spread(without, "quiet_itl", most=True),
            **newcomers(busy),
            "cpu": busy.cpu,
            "bars": bars_of(p99_over_median=(ratio, 1.3)),
        }

    def _prompts(self, adapters: int) -> list[Request]:
        return self.arrivals(self.sizes.prompt, range(adapters) if adapters else [None])

    # ------------------------------------------------------------- prompts
    def prefill(self, length: int) -> Iterator[Line]:
        """Prompts one by one, the base and an adapter in turn; then many that wait together."""
        self.driver.settle([0], "gpu")
        kinds: tuple[int | None, ...] = (None, 0)
        for _ in range(2):
            warm = self.driver.run([], [self._ask(length, 1, kind) for kind in kinds], None)
        pause = 1.2 * max(s.times[0] - warm.start for s in warm.arrivals) + 0.01
        pairs = min(20, max(3, int(self.sizes.seconds / pause / 2)))
        asked = [self._ask(length, 1, kinds[n % 2], at=n * pause) for n in range(2 * pairs)]
        came = self.driver.run([], asked, None).arrivals
        base, adapter = (1e3 * median(s.ttft for s in came[n::2]) for n in (0, 1))
        line: Line = {
            "case": "prefill",
            "prompt": length,
            "repeats": pairs,
            "base_ttft_ms": round(base, 3),
            "adapter_ttft_ms": round(adapter, 3),
            "base_tokens_per_s": round(1e3 * length / base),
            "adapter_tokens_per_s": round(1e3 * length / adapter),
            "adapter_over_base": round(adapter / base, 3),
        }
        count = max(2, QUEUED_TOKENS // length)
        for name, kind in (("base", None), ("adapter", 0)):
            run = self.driver.run([], [self._ask(length, 1, kind) for _ in range(count)], None)
            rate = count * length / (max(s.times[0] for s in run.arrivals) - run.start)
            line[f"{name}_queued_tokens_per_s"] = round(rate)
        bars = {"adapter_over_base": (adapter / base, 1.1)}
        if length == 2048 and base <= 53:
            bars["adapter_ttft_ms"] = adapter, 58.0
        yield line | {"bars": bars_of(**bars) if length == 2048 else {}}

    # ------------------------------------------------------------- long contexts
    def long(self, batch: int, length: int) -> Iterator[Line]:
        """Decode far into a context; bytes are the weights' and all keys and values, once."""
        behind = [self._ask(length, self.sizes.room - length, None) for _ in range(batch)]
        self._compute(behind)
        run = self.beside(behind, [], self.sizes.seconds)
        among = self.gaps(run)
        step = median(among)
        tokens = batch * length + _made_by_middle(run)
        line: Line = {
            "case": "long",
            "batch": batch,
            "context": round(tokens / batch),
            "steps": len(among) // batch,
            "step_ms": round(1e3 * step, 3),
            **spread(among, "itl", most=True),
        }
        facts = self.driver.facts
        if "weight_bytes" in facts:
            moved = int(str(facts["weight_bytes"])) + tokens * int(str(facts["kv_token_bytes"]))
            line |= {"gb_a_step": round(moved / 1e9, 3), "tb_per_s": round(moved / step / 1e12, 3)}
        yield line

    # ------------------------------------------------------------- mixes
    def mix(self, kind: Mix, adapters: int) -> Iterator[Line]:
        """Poisson arrivals over `adapters` adapters, shared out as `kind` says."""
        sizes = self.sizes
        self.driver.settle(range(adapters), "gpu")
        chosen = self._choose(kind, adapters)

        def asked(seconds: float, tokens: int) -> list[Request]:
            count = max(2, round(sizes.rate * seconds))
            times = np.cumsum(self.rng.exponential(1 / sizes.rate, count))
            return [self._ask(sizes.prompt, tokens, next(chosen), at=float(t)) for t in times]

        warm = asked(min(WARM_SECONDS, sizes.seconds), min(WARM_TOKENS, sizes.tokens))
        self.driver.run([], warm, None)
        requests = asked(sizes.seconds, sizes.tokens)
        run = self.driver.run([], requests, None)
        yield {
            "case": "mix",
            "mix": kind,
            "adapters": adapters,
            "rate": sizes.rate,
            "requests": len(requests),
            "adapters_used": len({r.adapter for r in requests}),
            "prompt": sizes.prompt,
            "tokens": sizes.tokens,
            "tokens_per_s": round(sum(s.tokens for s in run.arrivals) / _seconds(run), 1),
            **spread([s.ttft for s in run.arrivals], "ttft", most=True),
            **spread(token_gaps(run.arrivals), "itl", most=True),
            "cpu": run.cpu,
        }

    def _choose(self, kind: Mix, adapters: int) -> Iterator[int]:
        """skew90: nine of ten to one; zipf: the n-th as often as 1/n; distinct: each in turn."""
        if kind == "distinct":
            return cycle(range(adapters))
        weights = np.ones(adapters)
        if kind == "zipf":
            weights = 1 / np.arange(1, adapters + 1)
        elif kind == "skew90" and adapters > 1:
            weights = np.array([0.9] + [0.1 / (adapters - 1)] * (adapters - 1))
        weights /= weights.sum()
        return (int(self.rng.choice(adapters, p=weights)) for _ in iter(int, 1))

    # ------------------------------------------------------------- asking
    def _ask(self, length: int, tokens: int, adapter: int | None, at: float = 0.0) -> Request:
        prompt = self.rng.integers(0, self.driver.vocab, length).tolist()
        return Request(prompt, tokens, adapter, at)

    def _requests(self, count: int, adapters: int, tokens: int) -> list[Request]:
        """All at once, each adapter in turn."""
        return [
            self._ask(self.sizes.prompt, tokens, n % adapters if adapters else None)
            for n in range(count)
        ]

    def arrivals(self, length: int, adapters: Sequence[int | None]) -> list[Request]:
        """One every so often, for one token each, on each adapter in turn."""
        count = math.ceil(self.sizes.seconds / self.sizes.every)
        turns = islice(cycle(adapters), count)
        return [self._ask(length, 1, a, at=n * self.sizes.every) for n, a in enumerate(turns)]

    # ------------------------------------------------------------- bystanders
    def bystanders(self, streams: int, adapters: int) -> list[Request]:
        """Requests that do not end by themselves; adapters and prompts are where they belong."""
        self.driver.settle(range(adapters), "gpu")
        behind = self._requests(streams, adapters, self.sizes.room - self.sizes.prompt)
        self._compute(behind)
        return behind

    def _compute(self, requests: Sequence[Request]) -> None:
        """Bring the prompts into the prefix cache."""
        if requests:
            self.driver.run([], [replace(request, max_tokens=1) for request in requests], None)

    def beside(self, behind: Sequence[Request], arrivals: Sequence[Request], seconds: float) -> Run:
        return self.driver.run(behind, arrivals, seconds)

    def warm(self, behind: Sequence[Request], arrivals: Sequence[Request]) -> None:
        """The same for a while and for nobody."""
        self.beside(behind, arrivals, min(WARM_SECONDS, self.sizes.seconds))

    def gaps(self, run: Run) -> list[float]:
        """Of the bystanders, in the measured seconds; Failed if some had ended by then."""
        if any(s.ended is not None for s in run.background):
            raise Failed("bystanders ran out of room: take fewer --seconds")
        among = token_gaps(run.background, run.start, run.end)
        if not among:
            raise Failed("no two tokens in the measured seconds: more --seconds")
        return among


def _made_by_middle(run: Run) -> int:
    """Tokens of all bystanders up to the middle of the measured seconds."""
    middle = (run.start + run.end) / 2
    return sum(t < middle for stream in run.background for t in stream.times)


def newcomers(run: Run) -> Line:
    """First tokens of those that had one by the end."""
    served = [s.ttft for s in run.arrivals if s.times]
    late = max((s.sent - s.due for s in run.arrivals if s.times), default=0.0)
    told: Line = {"arrivals": len(run.arrivals), "served": len(served)}
    return told | spread(served, "ttft", most=True) | {"late_ms": round(1e3 * late, 3)}


def _seconds(run: Run) -> float:
    """From the arrivals' start to their last token."""
    return max(s.times[-1] for s in run.arrivals) - run.start


def _mean(cpus: Sequence[dict[str, float]]) -> Line:
    return {name: round(sum(c[name] for c in cpus) / len(cpus), 3) for name in cpus[0]}

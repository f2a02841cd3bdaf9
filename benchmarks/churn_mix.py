"""The cases `zipf` and `cliff` of `churn.py`: more adapters asked for than there is room for.

Goes in: a Fleet and the sizes of the run.  Comes out: lines.  Requests come as a Poisson process
at a share of what the engine was measured to serve of the same mix.  Every request is sorted by
where its adapter was when it came: `gpu`, `ram`, `disk`, or `loading` for another's sake.  A pause
between tokens counts as `with` loads if anything was on its way from disk or host memory meanwhile.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from churn_fleet import Fleet, Spans, copied
from streams import Line, Request, Run, percentile, spread, token_gaps

from engine.config import EvictionPolicy

#: Of capacity: the load that SLOs are written for, and one that leaves an engine idle now and then.
BUSY, LIGHT = 0.8, 0.25
#: Waves of a full batch in the burst that measures capacity.
WAVES = 3
#: Of a phase, once more and for nobody before it, so that the pool holds what the mix left in it.
WARM_SHARE = 0.4
POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
TIERS = ("gpu", "loading", "ram", "disk")


@dataclass(frozen=True, slots=True)
class MixSizes:
    """`seconds`: of a phase.  `prompt` and `tokens` of every request."""

    streams: int
    prompt: int
    tokens: int
    seconds: float


class Mixes:
    """`seed` makes two runs ask for the same."""

    def __init__(self, fleet: Fleet, sizes: MixSizes, seed: int = 0) -> None:
        self.fleet, self.sizes = fleet, sizes
        self.rng = np.random.default_rng(seed)
        self._warm_seconds = WARM_SHARE * sizes.seconds

    # ------------------------------------------------------------- cases
    def zipf(self, adapters: int, room: int) -> Iterator[Line]:
        """The n-th adapter is asked for as often as 1/n; then the same with room for all of them,
        which is what traffic without loads is held against."""
        weights = 1 / np.arange(1, adapters + 1)
        with self.fleet.room_for(room):
            capacity = self._capacity(weights)
        rate = BUSY * capacity
        warm = self._poisson(weights, rate, self._warm_seconds)
        asked = self._poisson(weights, rate, self.sizes.seconds)
        common: Line = {
            "case": "zipf",
            "adapters": adapters,
            "ram": self.fleet.ram,
            "capacity": round(capacity, 2),
            "rate": round(rate, 2),
            "prompt": self.sizes.prompt,
            "tokens": self.sizes.tokens,
        }
        with self.fleet.room_for(adapters):
            self.fleet.settle(range(adapters), "gpu")
            self._run(warm)
            quiet = self._run(asked)
        yield common | {"policy": "none", "room": adapters, **_figures(quiet)}
        for policy in POLICIES:
            with self.fleet.room_for(room, policy):
                self.fleet.settle(range(min(adapters, self.fleet.ram)), "ram")
                self._run(warm)
                run = self._run(asked)
            pauses = _p99(run) / _p99(quiet)
            line = {"policy": policy, "room": room, "itl_p99_over_quiet": round(pauses, 3)}
            yield common | line | _figures(run)

    def cliff(self, adapters: int, room: int) -> Iterator[Line]:
        """`adapters` in turn at random on room for `room`, against `room` of them at that rate."""
        few, many = (np.ones(count) for count in (room, adapters))
        with self.fleet.room_for(room):
            self.fleet.settle(range(room), "gpu")
            capacity = self._capacity(few)
        for share in (LIGHT, BUSY):
            medians = []
            for weights in (few, many):
                with self.fleet.room_for(room):
                    self.fleet.settle(range(len(weights)), "ram")
                    self.fleet.settle(range(room), "gpu")
                    self._run(self._poisson(weights, share * capacity, self._warm_seconds))
                    run = self._run(self._poisson(weights, share * capacity, self.sizes.seconds))
                medians.append(percentile([s.ttft for s in run.arrivals], 0.5))
                yield {
                    "case": "cliff",
                    "adapters": len(weights),
                    "room": room,
                    "capacity": round(capacity, 2),
                    "share": share,
                    "rate": round(share * capacity, 2),
                    "prompt": self.sizes.prompt,
                    "tokens": self.sizes.tokens,
                    **_figures(run),
                    "ttft_median_over_few": round(medians[-1] / medians[0], 3),
                }

    # ------------------------------------------------------------- asking
    def _capacity(self, weights: Sequence[float]) -> float:
        """Requests a second of a burst that keeps every seat taken; the second of two."""
        count = WAVES * self.sizes.streams
        for _ in range(2):
            run = self._run(self._ask(weights, np.zeros(count)))
        return count / (max(s.times[-1] for s in run.arrivals) - run.start)

    def _poisson(self, weights: Sequence[float], rate: float, seconds: float) -> list[Request]:
        count = max(4, round(rate * seconds))
        return self._ask(weights, np.cumsum(self.rng.exponential(1 / rate, count)))

    def _ask(self, weights: Sequence[float], times: Sequence[float]) -> list[Request]:
        shares = np.asarray(weights) / np.sum(weights)
        chosen = self.rng.choice(len(shares), len(times), p=shares)
        vocab, length = self.fleet.driver.vocab, self.sizes.prompt
        return [
            Request(
                self.rng.integers(0, vocab, length).tolist(),
                self.sizes.tokens,
                int(adapter),
                float(at),
            )
            for adapter, at in zip(chosen, times, strict=True)
        ]

    def _run(self, asked: Sequence[Request]) -> Run:
        """Prompts are drawn anew at their first token: none is found in the prefix cache."""
        mine = self.rng.integers(0, self.fleet.driver.vocab, len(asked))
        fresh = [
            replace(r, prompt=[int(first), *r.prompt[1:]])
            for r, first in zip(asked, mine, strict=True)
        ]
        self.fleet.known = max(self.fleet.known, *(r.adapter or 0 for r in asked))
        return self.fleet.driver.run([], fresh, None)


# ----------------------------------------------------------------- figures
def _figures(run: Run) -> Line:
    tiers = Counter(stream.tier for stream in run.arrivals)
    line: Line = {"requests": len(run.arrivals)}
    line |= {f"found_{tier}": tiers[tier] for tier in TIERS}
    line["hit_rate"] = round(tiers["gpu"] / len(run.arrivals), 4)
    line |= spread([s.ttft for s in run.arrivals], "ttft", most=True)
    for tier in TIERS:
        line |= spread([s.ttft for s in run.arrivals if s.tier == tier], f"ttft_{tier}")
    line |= spread(token_gaps(run.arrivals), "itl", most=True)
    among, quiet = Spans.of(run.moves).split(run.arrivals)
    line |= spread(among, "itl_with") | spread(quiet, "itl_without")
    if among and quiet:
        ratio = spread(among, "x")["x_p99_ms"] / spread(quiet, "x")["x_p99_ms"]
        line["itl_p99_with_over_without"] = round(ratio, 3)
    late = max(s.sent - s.due for s in run.arrivals)
    line |= {"late_ms": round(1e3 * late, 3), "cpu": run.cpu}
    return line | copied(run.moves, max(s.times[-1] for s in run.arrivals) - run.start)


def _p99(run: Run) -> float:
    return spread(token_gaps(run.arrivals), "itl")["itl_p99_ms"]

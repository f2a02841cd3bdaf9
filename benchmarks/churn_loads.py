"""The cases `idle` and `bystanders` of `churn.py`: one after the other asks for a cold adapter.

Goes in: a Fleet and sizes.  Comes out: a line without newcomers, and one for each place where a
newcomer's adapter may be: resident, in pinned host memory, in the page cache.  A newcomer wants one
token of a short prompt.  Every adapter is where it is said to be when it is asked for: the pool has
room for the bystanders' and for SHARED more, so that each leaves long before its next turn.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from churn_fleet import Fleet, copied
from streams import Failed, Line, bars_of, median, spread
from workloads import Sizes, Workloads, newcomers

#: Adapters of the bystanders, and room for all others.
RESIDENT, SHARED = 4, 8
PROMPT = 16
WHERE = {"resident": "gpu", "host": "ram", "cold": "disk"}
#: How much later a first token may come than a resident newcomer's: from host memory when idle,
#: and beside others on top of two steps; from the page cache.
IDLE_MS, BESIDE_MS, COLD_MS = 4.0, 2.0, 25.0
PAUSES = 1.1


class Newcomers:
    """`sizes.seconds` is of one phase; `adapters` is all that may be asked for."""

    def __init__(self, fleet: Fleet, sizes: Sizes, adapters: int) -> None:
        self.fleet, self.sizes, self.adapters = fleet, sizes, adapters

    def idle(self, streams: int, every: float) -> Iterator[Line]:
        """First tokens, of newcomers that come one by one; `streams` 0: nobody else is there."""
        yield from self._case("idle", streams, every)

    def bystanders(self, streams: int, every: float) -> Iterator[Line]:
        """Pauses of those who decode, while newcomers come as often as `every` seconds."""
        yield from self._case("bystanders", streams, every)

    def _case(self, name: str, streams: int, every: float) -> Iterator[Line]:
        with self.fleet.room_for(RESIDENT + SHARED):
            for line in self._beside(streams, every):
                yield {"case": name, "streams": streams, **line}

    def _beside(self, streams: int, every: float) -> Iterator[Line]:
        work, others = self._work(every), self._others(every)
        behind = work.bystanders(streams, RESIDENT)
        self.fleet.known = max(self.fleet.known, *others)
        work.driver.settle(others, "ram")
        work.warm(behind, work.arrivals(PROMPT, others))
        seconds = work.sizes.seconds
        quiet = work.gaps(work.beside(behind, [], seconds)) if streams else []
        if quiet:
            yield {"newcomers": "none", **spread(quiet, "itl", most=True)}
        resident: tuple[float, float] = math.nan, math.nan
        for kind, tier in WHERE.items():
            asked = range(RESIDENT) if kind == "resident" else others
            work.driver.settle(range(RESIDENT), "gpu")
            work.driver.settle(asked, tier)
            run = work.beside(behind, work.arrivals(PROMPT, asked), seconds)
            among = work.gaps(run) if streams else []
            first = [1e3 * s.ttft for s in run.arrivals if s.times and s.tier == tier]
            if not first:
                raise Failed(f"no newcomer found its adapter in {tier}: more --seconds")
            if kind == "resident":
                resident = median(first), _p99(among)
            yield {
                "newcomers": kind,
                "every_ms": 1e3 * every,
                **newcomers(run),
                "counted": len(first),
                **spread([t / 1e3 for t in first], "ttft", most=True),
                **spread(among, "itl", most=True),
                **_ratios(among, quiet, resident[1]),
                **copied(run.moves, run.end - run.start),
                "loads": run.loads,
                "reads": run.reads,
                "cpu": run.cpu,
                "bars": _bars(kind, quiet, among, median(first) - resident[0]),
            }

    def _work(self, every: float) -> Workloads:
        """No phase asks for more adapters than there are, or than host memory holds."""
        most = min(self.adapters, self.fleet.ram) - RESIDENT
        if most <= SHARED:
            raise Failed(f"needs more than {RESIDENT + SHARED} adapters and room for them in ram")
        sizes = replace(self.sizes, every=every, seconds=min(self.sizes.seconds, most * every))
        return Workloads(self.fleet.driver, sizes)

    def _others(self, every: float) -> range:
        count = math.ceil(self.sizes.seconds / every)
        most = min(self.adapters, self.fleet.ram) - RESIDENT
        return range(RESIDENT, RESIDENT + max(SHARED + 1, min(count, most)))


def _ratios(among: Sequence[float], quiet: Sequence[float], resident_p99: float) -> Line:
    if not quiet:
        return {}
    ratio = _p99(among) / resident_p99
    return {"itl_p99_over_resident_newcomers": round(ratio, 3)}


def _p99(gaps: Sequence[float]) -> float:
    return spread(gaps, "x")["x_p99_ms"] if gaps else math.nan


def _bars(kind: str, quiet: Sequence[float], among: Sequence[float], later_ms: float) -> Line:
    """`later_ms`: by how much the first token came later than a resident newcomer's."""
    bars: dict[str, tuple[float, float]] = {}
    if quiet and kind != "resident":
        bars["itl_p99_over_quiet"] = _p99(among) / _p99(quiet), PAUSES
    if kind == "host":
        limit = BESIDE_MS + 2 * 1e3 * median(quiet) if quiet else IDLE_MS
        bars["ttft_ms_over_resident"] = later_ms, limit
    if kind == "cold":
        bars["ttft_ms_over_resident"] = later_ms, COLD_MS
    return bars_of(**bars)

"""The case `loads` of `serve.py`: others ask for adapters that are not on the GPU.

Goes in: `Workloads`.  Comes out: lines for bystanders beside four kinds of newcomers: none, on a
resident adapter, on one in host memory, on one on disk (which is the page cache).  All but four of
the slots are taken by pinned adapters, the bystanders' among them, so that each newcomer of the
last two kinds finds no place free and has to be loaded; `loads` and `reads` say how often that was.
"""

import math
from collections.abc import Iterator, Sequence

from streams import median, spread
from workloads import Line, Workloads, bars_of, newcomers

#: Adapters of the bystanders, and slots that all others have to share.
RESIDENT, SHARED = 4, 4
#: Newcomers that host memory holds, and all of them: more than it holds, so that each is cold.
IN_RAM, FLEET = 8, 24
#: Adapters that host memory holds.
RAM_ADAPTERS = 16
PROMPT = 16


def loads(work: Workloads, streams: int) -> Iterator[Line]:
    """`streams` bystanders; with none of them, the newcomers find the engine idle."""
    pinned = range(work.sizes.slots - SHARED)
    fleet = range(pinned.stop, pinned.stop + FLEET)
    work.driver.settle(pinned, "gpu")
    work.driver.pin(pinned, True)
    try:
        yield from _beside_pinned(work, streams, fleet)
    finally:
        work.driver.pin(pinned, False)


def _beside_pinned(work: Workloads, streams: int, fleet: range) -> Iterator[Line]:
    seconds = work.sizes.seconds
    work.driver.settle(fleet, "disk")
    behind = work.bystanders(streams, RESIDENT)
    work.warm(behind, work.arrivals(PROMPT, fleet))
    quiet = work.gaps(work.beside(behind, [], seconds)) if streams else []
    if quiet:
        told = spread(quiet, "itl", most=True)
        yield {"case": "loads", "streams": streams, "newcomers": "none", **told}
    kinds: dict[str, tuple[str, Sequence[int]]] = {
        "resident": ("gpu", range(RESIDENT)),
        "host": ("ram", fleet[:IN_RAM]),
        "cold": ("disk", fleet),
    }
    resident = math.nan
    for kind, (tier, adapters) in kinds.items():
        work.driver.settle(adapters, tier)
        run = work.beside(behind, work.arrivals(PROMPT, adapters), seconds)
        first = [1e3 * s.ttft for s in run.arrivals if s.times]
        ttft = median(first) if first else math.nan
        resident = ttft if kind == "resident" else resident
        among = work.gaps(run) if streams else []
        yield {
            "case": "loads",
            "streams": streams,
            "newcomers": kind,
            "every_ms": 1e3 * work.sizes.every,
            **spread(among, "itl", most=True),
            **newcomers(run),
            "loads": run.loads,
            "reads": run.reads,
            "cpu": run.cpu,
            "bars": _bars(kind, quiet, among, ttft - resident),
        }


def _bars(kind: str, quiet: Sequence[float], among: Sequence[float], later_ms: float) -> Line:
    """`later_ms`: by how much the first token came later than a resident newcomer's."""
    bars: dict[str, tuple[float, float]] = {}
    if quiet and kind != "resident":
        before, after = (spread(times, "itl")["itl_p99_ms"] for times in (quiet, among))
        bars["p99_over_quiet_p99"] = after / before, 1.1
    if kind == "host":
        # 4 ms when idle; beside others 2 ms and two steps
        limit = 2 + 2 * 1e3 * median(quiet) if quiet else 4.0
        bars["ttft_ms_over_resident"] = later_ms, limit
    if kind == "cold":
        bars["ttft_ms_over_resident"] = later_ms, 25.0
    return bars_of(**bars)

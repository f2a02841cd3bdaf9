"""What a benchmark asks for, what came back, and the figures that are made of it.

Goes in: requests with the time at which each is due.  Comes out: for each the times of its tokens,
in seconds of the monotonic clock that all processes of a machine share.  Torch-free; knows neither
engine nor daemon.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

Line = dict[str, object]


@dataclass(slots=True)
class Request:
    """`at`: seconds after the arrivals' start.  `adapter`: a number, or None for the base."""

    prompt: list[int]
    max_tokens: int
    adapter: int | None = None
    at: float = 0.0


@dataclass(slots=True)
class Stream:
    """One request's answer.  `due` is when it should have been sent, `sent` when it was."""

    due: float
    sent: float
    times: list[float] = field(default_factory=list)  # of each token
    ended: float | None = None  # None: it was cut off at the end of the run
    tokens: int = 0
    error: str = ""
    tier: str = ""  # where its adapter was when it came: gpu, loading, ram or disk; "" = not told

    @property
    def ttft(self) -> float:
        """From when it was due: a late generator flatters nobody."""
        return self.times[0] - self.due


@dataclass(frozen=True, slots=True)
class Move:
    """An adapter's bytes on their way: read from disk into host memory, or copied to the GPU."""

    kind: Literal["read", "copy"]
    start: float
    end: float
    num_bytes: int


@dataclass(slots=True)
class Run:
    """`background` streams run before `start` and beside the `arrivals`, which end by `end`."""

    background: list[Stream]
    arrivals: list[Stream]
    start: float
    end: float
    loads: int = 0  # adapters that came to the GPU
    reads: int = 0  # of those, how many were read from disk
    cpu: dict[str, float] = field(default_factory=dict)  # process -> share of one core
    moves: list[Move] = field(default_factory=list)  # as far as the driver sees them


class Driver(Protocol):
    """Something that serves: the engine in this process, or a daemon behind its socket."""

    mode: str
    vocab: int
    facts: dict[str, object]

    def run(
        self, background: Sequence[Request], arrivals: Sequence[Request], seconds: float | None
    ) -> Run:
        """Start `background`; once each of its streams has a token, let `arrivals` come.

        Ends when all arrivals have ended, or after `seconds`, and then cuts off what still runs.
        Raises Failed if a request ends in an error.
        """
        ...

    def settle(self, adapters: Iterable[int], tier: str) -> None:
        """Bring adapters to a tier: "gpu", "ram" or "disk"."""
        ...

    def pin(self, adapters: Iterable[int], on: bool) -> None:
        """Keep adapters on the GPU, or let them go."""
        ...

    def close(self) -> None: ...


class Failed(Exception):
    """A case cannot be measured; one line that says why."""


def check(streams: Iterable[Stream]) -> None:
    """Raise Failed for the first stream that ended in an error."""
    for stream in streams:
        if stream.error:
            raise Failed(stream.error)


def token_gaps(
    streams: Iterable[Stream], start: float = -math.inf, end: float = math.inf
) -> list[float]:
    """Seconds between two tokens of a stream, of all streams, within a window."""
    pairs = (pair for stream in streams for pair in pairwise(stream.times))
    return [b - a for a, b in pairs if a >= start and b <= end]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float], name: str, *, most: bool = False) -> dict[str, float]:
    """p50, p90, p99 and if wanted the maximum, in milliseconds, each as `name`_p50_ms and so on."""
    if not values:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    told = {f"{name}_{k}_ms": 1e3 * percentile(values, share) for k, share in shares.items()}
    if most:
        told[f"{name}_max_ms"] = 1e3 * max(values)
    return {k: round(v, 3) for k, v in told.items()}


def decode_rate(streams: Sequence[Stream]) -> float | None:
    """Tokens a second while all streams decode: from the last first token to the first last one.

    None if there is no such time.  An event may hold several tokens, or its text be empty.
    """
    start = max(s.times[0] for s in streams)
    end = min(s.times[-1] for s in streams)
    made = sum(sum(start < t <= end for t in s.times) * s.tokens / len(s.times) for s in streams)
    return made / (end - start) if end > start else None


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def bars_of(**bars: tuple[float, float]) -> Line:
    """name=(value, limit) -> both, and whether the value stays within the limit."""
    return {name: _bar(value, limit, value <= limit) for name, (value, limit) in bars.items()}


def at_least(**bars: tuple[float, float]) -> Line:
    """The same where more is better."""
    return {name: _bar(value, limit, value >= limit) for name, (value, limit) in bars.items()}


def _bar(value: float, limit: float, met: bool) -> Line:
    shown = None if math.isnan(value) else round(value, 3)
    return {"value": shown, "limit": round(limit, 3), "met": met}

"""The door: how many sequences may wait for their first token, in all and for each tenant.

Goes in: requests that come, and word of each sequence that waits no longer.  Comes out: a `Place`,
or a 429 LoradError that says when to come back, from how fast sequences left while some waited.
A request whose deadline the queue before it cannot meet is refused at once.  Knows neither names
nor what a sequence does once it has begun.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

from lorad.errors import LoradError

#: How far back a rate looks, in seconds during which somebody waited.
SPAN_SECONDS = 10.0
#: Nobody is sent away for longer, whatever was measured.
MAX_RETRY_SECONDS = 60.0
#: A queue is believed to move this much faster than was measured, before anybody is refused for it.
BENEFIT_OF_DOUBT = 2.0

K = TypeVar("K")

#: Who is served in order of arrival: tenant, revision (None = base), priority.
Line = tuple[str, str | None, int]


class Limits(Protocol):
    """Of `[limits]`."""

    @property
    def queue(self) -> int: ...
    @property
    def queue_per_tenant(self) -> int: ...


class LeavingRate:
    """Sequences a second that left while some waited; time without a queue says nothing."""

    def __init__(self) -> None:
        self._left = self._seconds = 0.0

    def wait(self, seconds: float) -> None:
        """So long somebody waited."""
        keep = math.exp(-seconds / SPAN_SECONDS)
        self._left *= keep
        self._seconds = self._seconds * keep + SPAN_SECONDS * (1.0 - keep)

    def leave(self, count: int) -> None:
        self._left += count

    def seconds_for(self, count: int) -> float:
        """Until `count` more have left; a second if nothing is known."""
        return count * self._seconds / self._left if self._left else 1.0


class Place:
    """Where one request's sequences wait.  Each leaves once, whatever its end; see `close`."""

    def __init__(self, door: "Door", line: Line, count: int) -> None:
        self._door, self._line, self._count = door, line, count

    def leave(self, count: int = 1) -> None:
        """So many wait no longer; more than wait is as many as wait."""
        count = min(count, self._count)
        self._count -= count
        self._door.left(self._line, count)

    def close(self) -> None:
        """All the others leave too: the request is over."""
        self.leave(self._count)


class Door:
    """`refused` counts those that were turned away, by code."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        self.waiting = 0
        self._limits, self._clock = limits, clock
        self._tenants: Counter[str] = Counter()
        self._lines: Counter[Line] = Counter()
        self._rate = LeavingRate()
        self._seen = clock()

    def limit(self, limits: Limits) -> None:
        """From now on; who waits keeps its place."""
        self._limits = limits

    def enter(
        self,
        line: Line,
        count: int,
        *,
        seconds: float,
        starts_per_second: float,
        most: int = 0,
    ) -> Place:
        """A place for `count` sequences, of which the first `seconds` from now is too late.

        `starts_per_second`: how fast the engine lets queued ones begin, 0.0 if it need not wait.
        `most`: how many of this tenant may wait, 0 = limits.queue_per_tenant.  Raises queue_full,
        tenant_rate_limited, or invalid_value for what could not wait even alone.
        """
        self._pass_time()
        tenant = line[0]
        queued = self._tenants.get(tenant, 0)
        self._check("queue_full", "limits.queue", self._limits.queue, self.waiting, count)
        limit = "the tenant's queue" if most else "limits.queue_per_tenant"
        if most and count > most:
            message = f"{count} sequences are more than {limit} = {most}"
            raise LoradError("invalid_value", message, param="n")
        most = most or self._limits.queue_per_tenant
        self._check("tenant_rate_limited", limit, most, queued, count)
        self._check_deadline(line, count, seconds, starts_per_second)
        self.waiting += count
        self._tenants[tenant] += count
        self._lines[line] += count
        return Place(self, line, count)

    def left(self, line: Line, count: int) -> None:
        """For Place: so many of a line wait no longer."""
        self._pass_time()
        self._rate.leave(count)
        self.waiting -= count
        _take(self._tenants, line[0], count)
        _take(self._lines, line, count)

    def _check(self, code: str, limit: str, most: int, waiting: int, count: int) -> None:
        if waiting + count <= most:
            return
        whose = "of this tenant wait" if code == "tenant_rate_limited" else "wait"
        raise self._refusal(
            code,
            f"{waiting} sequences {whose} already; {limit} = {most}",
            self._rate.seconds_for(waiting + count - most),
        )

    def _check_deadline(self, line: Line, count: int, seconds: float, rate: float) -> None:
        """Only those count who surely go first: of its own line, at its own priority or above.

        Others may be overtaken, since tenants and adapters take turns; and what loading a cold
        adapter takes is no reason, or one that is slow to load would be refused for ever: a request
        that fails to wait for it leaves it in host memory for the next.
        """
        if not rate or seconds == math.inf:
            return
        tenant, rev, priority = line
        ahead = sum(
            n for (t, r, p), n in self._lines.items() if (t, r) == (tenant, rev) and p >= priority
        )
        wait = (ahead + count - 1) / (rate * BENEFIT_OF_DOUBT)
        if wait > seconds:
            raise self._refusal(
                "queue_full",
                f"{ahead} sequences for the same model are ahead of it, which takes {wait:.0f} s "
                f"at the least; its deadline is in {seconds:.0f} s",
                wait - seconds,
            )

    def _refusal(self, code: str, message: str, seconds: float) -> LoradError:
        self.refused[code] += 1
        whole = float(math.ceil(min(max(seconds, 1.0), MAX_RETRY_SECONDS)))
        return LoradError(code, message, retry_after=whole)

    def _pass_time(self) -> None:
        now = self._clock()
        if self.waiting:
            self._rate.wait(now - self._seen)
        self._seen = now


def _take(counter: "Counter[K]", key: K, count: int) -> None:
    """Names come and go: none is kept that nobody waits for."""
    counter[key] -= count
    if not counter[key]:
        del counter[key]

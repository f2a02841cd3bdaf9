"""Rates: how many requests and tokens each tenant had in the last minute, and when it may go on.

Goes in: requests that begin, and how to count what they have used so far.  Comes out: nothing, or
tenant_rate_limited with the seconds to wait.  A request begins while less than the limit was used:
how much it will use nobody knows, so what it uses beyond is waited for by the next one.  Tokens of
running requests are counted when somebody asks, not as they come: a token costs nothing here.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from lorad.errors import LoradError
from lorad.service.tenants import Tenant

SPAN_SECONDS = 60


class Window:
    """A sum over the last minute, to the second."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, int]] = deque()  # (second, how many), at most 61
        self.total = 0

    def add(self, now: float, count: int) -> None:
        if not count:
            return
        second = int(now)
        if self._parts and self._parts[-1][0] == second:
            second, before = self._parts.pop()
            self._parts.append((second, before + count))
        else:
            self._parts.append((second, count))
        self.total += count

    def pass_time(self, now: float) -> None:
        """Forget what is a minute old."""
        while self._parts and self._parts[0][0] <= now - SPAN_SECONDS - 1:
            self.total -= self._parts.popleft()[1]

    def seconds_below(self, limit: int, now: float) -> float:
        """Until the sum is below `limit`."""
        left = self.total
        for second, count in self._parts:
            left -= count
            if left < limit:
                return second + SPAN_SECONDS + 1 - now
        return 0.0


class Spending:
    """What one request has used, as far as it was counted."""

    def __init__(self, meter: "Meter") -> None:
        self._meter = meter
        self._count: Callable[[], int] = lambda: 0
        self._charged = 0

    def follow(self, count: Callable[[], int]) -> None:
        """From now on `count` says how many tokens it is."""
        self._count = count

    def charge(self, now: float) -> None:
        """Count what came since the last time."""
        used = self._count()
        self._meter.tokens.add(now, used - self._charged)
        self._charged = used

    def end(self) -> None:
        """It is over; repeating this is harmless."""
        self._meter.end(self)


class Meter:
    """Of one tenant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests, self.tokens = Window(), Window()
        self.live: set[Spending] = set()
        self._clock = clock

    def look(self) -> float:
        """Bring everything up to date; what time it is."""
        now = self._clock()
        for spending in self.live:
            spending.charge(now)
        self.requests.pass_time(now)
        self.tokens.pass_time(now)
        return now

    def begin(self) -> Spending:
        self.requests.add(self._clock(), 1)
        spending = Spending(self)
        self.live.add(spending)
        return spending

    def end(self, spending: Spending) -> None:
        if spending in self.live:
            spending.charge(self._clock())
            self.live.remove(spending)


class Rates:
    """Meters of all tenants that have a limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def check(self, tenant: Tenant) -> None:
        """Raises tenant_rate_limited."""
        meter = self._meters.get(tenant.name)
        if meter is None or not tenant.limited:
            return
        now = meter.look()
        for window, limit, what in (
            (meter.requests, tenant.rpm, "requests"),
            (meter.tokens, tenant.tokens_per_minute, "tokens"),
        ):
            if limit and window.total >= limit:
                raise LoradError(
                    "tenant_rate_limited",
                    f"this tenant had {window.total} {what} within a minute, of {limit}",
                    retry_after=float(math.ceil(max(window.seconds_below(limit, now), 1.0))),
                )

    def begin(self, tenant: Tenant) -> Spending | None:
        """A request that was let in; None if nobody counts."""
        if not tenant.limited:
            self._meters.pop(tenant.name, None)
            return None
        return self._meters.setdefault(tenant.name, Meter(self._clock)).begin()

    def forget(self, known: set[str]) -> None:
        """All tenants but these are gone."""
        for name in set(self._meters) - known:
            del self._meters[name]

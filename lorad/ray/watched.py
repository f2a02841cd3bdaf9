"""Watched: how a replica's daemon is, as Serve and the routers are told.

Goes in: a daemon that can be looked at.  Comes out: the last picture of it, and Unhealthy where
another one would be better.  Knows nothing of Ray.
"""

import time
from collections.abc import Callable
from typing import Protocol

from lorad.fleet.counting import Look
from lorad.fleet.daemon import Seen
from lorad.fleet.members import Lost

#: A picture younger than this is not asked for again.
FRESH_SECONDS = 0.2
#: Looks in a row that fail before it is lost: one may be late while a machine is busy.
MISSES = 2
#: Why a daemon takes no requests that somebody wanted so: another one would be no better.
_WANTED = ("draining",)


class Unhealthy(Exception):
    """Serve is to replace this replica; says why."""


class Looked(Protocol):
    """Of Daemon."""

    async def look(self) -> Seen: ...
    def cut(self) -> None: ...


class Watched:
    """`away_seconds`: as long as it takes the daemon itself to replace an engine, and more."""

    def __init__(
        self,
        daemon: Looked,
        away_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._daemon, self._away_seconds, self._clock = daemon, away_seconds, clock
        self.seen = Seen("away", "it starts", "", Look())
        self._looked = float("-inf")
        self._ready_at = clock()
        self._misses = 0

    async def look(self) -> Seen:
        """As it is now, or was a moment ago.  What waits for one that is lost ends."""
        now = self._clock()
        if now - self._looked < FRESH_SECONDS:
            return self.seen
        try:
            self.seen = await self._daemon.look()
        except Lost as lost:
            self._miss(lost.why)
            return self.seen
        self._looked, self._misses = now, 0
        if self.seen.state == "ready" or self.seen.reason in _WANTED:
            self._ready_at = now
        return self.seen

    async def check(self) -> None:
        """Raises Unhealthy: it answers nobody, or its engine does not come back by the time that
        the daemon itself should have replaced it."""
        seen = await self.look()
        if seen.state == "lost":
            raise Unhealthy(f"its daemon does not answer: {seen.reason}")
        away = self._clock() - self._ready_at
        if seen.state == "away" and away > self._away_seconds:
            raise Unhealthy(f"not ready for {away:.0f} s: {seen.reason}")

    def _miss(self, why: str) -> None:
        self._misses += 1
        if self._misses >= MISSES:
            self.seen = Seen("lost", why, self.seen.instance, self.seen.look)
            self._daemon.cut()

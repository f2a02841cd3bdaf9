"""Stalls: what to do about an engine whose step loop does not move.

Goes in: at each look whether it has stalled, by its own heartbeat.  Comes out: when that is news,
and when it has lasted for too long.  Ends and tells nothing itself.
"""

from collections.abc import Callable
from enum import Enum, auto


class Look(Enum):
    """What a look came to."""

    AS_BEFORE = auto()
    STALLED = auto()  # since this look
    HOPELESS = auto()  # it will never go on: said once
    MOVES = auto()  # again


class Stalls:
    """`patience`: seconds after which one that has stalled is given up."""

    def __init__(self, clock: Callable[[], float], patience: float) -> None:
        self._clock, self._patience = clock, patience
        self._since: float | None = None

    def look(self, stalled: bool) -> Look:
        if self._since is None:
            if not stalled:
                return Look.AS_BEFORE
            self._since = self._clock()
            return Look.STALLED
        if not stalled:
            self._since = None
            return Look.MOVES
        if self._clock() - self._since > self._patience:
            self._since = None
            return Look.HOPELESS
        return Look.AS_BEFORE

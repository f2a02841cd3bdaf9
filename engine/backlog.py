"""How fast queued sequences begin while more are ready than fit.

Goes in: after each pass of the scheduler how many began, and whether somebody was left over.  Comes
out: starts a second, as a reason to send those away who could not be served in time.  Knows nothing
of sequences.
"""

import math

#: How far back it looks, in seconds with a backlog.
SPAN_SECONDS = 20.0
#: A backlog says nothing of the engine's speed before it has lasted so long.
SURE_SECONDS = 3.0
#: After so long without one, what was measured is of another time.
STALE_SECONDS = 5.0


class Backlog:
    """`per_second` is read by other threads: it is one number, replaced at once."""

    def __init__(self, now: float) -> None:
        self.per_second = 0.0  # 0.0: nobody is left over, or not for long enough to tell
        self._starts = self._seconds = 0.0
        self._left_over = False
        self._looked = self._had = now

    def note(self, now: float, starts: int, *, left_over: bool) -> None:
        """A pass is over; `left_over`: one that could run found no seat, rows or memory."""
        if self._left_over:
            self._had = now
            keep = math.exp((self._looked - now) / SPAN_SECONDS)
            self._starts = self._starts * keep + starts
            self._seconds = self._seconds * keep + SPAN_SECONDS * (1.0 - keep)
        elif now - self._had > STALE_SECONDS:
            self._starts = self._seconds = 0.0
        self._looked, self._left_over = now, left_over
        sure = left_over and self._seconds >= SURE_SECONDS
        self.per_second = self._starts / self._seconds if sure else 0.0

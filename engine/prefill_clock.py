"""What a prompt token costs: seconds of steps that are mostly prompt, by the row.

Goes in: each step when it is settled, with when it was launched and whether its tokens were
waited for.  Comes out: calls of `observe(seconds, rows)`.  A step that samples nothing is settled
without a wait, long before the device has computed it, so its time is known only together with that
of the next one that is waited for.  Knows no device and has no clock.
"""

from collections.abc import Callable

from engine.sequence import StepWork


class PrefillClock:
    """Seconds are those of any one clock."""

    def __init__(self, observe: Callable[[float, int], None]) -> None:
        self._observe = observe
        self._known = 0.0  # when the device was last known to have ended
        self._launched: float | None = None  # the first step since
        self._rows = self._prompt = 0  # of all steps since

    def settled(self, work: StepWork, launched: float, now: float, *, waited: bool) -> None:
        """`work` was launched at `launched` and is settled at `now`."""
        self._launched = launched if self._launched is None else self._launched
        self._rows += sum(chunk.length for chunk in work.chunks)
        self._prompt += sum(c.length for c in work.chunks if c.length > 1 and not c.drafts)
        if not waited:
            return
        # A step that was launched ahead began when the one before it ended.
        seconds = now - max(self._launched, self._known)
        if 2 * self._prompt > self._rows:
            self._observe(seconds, self._rows)
        self._known = now
        self.forget()

    def forget(self) -> None:
        """Nothing is under way: what was not waited for will not be known."""
        self._launched, self._rows, self._prompt = None, 0, 0

"""Pace: how an engine that pools gives way to one that generates on the same device.

Goes in: its share of the device's time, and of each step its rows and how long it took.  Comes out:
when the next step may be launched, and how many rows it may have.  A step that took t seconds is
followed by t * (1/share - 1) of nothing, so that the share is kept whatever a step takes; and steps
take about SLICE_SECONDS, as a step of the other's waits for no more than one of them.  With a share
of 1 nobody waits, and steps are of any size.  Knows no device, no queue and no clock: it is told
the time.
"""

#: What a step takes while it gives way: half of what the shortest decode steps of an 8B do.
SLICE_SECONDS = 0.001
#: Steps are no smaller, however long they take: what is left of one then is its launch, which
#: smaller ones would have too.  On an H200 steps of a BGE-large took 13 ms with 256 rows and 11 to
#: 12 with 512, and streams beside them paused no longer (p99 1.25 times what it is alone, 1.24).
LEAST_ROWS = 512
#: What the last step's rows weigh in the speed that is learned; those before it the rest.
LATEST = 0.25


class Pace:
    """`most_rows`: of a step that gives way to nobody.  Times are seconds of one clock."""

    def __init__(
        self, most_rows: int, *, slice_seconds: float = SLICE_SECONDS, least_rows: int = LEAST_ROWS
    ) -> None:
        self._most, self._slice = most_rows, slice_seconds
        self._least = min(least_rows, most_rows)
        self._share = 1.0
        self._rows = self._seconds = 0.0  # of the steps so far, the older the less
        self._best = 0.0  # rows a second
        self._ended = self._took = 0.0  # the last step

    @property
    def share(self) -> float:
        """Of the device's time."""
        return self._share

    @property
    def gives_way(self) -> bool:
        """Steps go one at a time, each when it is due."""
        return self._share < 1.0

    def keep_to(self, share: float) -> None:
        """From now on, what the last step has left to wait included; above 0, at most 1."""
        assert 0.0 < share <= 1.0, share
        self._share = share

    @property
    def rows(self) -> int:
        """That the next step may have.  Before anything is known of the speed it is a small one."""
        if not self.gives_way:
            return self._most
        return max(self._least, min(int(self._slice * self._best), self._most))

    def seconds_left(self, now: float) -> float:
        """Until the next step is due; 0.0: it is."""
        return max(self._ended + self._took * (1.0 / self._share - 1.0) - now, 0.0)

    def note(self, rows: int, seconds: float, ended: float) -> None:
        """A step was through at `ended`, of which it had the device for `seconds`.

        The speed is the best that was ever kept up for some steps: what the others take of the
        device slows a step down and what a launch takes weighs on a small one, and were steps
        shrunk for that, they would be slower yet by the row, and end as one row each."""
        self._rows += LATEST * (rows - self._rows)
        self._seconds += LATEST * (seconds - self._seconds)
        if self._seconds > 0.0:
            self._best = max(self._best, self._rows / self._seconds)
        self._ended, self._took = ended, seconds

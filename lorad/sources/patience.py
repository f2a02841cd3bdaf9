"""Trying again, telling how far it is, and being told to stop.

Goes in: an attempt that may raise Again.  Comes out: its result, or the FetchError of the last one.
An attempt that brought something begins the patience anew.  Knows no protocol.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from lorad.sources.errors import Cancelled, FetchError
from lorad.sources.fetch import Progress

T = TypeVar("T")

#: Attempts of one file, however far each of them gets.
MAX_ATTEMPTS = 100
_TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Patience:
    """`waits`: seconds before each further attempt while none brings anything.  `longest`: what a
    server may ask for at most (Retry-After); more is the caller's to wait for."""

    waits: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    longest: float = 60.0


#: Of questions that somebody waits for, and that cannot be cancelled.
BRIEF = Patience(waits=(0.5, 1.0), longest=2.0)


class Again(Exception):
    """Another attempt may succeed.  `error` is what is said if none is made; `after` seconds were
    asked for by the other side."""

    def __init__(self, error: FetchError, after: float = 0.0) -> None:
        super().__init__(error.message)
        self.error = error
        self.after = after


class Meter:
    """Bytes of all files together, for a Progress.  Also where cancelling is seen."""

    def __init__(
        self, progress: Progress, cancelled: Callable[[], bool], total: int | None
    ) -> None:
        self._progress, self._cancelled, self._total = progress, cancelled, total
        self._before = 0  # bytes of the files that are done
        self._here = 0  # of this one
        self._shown = -1

    def begin(self) -> None:
        """The next file."""
        self._before, self._here = self._before + self._here, 0

    def at(self, offset: int) -> None:
        """So far of this file; tells nothing new where a file had to be begun again."""
        self.check()
        self._here = offset
        if self._before + offset > self._shown:
            self._shown = self._before + offset
            self._progress(self._shown, self._total)

    @property
    def here(self) -> int:
        return self._here

    def check(self) -> None:
        if self._cancelled():
            raise Cancelled("cancelled")

    def pause(self, seconds: float) -> None:
        """Sleep, unless told to stop."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(_TICK_SECONDS, left))
        self.check()


def silent_meter() -> Meter:
    """For questions: nobody watches, nobody cancels."""
    return Meter(lambda done, total: None, lambda: False, None)


def patiently(attempt: Callable[[], T], meter: Meter, patience: Patience) -> T:
    """The result of the first attempt that does not raise Again."""
    waits, before = iter(patience.waits), meter.here
    for _ in range(MAX_ATTEMPTS):
        try:
            return attempt()
        except Again as again:
            last = again.error
            if meter.here > before:
                waits, before = iter(patience.waits), meter.here
            seconds = next(waits, None)
            if seconds is None or again.after > patience.longest:
                raise last from None
            meter.pause(max(seconds, again.after))
    raise last


def retry_after(value: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number or a date; 0 if it says nothing."""
    if not value:
        return 0.0
    try:
        return max(0.0, min(float(value), 86400.0))
    except ValueError:
        pass
    try:
        return max(0.0, min(parsedate_to_datetime(value).timestamp() - time.time(), 86400.0))
    except (ValueError, TypeError, OverflowError):
        return 0.0

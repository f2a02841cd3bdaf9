"""When is a folder whole?  The rules, without a clock, a thread or a file of their own.

Goes in: what happened to which folder, what it looked like, and the time.  Comes out: which folders
to look at next, and for each look a verdict: report it, report it gone, or nothing.  A folder is
reported once for each content: when nothing has happened to it for `settle` seconds and its files
are consistent, or, when they are not (a truncated file), after `patience` seconds of quiet, so that
somebody can say what is wrong with it.

Times are seconds of any monotonic clock.  Knows no file system: a `View` is all it sees.
"""

import heapq
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

#: A writer that stalls leaves a file that is too short.  It is given this many times `settle`.
PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class View:
    """One look at a folder.  `signature` changes with names, sizes, times and inodes of its files,
    "" is no adapter at all; `whole` says that config and weights are there and consistent."""

    signature: str
    whole: bool


GONE = View("", True)
#: A signature that no view has: "reported once, content unknown".
UNKNOWN = "?"


class Verdict(Enum):
    REPORT = "report"  # new or changed content
    GONE = "gone"  # reported before, and there no more
    NOTHING = "nothing"  # unchanged, or not settled yet


@dataclass(slots=True)
class _Pending:
    quiet_since: float
    due: float
    seen: str | None  # the signature at the last look; None before the first


class Settler:
    """Not thread-safe: one thread owns it."""

    def __init__(self, settle: float, *, patience: float | None = None) -> None:
        self._settle = settle
        self._patience = PATIENCE * settle if patience is None else patience
        self._pending: dict[Path, _Pending] = {}
        self._heap: list[tuple[float, Path]] = []  # exactly one entry for each pending folder
        self._reported: dict[Path, str] = {}

    def remember(self, folder: Path, signature: str = UNKNOWN) -> None:
        """It was reported in an earlier run: report it again only if it differs or is gone."""
        self._reported[folder] = signature

    def forget(self, folder: Path) -> None:
        """Report it anew at the next look, even unchanged."""
        if folder in self._reported:
            self._reported[folder] = UNKNOWN

    def reported(self) -> list[Path]:
        """Every folder that was reported and is not gone."""
        return list(self._reported)

    def touch(self, folder: Path, now: float) -> None:
        """Something happened there: its quiet begins anew."""
        pending = self._pending.get(folder)
        if pending is None:
            self._schedule(folder, _Pending(now, now + self._settle, None))
        else:
            pending.quiet_since, pending.due = now, now + self._settle
            pending.seen = None  # what it was before does not matter any more

    def look(self, folder: Path, signature: str, now: float) -> None:
        """A scan saw this signature; "" when it saw no adapter there."""
        pending = self._pending.get(folder)
        if pending is not None:
            if pending.seen != signature:
                pending.quiet_since, pending.due = now, now + self._settle
                pending.seen = signature
        elif signature != self._reported.get(folder, ""):
            self._schedule(folder, _Pending(now, now + self._settle, signature))

    def due(self, now: float) -> list[Path]:
        """Folders whose quiet time is over; each is to be viewed and judged, in this order."""
        ready = []
        while self._heap and self._heap[0][0] <= now:
            _, folder = heapq.heappop(self._heap)
            pending = self._pending[folder]
            if pending.due > now:  # touched since it was entered
                heapq.heappush(self._heap, (pending.due, folder))
            else:
                ready.append(folder)
        return ready

    def next_due(self) -> float | None:
        """When `due` may have something; never later than that."""
        return self._heap[0][0] if self._heap else None

    def judge(self, folder: Path, view: View, now: float) -> Verdict:
        """For a folder of `due`, with a fresh view of it."""
        pending = self._pending[folder]
        if pending.seen not in (None, view.signature):
            self._schedule(folder, _Pending(now, now + self._settle, view.signature))
            return Verdict.NOTHING
        if not view.whole and now < pending.quiet_since + self._patience:
            due = min(now + self._settle, pending.quiet_since + self._patience)
            self._schedule(folder, _Pending(pending.quiet_since, due, view.signature))
            return Verdict.NOTHING
        del self._pending[folder]
        if view.signature == self._reported.get(folder, ""):
            return Verdict.NOTHING
        if view.signature == "":
            del self._reported[folder]
            return Verdict.GONE
        self._reported[folder] = view.signature
        return Verdict.REPORT

    def postpone(self, folder: Path, now: float) -> None:
        """For a folder of `due` that could not be viewed: try again later."""
        pending = self._pending[folder]
        self._schedule(folder, _Pending(now, now + self._patience, pending.seen))

    def _schedule(self, folder: Path, pending: _Pending) -> None:
        self._pending[folder] = pending
        heapq.heappush(self._heap, (pending.due, folder))

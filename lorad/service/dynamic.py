"""Dynamic: a request's `model` may be a reference, if the policy allows it.

Goes in: the model's text and how long the request may wait.  Comes out: the name of an adapter that
serves it, or why there is none.  What is here is served at once; what is not is pulled, once for
all who ask, while nobody else waits.  A reference without a commit means the one that was found
last, is asked for again behind the requests, and goes on meaning it while its source is away.
Failures are remembered for a while, so that a bad name cannot hammer anybody.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import quote

from lorad.errors import LoradError
from lorad.service.events import EventRing
from lorad.service.fetching import Asked, Fetching
from lorad.service.names import Names
from lorad.service.operations import Operations
from lorad.service.pulls import Pulls
from lorad.service.tasks import Tasks
from lorad.sources.fetch import Resolved
from lorad.sources.reference import Reference, parse_reference
from lorad.spelling import is_reference
from lorad.wire_operations import PullStart

ACTOR = "request"
#: Pulls that requests have begun and that have not ended; who asks for one more is to come back.
MAX_PULLS = 64
#: Seconds for which a failure stands: what will not pass by itself, and what may.
REFUSED_SECONDS, AWAY_SECONDS = 60.0, 10.0
MAX_FAILURES = 1024
#: A file name of the registry holds the reference.
MAX_NAME_BYTES = 240

_UNKNOWN = ("source_not_found", "source_denied", "bad_reference")
_AWAY = ("source_unreachable", "source_busy", "source_offline")
_FULL = "insufficient_storage"


@dataclass(frozen=True, slots=True)
class _Meaning:
    """A pinned reference, and when it was asked for."""

    reference: str
    at: float


@dataclass(frozen=True, slots=True)
class _Failure:
    error: LoradError
    until: float


class Dynamic:
    """One a daemon.  `allow`: patterns of references without their commits; () is none."""

    def __init__(
        self,
        fetching: Fetching,
        pulls: Pulls,
        operations: Operations,
        names: Names,
        events: EventRing,
        tasks: Tasks,
        *,
        allow: Sequence[str],
        every: float,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetching, self._pulls, self._operations = fetching, pulls, operations
        self._names, self._catalog = names, names.catalog
        self._events, self._tasks = events, tasks
        self._allow, self._every, self._max_waiting = tuple(allow), every, max_waiting
        self._clock = clock
        self._waiting = 0
        self._meanings: dict[str, _Meaning] = {}  # references without a commit
        self._failures: dict[str, _Failure] = {}
        self._flights: dict[str, asyncio.Task[str | LoradError]] = {}

    def known(self, model: str) -> str:
        """The name that serves `model` now, or `model` itself if there is none."""
        if not is_reference(model) or self._serves(model):
            return model
        reference = self._allowed(model)
        return (reference is not None and self._served(reference)) or model

    async def find(self, model: str, seconds: float) -> str:
        """The same, waiting for a pull if that is what it takes.

        What is not allowed comes back as it is, and is unknown like any other name.  Raises
        model_not_found, adapter_invalid, a source's code, queue_full, deadline_exceeded.
        """
        if not is_reference(model) or self._serves(model):
            return model
        reference = self._allowed(model)
        if reference is None:
            return model
        served = self._served(reference)
        if served and self._fresh(reference):
            return served
        if served:
            self._ask_again(reference)
            return served
        self._refuse_again(reference.text)
        flight = self._flights.get(reference.text) or self._take_off(reference)
        return await self._landing(flight, model, seconds)

    def close(self) -> None:
        """The daemon drains: nobody waits here any more."""
        for flight in self._flights.values():
            flight.cancel()

    # ------------------------------------------------------------- what is known
    def _allowed(self, model: str) -> Reference | None:
        if len(quote(model, safe="")) > MAX_NAME_BYTES:
            return None
        try:
            reference = parse_reference(model)
        except LoradError:
            return None
        bare = reference.text.partition(_pin_of(reference))[0]
        allowed = any(fnmatchcase(bare, glob) for glob in self._allow)
        return reference if allowed and reference.scheme in ("hf", "s3") else None

    def _serves(self, name: str) -> bool:
        entry = self._catalog.get(name)
        return entry is not None and entry.rev is not None

    def _served(self, reference: Reference) -> str:
        """A name that serves what it means, or meant last."""
        if reference.pinned:
            return self._catalog.named_by(reference.text)
        meaning = self._meanings.get(reference.text)
        if meaning is not None:
            return self._catalog.named_by(meaning.reference)
        if reference.revision:
            return ""  # which of the commits that are here was the branch's, nobody knows
        newest = self._newest(f"{reference.text}{_pin_of(reference)}")
        if newest:  # found before a restart: good until its source says otherwise
            self._meanings[reference.text] = _Meaning(newest, -math.inf)
        return self._catalog.named_by(newest) if newest else ""

    def _newest(self, beginning: str) -> str:
        """Of the pinned references that begin so and are here, the one that came last."""
        pinned = self._catalog.sources(beginning)
        records = {ref: self._names.registry.get(self._catalog.named_by(ref)) for ref in pinned}
        return max(
            (ref for ref, record in records.items() if record is not None),
            key=lambda ref: records[ref].created_at,  # type: ignore[union-attr]
            default="",
        )

    def _fresh(self, reference: Reference) -> bool:
        """No need to ask its source."""
        meaning = self._meanings.get(reference.text)
        asked = meaning is not None and self._clock() < meaning.at + self._every
        failed = self._failures.get(reference.text)
        return reference.pinned or asked or (failed is not None and self._clock() < failed.until)

    def _refuse_again(self, text: str) -> None:
        failed = self._failures.get(text)
        if failed is None:
            return
        left = failed.until - self._clock()
        if left <= 0:
            del self._failures[text]
            return
        raise _told(failed.error, left)

    # ------------------------------------------------------------- pulling
    def _ask_again(self, reference: Reference) -> None:
        """Behind the requests, which go on with what is here."""
        if reference.text not in self._flights and len(self._flights) < MAX_PULLS:
            self._failures.pop(reference.text, None)
            self._take_off(reference)

    def _take_off(self, reference: Reference) -> "asyncio.Task[str | LoradError]":
        if len(self._flights) >= MAX_PULLS:
            message = f"{MAX_PULLS} adapters are being pulled already"
            raise LoradError("queue_full", message, retry_after=AWAY_SECONDS)
        flight = self._tasks.spawn(self._fly(reference))
        self._flights[reference.text] = flight
        return flight

    async def _landing(
        self, flight: "asyncio.Task[str | LoradError]", model: str, seconds: float
    ) -> str:
        if self._waiting >= self._max_waiting:
            message = f"{self._waiting} requests wait for adapters that are being pulled"
            raise LoradError("queue_full", message)
        self._waiting += 1
        try:
            await asyncio.wait({flight}, timeout=max(seconds, 0.0))
        finally:
            self._waiting -= 1
        if not flight.done():
            message = f"{model!r} is still being pulled; it goes on, ask again later"
            raise LoradError("deadline_exceeded", message, param="model")
        if flight.cancelled():
            raise LoradError("draining", "lorad is shutting down")
        landed = flight.result()
        if isinstance(landed, LoradError):
            raise landed
        return landed

    async def _fly(self, reference: Reference) -> str | LoradError:
        """Resolve, pull, and remember how it went.  An expected error is a result here."""
        try:
            resolved = await self._fetching.resolve(Asked(reference))
            name = self._catalog.named_by(resolved.reference) or await self._pull(resolved)
        except LoradError as error:
            return self._failed(reference, error)
        finally:
            self._flights.pop(reference.text, None)
        self._failures.pop(reference.text, None)
        if not reference.pinned:
            self._meanings[reference.text] = _Meaning(resolved.reference, self._clock())
        return name

    async def _pull(self, resolved: Resolved) -> str:
        if len(quote(resolved.reference, safe="")) > MAX_NAME_BYTES:
            raise LoradError("source_not_found", f"{resolved.reference} is too long a name")
        start = PullStart(reference=resolved.reference, name=resolved.reference)
        begun = await self._pulls.begin(start, actor=ACTOR, resolved=resolved)
        ended = await self._operations.wait(begun.id)
        if ended.state == "cancelled":
            raise LoradError("source_not_found", f"the pull of {resolved.reference} was cancelled")
        if ended.state == "failed":
            details = {"reason": ended.reason} if ended.reason else {}
            raise LoradError(ended.code, ended.message, details=details)
        return resolved.reference

    def _failed(self, reference: Reference, error: LoradError) -> LoradError:
        seconds = max(AWAY_SECONDS, error.retry_after or 0.0)
        seconds = seconds if error.code in (*_AWAY, _FULL) else REFUSED_SECONDS
        while len(self._failures) >= MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[reference.text] = _Failure(error, self._clock() + seconds)
        self._events.publish(
            "resolve.failed",
            level="warn",
            name=reference.text,
            cause=error.details.get("reason", error.code),
            message=error.message,
        )
        return _told(error, seconds)


def _pin_of(reference: Reference) -> str:
    """What stands between a reference and the content that it is pinned to."""
    return "@" if reference.scheme == "hf" else "#etags="


def _told(error: LoradError, seconds: float) -> LoradError:
    """As the request hears it: what its source does not have is unknown, what is away may come."""
    if error.code in _UNKNOWN:
        message = f"The model does not exist: {error.message}"
        return LoradError("model_not_found", message, param="model")
    if error.code == "source_too_big":
        return LoradError("adapter_invalid", error.message, details={"reason": "E_FILE_TOO_LARGE"})
    if error.code == _FULL:  # which disk, and how full, is the operator's to know
        message = "no disk space to fetch the adapter now"
        return LoradError("no_room", message, param="model", retry_after=seconds)
    away = error.code in _AWAY
    return LoradError(
        error.code,
        error.message,
        param="model",
        details=error.details,
        retry_after=seconds if away else None,
    )

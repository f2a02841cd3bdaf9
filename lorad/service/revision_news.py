"""What becomes of a revision, as events under its names.

Goes in: the engine's transitions, and what the daemon did.  Comes out: one event a name, with a
type of `event_types.py`.  Decides nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from engine.adapters.states import RESIDENT, State
from engine.messages import AdapterEvent
from lorad.errors import LoradError
from lorad.service.catalog import Catalog
from lorad.service.events import EventRing

log = logging.getLogger("lorad.revisions")


class RevisionNews:
    """`catalog` says under which names; `replica` "": the model has one engine."""

    def __init__(self, events: EventRing, catalog: Catalog, replica: str = "") -> None:
        self._events, self._catalog, self._replica = events, catalog, replica

    def publish_transition(self, event: AdapterEvent) -> bool:
        """False for what every request makes: active and idle are shown by the snapshot."""
        before, after = State(event.before), State(event.after)
        kind = _kind(before, after, bool(event.message))
        if kind is None:
            return False
        details = {"before": before.value, "after": after.value}
        details |= {"seconds": f"{event.seconds:.4f}"} if event.seconds else {}
        details |= {"slot": str(event.slot)} if event.slot is not None else {}
        details |= {"num_bytes": str(event.num_bytes)} if event.num_bytes else {}
        if event.away_seconds is not None:
            details["thrash"] = f"back after {event.away_seconds:.2f} s"
        level: Literal["info", "warn"] = "warn" if event.message else "info"
        self.publish(kind, event.rev, level, event.cause, event.message, details)
        return True

    @contextmanager
    def for_request(self, rev: str) -> Iterator[None]:
        """What bringing it up raises, as a request is told: content that turns out bad is a model
        that is not there, and how full which disk is, is the operator's to know."""
        try:
            yield
        except LoradError as error:
            if error.code in ("adapter_invalid", "load_failed"):
                fit = rev not in self._catalog.unfit
                if error.code == "adapter_invalid" and fit:  # it was once: a setting has changed
                    self.publish_unpacked(rev, error)
                raise LoradError("model_not_found", error.advised) from error
            if error.code == "insufficient_storage":
                self.publish_unpacked(rev, error)
                message = "no disk space to bring up the adapter now"
                hint = "free space on the store's disk: loractl doctor and explain say which"
                raise LoradError("no_room", message, hint=hint) from error
            raise

    def publish_unpacked(self, rev: str, error: LoradError) -> None:
        """A request could not have it packed, for want of disk space or as it fits no longer: an
        event for the first of many, as clients come again at once, and kept for `loractl explain`
        until it is packed."""
        log.warning("%s cannot be packed: %s", self._catalog.label(rev), error.message)
        if rev not in self._catalog.unpacked:
            message = f"a request could not have it packed: {error.advised}"
            self.publish("adapter.not_loaded", rev, "warn", error.code, message)
        self._catalog.unpacked[rev] = error.message, error.hint

    def publish_unfit(self, rev: str, error: LoradError) -> None:
        """Its tokenizer files do not fit the base; kept for `loractl explain`."""
        cause = error.details.get("reason", error.code)
        self.publish("adapter.not_loaded", rev, "warn", cause, error.advised)
        self._catalog.unfit[rev] = error.message, error.hint

    def publish(
        self,
        kind: str,
        rev: str,
        level: Literal["info", "warn", "error"] = "info",
        cause: str = "",
        message: str = "",
        details: dict[str, str] | None = None,
    ) -> None:
        """An event under every name of `rev`, or under what a nameless one was called."""
        for name in self._catalog.names_of(rev) or (self._catalog.label(rev),):
            self._events.publish(
                kind,
                level=level,
                name=name,
                rev=rev,
                cause=cause,
                message=message,
                details=details,
                replica=self._replica,
            )


def _kind(before: State, after: State, failed: bool) -> str | None:
    """The event type of a transition; None for those that every request makes."""
    if {before, after} <= {State.ACTIVE, State.IDLE}:
        return None
    if after == State.LOADING:
        return "slot.loading" if before == State.RAM else "ram.loading"
    if before == State.LOADING:
        if after in RESIDENT:
            return "slot.load"
        return "slot.load_failed" if failed or after == State.REGISTERED else "ram.load"
    if after == State.DRAINING:
        return "slot.drain"
    if before in RESIDENT:
        return "slot.evict" if after not in RESIDENT else "slot.undrain"
    return "ram.drop" if after == State.REGISTERED else "ram.load"

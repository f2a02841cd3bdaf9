"""Draining: an operator takes the daemon, or one adapter, out of service and puts it back.

Goes in: `DrainAsk`.  Comes out: `Drained`, once nothing of it runs or the time is up; what then
still runs goes on, or is cancelled where that is asked for.  Adapters stay where they are, so
`resume` costs nothing.  It holds until `resume` or the daemon's end; the registry is not told.
"""

from collections.abc import Callable
from typing import Protocol

from lorad.errors import LoradError
from lorad.service.events import EventRing
from lorad.service.gate import HELD, STOPPING, Gate
from lorad.service.names import Names
from lorad.spelling import several, still_running
from lorad.wire_operate import DrainAsk, Drained

#: What was cancelled gets this long to send its error.
FAREWELL_SECONDS = 2.0


class Requests(Protocol):
    """Of RequestService; `name` None means all requests."""

    def running(self, name: str | None = None) -> int: ...
    async def wait_until_idle(self, seconds: float, name: str | None = None) -> bool: ...
    def cancel(self, code: str, message: str, name: str | None = None) -> int: ...


class Draining:
    """Holds names and all at the gate."""

    def __init__(self, gate: Gate, names: Names, requests: Requests, events: EventRing) -> None:
        self._gate, self._names = gate, names
        self._requests, self._events = requests, events
        self.on_begin: Callable[[str], None] = lambda name: None  # "" is the daemon

    async def drain(self, ask: DrainAsk) -> Drained:
        """Raises model_not_found; deadline_exceeded when requests are left, which stay drained."""
        name = self._known(ask.name)
        changed = self._close(name)
        if changed:
            self.on_begin(name or "")
            running = several(self._requests.running(name), "request")
            self._tell("drain.start", name, f"{running} in flight")
        cancelled = 0
        if ask.wait and not await self._requests.wait_until_idle(ask.timeout_s, name):
            if not ask.cancel:
                self._check_done(name, ask)
            why = "an operator cancelled what ran"
            cancelled = self._requests.cancel("draining", why, name)
            await self._requests.wait_until_idle(FAREWELL_SECONDS, name)
            aborted = several(cancelled, "request")
            self._tell("drain.forced", name, f"{aborted} aborted", level="warn")
        left = self._requests.running(name)
        if ask.wait and not left:
            self._tell("drain.done", name, "nothing runs")
        return self._drained(name, draining=True, changed=changed, cancelled=cancelled)

    def resume(self, ask: DrainAsk) -> Drained:
        """Take new requests again.  Names that are drained themselves stay so."""
        gate, name = self._gate, ask.name
        if gate.closed == STOPPING:
            raise LoradError("draining", STOPPING)
        if name is None:
            changed, gate.closed = bool(gate.closed), ""
        else:
            if name not in gate.held:
                self._known(name)
            changed = name in gate.held
            gate.held.discard(name)
        if changed:
            self._tell("drain.resumed", name, "new requests are taken")
        return self._drained(name, draining=False, changed=changed)

    def _known(self, name: str | None) -> str | None:
        return None if name is None else self._names.known(name).name

    def _close(self, name: str | None) -> bool:
        """True if it was open."""
        gate = self._gate
        if name is None:
            was_open = not gate.closed
            gate.closed = gate.closed or HELD
        else:
            was_open = name not in gate.held
            gate.held.add(name)
        return was_open

    def _check_done(self, name: str | None, ask: DrainAsk) -> None:
        left = self._requests.running(name)
        if not left:
            return
        raise LoradError(
            "deadline_exceeded",
            f"{still_running(left)} after {ask.timeout_s:g} s; no new ones are taken",
            hint=f"loractl drain {name or ''} --cancel".replace("  ", " "),
        )

    def _drained(
        self, name: str | None, *, draining: bool, changed: bool, cancelled: int = 0
    ) -> Drained:
        return Drained(
            name=name,
            draining=draining,
            running=self._requests.running(name),
            cancelled=cancelled,
            changed=changed,
            still=tuple(sorted(self._gate.held - {name or ""})),
        )

    def _tell(self, type: str, name: str | None, message: str, *, level: str = "info") -> None:
        self._events.publish(
            type,
            level="warn" if level == "warn" else "info",
            name=name or "",
            cause="operator",
            message=message,
        )

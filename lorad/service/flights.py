"""Flights: the sequences that are under way in the engine, or on their way to it.

Goes in: Submits with a callback, deltas.  Comes out: each delta to the callback of its sequence,
the last one once, whatever ends it: the engine's word, a revision that cannot be prepared, a dead
process.  Starts and watches no engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container
from typing import Protocol

from engine.errors import EngineError
from engine.messages import SequenceDelta, Submit
from lorad.errors import LoradError, from_engine

OnDelta = Callable[[SequenceDelta], None]


class Sender(Protocol):
    """The face of the engine's client that is used here."""

    def submit(self, submit: Submit) -> None: ...
    def abort(self, request_id: str) -> None: ...


class Flights:
    """`sender` is the present engine's, or raises LoradError; `known` has what it knows, and
    `prepare` makes it know a revision."""

    def __init__(
        self,
        sender: Callable[[], Sender],
        known: Container[str],
        prepare: Callable[[str], Awaitable[None]],
        spawn: Callable[[Awaitable[None]], asyncio.Task[None]],
    ) -> None:
        self._sender, self._known = sender, known
        self._prepare, self._spawn = prepare, spawn
        self._sinks: dict[str, OnDelta] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self.on_busy: Callable[[], None] = lambda: None  # the first has come, or the last has left

    def __len__(self) -> int:
        return len(self._sinks)

    def begin(self, submit: Submit, on_delta: OnDelta) -> None:
        """Send it, once its revision is known; if that fails, the one delta is an error."""
        was_idle, self._sinks[submit.request_id] = not self._sinks, on_delta
        if was_idle:
            self.on_busy()
        if submit.rev is None or submit.rev in self._known:
            self._send(submit)
            return
        task = self._spawn(self._prepare_and_send(submit.rev, submit))
        self._preparing[submit.request_id] = task

    def abort(self, request_id: str) -> None:
        """Its last delta follows.  Unknown ids are ignored."""
        if request_id in self._preparing:
            self._preparing.pop(request_id).cancel()
            self.deliver(SequenceDelta(request_id=request_id, finish_reason="abort"))
        elif request_id in self._sinks:
            self._sender().abort(request_id)

    def end_all(self, code: str, message: str) -> None:
        """Each with that error."""
        for task in list(self._preparing.values()):
            task.cancel()
        self._preparing.clear()
        for request_id in list(self._sinks):
            self._refuse(request_id, LoradError(code, message))

    def deliver(self, delta: SequenceDelta) -> None:
        """To its callback, if it is under way."""
        sink = self._sinks.get(delta.request_id)
        if sink is not None and delta.finish_reason is not None:
            del self._sinks[delta.request_id]
            if not self._sinks:
                self.on_busy()
        if sink is not None:
            sink(delta)

    def _send(self, submit: Submit) -> None:
        try:
            self._sender().submit(submit)
        except EngineError as error:
            self._refuse(submit.request_id, from_engine(error))

    async def _prepare_and_send(self, rev: str, submit: Submit) -> None:
        try:
            await self._prepare(rev)
        except LoradError as error:
            del self._preparing[submit.request_id]
            self._refuse(submit.request_id, error)
            return
        del self._preparing[submit.request_id]  # before it is sent: an abort is the engine's now
        self._send(submit)

    def _refuse(self, request_id: str, error: LoradError) -> None:
        self.deliver(
            SequenceDelta(
                request_id=request_id,
                finish_reason="error",
                code=error.code,
                message=error.message,
            )
        )

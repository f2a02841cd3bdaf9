"""Operations: what was begun for somebody and goes on when its client leaves.

Goes in: a kind, a target and a wish.  Comes out: a record with an id, at once and durably, then
what became of it; events at its begin and end.  `Operations` is the only writer of their rows: it
starts the work that was given for a kind, counts its bytes, ends it when asked, and after a restart
starts again what had not ended.  Knows nothing of what the work does.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

from lorad.errors import LoradError
from lorad.registry.records import OperationRecord
from lorad.registry.registry import Registry
from lorad.service.events import EventRing, Level, rfc3339
from lorad.service.tasks import Tasks
from lorad.wire_operations import Operation

log = logging.getLogger("lorad.operations")

#: The bytes of a download change a thousand times a second; the registry hears of them this often,
#: all in one write.  Whoever asks the daemon gets them as they are.
FLUSH_SECONDS = 5.0
#: A client may wait this long for an answer that says how far it is.
MAX_WAIT_SECONDS = 30.0


class Ended(Exception):
    """The operation was cancelled, or the daemon stops: its work has nothing to report."""


@dataclass(eq=False)
class Running:
    """One that has not ended, as its work sees it.  `progress` and `cancelled` from any thread."""

    record: OperationRecord
    owner: "Operations"
    over: asyncio.Event = field(default_factory=asyncio.Event)
    stop: bool = False  # somebody cancelled it
    sealed: bool = False  # too late for that
    ending: bool = False
    dirty: bool = False  # bytes that the registry has not heard of

    def progress(self, done: int, total: int | None) -> None:
        """Bytes so far, and in all if that is known."""
        self.record = replace(self.record, done_bytes=done, total_bytes=total or 0)
        self.dirty = True

    def cancelled(self) -> bool:
        return self.stop or self.owner.stopping

    def check(self) -> None:
        """Raises Ended if nobody wants it any more."""
        if self.cancelled():
            raise Ended

    async def note(self, **values: Any) -> None:
        """Set columns of its row; on disk when this returns."""
        await self.owner.write(self, **values)

    def seal(self) -> None:
        """From here on it cannot be cancelled."""
        self.check()
        self.sealed = True


#: Does the work, and returns columns of the ended row: name, rev, message.  LoradError is failure.
Work = Callable[[Running], Awaitable[dict[str, Any]]]


class Operations:
    """One a daemon.  `works`: kind -> its work; other kinds do not survive a restart."""

    def __init__(self, registry: Registry, events: EventRing, tasks: Tasks) -> None:
        self.works: dict[str, Work] = {}
        self.stopping = False
        self.on_end: Callable[[OperationRecord], None] = lambda record: None
        self._rows, self._events, self._tasks = registry.operations, events, tasks
        self._live: dict[str, Running] = {}
        self._unwritten: dict[str, dict[str, Any]] = {}  # ends that a full disk did not take

    # ------------------------------------------------------------- for whoever asks
    def get(self, id: str) -> OperationRecord:
        """The record, with its bytes as they are now.  not_found."""
        found = self._rows.get(id)
        if found is None:
            raise LoradError("not_found", f"no operation {id[:40]!r}", hint="loractl op ls")
        return self._fresh(found)

    def list(self, *, live: bool = False, limit: int = 100) -> tuple[OperationRecord, ...]:
        """The newest first."""
        states = ("queued", "running") if live else ()
        return tuple(map(self._fresh, self._rows.list(states=states, limit=limit)))

    def live(self, kind: str) -> tuple[OperationRecord, ...]:
        """Those of a kind that have not ended."""
        return tuple(
            r.record for r in self._live.values() if r.record.kind == kind and not r.ending
        )

    async def wait(self, id: str, seconds: float | None = None) -> OperationRecord:
        """Until it has ended or `seconds` have passed; whatever it is then."""
        record = self.get(id)
        running = self._live.get(record.id)
        if running is not None:
            waiting = asyncio.wait_for(running.over.wait(), seconds)
            try:
                await waiting
            except TimeoutError:
                return running.record
        return self.get(record.id)

    async def cancel(self, id: str) -> OperationRecord:
        """End it; also when it was cancelled already.  conflict if it has ended otherwise."""
        record = self.get(id)
        running = self._live.get(record.id)
        if running is not None and running.ending:
            record = await self._end(running, "cancelled")
        if not record.live or running is None:
            if record.state == "cancelled":
                return record
            raise LoradError("conflict", f"operation {record.id} is {record.state} already")
        if running.sealed:
            message = f"operation {record.id} is about to end, and cannot be cancelled any more"
            raise LoradError("conflict", message, hint=f"loractl op show {record.id}")
        running.stop = True
        return await self._end(running, "cancelled")

    # ------------------------------------------------------------- for services
    async def begin(
        self, kind: str, target: str, *, wish: str = "{}", name: str = "", actor: str = ""
    ) -> OperationRecord:
        """File it, then start its work."""
        begun = self._rows.begin(kind, target, wish=wish, name=name, actor=actor)
        record = await asyncio.wrap_future(begun)
        self._tell(record, "operation.begun", message=f"{kind} {target}")
        self._start(record)
        return record

    async def adopt(self, kind: str, target: str, done: "asyncio.Task[LoradError | None]") -> str:
        """File work that runs already, and ends with None or its error; the id of its operation."""
        begun = self._rows.begin(kind, target, wish="{}", name=target, actor="", state="running")
        running = Running(await asyncio.wrap_future(begun), self, sealed=True)
        self._live[running.record.id] = running

        async def work(running: Running) -> dict[str, Any]:
            if (error := await asyncio.shield(done)) is not None:
                raise error
            return {}

        self._tasks.spawn(self._run(running, work))
        return running.record.id

    def given_up(self, kind: str, before: float) -> tuple[OperationRecord, ...]:
        """Failed before then, with a staging folder that nobody came back for."""
        used = {running.record.staging for running in self._live.values()}
        failed = self._rows.list(states=("failed",), kind=kind)
        return tuple(
            r for r in failed if r.staging and r.staging not in used and r.updated_at < before
        )

    async def forget_staging(self, record: OperationRecord) -> None:
        """Its folder is gone."""
        await asyncio.wrap_future(self._rows.change(record.id, staging=""))

    async def resume(self) -> None:
        """At start: what had not ended goes on, or is told to have failed."""
        for record in reversed(self._rows.list(states=("queued", "running"))):
            if record.id in self._live:
                continue
            if record.kind in self.works:
                self._tell(record, "operation.resumed", message=f"{record.kind} {record.target}")
                self._start(record)
            else:
                message, hint = "lorad was restarted", f"loractl {record.kind} {record.target}"
                running = Running(record, self)
                await self._end(
                    running, "failed", code="internal_error", message=message, hint=hint
                )

    async def run(self) -> None:
        """Tell the registry how far everything is, now and then."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        for id, columns in list(self._unwritten.items()):
            with suppress(LoradError):
                await asyncio.wrap_future(self._rows.change(id, **columns))
                self._unwritten.pop(id, None)
        changed = [running for running in self._live.values() if running.dirty]
        if not changed:
            return
        for running in changed:
            running.dirty = False
        done = {r.record.id: (r.record.done_bytes, r.record.total_bytes) for r in changed}
        try:
            await asyncio.wrap_future(self._rows.note_progress(done))
        except LoradError as error:
            log.warning("progress is not written now: %s", error)

    def close(self) -> None:
        """The daemon stops: work ends, rows stay as they are, and the next start goes on."""
        self.stopping = True

    async def write(self, running: Running, **values: Any) -> None:
        """Change a live one's row; only `Running` and this class call it."""
        done = {"done_bytes": running.record.done_bytes, "total_bytes": running.record.total_bytes}
        change = self._rows.change(running.record.id, **(done | values))
        changed = await asyncio.wrap_future(change)
        now = running.record  # bytes may have moved meanwhile
        running.record = replace(changed, done_bytes=now.done_bytes, total_bytes=now.total_bytes)

    # ------------------------------------------------------------- inside
    def _start(self, record: OperationRecord) -> None:
        running = self._live[record.id] = Running(record, self)
        self._tasks.spawn(self._run(running, self.works[record.kind]))

    async def _run(self, running: Running, work: Work) -> None:
        try:
            columns = await work(running)
        except Ended:
            pass
        except LoradError as error:
            await self._fail(running, error)
        except Exception:
            log.exception("operation %s failed", running.record.id)
            message = "something went wrong inside lorad; its log says what"
            await self._fail(running, LoradError("internal_error", message))
        else:
            await self._end(running, "done", **columns)
        finally:
            self._live.pop(running.record.id, None)

    async def _fail(self, running: Running, error: LoradError) -> None:
        reason = error.details.get("reason", "")
        said = {"code": error.code, "message": error.message, "hint": error.hint}
        await self._end(running, "failed", reason=reason, **said)

    async def _end(self, running: Running, state: str, **columns: Any) -> OperationRecord:
        """Write the end, tell it, wake whoever waits.  What has ended stays as it ended."""
        if running.ending:
            await running.over.wait()
            return running.record
        running.ending = True
        try:
            await self.write(running, state=state, **columns)
        except LoradError as error:  # a full disk: `flush` tries again
            log.warning("the end of operation %s is not written: %s", running.record.id, error)
            self._unwritten[running.record.id] = {"state": state, **columns}
            running.record = self._fresh(running.record)
        running.over.set()
        record = running.record
        self.on_end(record)
        level: Level = "warn" if state == "failed" else "info"
        message = f"{record.kind} {record.target}"
        if record.message:
            message += f": {record.message}"
        cause = record.reason or (record.code if state == "failed" else "")
        self._tell(record, f"operation.{state}", level=level, cause=cause, message=message)
        return record

    def _fresh(self, record: OperationRecord) -> OperationRecord:
        running = self._live.get(record.id)
        record = running.record if running is not None else record
        return replace(record, **self._unwritten.get(record.id, {}))

    def _tell(self, record: OperationRecord, type: str, **words: Any) -> None:
        details = {"operation": record.id, "kind": record.kind, "target": record.target}
        self._events.publish(type, name=record.name, rev=record.rev, details=details, **words)


def shown(record: OperationRecord) -> Operation:
    """As clients see it."""

    def time(seconds: float) -> str:
        return rfc3339(datetime.fromtimestamp(seconds, UTC))

    return Operation(
        id=record.id,
        kind=record.kind,
        target=record.target,
        state=cast(Any, record.state),
        done_bytes=record.done_bytes,
        total_bytes=record.total_bytes or None,
        name=record.name,
        rev=record.rev,
        commit=record.commit,
        code=record.code,
        reason=record.reason,
        message=record.message,
        hint=record.hint,
        actor=record.actor,
        created_at=time(record.created_at),
        updated_at=time(record.updated_at),
    )

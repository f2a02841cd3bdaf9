"""Pulls: the gateway fetches an adapter from elsewhere, once, and rolls it out.

Goes in: a PullStart.  Comes out: an operation that goes on when its client leaves.  Operations are
this gateway's own, and end with it; what was rolled out by then is in the catalog.  Where several
stand behind one address, each tells the others of its operations in the catalog's place.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from lorad import wire
from lorad.config import Settings
from lorad.errors import LoradError
from lorad.fleet.asking import each, given
from lorad.fleet.blobs import Blobs
from lorad.fleet.staging import Stage
from lorad.service.events import rfc3339, utc_now
from lorad.service.threads import on_thread
from lorad.sources.choice import fetcher_for
from lorad.sources.errors import Cancelled
from lorad.sources.fetch import Resolved
from lorad.sources.reference import Reference, parse_reference
from lorad.spelling import adapter_name
from lorad.wire_operations import Operation, OperationPage, PulledFile, PullPlan, PullStart

log = logging.getLogger("lorad.fleet")

#: Operations that have ended and are remembered.
KEPT = 200
#: Others' are forgotten so long after they ended, or after the gateway did that they ran on.
FORGET_SECONDS = 86400.0
#: Between two words to other gateways.
TELL_SECONDS = 0.5
_PLACE = "operations/"
MAX_WAIT_SECONDS = 30.0

Add = Callable[..., Awaitable[wire.Added]]


@dataclass(slots=True)
class _Op:
    value: dict[str, Any]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    stop: bool = False

    def shown(self) -> Operation:
        return Operation(**self.value)

    def end(self) -> None:
        """As soon as it can."""
        self.stop = True
        if self.task is not None and not self.over.is_set():
            self.task.cancel()


class Pulls:
    """`add` is that of Wishes; `shared` is where others look, None: nobody does."""

    def __init__(
        self, settings: Settings, stage: Stage, add: Add, shared: Blobs | None = None
    ) -> None:
        self._settings, self._stage, self._add = settings, stage, add
        self._shared = shared
        self._ops: dict[str, _Op] = {}

    async def close(self) -> None:
        tasks = [op.task for op in self._ops.values() if op.task is not None]
        for op in self._ops.values():
            op.end()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def plan(self, start: PullStart) -> PullPlan:
        reference = parse_reference(start.reference, start.revision)
        resolved = await self._resolve(reference, start)
        return PullPlan(
            reference=resolved.reference,
            commit=resolved.commit,
            name=_name(start, reference),
            files=tuple(PulledFile(name=f.name, num_bytes=f.size) for f in resolved.files),
            total_bytes=resolved.total_bytes,
        )

    async def begin(self, start: PullStart, actor: str) -> Operation:
        reference = parse_reference(start.reference, start.revision)
        name, now = _name(start, reference), rfc3339(utc_now())
        op = _Op(
            {
                "id": secrets.token_hex(8),
                "kind": "pull",
                "target": reference.text,
                "state": "running",
                "name": name,
                "actor": actor,
                "created_at": now,
                "updated_at": now,
            }
        )
        await self._tell(op)  # else another gateway that is asked of it next knows of none
        self._ops[op.value["id"]] = op
        op.task = asyncio.ensure_future(self._run(op, reference, start, name))
        for old in [id for id, o in self._ops.items() if o.over.is_set()][:-KEPT]:
            del self._ops[old]
            if self._shared is not None:
                with suppress(LoradError):
                    await asyncio.to_thread(self._shared.remove, f"{_PLACE}{old}.json")
        return op.shown()

    # ------------------------------------------------------------- operations
    async def page(self, *, live: bool, limit: int) -> OperationPage:
        """The newest first, those of other gateways too."""
        found = {op.id: op for op in await self._told_of()}
        found |= {id: op.shown() for id, op in self._ops.items()}
        rows = sorted(found.values(), key=lambda op: op.created_at, reverse=True)
        wanted = [op for op in rows if not live or op.state == "running"]
        return OperationPage(items=tuple(wanted[:limit]))

    async def wait(self, id: str, seconds: float) -> Operation:
        """As it is when it has ended, or after so long."""
        op = self._ops.get(id)
        if op is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await op.over.wait()
            return op.shown()
        until = asyncio.get_running_loop().time() + seconds
        while True:
            told = await self._of_others(id)
            left = until - asyncio.get_running_loop().time()
            if told.state != "running" or left <= 0:
                return told
            await asyncio.sleep(min(TELL_SECONDS, left))

    async def cancel(self, id: str) -> Operation:
        """Here, or at the gateway that has it."""
        op = self._ops.get(id)
        if op is None:
            await self._of_others(id)
            assert self._shared is not None
            await asyncio.to_thread(self._shared.put, f"{_PLACE}{id}.cancel", b"")
            return await self.wait(id, MAX_WAIT_SECONDS)
        op.end()
        await op.over.wait()
        return op.shown()

    # ------------------------------------------------------------- other gateways
    async def _of_others(self, id: str) -> Operation:
        data = None
        if self._shared is not None and id.isascii() and id.isalnum():
            data = await asyncio.to_thread(self._shared.read, f"{_PLACE}{id}.json")
        if data is None:
            message = f"no operation {id[:40]!r} on this gateway"
            raise LoradError("not_found", message, hint="loractl op ls")
        return msgspec.json.decode(data, type=Operation)

    async def _told_of(self) -> list[Operation]:
        if self._shared is None:
            return []
        names = await asyncio.to_thread(self._shared.names, _PLACE)
        ids = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return list(given(await each(ids, self._of_others)).values())

    async def _tell(self, op: _Op) -> None:
        if self._shared is not None:
            data = msgspec.json.encode(op.shown())
            await asyncio.to_thread(self._shared.put, f"{_PLACE}{op.value['id']}.json", data)

    async def _listen(self, op: _Op) -> None:
        """Tell how far it is, hear whether somebody cancels it, and tell how it ended."""
        assert self._shared is not None
        key = f"{_PLACE}{op.value['id']}.cancel"
        while not op.over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(op.over.wait(), TELL_SECONDS)
                break
            with suppress(LoradError):
                await self._tell(op)
                if await asyncio.to_thread(self._shared.read, key) is not None:
                    await asyncio.to_thread(self._shared.remove, key)
                    op.end()
        with suppress(LoradError):
            await self._tell(op)

    async def _sweep(self) -> None:
        """What gateways have left behind that are gone, whatever became of it."""
        assert self._shared is not None
        late = rfc3339(utc_now() - timedelta(seconds=FORGET_SECONDS))
        with suppress(LoradError):
            for op in await self._told_of():
                if op.id not in self._ops and op.updated_at < late:
                    await asyncio.to_thread(self._shared.remove, f"{_PLACE}{op.id}.json")

    # ------------------------------------------------------------- the work
    async def _run(self, op: _Op, reference: Reference, start: PullStart, name: str) -> None:
        told: dict[str, Any]
        listening = asyncio.ensure_future(self._listen(op)) if self._shared is not None else None
        try:
            told = {"state": "done"} | await self._pull(op, reference, start, name)
        except (asyncio.CancelledError, Cancelled):
            told = {"state": "cancelled"}
        except LoradError as error:
            told = {
                "state": "failed",
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "reason": error.details.get("reason", ""),
            }
        except Exception:
            log.exception("pulling %s failed by our own fault", reference.text)
            message = "something went wrong inside lorad; its log says what"
            told = {"state": "failed", "code": "internal_error", "message": message}
        op.value |= told | {"updated_at": rfc3339(utc_now())}
        op.over.set()
        if listening is not None:
            await listening  # which says how it ended, behind all that it has said before
            await self._sweep()

    async def _pull(
        self, op: _Op, reference: Reference, start: PullStart, name: str
    ) -> dict[str, Any]:
        resolved = await self._resolve(reference, start)
        op.value |= {"commit": resolved.commit, "total_bytes": resolved.total_bytes}

        def progress(done: int, total: int | None) -> None:
            op.value["done_bytes"] = done

        staging = await self._stage.stage(resolved.total_bytes or 0)
        try:
            folder: Path = staging.path
            await on_thread(
                lambda: self._fetcher(reference, start).fetch(
                    resolved, folder, progress, lambda: op.stop
                )
            )
            added = await self._add(
                staging,
                name,
                source=resolved.reference,
                model=start.model,
                replace=start.replace,
                pin=start.pin or None,
                load=start.load,
            )
        finally:
            await self._stage.discard(staging)
        return {"rev": added.rev}

    async def _resolve(self, reference: Reference, start: PullStart) -> Resolved:
        return await on_thread(lambda: self._fetcher(reference, start).resolve(reference))

    def _fetcher(self, reference: Reference, start: PullStart) -> Any:
        return fetcher_for(reference, self._settings, token=start.token, offline=start.offline)


def _name(start: PullStart, reference: Reference) -> str:
    name = start.name or adapter_name(reference.text)
    if not name:
        raise LoradError("invalid_value", "nothing of the reference is a name", hint="--name NAME")
    return name

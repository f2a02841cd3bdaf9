"""Daemon: one member with what it has to know of the catalog, beside it or at the gateway.

Goes in: requests with the revision that they mean, orders, a look now and then.  Comes out: answers
of that revision and of no other.  What the daemon lacks is taken in when it is first asked for, if
the table means it; a daemon that has just started takes in first what it served before.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, TypeVar
from urllib.parse import quote

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet import joining, taking
from lorad.fleet import table as tables
from lorad.fleet.catalog import Catalog
from lorad.fleet.counting import Look, look_of
from lorad.fleet.line import Line, Site
from lorad.fleet.members import BRIEF_SECONDS, Answer, Ask, Head, Lost, Order, State
from lorad.fleet.said import said
from lorad.fleet.table import Entry
from lorad.wire_status import Status

T = TypeVar("T")

#: What became of a revision that a daemon lacked: it was taken in; it is there, since lately or not
#: for who asks; or its name means another one.
Found = Literal["taken", "there", "moved"]

log = logging.getLogger("lorad.fleet")

#: What was refused is not sent again for so long: it may be a file of a hundred megabytes.
REFUSED_SECONDS = 10.0
#: A request is sent so often at most.  What was taken in for it may be gone when it is sent again:
#: another gateway was still taking in what the name meant before, or the daemon was started anew.
MOST_TRIES = 4
#: Revisions that were taken in, or refused, lately.
REMEMBERED = 1000
#: Beside each request for an adapter, and beside all: see lorad.api.identity.
REV_HEADER, MOVES_HEADER = "x-lorad-rev", "x-lorad-moves"
_STATUS = Ask("GET", f"{taking.V1}/status", face="admin")
_SLOTS = Ask("GET", f"{taking.V1}/slots", face="admin")


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a daemon that answers."""

    state: State
    reason: str
    instance: str
    look: Look


@dataclass(frozen=True, slots=True)
class _Taking:
    """An order that is being carried out."""

    order: Order
    task: "asyncio.Task[wire.Added]"


class Daemon:
    """Use it from one event loop; `close` it."""

    def __init__(self, site: Site, catalog: Catalog) -> None:
        self.name = site.name
        self._line, self._catalog = Line(site), catalog
        self._taking: dict[str, _Taking] = {}  # name@revision -> the last that is under way
        self._orders: set[asyncio.Task[wire.Added]] = set()
        self._taken: dict[str, float] = {}  # and when it ended well, on the loop's clock
        self._refused: dict[str, tuple[float, LoradError]] = {}  # until when that is the answer
        self._joined = ""  # the instance that has taken in what it must
        self._away = False  # since then, and may have missed something
        self._joining: asyncio.Task[None] | None = None
        self._trouble = ""

    async def close(self) -> None:
        for task in (*self._orders, *filter(None, [self._joining])):
            task.cancel()
        await self._line.close()

    def cut(self) -> None:
        """It is lost: what is under way ends so."""
        self._line.cut()

    async def look(self) -> Seen:
        """Raises Lost.  Ready is one that takes requests, and has what it must have."""
        try:
            status = await self._read(_STATUS, Status)
            slots = await self._read(_SLOTS, wire.SlotPage)
        except Lost:
            self._away = True
            raise
        look, ready = look_of(status, slots.items), status.state == "ready"
        if not ready:
            self._away = True
            return Seen("away", status.reason or status.state, status.instance_id, look)
        if self._joined != status.instance_id:
            self._join(status.instance_id)
            reason = self._trouble or "it takes in the catalog's adapters"
            return Seen("away", reason, status.instance_id, look)
        if self._away:
            self._join(status.instance_id)  # beside its requests: each says its revision
        return Seen("ready", "", status.instance_id, look)

    async def ask(self, ask: Ask, *, seconds: float | None = BRIEF_SECONDS) -> Answer:
        """See Members."""
        return await self._line.ask(ask, seconds)

    async def stream(self, ask: Ask) -> AsyncGenerator[Head | bytes, None]:
        """Of `ask.model`, whatever the name means to the daemon.  Raises Lost."""
        sent, last = ask, ""
        if ask.model:
            rev = ask.model.partition("@")[2]
            sent = replace(ask, headers=(*ask.headers, (REV_HEADER, rev)))
        for more in reversed(range(MOST_TRIES)):
            began = asyncio.get_running_loop().time()
            async with aclosing(self._line.stream(sent)) as parts:
                head = await anext(parts)
                assert isinstance(head, Head)
                if head.status != 404 or not ask.model:
                    yield head
                    async for part in parts:
                        yield part
                    return
                body = [part async for part in parts if isinstance(part, bytes)]
            answer = Answer(head, b"".join(body))
            if not (more and taking.lacks(answer)):
                break
            try:
                found = await self._obtain(ask.model, began)
            except LoradError as error:
                answer = said(error, self.name)
                break
            if found == "moved" or found == last == "there":
                break
            last = found
        yield answer.head
        yield answer.body

    async def take_in(self, order: Order) -> wire.Added:
        """Raises Lost, LoradError.  One that wants no more than another which is under way has
        what that comes to; one that wants more, such as a pin, follows it."""
        key = f"{order.name}@{order.rev or order.content}{'?' if order.dry_run else ''}"
        before = self._taking.get(key)
        if before is not None and before.order.covers(order):
            return await asyncio.shield(before.task)
        task = asyncio.ensure_future(self._carry_out(order, before))
        self._orders.add(task)
        self._taking[key] = _Taking(order, task)
        task.add_done_callback(lambda task: self._note_taken(key, task))
        return await asyncio.shield(task)

    # ------------------------------------------------------------- inside
    async def _carry_out(self, order: Order, before: _Taking | None) -> wire.Added:
        if before is not None:
            await taking.hold(self._line, order)  # what it serves now, not what is being taken in
            await asyncio.wait({before.task})
        return await taking.take_in(self._line, self._catalog.store, order)

    def _note_taken(self, key: str, task: "asyncio.Task[wire.Added]") -> None:
        self._orders.discard(task)
        last = self._taking.get(key)
        if last is not None and last.task is task:
            del self._taking[key]
        if task.cancelled():
            return
        now, error = asyncio.get_running_loop().time(), task.exception()  # who waits raises it
        for kept in (self._taken, self._refused):
            if len(kept) >= REMEMBERED:
                kept.clear()
        if error is None:
            self._taken[key] = now
            self._refused.pop(key, None)
        elif isinstance(error, LoradError):
            self._refused[key] = (now + REFUSED_SECONDS, error)

    async def _obtain(self, model: str, since: float) -> Found:
        """Take in what the table means by it, unless that was done since."""
        if self._taken.get(model, since) > since:
            return "taken"
        until, error = self._refused.get(model, (since, None))
        if error is not None and since < until:
            raise error
        entry = tables.find(await self._catalog.look(), model)
        if entry is None or entry.id != model:
            return "moved"
        if self._taken.get(model, since) > since:  # while the table was looked at
            return "taken"
        if await self._has(entry):
            return "there"
        await self.take_in(taking.order_for(entry))
        return "taken"

    async def _has(self, entry: Entry) -> bool:
        """Does its name mean that there?  What is unknown to a tenant need not be sent again."""
        path = f"{taking.V1}/adapters/{quote(entry.name)}"
        try:
            answer = await taking.call(self._line, "GET", path, query="show=1")
        except LoradError:
            return False
        return taking.read(answer, wire.AdapterDetail).adapter.rev == entry.rev

    def _join(self, instance: str) -> None:
        if self._joining is None or self._joining.done():
            self._joining = asyncio.ensure_future(self._do_join(instance))

    async def _do_join(self, instance: str) -> None:
        try:
            await joining.join(self._line, self._catalog, self.take_in)
        except (Lost, LoradError) as error:
            trouble = f"it cannot take in the catalog's adapters: {error}"
            if trouble != self._trouble:
                log.warning("%s: %s", self.name, trouble)
            self._trouble = trouble
            return
        self._joined, self._trouble, self._away = instance, "", False

    async def _read(self, ask: Ask, kind: type[T]) -> T:
        answer = await self._line.ask(ask, BRIEF_SECONDS)
        if answer.status != 200:
            raise Lost(self.name, f"its admin routes answer {answer.status}")
        return taking.read(answer, kind)

"""Daemons on sockets or at URLs as `Members`: what tests use, and whoever has no Ray.

Goes in: where each is.  Comes out: requests routed by where their adapter is.  Every member is
looked at once a second; one that does not answer is lost until it does again, and what waits for
it ends then.  Owns no request.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet.counting import Count, look_of
from lorad.fleet.line import Line, Site
from lorad.fleet.members import BRIEF_SECONDS, Answer, Ask, Head, Lost, Member, Order, State
from lorad.routing.affinity import Router
from lorad.wire_status import Status

T = TypeVar("T")

LOOK_SECONDS = 1.0
#: Looks in a row that fail before a member is lost: one may be late while a machine is busy.
MISSES = 2
_STATUS = Ask("GET", "/admin/v1/status", face="admin")
_SLOTS = Ask("GET", "/admin/v1/slots", face="admin")


@dataclass(slots=True)
class _Seat:
    line: Line
    count: Count
    state: State = "lost"
    reason: str = "it was not looked at yet"
    instance: str = ""
    misses: int = 0


class LocalMembers:
    """`take_in` gives a member files of the catalog.  Await `look` once, then let `run` go on."""

    def __init__(
        self,
        sites: Sequence[Site],
        take_in: Callable[[Line, Order], Awaitable[wire.Added]],
        *,
        router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ordered = sorted(sites, key=lambda site: site.name)
        self._seats = {site.name: _Seat(Line(site), Count(site.name)) for site in ordered}
        if len(self._seats) < len(sites):
            raise ValueError("two members have the same name")
        self._take_in, self._router, self._clock = take_in, router or Router(), clock

    async def close(self) -> None:
        for seat in self._seats.values():
            await seat.line.close()

    # ------------------------------------------------------------- how they are
    def seen(self) -> Sequence[Member]:
        return [
            Member(name, s.state, s.instance, s.count.seen(alive=s.state == "ready"), s.reason)
            for name, s in self._seats.items()
        ]

    async def run(self) -> None:
        """Look at each once a second, until it is cancelled; one that hangs holds nobody up."""

        async def each(seat: _Seat) -> None:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self._look(seat)

        async with asyncio.TaskGroup() as group:
            for seat in self._seats.values():
                group.create_task(each(seat))

    async def look(self) -> None:
        """At all of them, once."""
        await asyncio.gather(*map(self._look, self._seats.values()))

    async def _look(self, seat: _Seat) -> None:
        try:
            status = await _read(seat.line, _STATUS, Status)
            slots = await _read(seat.line, _SLOTS, wire.SlotPage)
        except Lost as lost:
            seat.misses += 1
            if seat.misses >= MISSES or not seat.instance:
                seat.state, seat.reason = "lost", lost.why
                seat.line.cut()
            return
        seat.misses, seat.instance = 0, status.instance_id
        seat.state = "ready" if status.state == "ready" else "away"
        seat.reason = status.reason or ("" if seat.state == "ready" else status.state)
        seat.count.take(look_of(status, slots.items))

    # ------------------------------------------------------------- requests
    async def ask(self, member: str, ask: Ask, *, seconds: float | None = BRIEF_SECONDS) -> Answer:
        seat = self._seats.get(member)
        if seat is None:
            raise Lost(member, "there is no such member")
        return await seat.line.ask(ask, seconds)

    async def stream(
        self, ask: Ask, rev: str | None, *, without: Collection[str] = ()
    ) -> AsyncGenerator[Head | bytes, None]:
        seat = self._choose(rev, without)
        count, began = seat.count, False
        count.enter(rev)
        try:
            async with aclosing(seat.line.stream(ask)) as parts:
                async for part in parts:
                    yield part
                    if not began:
                        began = True
                        count.begin(rev)
        except Lost as lost:
            if not lost.began:
                self._doubt(seat, lost)
            raise
        finally:
            count.leave(rev, began=began)

    async def take_in(self, member: str, order: Order) -> wire.Added:
        seat = self._seats.get(member)
        if seat is None:
            raise Lost(member, "there is no such member")
        return await self._take_in(seat.line, order)

    def _choose(self, rev: str | None, without: Collection[str]) -> _Seat:
        replicas = [
            seat.count.seen(alive=seat.state == "ready" and name not in without)
            for name, seat in self._seats.items()
        ]
        chosen = self._router.choose(rev, replicas, self._clock())
        if chosen is None:
            raise LoradError("engine_restarting", nobody(self.seen()))
        return self._seats[chosen.name]

    def _doubt(self, seat: _Seat, lost: Lost) -> None:
        """Nobody else is sent there before it has answered a look."""
        if seat.state == "ready":
            seat.state, seat.reason = "away", lost.why


def nobody(members: Sequence[Member]) -> str:
    """Why no member takes requests, in one line."""
    whys: Mapping[str, str] = {m.name: m.reason or m.state for m in members}
    said = "; ".join(f"{name}: {why}" for name, why in whys.items())
    return f"no member takes requests ({said})" if said else "there are no members yet"


async def _read(line: Line, ask: Ask, kind: type[T]) -> T:
    answer = await line.ask(ask, BRIEF_SECONDS)
    try:
        if answer.status != 200:
            raise Lost(line.site.name, f"its admin routes answer {answer.status}")
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.DecodeError:
        raise Lost(line.site.name, "what answers there is no lorad") from None

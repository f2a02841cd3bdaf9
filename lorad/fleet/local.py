"""Daemons on sockets or at URLs as `Members`: what tests use, and whoever has no Ray.

Goes in: where each is.  Comes out: requests routed by where their adapter is.  Every member is
looked at once a second; one that does not answer is lost until it does again, and what waits for
it ends then.  Owns no request.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet.catalog import Catalog
from lorad.fleet.counting import Count
from lorad.fleet.daemon import Daemon
from lorad.fleet.line import Site
from lorad.fleet.members import BRIEF_SECONDS, Answer, Ask, Head, Lost, Member, Order, State
from lorad.routing.affinity import Router

LOOK_SECONDS = 1.0
#: Looks in a row that fail before a member is lost: one may be late while a machine is busy.
MISSES = 2


@dataclass(slots=True)
class _Seat:
    daemon: Daemon
    count: Count
    state: State = "lost"
    reason: str = "it was not looked at yet"
    instance: str = ""
    misses: int = 0


class LocalMembers:
    """Await `look` until those are ready that are to be, then let `run` go on."""

    def __init__(
        self,
        sites: Sequence[Site],
        catalog: Catalog,
        *,
        router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ordered = sorted(sites, key=lambda site: site.name)
        self._seats = {s.name: _Seat(Daemon(s, catalog), Count(s.name)) for s in ordered}
        if len(self._seats) < len(sites):
            raise ValueError("two members have the same name")
        self._router, self._clock = router or Router(), clock

    async def close(self) -> None:
        for seat in self._seats.values():
            await seat.daemon.close()

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
            seen = await seat.daemon.look()
        except Lost as lost:
            seat.misses += 1
            if seat.misses >= MISSES or not seat.instance:
                seat.state, seat.reason = "lost", lost.why
                seat.daemon.cut()
            return
        seat.misses, seat.instance = 0, seen.instance
        seat.state, seat.reason = seen.state, seen.reason
        seat.count.take(seen.look)

    # ------------------------------------------------------------- requests
    async def ask(self, member: str, ask: Ask, *, seconds: float | None = BRIEF_SECONDS) -> Answer:
        seat = self._seats.get(member)
        if seat is None:
            raise Lost(member, "there is no such member")
        return await seat.daemon.ask(ask, seconds=seconds)

    async def stream(
        self, ask: Ask, rev: str | None, *, without: Collection[str] = ()
    ) -> AsyncGenerator[Head | bytes, None]:
        seat = self._choose(rev, without)
        count, began = seat.count, False
        count.enter(rev)
        try:
            async with aclosing(seat.daemon.stream(ask)) as parts:
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
        return await seat.daemon.take_in(order)

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

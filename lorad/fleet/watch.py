"""Watch: what happens on all members, as one ring of events and one live board.

Goes in: members' events and boards, asked for once a second.  Comes out: events with the member as
their replica, and messages for whoever follows.  Boards are asked for only while somebody looks.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from msgspec.structs import replace

from lorad import wire
from lorad.board.stream import Message, Stream
from lorad.board_apply import MAX_EVENTS
from lorad.fleet import merge_board
from lorad.fleet.asking import V1, ask_each, each, get, given
from lorad.fleet.catalog import Catalog
from lorad.fleet.listing import Listing
from lorad.fleet.members import Member, Members
from lorad.service.events import EventRing, rfc3339, utc_now
from lorad.wire_stream import Board

EVERY_SECONDS = 1.0
#: Of one member, at once.
MAX_NEW_EVENTS = 200
_UNSEEN = ("", "")  # no state yet, and no reason for it


class Events:
    """Fills a ring with what members tell, and with how they are."""

    def __init__(self, members: Members, ring: EventRing) -> None:
        self._members, self._ring = members, ring
        self._seen: dict[str, tuple[str, int]] = {}  # member -> instance, its newest event
        self._states: dict[str, tuple[str, str]] = {}

    async def run(self) -> None:
        """Once a second, until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_SECONDS)

    async def look(self) -> None:
        for member in self._members.seen():
            self._note_state(member)
        there = [m.name for m in self._members.seen() if m.state != "lost"]
        pages = given(await each(there, self._page))
        for name, page in pages.items():
            self._take(name, page)

    async def _page(self, name: str) -> wire.EventPage:
        _, last = self._seen.get(name, ("", 0))
        query = f"limit={MAX_NEW_EVENTS}" + (f"&since={last}" if name in self._seen else "")
        return await get(self._members, name, f"{V1}/events", wire.EventPage, query=query)

    def _take(self, name: str, page: wire.EventPage) -> None:
        """What is new; at the first look and after a start of the member's, nothing is old news."""
        newest = max((item.id for item in page.items), default=self._seen.get(name, ("", 0))[1])
        known = self._seen.get(name)
        self._seen[name] = (page.instance_id, newest)
        if known is None:
            return
        if known[0] != page.instance_id:
            self._seen[name] = (page.instance_id, 0)  # its ids begin anew
            return
        for item in page.items:
            self._ring.publish(
                item.type,
                level=item.level,
                name=item.name,
                rev=item.rev,
                cause=item.cause,
                message=item.message,
                details=item.details,
                replica=f"{name}/{item.replica}" if item.replica else name,
            )

    def _note_state(self, member: Member) -> None:
        before, now = self._states.get(member.name), (member.state, member.reason)
        self._states[member.name] = now
        if before is None and member.state == "lost":
            self._states[member.name] = _UNSEEN  # nobody may have asked it yet: the next look tells
            return
        if before is None and member.state == "ready":
            before = _UNSEEN  # a gateway's first, or in the place of one that was lost
        if before is None or before[0] == now[0] or (before == _UNSEEN and now[0] == "away"):
            return
        self._ring.publish(
            {"ready": "member.ready", "away": "member.away", "lost": "member.lost"}[member.state],
            level="info" if member.state == "ready" else "warn",
            message=member.reason or (f"was {before[0]}" if before[0] else ""),
            details={"before": before[0]} if before[0] else None,
            replica=member.name,
        )


class Boards:
    """Has the face of the daemon's towards the admin routes."""

    def __init__(
        self,
        members: Members,
        catalog: Catalog,
        listing: Listing,
        ring: EventRing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._catalog, self._listing = members, catalog, listing
        self._ring, self._clock = ring, clock
        self._board: Board | None = None
        self._painted = float("-inf")
        self._painting = asyncio.Lock()
        self._readers = 0
        self._came = asyncio.Event()

    async def run(self) -> None:
        """Paint once a second while somebody follows, until it is cancelled."""
        while True:
            if not self._readers:
                self._came.clear()
                await self._came.wait()
            await self.once()
            await asyncio.sleep(EVERY_SECONDS)

    async def once(self) -> Board:
        """As it is now, or was a moment ago."""
        async with self._painting:
            if self._board is None or self._clock() - self._painted >= EVERY_SECONDS / 2:
                self._board = await self._paint()
                self._painted = self._clock()
            return self._board

    async def follow(
        self, interval: float, after: int | None = None
    ) -> AsyncGenerator[Message, None]:
        """See lorad.board.stream."""
        with self._reader():
            first = await self.once()
            stream = Stream(lambda: self._board or first, self._ring, self._clock)
            async with aclosing(stream.follow(interval, after)) as messages:
                async for message in messages:
                    yield message

    async def _paint(self) -> Board:
        boards = given(await ask_each(self._members, f"{V1}/board", Board))
        await self._listing.look()
        trouble = str(self._catalog.trouble) if self._catalog.trouble is not None else ""
        checks = merge_board.checks(self._members.seen(), trouble)
        painted = merge_board.board(boards, self._listing.status(), checks, rfc3339(utc_now()))
        return replace(painted, events=self._ring.newest(MAX_EVENTS))

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        self._readers += 1
        self._came.set()
        try:
            yield
        finally:
            self._readers -= 1

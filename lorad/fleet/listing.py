"""Listing: what the cluster looks like, asked of all members at once and kept for a moment.

Goes in: members' pictures.  Comes out: the pictures that the admin routes show, as of one daemon.
A member that does not answer in time is in them as such, and nobody waits for it.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import quote

from msgspec.structs import replace

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet import merge
from lorad.fleet.asking import V1, alive, ask_each, get, given
from lorad.fleet.catalog import Catalog
from lorad.fleet.local import nobody
from lorad.fleet.members import Lost, Members
from lorad.fleet.rollout import home_of
from lorad.fleet.table import Entry, unknown
from lorad.fleet.wishes import holder_of
from lorad.spelling import split_digest
from lorad.wire_explain import Explained
from lorad.wire_status import PoolPicture, Status

T = TypeVar("T")

#: Pictures that are no older are shown again: `loractl` asks page by page.
FRESH_SECONDS = 0.5


class Listing:
    """`own` is the gateway as a daemon: version, sockets and the like."""

    def __init__(
        self,
        members: Members,
        catalog: Catalog,
        own: Callable[[], Status],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._catalog, self._own, self._clock = members, catalog, own, clock
        self._statuses: dict[str, Status] = {}
        self._slots: dict[str, wire.SlotPage] = {}
        self._rows: dict[str, wire.Adapter] = {}
        self._begun = self._looked = self._changed = float("-inf")
        self._looking = asyncio.Lock()

    async def look(self) -> None:
        """At all of them, unless that was done just now."""
        async with self._looking:
            now = self._clock()
            if now - self._looked < FRESH_SECONDS and self._begun > self._changed:
                return
            statuses, slots = await asyncio.gather(
                ask_each(self._members, f"{V1}/status", Status),
                ask_each(self._members, f"{V1}/slots", wire.SlotPage),
            )
            self._statuses, self._slots = given(statuses), given(slots)
            self._rows = merge.together({name: page.items for name, page in self._slots.items()})
            self._begun, self._looked = now, self._clock()

    def note_change(self) -> None:
        """Who gave an order sees what it did: pictures of before are not shown again."""
        self._changed = self._clock()

    # ------------------------------------------------------------- of all
    def ready(self, model: str | None = None) -> tuple[bool, str]:
        """One member that takes requests is enough."""
        return (True, "") if alive(self._members) else (False, "engine_restarting")

    def waiting(self) -> str:
        return nobody(self._members.seen())

    def status(self) -> Status:
        members = self._members.seen()
        ready = bool(alive(self._members))
        away = [f"{m.name} {m.state}: {m.reason}" for m in members if m.state != "ready"]
        entries = self._catalog.table.entries.values()
        own = replace(
            self._own(),
            state="ready" if ready else "engine_restarting",
            reason="; ".join([*away, *self.mixed()]),
            drained=tuple(entry.name for entry in entries if entry.drained),
        )
        states = merge.states(self._catalog.table, self._rows)
        return merge.status(own, self._statuses, members, states)

    def mixed(self) -> list[str]:
        """See merge."""
        return merge.mixed(self._statuses)

    def slots(self) -> wire.SlotPage:
        return merge.slots(self._slots)

    def page(
        self,
        *,
        state: str | None,
        tenant: str | None,
        model: str | None = None,
        q: str | None,
        sort: str,
        limit: int,
        cursor: str | None,
    ) -> wire.AdapterPage:
        return merge.page(
            merge.listed(self._catalog.table, self._rows),
            state=state,
            tenant=tenant,
            model=model,
            q=q,
            sort=sort,
            limit=limit,
            cursor=cursor,
        )

    # ------------------------------------------------------------- of one
    def known(self, name: str) -> Entry:
        entry = self._catalog.table.entries.get(split_digest(name)[0])
        if entry is None:
            raise unknown(name, self._catalog.table.entries)
        return entry

    async def detail(self, name: str) -> wire.AdapterDetail:
        """As a member shows it that has it, with what holds everywhere."""
        await self.look()
        entry = self.known(name)
        path = f"{V1}/adapters/{quote(entry.name)}"
        found = await self._first(entry, path, wire.AdapterDetail, "show=1")
        row = merge.row_of(entry, self._rows.get(entry.name))
        history = tuple(content.rev for content in entry.before)
        if found is None or found[1].adapter.rev != entry.rev:
            return wire.AdapterDetail(adapter=row, serving=None, candidate=None, history=history)
        return replace(found[1], adapter=row, candidate=None, history=history)

    async def explain(self, name: str) -> Explained:
        """By the member where its requests go."""
        entry = self.known(name)
        path = f"{V1}/adapters/{quote(entry.name)}/explain"
        found = await self._first(entry, path, Explained, "")
        if found is not None and found[1].rev == entry.rev:
            member, said = found
            return replace(said, replica=f"{member}/{said.replica}" if said.replica else member)
        members = alive(self._members)
        return Explained(
            name=entry.name,
            rev=entry.rev,
            state="registered",
            tier="remote",
            served=False,
            why="it is in the catalog, and no member has taken it in yet",
            next=f"its first request brings it to {home_of(entry.rev, members).name}"
            if members
            else nobody(self._members.seen()),
            hint=f"loractl load {entry.name}",
        )

    async def _first(
        self, entry: Entry, path: str, kind: type[T], query: str
    ) -> tuple[str, T] | None:
        """A member and its word: of those that may have it, where requests would go first."""
        members = alive(self._members)
        if not members:
            return None
        likely = holder_of(entry.rev, members) or home_of(entry.rev, members)
        for member in (likely, *(m for m in members if m is not likely)):
            try:
                found = await get(self._members, member.name, path, kind, query=query)
            except (Lost, LoradError):
                continue
            return member.name, found
        return None


def own_status(version: str, instance_id: str, sockets: Sequence[str], since: float) -> Status:
    """The gateway where a daemon says who it is; what is of engines is nothing yet."""
    return Status(
        version=version,
        instance_id=instance_id,
        pid=os.getpid(),
        state="ready",
        reason="",
        uptime_seconds=time.monotonic() - since,
        base="",
        model="",
        device="",
        device_name="",
        dtype="",
        max_model_len=0,
        inference_socket=sockets[0],
        admin_socket=sockets[1],
        inbox=None,
        state_dir=sockets[2],
        adapters={},
        slots_total=0,
        slots_used=0,
        pinned=0,
        running=0,
        waiting=0,
        ram_used_bytes=0,
        ram_limit_bytes=0,
        pool=PoolPicture(),
        generated_tokens=0,
        prompt_tokens=0,
        forward_passes=0,
        preemptions=0,
    )

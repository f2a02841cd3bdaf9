"""Rollout: a name comes to mean other content, on every member, without a request noticing.

Goes in: files in the catalog, and how a name is to be.  Comes out: `wire.Added` when no gateway
asks for what was before and no member answers with it; or why not and whose word that is, with
everything as it was.

The order: one member looks at the files; those that have the name take the new revision beside the
old one, the first alone and then a few at a time; the table moves; every gateway goes by it;
members let go of the old one.  Until the table moves all requests get the old revision.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from msgspec.structs import replace

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet import table as tables
from lorad.fleet.asking import V1, alive, call, each, get
from lorad.fleet.catalog import Catalog
from lorad.fleet.members import Lost, Member, Members, Order
from lorad.fleet.presence import Presence
from lorad.fleet.table import Entry, Table
from lorad.fleet.taking import named, order_for
from lorad.routing.affinity import ranking
from lorad.wire_operate import HoldAsk

log = logging.getLogger("lorad.fleet")

#: Members that take a new revision at once, after the first has it.
AT_ONCE = 2
#: So long a replaced revision stays to be had at members whose gateway died on the way.
HOLD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a name is to be; None leaves a setting as it is."""

    name: str
    model: str = ""
    source: str = "upload"
    replace: bool = False
    pin: bool | None = None
    load: bool = False
    priority: int | None = None
    labels: dict[str, str] | None = None
    dry_run: bool = False


class Rollout:
    """Call it for one name at a time."""

    def __init__(self, members: Members, catalog: Catalog, presence: Presence) -> None:
        self._members, self._catalog, self._presence = members, catalog, presence

    async def run(self, content: str, wish: Wish) -> wire.Added:
        """Raises LoradError: a member's with its name, name_taken, conflict."""
        old = (await self._catalog.look()).entries.get(wish.name)
        vetted = await self._vet(content, wish)
        entry = _entry(content, vetted.rev, wish, old, self._catalog.now())
        unchanged = old is not None and old.rev == entry.rev
        if old is not None and not unchanged and not wish.replace:
            message = f"{wish.name!r} serves other content ({old.rev[:12]})"
            raise LoradError("name_taken", message, hint="use --replace")
        home = vetted
        if not (wish.dry_run or (unchanged and entry == old and not wish.load)):
            home = await self._carry_out(entry, old, wish.load) or vetted
        return wire.Added(
            name=wish.name,
            rev=entry.rev,
            state=home.state,
            num_bytes=home.num_bytes,
            load_seconds=home.load_seconds,
            unchanged=unchanged,
            replaced_rev=old.rev if old is not None and not unchanged else None,
            warnings=home.warnings,
            dry_run=wish.dry_run,
        )

    async def let_go(self, name: str) -> None:
        """No member that can be asked answers from here on for what the name meant before."""
        ask = HoldAsk(name=name, seconds=0)
        await each(alive(self._members), lambda m: self._post(m, "hold", ask))

    # ------------------------------------------------------------- steps
    async def _vet(self, content: str, wish: Wish) -> wire.Added:
        """A member's word on the files; the first that can give one."""
        order = Order(
            name=wish.name,
            content=content,
            model=wish.model,
            priority=wish.priority,
            labels=wish.labels or {},
            dry_run=True,
        )
        for member in alive(self._members):
            try:
                return await self._members.take_in(member.name, order)
            except Lost:
                continue
            except LoradError as error:
                raise named(error, member.name) from None
        message = "no member is ready to take it"
        raise LoradError("engine_restarting", message, hint="loractl status tells why")

    async def _carry_out(self, entry: Entry, old: Entry | None, load: bool) -> wire.Added | None:
        """What its home says of it, None if that is lost."""
        taken: list[Member] = []
        try:
            home = await self._take(entry, old, load, taken)
            entry = await self._with_facts(entry, taken)
            table = await self._catalog.change(
                f"add {entry.name}",
                lambda table: tables.moved(table, unless_moved(table, old, entry)),
            )
        except BaseException:
            await asyncio.shield(self._undo(taken, entry, old))
            raise
        await self._presence.all_at(table.generation)
        if old is not None:
            await self.let_go(entry.name)
        return home

    async def _take(
        self, entry: Entry, old: Entry | None, load: bool, taken: list[Member]
    ) -> wire.Added | None:
        """The members that are to have it now; who has it is in `taken`.  One that is lost on the
        way takes it when it is first asked for."""
        first, *others = await self._targets(entry)
        hold = HOLD_SECONDS if old is not None and old.rev != entry.rev else 0.0

        async def one(member: Member) -> wire.Added | None:
            order = order_for(entry, load=load and member is first, hold_seconds=hold)
            try:
                return await self._members.take_in(member.name, order)
            except Lost as lost:
                log.warning("%s goes on without %s", entry.name, lost)
                return None
            except LoradError as error:
                raise named(error, member.name) from None
            finally:
                taken.append(member)  # it may have begun to

        home = await one(first)
        for at in range(0, len(others), AT_ONCE):
            outcomes = await each(others[at : at + AT_ONCE], one)
            for outcome in outcomes.values():
                if isinstance(outcome, LoradError):
                    raise outcome
        return home

    async def _with_facts(self, entry: Entry, taken: Sequence[Member]) -> Entry:
        """With what lists show of one that is on no GPU."""
        for member in taken:
            path = f"{V1}/adapters/{quote(entry.name)}"
            try:
                detail = await get(
                    self._members, member.name, path, wire.AdapterDetail, query="show=1"
                )
            except (Lost, LoradError):
                continue
            row = detail.adapter
            return replace(
                entry,
                model=row.model or entry.model,
                rank=row.rank,
                num_bytes=row.num_bytes,
                targets=row.targets,
            )
        return entry

    async def _targets(self, entry: Entry) -> list[Member]:
        """All for what is pinned; else the one where its requests would go, and who has the name
        already.  The home goes first."""
        members = alive(self._members)
        if not members:
            raise LoradError("engine_restarting", "no member is ready to take it")
        home = home_of(entry.rev, members)
        others = [member for member in members if member is not home]
        if not entry.pin:
            has = await each(others, lambda member: self._has(member, entry.name))
            others = [member for member in others if has[member] is True]
        return [home, *others]

    async def _has(self, member: Member, name: str) -> bool:
        try:
            path = f"{V1}/adapters/{quote(name)}"
            await call(self._members, member.name, "GET", path, query="show=1", seconds=10.0)
        except LoradError as error:
            if error.code == "model_not_found":
                return False
            raise
        return True

    async def _undo(self, taken: Sequence[Member], entry: Entry, old: Entry | None) -> None:
        """As it was, as far as members can be reached: one that cannot takes the old revision when
        it is next asked for."""

        async def one(member: Member) -> None:
            if old is None:
                path = f"{V1}/adapters/{quote(entry.name)}"
                await call(self._members, member.name, "DELETE", path, seconds=10.0)
            else:
                await self._members.take_in(member.name, order_for(old))
                await self._post(member, "hold", HoldAsk(name=entry.name, seconds=0))

        for member, outcome in (await each(taken, one)).items():
            known = isinstance(outcome, LoradError) and outcome.code == "model_not_found"
            if isinstance(outcome, LoradError | Lost) and not known:
                log.warning("%s is not as it was on %s: %s", entry.name, member.name, outcome)

    async def _post(self, member: Member, route: str, body: object) -> None:
        await call(self._members, member.name, "POST", f"{V1}/{route}", body)


def home_of(rev: str, members: Sequence[Member]) -> Member:
    """Where requests for a revision go that is nowhere yet."""
    by_name = {member.replica.name: member for member in members}
    return by_name[ranking(rev, tuple(by_name))[0]]


def _entry(content: str, rev: str, wish: Wish, old: Entry | None, now: str) -> Entry:
    """What the table is to say; of the same revision, `old` with what is wished."""
    if old is not None and old.rev == rev:
        base = old
    else:
        base = Entry(
            name=wish.name,
            content=content,
            rev=rev,
            model=wish.model or (old.model if old else ""),
            source=wish.source,
            created_at=now,
            moved_at=now,
            pin=old.pin if old else False,
            priority=old.priority if old else None,
            labels=old.labels if old else {},
            drained=old.drained if old else False,
        )
    return replace(
        base,
        pin=base.pin if wish.pin is None else wish.pin,
        priority=base.priority if wish.priority is None else wish.priority,
        labels=base.labels if wish.labels is None else wish.labels,
    )


def unless_moved(table: Table, old: Entry | None, entry: Entry) -> Entry:
    """`entry`, if the name means what it did when this began."""
    now = table.entries.get(entry.name)
    if (now.generation if now else 0) != (old.generation if old else 0):
        message = f"another gateway moved {entry.name!r} meanwhile"
        raise LoradError("conflict", message, hint="look at it with loractl show, and do it again")
    return entry

"""Wishes: what operators want of adapters, on all members that it is about.

Goes in: the same as a daemon's AdapterService takes.  Comes out: the same, with a member's name
where one refuses.  Changes of one name follow each other at one gateway, and between gateways the
table says who was first.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

from msgspec.structs import replace

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet import table as tables
from lorad.fleet.asking import V1, alive, call, each, given
from lorad.fleet.catalog import DAMAGED, Catalog
from lorad.fleet.members import Lost, Member, Members
from lorad.fleet.presence import Presence
from lorad.fleet.rollout import Rollout, Wish, home_of, unless_moved
from lorad.fleet.staging import Stage, Staged
from lorad.fleet.table import Entry, unknown
from lorad.fleet.taking import TAKE_SECONDS, named, order_for, read
from lorad.wire_operate import Held, HoldAsk

#: Digits of a revision that will do for all of them.
SHORT_REV = 8
#: Names that are worked at together.
AT_ONCE = 8


class Publish(Protocol):
    """Of EventRing."""

    def __call__(self, type: str, /, *, name: str, rev: str, message: str) -> object: ...


class Wishes:
    """Has the face of AdapterService towards the admin routes."""

    def __init__(
        self,
        members: Members,
        catalog: Catalog,
        presence: Presence,
        stage: Stage,
        publish: Publish,
    ) -> None:
        self._members, self._catalog, self._presence = members, catalog, presence
        self._rollout = Rollout(members, catalog, presence)
        self._publish = publish
        self.stage, self.discard = stage.stage, stage.discard
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    # ------------------------------------------------------------- content
    async def add(
        self,
        staging: Staged,
        name: str,
        *,
        source: str,
        model: str = "",
        replace: bool = False,
        pin: bool | None = None,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
        load: bool = False,
        dry_run: bool = False,
    ) -> wire.Added:
        """Into the catalog, and to the members; the staging folder is used up.  Returns when the
        rollout is done."""
        wish = Wish(
            name=name,
            model=model,
            source=source,
            replace=replace,
            pin=pin,
            load=load,
            priority=priority,
            labels=None if labels is None else dict(labels),
            dry_run=dry_run,
        )
        before = self._catalog.table.contents()
        try:
            async with self._catalog.holding(staging.path) as content:
                before = self._catalog.table.contents() | {content}
                async with self._lock(name):
                    try:
                        added = await self._rollout.run(content, wish)
                    except LoradError as error:
                        if error.code not in DAMAGED:
                            raise
                        await self._catalog.add(staging.path, anew=True)
                        added = await self._rollout.run(content, wish)
        finally:
            await self.discard(staging)
            left = before - self._catalog.table.contents()  # of long ago, or of no name
            await asyncio.shield(self._drop(*left))
        if not (dry_run or added.unchanged):
            kind = "adapter.replaced" if added.replaced_rev else "adapter.added"
            was = f"was {added.replaced_rev[:12]}" if added.replaced_rev else ""
            self._publish(kind, name=name, rev=added.rev, message=was)
        return added

    async def rollback(self, name: str, rev: str) -> wire.Added:
        """To an earlier content of it, "" is the one before; as adding that again."""
        entry = self._known(name, (await self._catalog.look()).entries)
        cut = rev if len(rev) >= SHORT_REV else "-"
        found = [c for c in entry.before if not rev or c.rev.startswith(cut)]
        if not found:
            had = ", ".join(c.rev[:12] for c in entry.before) or "none"
            message = f"the catalog has no earlier revision {rev[:12]} of {name!r}; it has {had}"
            if 0 < len(rev) < SHORT_REV:
                few = f"{rev!r} has too few digits, {SHORT_REV} or more are needed"
                message = f"{few}; of {name!r} there is {had}"
            raise LoradError("model_not_found", message, hint=f"loractl show {name}")
        wish = Wish(name=name, model=entry.model, source=entry.source, replace=True)
        async with self._lock(name):
            added = await self._rollout.run(found[0].content, wish)
        message = f"was {(added.replaced_rev or '')[:12]}"
        self._publish("adapter.replaced", name=name, rev=added.rev, message=message)
        return added

    async def remove(self, name: str, *, keep_files: bool = False) -> wire.Removed:
        """From the table, then from every member that takes requests; the others remove it when
        they join again."""
        async with self._lock(name):
            old = self._known(name, (await self._catalog.look()).entries)
            table = await self._catalog.change(
                f"rm {name}", lambda table: tables.without(table, name)
            )
            await self._presence.all_at(table.generation)
            path = f"{V1}/adapters/{quote(name)}"
            await each(
                alive(self._members),
                lambda m: call(self._members, m.name, "DELETE", path, seconds=30.0),
            )
            if not keep_files:
                await self._drop(old.content, *(c.content for c in old.before))
        self._publish("adapter.removed", name=name, rev=old.rev, message="")
        return wire.Removed(name=name, rev=old.rev)

    # ------------------------------------------------------------- settings
    async def patch(self, name: str, patch: wire.AdapterPatch) -> None:
        """Of the name everywhere.  What is pinned is on every member; raises what one of them has
        against it, and then the table is as it was."""
        async with self._lock(name):
            old = self._known(name, (await self._catalog.look()).entries)
            entry = patched(old, patch)
            if entry == old:
                return
            if entry.pin and not old.pin:
                await self._everywhere(lambda m: self._pin(m, entry))
            path = f"{V1}/adapters/{quote(name)}"
            await self._everywhere(
                lambda m: call(self._members, m.name, "PATCH", path, patch, seconds=30.0),
                but=("model_not_found",),
            )
            await self._catalog.change(
                f"set {name}",
                lambda table: {**table.entries, name: unless_moved(table, old, entry)},
            )

    async def drain(self, name: str, drained: bool) -> bool:
        """No gateway takes requests for it from here on, or all do again; was it otherwise?"""
        async with self._lock(name):
            old = self._known(name, (await self._catalog.look()).entries)
            if old.drained == drained:
                return False
            entry = replace(old, drained=drained)
            table = await self._catalog.change(
                f"{'drain' if drained else 'resume'} {name}",
                lambda table: {**table.entries, name: unless_moved(table, old, entry)},
            )
            await self._presence.all_at(table.generation)
            return True

    async def pin(self, names: wire.Names) -> wire.Results:
        return await self._set(names, wire.AdapterPatch(pinned=True))

    async def unpin(self, names: wire.Names) -> wire.Results:
        return await self._set(names, wire.AdapterPatch(pinned=False))

    # ------------------------------------------------------------- where they are
    async def load(self, names: wire.Names) -> wire.Results:
        """Onto the member where requests for it go now."""

        async def one(entry: Entry) -> wire.ItemResult:
            members = self._needed()
            member = holder_of(entry.rev, members) or home_of(entry.rev, members)
            ask = replace(names, names=(entry.name,), pin=False)
            try:
                return await self._wish(member, "load", ask)
            except LoradError as error:
                if error.code != "model_not_found" or names.dry_run:
                    raise
            added = await self._members.take_in(member.name, order_for(entry, load=True))
            return wire.ItemResult(name=entry.name, ok=True, state=added.state, rev=added.rev)

        results = await self._results(names.names, one)
        return await self._set(names, wire.AdapterPatch(pinned=True)) if names.pin else results

    async def evict(self, names: wire.Names) -> wire.Results:
        """Off all members."""
        if names.all:
            return await self._evict_all(names)

        async def one(entry: Entry) -> wire.ItemResult:
            ask = replace(names, names=(entry.name,))
            answers = await each(self._needed(), lambda m: self._wish(m, "evict", ask))
            done = list(given(answers).values())
            for error in answers.values():
                if isinstance(error, LoradError) and error.code != "model_not_found":
                    raise error
            plain = wire.ItemResult(name=entry.name, ok=True, state="registered", rev=entry.rev)
            return next((item for item in done if not item.ok), done[0] if done else plain)

        return await self._results(names.names, one)

    def hold(self, ask: HoldAsk) -> Held:
        raise LoradError("invalid_value", "revisions are held on members, not on their gateway")

    async def verify(self, names: wire.Names) -> wire.Verifications:
        """On every member that has them: the first that finds something wrong is told, with its
        name; else one that found nothing."""
        entries = self._catalog.table.entries
        for name in names.names:
            self._known(name, entries)

        async def one(member: Member) -> wire.Verifications:
            seconds = names.timeout_s * max(len(names.names), 1) + TAKE_SECONDS
            answer = await call(
                self._members, member.name, "POST", f"{V1}/verify", names, seconds=seconds
            )
            return read(answer, wire.Verifications)

        found: dict[str, wire.Verification] = {}
        for member, said in given(await each(self._needed(), one)).items():
            for item in said.items:
                if not (item.ok or item.code == "model_not_found"):
                    item = replace(item, message=f"{member.name}: {item.message}")
                known = found.get(item.name)
                if known is None or _worth(item) > _worth(known):
                    found[item.name] = item
        return wire.Verifications(items=tuple(found.values()))

    # ------------------------------------------------------------- inside
    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _known(self, name: str, entries: Mapping[str, Entry]) -> Entry:
        entry = entries.get(name)
        if entry is None:
            raise unknown(name, entries)
        return entry

    def _needed(self) -> list[Member]:
        members = alive(self._members)
        if not members:
            raise LoradError("engine_restarting", "no member takes requests now")
        return members

    async def _drop(self, *contents: str) -> None:
        try:
            for content in contents:
                await self._catalog.drop_unused(content)
        except LoradError:
            return  # the catalog cannot be reached: they lie there as nobody's

    async def _pin(self, member: Member, entry: Entry) -> None:
        await self._members.take_in(member.name, order_for(entry, load=True))

    async def _everywhere(
        self, act: Callable[[Member], Awaitable[object]], but: Sequence[str] = ()
    ) -> None:
        """Raises what one of them has against it, with its name."""
        for member, outcome in (await each(self._needed(), act)).items():
            if isinstance(outcome, LoradError) and outcome.code not in but:
                told = "member" in outcome.details
                raise outcome if told else named(outcome, member.name)

    async def _wish(self, member: Member, route: str, ask: wire.Names) -> wire.ItemResult:
        seconds = TAKE_SECONDS + ask.timeout_s
        answer = await call(
            self._members, member.name, "POST", f"{V1}/{route}", ask, seconds=seconds
        )
        items = read(answer, wire.Results).items
        if items and items[0].code == "model_not_found":
            raise LoradError("model_not_found", items[0].message)
        # what goes on there is an operation of the member's, which the gateway could not show
        return replace(items[0], operation="") if items else _done(ask.names[0])

    async def _evict_all(self, names: wire.Names) -> wire.Results:
        async def one(member: Member) -> wire.Results:
            answer = await call(
                self._members, member.name, "POST", f"{V1}/evict", names, seconds=TAKE_SECONDS
            )
            return read(answer, wire.Results)

        found: dict[str, wire.ItemResult] = {}
        skipped: set[str] = set()
        for results in given(await each(self._needed(), one)).values():
            skipped |= set(results.skipped)
            for item in results.items:
                if item.name not in found or not item.ok:
                    found[item.name] = item
        return wire.Results(items=tuple(found.values()), skipped=tuple(sorted(skipped)))

    async def _set(self, names: wire.Names, patch: wire.AdapterPatch) -> wire.Results:
        async def one(entry: Entry) -> wire.ItemResult:
            await self.patch(entry.name, patch)
            return wire.ItemResult(name=entry.name, ok=True, rev=entry.rev)

        return await self._results(names.names, one)

    async def _results(
        self, names: Iterable[str], act: Callable[[Entry], Awaitable[wire.ItemResult]]
    ) -> wire.Results:
        entries = (await self._catalog.look()).entries
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(name: str) -> wire.ItemResult:
            async with turn:
                try:
                    return await act(self._known(name, entries))
                except LoradError as error:
                    return wire.ItemResult(
                        name=name,
                        ok=False,
                        code=error.code,
                        message=error.message,
                        hint=error.hint,
                        details=error.details,
                    )
                except Lost as lost:
                    code, message = "engine_restarting", str(lost)
                    return wire.ItemResult(name=name, ok=False, code=code, message=message)

        return wire.Results(items=tuple(await asyncio.gather(*map(one, names))))


def patched(old: Entry, patch: wire.AdapterPatch) -> Entry:
    """As it is to be; a None label goes."""
    labels = {**old.labels, **{k: v for k, v in patch.labels.items() if v is not None}}
    for key in (key for key, value in patch.labels.items() if value is None):
        labels.pop(key, None)
    return replace(
        old,
        pin=old.pin if patch.pinned is None else patch.pinned,
        priority=old.priority if patch.priority is None else patch.priority,
        labels=labels,
    )


def _done(name: str) -> wire.ItemResult:
    return wire.ItemResult(name=name, ok=True)


def _worth(item: wire.Verification) -> int:
    """What is wrong goes before what is right, and both before who has nothing to look at."""
    return 1 if item.ok else 0 if item.code == "model_not_found" else 2


def holder_of(rev: str, members: Sequence[Member]) -> Member | None:
    """One that has it on its GPU, or will in a moment; the least loaded."""
    found = [member for member in members if member.replica.holds(rev)]
    return min(found, key=lambda member: member.replica.load) if found else None

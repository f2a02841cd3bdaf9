"""ReplicaRevisions: the adapters of one model on several engines, as Revisions does for one.

Goes in: what Revisions takes.  Comes out: the same, told to the engines that it is for.  A revision
is packed once, and announced to an engine when something of it is sent there.  A load goes where
requests would; a pin is for one replica, its keeper, and moves when that is lost or comes back;
what leaves, leaves all of them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Literal

from engine.adapters.states import State
from engine.messages import EngineInfo, VerifyReport
from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog
from lorad.service.events import EventRing
from lorad.service.intake import Intake
from lorad.service.packed_files import PackedFiles
from lorad.service.replicas import LOST, Replicas
from lorad.service.retiring import Retiring
from lorad.service.revision_news import RevisionNews
from lorad.service.revisions import Revisions
from lorad.service.revival import Revival
from lorad.service.shelf import Shelf
from lorad.service.tasks import Tasks

log = logging.getLogger("lorad.revisions")

#: Where a revision is, of all the places where it is: the first of these.
_BEST = (State.ACTIVE, State.IDLE, State.DRAINING, State.LOADING, State.RAM)


class ReplicaRevisions:
    """Of one model.  `join` each engine's Revisions before anything runs."""

    def __init__(
        self,
        registry: Registry,
        replicas: Replicas,
        intake: Intake,
        catalog: Catalog,
        events: EventRing,
        tasks: Tasks,
        shelf: Shelf,
        *,
        model: str,
    ) -> None:
        self.shelf, self.news = shelf, RevisionNews(events, catalog)
        self.files = PackedFiles(registry, replicas, intake, catalog, shelf, self.news)
        self._each: dict[str, Revisions] = {}
        self.retiring = Retiring(self._each.values(), shelf, catalog, events, tasks)
        self.standing = Standings(self)
        self.on_change: Callable[[], None] = lambda: None
        self.retiring.on_change = lambda: self.on_change()
        self._replicas, self._catalog, self._tasks = replicas, catalog, tasks
        self._model = model

    def join(self, revisions: Revisions) -> None:
        """One engine's, whose team this is."""
        self._each[revisions.replica] = revisions
        self._replicas[revisions.replica].watch(revisions.tiers)
        revisions.on_change = lambda: self.on_change()
        revisions.on_gone = self.settle_pins

    def __getitem__(self, replica: str) -> Revisions:
        return self._each[replica]

    def __iter__(self) -> Iterator[Revisions]:
        return iter(self._each.values())

    # ------------------------------------------------------------- whose it is
    def keeps(self, rev: str) -> str:
        """The replica that a pin of it is for."""
        return self._replicas.keeper(rev)

    def settle_pins(self) -> None:
        """A replica went or came: pinned adapters go to those that keep them now."""
        pinned = {entry.rev for entry in self._catalog.of(self._model) if entry.pinned}
        for rev in pinned - {None}:
            assert rev is not None
            self._tasks.spawn(self._settle_pin(rev))

    async def _settle_pin(self, rev: str) -> None:
        """To the new keeper first, so that it is never nowhere."""
        keeper = self._each[self.keeps(rev)]
        try:
            if not keeper.resident(rev):
                await keeper.load(rev)
            await self.standing.follow(rev)
        except LoradError as error:
            if error.code not in LOST:
                self.news.publish("adapter.not_loaded", rev, "warn", error.code, error.message)

    # ------------------------------------------------------------- towards the engines
    async def prepare(self, rev: str) -> None:
        """Packed, and announced to the engine that requests for it would go to now."""
        await self._where_it_belongs(rev, lambda one: one.prepare(rev))

    async def load(self, rev: str, tier: Literal["gpu", "ram"] = "gpu") -> None:
        """As Revisions does, on one engine: its keeper if it is pinned, else where it is, or where
        requests for it would go to now."""
        if tier == "gpu" and self._catalog.wanted(rev)[0]:
            return await self._each[self.keeps(rev)].load(rev)
        await self._where_it_belongs(rev, lambda one: one.load(rev, tier))

    async def stand_beside(self, rev: str, old: str) -> None:
        """Bring it to every engine that has `old` on its device: requests find it in all places
        where they found that one.  Raises what one of them refuses; a lost one has nothing."""
        holders = [one for one in self if one.resident(old)]
        _raise_first(await _all(one.load(rev) for one in holders), but=LOST)

    async def evict(
        self, rev: str, *, to: Literal["ram", "disk"], drain: float, now: bool, force: bool
    ) -> None:
        """From all engines."""
        work = (one.evict(rev, to=to, drain=drain, now=now, force=force) for one in self)
        _raise_first(await _all(work), but=LOST)

    async def unpack(self, rev: str, layouts: Sequence[str], *, remote: bool = False) -> int:
        """As Revisions does: the files are those of all engines."""
        if not self.may_leave(rev):
            return 0
        first, *others = self
        for one in others:
            one.set_aside(rev)
        return await first.unpack(rev, layouts, remote=remote)

    def renew(self, rev: str) -> None:
        for one in self:
            one.renew(rev)

    def may_leave(self, rev: str) -> bool:
        return all(one.may_leave(rev) for one in self)

    async def compare(self, rev: str, probe: str) -> VerifyReport:
        """Of every engine that has it; the first that finds something wrong is told."""
        holders = [one for one in self if one.resident(rev)]
        if not holders:
            await self.load(rev)
            holders = [one for one in self if one.resident(rev)] or list(self)[:1]
        reports = [await one.compare(rev, probe) for one in holders]
        return next((report for report in reports if report.findings), reports[0])

    # ------------------------------------------------------------- where they are
    def tier(self, rev: str) -> State:
        """The best of where it is."""
        tiers = {one.tier(rev) for one in self}
        return next((tier for tier in _BEST if tier in tiers), State.REGISTERED)

    def resident(self, rev: str) -> bool:
        return any(one.resident(rev) for one in self)

    def all_resident(self) -> list[str]:
        return list(dict.fromkeys(rev for one in self for rev in one.all_resident()))

    # ------------------------------------------------------------- leases and farewell
    def lease(self, rev: str) -> None:
        self._catalog.lease(rev)

    def release(self, rev: str) -> None:
        if self._catalog.release(rev) == 0:
            self.consider_retiring(rev)

    def consider_retiring(self, rev: str) -> None:
        self.retiring.consider(rev)

    # ------------------------------------------------------------- who is told
    def tell_losses(
        self,
        on_missing: Callable[[str], Coroutine[Any, Any, None]],
        on_hopeless: Callable[[str, str], Awaitable[None]],
    ) -> None:
        for one in self:
            one.tell_losses(on_missing, on_hopeless)

    def when_up(self, bring_up: Callable[[EngineInfo, Revival], Awaitable[None]]) -> None:
        for one in self:
            one.when_up(bring_up)

    # ------------------------------------------------------------- inside
    async def _where_it_belongs(
        self, rev: str, act: Callable[[Revisions], Awaitable[None]]
    ) -> None:
        """On the chosen engine; if that goes away meanwhile, on the next."""
        left: list[str] = []
        while True:
            chosen = self._replicas.choose(rev, left)
            name = chosen.name if chosen is not None else self._replicas.rising(left)
            try:
                return await act(self._each[name])
            except LoradError as error:
                left.append(name)
                if error.code not in LOST or len(left) == len(self._each):
                    raise


class Standings:
    """What the engines are told of pins and priorities; see Standing."""

    def __init__(self, each: Iterable[Revisions]) -> None:
        self._each = each

    async def apply(self, rev: str) -> None:
        """Raises no_room if its keeper has none."""
        _raise_first(await _all(one.standing.apply(rev) for one in self._each), but=LOST)

    async def follow(self, rev: str) -> None:
        _raise_first(await _all(one.standing.follow(rev) for one in self._each), but=LOST)


async def _all(work: Iterable[Awaitable[None]]) -> list[LoradError | None]:
    """What each raised; all of it is done."""

    async def caught(one: Awaitable[None]) -> LoradError | None:
        try:
            await one
        except LoradError as error:
            return error
        return None

    return await asyncio.gather(*map(caught, work))


def _raise_first(errors: Sequence[LoradError | None], *, but: Sequence[str]) -> None:
    """The first that counts; one of `but` only if nothing else came of it."""
    found = [error for error in errors if error is not None]
    for error in found:
        if error.code not in but:
            raise error
    if found and len(found) == len(errors):
        raise found[0]

"""ReplicaRevisions: the adapters of one model on several engines, as Revisions does for one.

Goes in: what Revisions takes.  Comes out: the same, told to the engines that it is for.  A revision
is packed once, and announced to an engine when something of it is sent there.  A load goes where
requests would; a pin is for one replica, its keeper, and moves when that is lost or comes back;
what leaves, leaves all of them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

from engine.adapters.states import State
from engine.messages import EngineInfo
from engine.verify_messages import VerifyReport
from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog
from lorad.service.events import EventRing
from lorad.service.hanging import answered
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

T = TypeVar("T")

_LEAVES = "hangs: the adapter leaves it as soon as that goes on or is replaced"
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
                self.news.publish("adapter.not_loaded", rev, "warn", error.code, error.advised)

    # ------------------------------------------------------------- towards the engines
    async def prepare(self, rev: str) -> None:
        """Packed, and announced to the engine that requests for it would go to now."""
        await self._where_it_belongs(rev, lambda one: one.prepare(rev))

    async def load(self, rev: str, tier: Literal["gpu", "ram"] = "gpu") -> None:
        """As Revisions does, on one engine: its keeper if it is pinned, else where it is, or where
        requests for it would go to now."""
        if tier == "gpu" and self._catalog.wanted(rev)[0]:
            keeper = self._each[self.keeps(rev)]
            later = "keeps this pin and hangs: it is loaded there as soon as that goes on"
            return await self.answer_of(keeper, keeper.load(rev), later)
        await self._where_it_belongs(rev, lambda one: one.load(rev, tier))

    async def stand_beside(self, rev: str, old: str) -> None:
        """Bring it to every engine that has `old` on its device: requests find it in all places
        where they found that one.  Raises what one of them refuses; a lost one has nothing."""
        holders = [one for one in self if one.resident(old)]
        loads = (self.answer_of(one, one.load(rev), "hangs") for one in holders)
        _raise_first(await _all(loads), but=LOST)

    async def evict(
        self, rev: str, *, to: Literal["ram", "disk"], drain: float, now: bool, force: bool
    ) -> None:
        """From all engines; engine_stalled names one that hangs, and does it when it goes on."""
        work = (
            self.answer_of(one, one.evict(rev, to=to, drain=drain, now=now, force=force), _LEAVES)
            for one in self
        )
        errors = await _all(work)
        _raise_first(errors, but=LOST)
        _raise_first([error for error in errors if error and error.code == "engine_stalled"])

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

    def retell(self, rev: str) -> None:
        for one in self:
            one.retell(rev)

    def may_leave(self, rev: str) -> bool:
        return all(one.may_leave(rev) for one in self)

    async def compare(self, rev: str, probe: str) -> VerifyReport:
        """Of every engine that has it; the first that finds something wrong is told."""
        holders = [one for one in self if one.resident(rev)]
        if not holders:
            await self.load(rev)
            holders = [one for one in self if one.resident(rev)] or list(self)[:1]
        reports = [
            await self.answer_of(one, one.compare(rev, probe), "hangs, and cannot be looked at")
            for one in holders
        ]
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
        self, rev: str, act: Callable[[Revisions], Coroutine[Any, Any, None]]
    ) -> None:
        """On the chosen engine; if that goes away or hangs meanwhile, on the next."""
        left: list[str] = []
        while True:
            chosen = self._replicas.choose(rev, left)
            name = chosen.name if chosen is not None else self._replicas.rising(left)
            try:
                return await self.answer_of(self._each[name], act(self._each[name]), "hangs")
            except LoradError as error:
                left.append(name)
                if error.code not in LOST or len(left) == len(self._each):
                    raise

    async def answer_of(self, one: Revisions, work: Coroutine[Any, Any, T], hanging: str) -> T:
        """What came of it; engine_stalled if that engine hangs, while the work goes on."""
        task = self._tasks.spawn(_outcome(work))
        if not await answered(task, self._replicas[one.replica].link):
            message = f"replica {one.replica} {hanging}"
            raise LoradError("engine_stalled", message, hint="loractl status")
        result, error = task.result()
        if error is not None:
            raise error
        return cast(T, result)


class Standings:
    """What the engines are told of pins and priorities; see Standing."""

    def __init__(self, team: ReplicaRevisions) -> None:
        self._team = team

    async def apply(self, rev: str) -> None:
        """Raises no_room if its keeper has none."""
        await self._all(rev, lambda one: one.standing.apply(rev))

    async def follow(self, rev: str) -> None:
        await self._all(rev, lambda one: one.standing.follow(rev))

    async def _all(self, rev: str, tell: Callable[[Revisions], Coroutine[Any, Any, None]]) -> None:
        """One that hangs takes it when it goes on; who comes after it is told anyway."""
        told = (self._team.answer_of(one, tell(one), "hangs") for one in self._team)
        _raise_first(await _all(told), but=LOST)


async def _outcome(work: Awaitable[T]) -> tuple[T | None, LoradError | None]:
    """An expected error is a result here: whoever waits for it may have left."""
    try:
        return await work, None
    except LoradError as error:
        return None, error


async def _all(work: Iterable[Awaitable[None]]) -> list[LoradError | None]:
    """What each raised; all of it is done."""

    async def caught(one: Awaitable[None]) -> LoradError | None:
        try:
            await one
        except LoradError as error:
            return error
        return None

    return await asyncio.gather(*map(caught, work))


def _raise_first(errors: Sequence[LoradError | None], *, but: Sequence[str] = ()) -> None:
    """The first that counts; one of `but` only if nothing else came of it."""
    found = [error for error in errors if error is not None]
    for error in found:
        if error.code not in but:
            raise error
    if found and len(found) == len(errors):
        raise found[0]

"""Revisions: what the engine must know and hold, so that names can be asked for.

Goes in: revisions that the catalog refers to, wishes (load, evict, pin), the engine's transitions.
Comes out: AddRevision, Evict and RemoveRevision commands, each sent once and in an order that
holds: packed before added, added before used, removed after the last lease; what is loaded is so by
`loading.py`.  Knows no names.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol

from engine.adapters.states import RESIDENT, State
from engine.messages import AdapterEvent, AddRevision, EngineInfo, Evict, RemoveRevision
from engine.verify_messages import VerifyReport, VerifyRevision
from lorad.errors import LoradError
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.intake import Intake
from lorad.service.loading import Loading
from lorad.service.mending import Mending
from lorad.service.packed_files import PackedFiles
from lorad.service.retiring import Retiring
from lorad.service.revision_news import RevisionNews
from lorad.service.revival import Revival
from lorad.service.shelf import Shelf
from lorad.service.standing import Standing
from lorad.service.tasks import Tasks

log = logging.getLogger("lorad.revisions")


class Team(Protocol):
    """Of ReplicaRevisions: what the replicas of one model have together.  `keeps`: which replica a
    pin of that revision is for."""

    @property
    def files(self) -> PackedFiles: ...
    @property
    def retiring(self) -> Retiring: ...
    def keeps(self, rev: str) -> str: ...


class Revisions:
    """Of one engine.  One lock a revision: preparing, changing and retiring the same one never
    overlap.  `shelf` is that of all models; `replica` is the engine's name in its `team`, where its
    model has several."""

    def __init__(
        self,
        registry: Registry,
        link: EngineLink,
        intake: Intake,
        catalog: Catalog,
        events: EventRing,
        tasks: Tasks,
        shelf: Shelf | None = None,
        *,
        model: str,
        team: Team | None = None,
        replica: str = "",
    ) -> None:
        self.tiers: dict[str, State] = {}  # as the engine's last transition left it
        self.replica, self._team = replica, team
        self.shelf = shelf or Shelf(registry, catalog)
        self.news = news = RevisionNews(events, catalog, replica)
        self.files, self.retiring = self._shared(registry, link, intake, events, catalog, tasks)
        self.mending = Mending(self.repack, news, tasks)
        self.standing = Standing(link, catalog, news, lambda: self.on_change(), self.wanted)
        self.revival = Revival(model, catalog, news, tasks, self.load, self.wanted)
        self._loading = Loading(
            link,
            intake,
            catalog,
            self.files,
            self.mending,
            self.prepare,
            lambda: self.on_change(),
        )
        self.on_change: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None  # the engine died
        self._registry, self._link, self._intake = registry, link, intake
        self._catalog, self._tasks = catalog, tasks
        self._dormant: set[str] = set()  # the engine knows them still, without their packed files
        link.prepare = self.prepare_for_request
        link.on_adapter = self.take_transition
        link.on_death = self.take_death

    def _shared(
        self,
        registry: Registry,
        link: EngineLink,
        intake: Intake,
        events: EventRing,
        catalog: Catalog,
        tasks: Tasks,
    ) -> tuple[PackedFiles, Retiring]:
        """The team's; of a model with one engine its own."""
        if self._team is not None:
            return self._team.files, self._team.retiring
        files = PackedFiles(registry, link, intake, catalog, self.shelf, self.news)
        retiring = Retiring((self,), self.shelf, catalog, events, tasks)
        retiring.on_change = lambda: self.on_change()
        return files, retiring

    def wanted(self, rev: str) -> tuple[bool, int]:
        """Pinned here, and its priority; see Catalog.  A pin is for one of the replicas."""
        pinned, priority = self._catalog.wanted(rev)
        if pinned and self._team is not None:
            pinned = self._team.keeps(rev) == self.replica
        return pinned, priority

    # ------------------------------------------------------------- towards the engine
    async def prepare(self, rev: str) -> None:
        """Make sure that the engine knows `rev`: its files are here, packed, and announced."""
        if rev not in self._link.known:
            # Shielded: a client that leaves now would leave the engine with a revision that nobody
            # here knows of, and nobody would ever remove.
            work = self._tasks.spawn(_outcome(self._prepare(rev)))
            error = await asyncio.shield(work)
            if error is not None:
                raise error

    async def _prepare(self, rev: str) -> None:
        async with self.shelf.hold(rev):
            if rev in self._link.known:
                return
            manifest = await self.files.packed(rev)
            pinned, priority = self.wanted(rev)
            add = AddRevision(
                command_id=self._link.next_id(),
                manifest=manifest,
                priority=priority,
                pinned=pinned,
            )
            try:
                await self._link.call(add)
            except LoradError as error:
                if not pinned or error.code != "no_room":
                    raise
                self.standing.note_unpinned(rev, error)  # the engine took it in, without the pin
            self._link.known.add(rev)
            self._catalog.unpacked.pop(rev, None)
            self._catalog.unfit.pop(rev, None)
            self._dormant.discard(rev)
            if self.wanted(rev) != (pinned, priority):
                await self.standing.follow(rev)  # changed while the engine was being told
        self.consider_retiring(rev)  # removed meanwhile

    async def prepare_for_request(self, rev: str) -> None:
        """The same for a request, in its words."""
        with self.news.for_request(rev), self._intake.wanted(rev):
            await self.prepare(rev)

    async def unpack(self, rev: str, layouts: Sequence[str], *, remote: bool = False) -> int:
        """Let packed files go, as they can be packed again; with `remote` all its files, as they
        can be fetched again.  Returns the bytes gained: 0 if it is in use, or about to be."""
        if not self.may_leave(rev):
            return 0
        async with self.shelf.lock(rev):
            self.set_aside(rev)
            store = self._intake.store
            if remote:
                gained = await asyncio.to_thread(store.make_remote, rev)
            else:
                gained = await asyncio.to_thread(store.drop_packed, rev, layouts)
            await asyncio.wrap_future(self._registry.forget_packed(rev, layouts))
        words = "its files can be fetched again" if remote else "its files can be packed again"
        details = {"num_bytes": str(gained)}
        kind = "adapter.remote" if remote else "adapter.unpacked"
        self.news.publish(kind, rev, "info", "budget", words, details)
        return gained

    def renew(self, rev: str) -> None:
        """Its own files were put back: if the packed one is gone too, it is packed and announced
        anew before the next request; a copy in memory serves on."""
        if rev in self._link.known and self.files.has_lost(rev):
            self.set_aside(rev)

    def retell(self, rev: str) -> None:
        """Whose tokenizer it has is known otherwise: the engine hears of it before the next
        request; what runs ends as it began."""
        if self.files.look is not None:
            self.files.look.on_change(rev)
        self.set_aside(rev)

    def set_aside(self, rev: str) -> None:
        """Its cached KV stays in the engine; it is announced again when it is asked for."""
        if rev in self._link.known:
            self._link.known.discard(rev)
            self._dormant.add(rev)

    def may_leave(self, rev: str) -> bool:
        """Nobody uses it, has pinned it, or is at it: it is on the disk alone."""
        at_rest = self.tier(rev) is State.REGISTERED
        used = self._catalog.leases(rev) > 0 or self._catalog.wanted(rev)[0]
        return at_rest and not used and not self.shelf.is_busy(rev)

    async def load(self, rev: str, tier: Literal["gpu", "ram"] = "gpu") -> None:
        """See Loading."""
        await self._loading.load(rev, tier)

    async def stand_beside(self, rev: str, old: str) -> None:
        """Bring it to where `old` is on the GPU; raises what `load` does."""
        if self.resident(old):
            await self.load(rev)

    async def evict(
        self, rev: str, *, to: Literal["ram", "disk"], drain: float, now: bool, force: bool
    ) -> None:
        """Out of its slot, and with `to` disk out of the host cache."""
        self.revival.forget(rev)
        held = self.tiers.get(rev) in (*RESIDENT, State.LOADING)
        held |= to == "disk" and self.tiers.get(rev) == State.RAM
        if not held or rev not in self._link.known:
            return
        evict = Evict(
            command_id=self._link.next_id(),
            rev=rev,
            to=to,
            drain_timeout=drain,
            abort_running=now,
            force=force,
        )
        try:
            await self._link.call(evict)
        except LoradError as error:
            if error.code == "engine_restarting":  # dead, and the next one is not to have it
                self.tiers.pop(rev, None)
                self.revival.forget(rev)
            raise
        self.on_change()

    async def repack(self, rev: str) -> None:
        """Write its packed file anew from its stored files; requests wait for it meanwhile."""
        async with self.shelf.hold(rev):
            info, record = self._link.info, self._registry.revision(rev)
            if info is None or record is None:
                raise LoradError("loading_base", "nothing reads its packed file now")
            known, restarts = rev in self._link.known, self._link.restarts
            self._link.known.discard(rev)
            try:
                await self.files.pack(record, info)
            finally:
                if known and restarts == self._link.restarts:
                    self._link.known.add(rev)
                    await self.standing.follow(rev)  # what was changed meanwhile went past it
        self.consider_retiring(rev)

    def all_resident(self) -> list[str]:
        return [rev for rev in self.tiers if self.resident(rev)]

    def tier(self, rev: str) -> State:
        """The engine's last word on where it is."""
        return self.tiers.get(rev, State.REGISTERED)

    def resident(self, rev: str) -> bool:
        return self.tiers.get(rev) in RESIDENT

    async def compare(self, rev: str, probe: str) -> VerifyReport:
        """What the engine finds in its slot, beside a probe file; raises conflict if it was evicted
        meanwhile, and what loading it raises."""
        await self.load(rev)
        answer = await self._link.call(VerifyRevision(self._link.next_id(), rev, probe))
        assert answer.report is not None, "a verification without a report"
        return answer.report

    # ------------------------------------------------------------- who is told
    def tell_losses(
        self,
        on_missing: Callable[[str], Coroutine[Any, Any, None]],
        on_hopeless: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """Of stored files that are gone, and of packed ones that cannot be mended."""
        self.files.on_missing, self.mending.on_hopeless = on_missing, on_hopeless

    def when_up(self, bring_up: Callable[[EngineInfo, Revival], Awaitable[None]]) -> None:
        """Call it when a new engine is there, before it takes requests."""
        self._link.bring_up = lambda info: bring_up(info, self.revival)

    # ------------------------------------------------------------- leases and farewell
    def lease(self, rev: str) -> None:
        self._catalog.lease(rev)

    def release(self, rev: str) -> None:
        if self._catalog.release(rev) == 0:
            self.consider_retiring(rev)

    def consider_retiring(self, rev: str) -> None:
        """Without a name and without a lease it leaves the engine, then the store."""
        self.retiring.consider(rev)

    async def leave(self, rev: str) -> None:
        """For Retiring, which holds its lock: the engine forgets it."""
        if rev not in self._link.known and rev not in self._dormant:
            return
        self._link.known.discard(rev)
        self._dormant.discard(rev)
        try:
            await self._link.call(RemoveRevision(self._link.next_id(), rev))
        except LoradError as error:  # a dead engine holds nothing either
            log.info("removing %s from the engine: %s", rev[:12], error.message)
        else:
            await self.standing.forget(rev)

    def forget(self, rev: str) -> None:
        """It has retired."""
        self.tiers.pop(rev, None)
        self.revival.forget(rev)

    # ------------------------------------------------------------- the engine's deaths and starts
    def take_death(self) -> None:
        """What was resident is remembered until it is back, however many starts that takes."""
        held = (*RESIDENT, State.LOADING)
        self.revival.remember(rev for rev, tier in self.tiers.items() if tier in held)
        self.tiers.clear()  # here: the next engine may be told to load before `bring_up`
        self.standing.unpinned.clear()
        self._dormant.clear()
        self.on_change()
        self.on_gone()

    # ------------------------------------------------------------- from the engine
    def take_transition(self, event: AdapterEvent) -> None:
        """Remember where a revision is now, and tell those who watch."""
        before, after = State(event.before), State(event.after)
        self.tiers[event.rev] = after
        lost = event.cause == "error" and self.files.has_lost(event.rev)
        if lost or event.cause == "damaged":
            self.mending.hear(event.rev, event.message)
        elif event.cause == "error" and not self._intake.store.has(event.rev):
            self._tasks.spawn(self.files.on_missing(event.rev))
        elif (before, after) == (State.LOADING, State.RAM):
            self.mending.whole(event.rev)
        if self.news.publish_transition(event):
            self.on_change()


async def _outcome(work: Awaitable[None]) -> LoradError | None:
    """An expected error is a result here: whoever waits for it may have left."""
    try:
        await work
    except LoradError as error:
        return error
    return None

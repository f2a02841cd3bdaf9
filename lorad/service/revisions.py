"""Revisions: what the engine must know and hold, so that names can be asked for.

Goes in: revisions that the catalog refers to, wishes (load, evict, pin), the engine's transitions.
Comes out: AddRevision, SetRevision, Load, Evict and RemoveRevision commands, each sent once and in
an order that holds: packed before added, added before used, removed after the last lease.  Knows
names only to label events.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from engine.adapters.checksums import path_of
from engine.adapters.states import RESIDENT, State
from engine.messages import (
    AdapterEvent,
    AddRevision,
    EngineInfo,
    Evict,
    Load,
    PackedManifest,
    RemoveRevision,
    SetRevision,
)
from lorad.errors import LoradError
from lorad.registry.records import Packing, RevisionRecord
from lorad.registry.registry import Registry
from lorad.registry.store import StagingDir
from lorad.service.catalog import Catalog
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.intake import Intake
from lorad.service.mending import Mending
from lorad.service.shelf import Shelf
from lorad.service.tasks import Tasks

log = logging.getLogger("lorad.revisions")

#: How many revisions are brought up side by side at a start.
PARALLEL_LOADS = 8


class Revisions:
    """One lock a revision: preparing, changing and retiring the same one never overlap."""

    def __init__(
        self,
        registry: Registry,
        link: EngineLink,
        intake: Intake,
        catalog: Catalog,
        events: EventRing,
        tasks: Tasks,
    ) -> None:
        self.tiers: dict[str, State] = {}  # as the engine's last transition left it
        self.on_missing: Callable[[str], Coroutine[Any, Any, None]] = _nobody
        #: Fetches a name's content anew from its source, into a staging folder; None: nobody can,
        #: and no revision's own files leave while a name means it.
        self.refetch: Callable[[str], Awaitable[StagingDir]] | None = None
        self.mending = Mending(self, tasks)
        self.shelf = Shelf(registry, catalog)
        self.on_retired: Callable[[str], None] = lambda rev: None
        self.on_change: Callable[[], None] = lambda: None
        self._registry, self._link, self._intake = registry, link, intake
        self._catalog, self._events, self._tasks = catalog, events, tasks
        self._dormant: set[str] = set()  # the engine knows them still, without their packed files
        self._unpinned: set[str] = set()  # wanted pinned, and the engine has no room for the pin
        self._lost: dict[str, None] = {}  # on the GPU when an engine died, and not back yet
        link.prepare = self.prepare_for_request
        link.on_adapter = self.take_transition
        link.on_death = self.take_death

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
            manifest = await self.packed(rev)
            pinned, priority = self._catalog.wanted(rev)
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
                self._note_unpinned(rev, error)  # the engine took it in, without the pin
            self._link.known.add(rev)
            self._dormant.discard(rev)
            if self._catalog.wanted(rev) != (pinned, priority):
                await self.follow(rev)  # changed while the engine was being told
        self.consider_retiring(rev)  # removed meanwhile

    async def prepare_for_request(self, rev: str) -> None:
        """The same for a request: content that turns out bad is a model that is not there, and how
        full which disk is, is the operator's to know."""
        try:
            with self._intake.wanted(rev):
                await self.prepare(rev)
        except LoradError as error:
            if error.code in ("adapter_invalid", "load_failed"):
                raise LoradError("model_not_found", error.message) from error
            if error.code == "insufficient_storage":
                log.warning("%s cannot be packed: %s", self._catalog.label(rev), error.message)
                raise LoradError("no_room", "no disk space to bring up the adapter now") from error
            raise

    async def packed(self, rev: str) -> PackedManifest:
        """The manifest of `rev` for the present layout; packs it first if need be."""
        info = self._link.info
        if info is None:
            raise LoradError("loading_base", "the base model is still loading")
        record = self._registry.revision(rev)
        if record is None:
            raise LoradError("model_not_found", f"{self._catalog.label(rev)} was removed meanwhile")
        manifest = record.packed_manifest(info)
        if manifest is not None and _is_whole(manifest, info):
            return manifest
        if rev in self._intake.store.remote:
            await self._fetch_back(rev)
        if not self._intake.store.has(rev):
            await self.on_missing(rev)
            raise LoradError("load_failed", f"the files of {rev[:12]} are gone from the store")
        return await self._pack(record, info)

    async def _pack(self, record: RevisionRecord, info: EngineInfo) -> PackedManifest:
        """Write its packed file, and record it."""
        rev = record.rev
        estimate = record.packed_estimate(info)
        manifest = await self._intake.pack(rev, record.stream(info), estimate)
        recorded = self._registry.record_packed(
            rev, manifest.layout, num_blocks=manifest.num_blocks, true_bytes=manifest.true_bytes
        )
        try:
            await asyncio.wrap_future(recorded)
        except OSError as error:  # a failing disk is this revision's trouble, and nobody else's
            message = f"cannot keep the packed file of {rev[:12]}: {error}"
            raise LoradError("internal_error", message) from error
        return manifest

    async def packed_already(self) -> set[str]:
        """Revisions that need no packing: thousands are looked at, on a thread."""
        info = self._link.info
        return await asyncio.to_thread(self._whole, info) if info is not None else set()

    def _whole(self, info: EngineInfo) -> set[str]:
        streams, store = Packing.of(info, info.block_bytes).streams, self._intake.store
        files = self._registry.packed_files(streams)
        return {
            rev
            for rev, layout, blocks in files
            if is_whole(store.packed(rev, layout), blocks * info.block_bytes)
        }

    async def pack_ahead(self, rev: str) -> None:
        """Pack it before anybody asks for it, if that takes no room from others."""
        info, record = self._link.info, self._registry.revision(rev)
        if info is None or record is None or rev in self._intake.store.remote:
            return
        async with self.shelf.hold(rev):
            manifest = record.packed_manifest(info)
            if manifest is None or not _is_whole(manifest, info):
                room, size = self._intake.store.room, record.packed_estimate(info)
                if not await asyncio.to_thread(room.lacking, size):
                    await self.packed(rev)

    async def unpack(self, rev: str, layouts: Sequence[str], *, remote: bool = False) -> int:
        """Let packed files go, as they can be packed again; with `remote` all its files, as they
        can be fetched again.  Returns the bytes gained: 0 if it is in use, or about to be."""
        if not self.may_leave(rev):
            return 0
        async with self.shelf.lock(rev):
            if rev in self._link.known:  # its cached KV stays; it is announced again when asked for
                self._link.known.discard(rev)
                self._dormant.add(rev)
            store = self._intake.store
            if remote:
                gained = await asyncio.to_thread(store.make_remote, rev)
            else:
                gained = await asyncio.to_thread(store.drop_packed, rev, layouts)
            await asyncio.wrap_future(self._registry.forget_packed(rev, layouts))
        words = "its files can be fetched again" if remote else "its files can be packed again"
        details = {"num_bytes": str(gained)}
        kind = "adapter.remote" if remote else "adapter.unpacked"
        self.publish(kind, rev, "info", "budget", words, details)
        return gained

    def renew(self, rev: str) -> None:
        """Its own files were put back: if the packed one is gone too, it is packed and announced
        anew before the next request; a copy in memory serves on."""
        if rev in self._link.known and self._has_lost_its_file(rev):
            self._link.known.discard(rev)
            self._dormant.add(rev)

    def may_leave(self, rev: str) -> bool:
        """Nobody uses it, has pinned it, or is at it: it is on the disk alone."""
        at_rest = self.tiers.get(rev, State.REGISTERED) is State.REGISTERED
        used = self._catalog.leases(rev) > 0 or self._catalog.wanted(rev)[0]
        return at_rest and not used and not self.shelf.is_busy(rev)

    async def _fetch_back(self, rev: str) -> None:
        """The content of a remote revision, from where it came."""
        names = self._catalog.names_of(rev) or (self._catalog.label(rev),)
        if self.refetch is None:
            message = f"the files of {names[0]} are not here, and nothing can fetch them"
            raise LoradError("load_failed", message, hint=f"add {names[0]} again")
        staging = await self.refetch(names[0])
        try:
            found = await self._intake.find(staging)
            if found.rev != rev:
                message = f"the source of {names[0]} holds other content now: {found.rev[:12]}"
                raise LoradError("load_failed", message, hint=f"add {names[0]} again")
            await self._intake.keep(found)
        finally:
            await self._intake.discard(staging)
        self.publish("adapter.fetched", rev, "info", "remote")

    async def apply(self, rev: str) -> None:
        """Tell the engine pin and priority as the names want them now.

        Raises no_room for a pin that does not fit; its priority counts all the same.
        """
        if rev not in self._link.known:
            return
        pinned, priority = self._catalog.wanted(rev)
        command_id = self._link.next_id()
        await self._link.call(
            SetRevision(command_id=command_id, rev=rev, pinned=pinned, priority=priority)
        )
        self._unpinned.discard(rev)
        if not pinned:
            await self._retry_pins()
        self.on_change()

    async def follow(self, rev: str) -> None:
        """`apply` where nobody waits for the pin: without room it is an event, and waits itself."""
        try:
            await self.apply(rev)
        except LoradError as error:
            if error.code != "no_room":
                raise
            self._note_unpinned(rev, error)

    async def _retry_pins(self) -> None:
        """There may be room now for a pin that had none."""
        for rev in tuple(self._unpinned):
            if self._catalog.wanted(rev)[0]:
                await self.follow(rev)
            else:
                self._unpinned.discard(rev)

    def _note_unpinned(self, rev: str, error: LoradError) -> None:
        """It is served like any other, which is better than not at all."""
        if rev not in self._unpinned:
            self._unpinned.add(rev)
            self.publish("pin.refused", rev, "warn", error.code, error.message)

    async def load(self, rev: str, tier: Literal["gpu", "ram"] = "gpu") -> None:
        """Bring it to `tier`; raises no_room, load_failed, or what preparing raised.

        One whose packed file is damaged, cut or gone is packed anew and tried again, once.
        """
        heard, names = self.mending.heard(rev), self._catalog.names_of(rev)
        try:
            with self._intake.wanted(rev):
                await self._load_mended(rev, tier, heard)
        except LoradError as error:
            its_file = error.code in ("adapter_damaged", "load_failed")
            if not its_file or self.mending.heard(rev) == heard:
                raise
            raise self._beyond_mending(rev, names, error) from error

    def _beyond_mending(self, rev: str, names: Sequence[str], error: LoradError) -> LoradError:
        """Damage as it is told; `names`: before they were quarantined for it."""
        who = ", ".join(names) or self._catalog.label(rev)
        why = self.mending.failed(rev)
        again = f"it cannot be packed anew: {why}" if why else "it was packed anew before"
        name = names[0] if names else who
        hint = f"loractl rm {name}, and add it again; look at the disk"
        if self.mending.may_be_tried(rev):
            hint = f"loractl load {name}, once that is mended"
        return LoradError(
            error.code,
            f"{who}: its packed file is damaged ({error.message}), and {again}",
            hint=hint,
        )

    async def _load_mended(self, rev: str, tier: Literal["gpu", "ram"], heard: int) -> None:
        try:
            await self._load(rev, tier)
        except LoradError as error:
            lost = error.code == "load_failed" and (
                self.mending.heard(rev) > heard or self._has_lost_its_file(rev)
            )
            if not (lost or error.code == "adapter_damaged"):
                raise
            if not await self.mending.mended(rev, heard):
                raise
            await self._load(rev, tier)

    async def _load(self, rev: str, tier: Literal["gpu", "ram"]) -> None:
        await self.prepare(rev)
        try:
            await self._link.call(Load(command_id=self._link.next_id(), rev=rev, tier=tier))
        except LoradError as error:
            if error.code == "load_failed" and not self._intake.store.has(rev):
                await self.on_missing(rev)
            raise
        finally:
            self.on_change()

    async def evict(
        self, rev: str, *, to: Literal["ram", "disk"], drain: float, now: bool, force: bool
    ) -> None:
        """Out of its slot, and with `to` disk out of the host cache."""
        self._lost.pop(rev, None)
        held = self.tiers.get(rev) in (*RESIDENT, State.LOADING)
        held |= to == "disk" and self.tiers.get(rev) == State.RAM
        if not held or rev not in self._link.known:
            return
        await self._link.call(
            Evict(
                command_id=self._link.next_id(),
                rev=rev,
                to=to,
                drain_timeout=drain,
                abort_running=now,
                force=force,
            )
        )
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
                await self._pack(record, info)
            finally:
                if known and restarts == self._link.restarts:
                    self._link.known.add(rev)
                    await self.follow(rev)  # what was changed meanwhile went past it
        self.consider_retiring(rev)

    def _has_lost_its_file(self, rev: str) -> bool:
        """Whether what the engine was to read is gone or cut, and can be packed anew."""
        info, record = self._link.info, self._registry.revision(rev)
        manifest = record.packed_manifest(info) if record is not None and info is not None else None
        if info is None or manifest is None or _is_whole(manifest, info):
            return False
        return self._intake.store.has(rev)

    def resident(self, rev: str) -> bool:
        return self.tiers.get(rev) in RESIDENT

    # ------------------------------------------------------------- leases and farewell
    def lease(self, rev: str) -> None:
        self._catalog.lease(rev)

    def release(self, rev: str) -> None:
        if self._catalog.release(rev) == 0:
            self.consider_retiring(rev)

    def consider_retiring(self, rev: str) -> None:
        """Without a name and without a lease it leaves the engine, then the store."""
        if not self._in_use(rev):
            self._tasks.spawn(self._retire(rev))

    async def _retire(self, rev: str) -> None:
        async with self.shelf.lock(rev):
            if self._in_use(rev):
                return
            if rev in self._link.known or rev in self._dormant:
                self._link.known.discard(rev)
                self._dormant.discard(rev)
                try:
                    await self._link.call(RemoveRevision(self._link.next_id(), rev))
                except LoradError as error:  # a dead engine holds nothing either
                    log.info("removing %s from the engine: %s", rev[:12], error.message)
                else:
                    self._unpinned.discard(rev)
                    await self._retry_pins()
            label = self._catalog.label(rev)
            self.on_retired(rev)
            try:
                await self.shelf.collect()
            except LoradError as error:  # a full disk, say; the housekeeper comes by later
                log.warning("the files of %s stay for now: %s", rev[:12], error.message)
            # Only now: its last transitions come after the engine's answer, and bear its name.
            self.tiers.pop(rev, None)
            self._lost.pop(rev, None)
            self._catalog.forget(rev)
        self._events.publish("adapter.retired", name=label, rev=rev)
        self.on_change()

    def _in_use(self, rev: str) -> bool:
        return self._catalog.referenced(rev) or self._catalog.leases(rev) > 0

    # ------------------------------------------------------------- the engine's deaths and starts
    def take_death(self) -> None:
        """What was resident is remembered until it is back, however many starts that takes."""
        held = (*RESIDENT, State.LOADING)
        self._lost |= dict.fromkeys(rev for rev, tier in self.tiers.items() if tier in held)
        self.tiers.clear()  # here: the next engine may be told to load before `bring_up`
        self._unpinned.clear()
        self._dormant.clear()
        self.on_change()

    async def bring_up(self, info: EngineInfo) -> None:
        """Give a new engine its pinned adapters; what else was resident follows by itself."""
        priority = {
            entry.rev: self._catalog.wanted(entry.rev)[1]
            for entry in self._catalog
            if entry.pinned and entry.rev is not None
        }
        await self._load_all(sorted(priority, key=lambda rev: (-priority[rev], rev)), "pin")
        rest = [rev for rev in self._lost if self._catalog.names_of(rev)]
        self._lost = dict.fromkeys(rest)
        if rest:
            self._tasks.spawn(self._load_all(rest, "restart"))

    async def _load_all(self, revs: Iterable[str], cause: str) -> None:
        room = asyncio.Semaphore(PARALLEL_LOADS)

        async def one(rev: str) -> None:
            async with room:
                if cause == "restart" and rev not in self._lost:
                    return  # evicted or retired meanwhile
                try:
                    await self.load(rev)
                except LoradError as error:
                    self.publish("slot.load_failed", rev, "warn", cause, error.message)
                    if error.code == "engine_restarting":
                        return
                self._lost.pop(rev, None)

        await asyncio.gather(*(one(rev) for rev in revs))

    # ------------------------------------------------------------- from the engine
    def take_transition(self, event: AdapterEvent) -> None:
        """Remember where a revision is now, and tell those who watch."""
        before, after = State(event.before), State(event.after)
        self.tiers[event.rev] = after
        lost = event.cause == "error" and self._has_lost_its_file(event.rev)
        if lost or event.cause == "damaged":
            self.mending.hear(event.rev, event.message)
        elif event.cause == "error" and not self._intake.store.has(event.rev):
            self._tasks.spawn(self.on_missing(event.rev))
        elif (before, after) == (State.LOADING, State.RAM):
            self.mending.whole(event.rev)
        kind = _kind(before, after, bool(event.message))
        if kind is None:
            return  # active and idle change with every request: the snapshot shows them
        details = {"before": before.value, "after": after.value}
        details |= {"seconds": f"{event.seconds:.4f}"} if event.seconds else {}
        details |= {"slot": str(event.slot)} if event.slot is not None else {}
        details |= {"num_bytes": str(event.num_bytes)} if event.num_bytes else {}
        if event.away_seconds is not None:
            details["thrash"] = f"back after {event.away_seconds:.2f} s"
        level: Literal["info", "warn"] = "warn" if event.message else "info"
        self.publish(kind, event.rev, level, event.cause, event.message, details)
        self.on_change()

    def publish(
        self,
        kind: str,
        rev: str,
        level: Literal["info", "warn", "error"] = "info",
        cause: str = "",
        message: str = "",
        details: dict[str, str] | None = None,
    ) -> None:
        """An event under every name of `rev`, or under what a nameless one was called."""
        for name in self._catalog.names_of(rev) or (self._catalog.label(rev),):
            self._events.publish(
                kind,
                level=level,
                name=name,
                rev=rev,
                cause=cause,
                message=message,
                details=details,
            )


def _is_whole(manifest: PackedManifest, info: EngineInfo) -> bool:
    """A packed file that is gone or was cut short is packed anew: its source is beside it."""
    return is_whole(Path(manifest.path), manifest.num_blocks * info.block_bytes)


def is_whole(path: Path, num_bytes: int) -> bool:
    """Whether a packed file of so many bytes is there, and its checksums."""
    try:
        return path.stat().st_size == num_bytes and path_of(path).is_file()
    except OSError:
        return False


async def _outcome(work: Awaitable[None]) -> LoradError | None:
    """An expected error is a result here: whoever waits for it may have left."""
    try:
        await work
    except LoradError as error:
        return error
    return None


async def _nobody(rev: str) -> None:
    return None


def _kind(before: State, after: State, failed: bool) -> str | None:
    """The event type of a transition; None for those that every request makes."""
    if {before, after} <= {State.ACTIVE, State.IDLE}:
        return None
    if after == State.LOADING:
        return "slot.loading" if before == State.RAM else "ram.loading"
    if before == State.LOADING:
        if after in RESIDENT:
            return "slot.load"
        return "slot.load_failed" if failed or after == State.REGISTERED else "ram.load"
    if after == State.DRAINING:
        return "slot.drain"
    if before in RESIDENT:
        return "slot.evict" if after not in RESIDENT else "slot.undrain"
    return "ram.drop" if after == State.REGISTERED else "ram.load"

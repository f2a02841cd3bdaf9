"""AdapterService: the only writer of adapter truth.

Goes in: names from requests, staged folders from the inbox and from uploads, an operator's wishes.
Comes out: a revision for a name, what became of each wish, and events.  Every change is in the
registry before it is in the catalog, and in the catalog before anybody is told.  Changes of one
name follow each other; different names do not wait for one another.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec import structs

from lorad import wire
from lorad.errors import LoradError
from lorad.registry.store import StagingDir
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing
from lorad.service.finishing import Finishing
from lorad.service.gate import Gate
from lorad.service.intake import Intake
from lorad.service.losses import Losses
from lorad.service.name_settings import NameSettings, in_range, labelled
from lorad.service.names import Names
from lorad.service.outcomes import Outcomes
from lorad.service.pins import still_pinned
from lorad.service.registration import Registration, Terms
from lorad.service.revisions import Revisions
from lorad.service.tasks import Tasks
from lorad.service.tenants import unknown
from lorad.spelling import split_digest


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a name means, for the whole life of a request.  `rev` None: the base model."""

    name: str | None
    rev: str | None
    base: bool = False
    priority: int | None = None  # of the name; None: the base model has none


class Staged(Protocol):
    """A staging folder, whoever made the object."""

    @property
    def path(self) -> Path: ...


class AdapterService:
    """One a daemon.  `check_pin` is PinRoom's; `refresh` makes what is shown next show a change."""

    def __init__(
        self,
        names: Names,
        link: EngineLink,
        intake: Intake,
        revisions: Revisions,
        registration: Registration,
        events: EventRing,
        tasks: Tasks,
        *,
        check_pin: Callable[[str, int], None],
        refresh: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.time,
        gate: Gate | None = None,
    ) -> None:
        self.gate = gate or Gate()
        self.on_removed: Callable[[str], None] = lambda name: None
        self.revisions = revisions
        self.refresh = refresh
        self._names, self._link, self._intake = names, link, intake
        self._registration, self._events, self._tasks = registration, events, tasks
        self._check_pin, self._clock = check_pin, clock
        self._settings = NameSettings(names, revisions.standing, events)
        self.losses = Losses(names, revisions, events)
        self.outcomes = Outcomes(names, revisions, tasks, refresh)
        self.finishing = Finishing(names, revisions, registration, tasks, refresh)
        self._used: dict[str, float] = {}  # name -> time of last use, not yet in the registry
        link.bring_up = self.finishing.bring_up

    @property
    def draining(self) -> bool:
        """No requests are taken at all."""
        return bool(self.gate.closed)

    # ------------------------------------------------------------- for requests
    def resolve(self, model: str) -> Resolved:
        """The revision that `model` (a name, or name@digest) means now.

        Raises model_not_found for what is unknown, quarantined or missing, draining, or what the
        engine's state is.  A cold adapter is no error: its request waits.
        """
        resolved = Resolved(None, None, base=True)
        if model != self._names.model:
            name, digest = split_digest(model)
            entry = self._names.catalog.get(name)
            rev = entry.rev if entry is not None else None
            priority = entry.priority if entry is not None else None
            other = name != model and (len(digest) < 8 or not (rev or "").startswith(digest))
            if rev is None or other:
                raise unknown(model)
            resolved = Resolved(name, rev, priority=priority)
            self._used[name] = self._clock()
        self.gate.check(resolved.name)
        self._link.check()
        return resolved

    def lease(self, rev: str) -> None:
        """Hold `rev` until `release`, whatever becomes of the names that meant it."""
        self.revisions.lease(rev)

    def release(self, rev: str) -> None:
        self.revisions.release(rev)

    # ------------------------------------------------------------- adding and replacing
    async def stage(self, expected_bytes: int = 0) -> StagingDir:
        """A folder to fill and hand to `add` or `discard`; raises insufficient_storage."""
        return await self._intake.stage(expected_bytes)

    async def discard(self, staging: Staged) -> None:
        await self._intake.discard(StagingDir(staging.path))

    async def add(
        self,
        staging: Staged,
        name: str,
        *,
        source: str,
        replace: bool = False,
        pin: bool | None = None,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
        load: bool = False,
        dry_run: bool = False,
    ) -> wire.Added:
        """Take a staged folder as `name`; returns when it serves (or, before READY, is registered).

        The staging folder is used up in every case.  Raises adapter_invalid with its reason,
        name_taken, invalid_value, insufficient_storage; with `load` or a pin also no_room.
        """
        terms = Terms(
            source=source,
            replace=replace,
            pin=pin,
            priority=priority,
            labels=labels,
            dry_run=dry_run,
        )
        added = await self.take(staging, name, terms)
        if load and not dry_run:
            await self.load_now(added.rev)
        return added

    async def load_now(self, rev: str) -> None:
        """Onto the GPU; before READY nothing is."""
        if self._link.info is not None:
            await self.revisions.load(rev)

    async def take(self, staging: Staged, name: str, terms: Terms) -> wire.Added:
        """The same for whoever has more to say; a name that is pinned is loaded."""
        try:
            in_range(terms.priority)
            labelled(terms.labels)
            async with self._names.lock(name):
                added = await self._registration.take(StagingDir(staging.path), name, terms)
                if added.unchanged and not terms.dry_run:
                    await self._settings.set(name, terms.pin, terms.priority, terms.labels)
        finally:
            await self.discard(staging)
        entry = self._names.catalog.get(name)
        pinned = entry is not None and entry.pinned and entry.rev == added.rev
        if pinned and not terms.dry_run and self._link.info is not None:
            await self.revisions.load(added.rev)
        await self.refresh()
        return added

    async def quarantine(
        self, name: str, source: str, error: LoradError, *, display_name: str | None = None
    ) -> None:
        """File a folder that was refused; a name that serves goes on with what it has."""
        async with self._names.lock(name):
            await self._registration.quarantine(name, source, error, display_name)

    # ------------------------------------------------------------- an operator's wishes
    async def load(self, names: wire.Names) -> wire.Results:
        async def one(name: str) -> None:
            rev = self._names.serving(name)
            if names.pin:
                await self._pin(name)
            await self.revisions.load(rev, names.tier)

        return await self.outcomes.of("load", names, one)

    async def evict(self, names: wire.Names) -> wire.Results:
        wanted = self._names.catalog.wanted

        async def one(name: str) -> None:
            rev = self._names.serving(name)
            if wanted(rev)[0] and not names.force:
                raise still_pinned(self._names.catalog, name, rev)
            await self.revisions.evict(
                rev,
                to=names.to,
                drain=names.drain_timeout_s,
                now=names.now,
                force=names.force,
            )

        if not names.all:
            return await self.outcomes.of("evict", names, one)
        held = [rev for rev in self.revisions.tiers if self.revisions.resident(rev)]
        chosen = [rev for rev in held if names.force or not wanted(rev)[0]]
        names_of = self._names.catalog.names_of
        every = {name for rev in chosen for name in names_of(rev)}
        kept = {name for rev in held for name in names_of(rev)} - every
        results = await self.outcomes.of("evict", names, one, sorted(every))
        return structs.replace(results, skipped=tuple(sorted(kept)))

    async def pin(self, names: wire.Names) -> wire.Results:
        async def one(name: str) -> None:
            rev = self._names.serving(name)
            await self._pin(name)
            if not names.no_load:
                await self.revisions.load(rev)

        return await self.outcomes.of("pin", names, one)

    async def unpin(self, names: wire.Names) -> wire.Results:
        async def one(name: str) -> None:
            async with self._change(name):
                await self._settings.set(name, False, None, None)

        return await self.outcomes.of("unpin", names, one)

    async def patch(self, name: str, patch: wire.AdapterPatch) -> None:
        """Change pin, priority, labels; read the result from `Listing`."""
        priority = in_range(patch.priority)
        async with self._change(name):
            record = self._names.known(name)
            labels = dict(record.labels)
            for key, value in patch.labels.items():
                if value is None:
                    labels.pop(key, None)
                else:
                    labels[key] = value
            labelled({key: labels[key] for key in patch.labels if key in labels}, len(labels))
            if patch.pinned and record.serving_rev is not None:
                self._check_pin(record.serving_rev, 0)
            await self._settings.set(name, patch.pinned, priority, labels)
        await self.refresh()

    async def remove(
        self, name: str, *, keep_files: bool = False, forget: bool = False
    ) -> wire.Removed:
        """Take the name away; its requests in flight end on what they have.  If it waits to be
        packed, it need not be any more.

        The content stays away too until its source changes; `forget`: the source itself is gone.
        """
        with self._names.catalog.leaving(name):
            try:
                return await self._remove(name, keep_files, forget)
            finally:
                self._go_on_if_it_stayed(name)

    async def _remove(self, name: str, keep_files: bool, forget: bool) -> wire.Removed:
        async with self._change(name):
            record = self._names.known(name)
            rev = record.serving_rev
            if keep_files and rev is not None:
                await self.revisions.shelf.keep_files(rev, True)
            tombstone = None if forget else record.candidate_rev or rev
            await self._names.write(name, self._names.registry.remove(name, tombstone))
        self.gate.held.discard(name)
        self._events.publish("adapter.removed", name=name, rev=rev or "")
        await self._registration.settle(rev, record.candidate_rev)
        await self.refresh()
        self.on_removed(name)
        return wire.Removed(name=name, rev=rev)

    def _go_on_if_it_stayed(self, name: str) -> None:
        """A disk that is full, say, kept the name, whose packing may have been left out."""
        entry = self._names.catalog.get(name)
        if entry is not None and entry.candidate is not None and self._link.info is not None:
            self._tasks.spawn(self.finishing.finish(entry))

    async def flush(self) -> None:
        """Write the times of last use."""
        used, self._used = self._used, {}
        if used:
            await asyncio.wrap_future(self._names.registry.touch_used(used))

    # ------------------------------------------------------------- inside
    async def _pin(self, name: str) -> None:
        async with self._change(name):
            self._check_pin(self._names.serving(name), 0)
            await self._settings.set(name, True, None, None)

    @asynccontextmanager
    async def _change(self, name: str) -> AsyncIterator[None]:
        """The name's lock, for somebody who waits for it: whoever holds it may wait for packers."""
        entry = self._names.catalog.get(name)
        with ExitStack() as waiting:
            for rev in {entry.rev, entry.candidate} - {None} if entry is not None else ():
                assert rev is not None
                waiting.enter_context(self._intake.wanted(rev))
            async with self._names.lock(name):
                yield

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

from engine.adapters.states import State
from lorad import wire
from lorad.errors import LoradError
from lorad.registry.store import StagingDir
from lorad.service.choosing import choose
from lorad.service.events import EventRing
from lorad.service.gate import Gate
from lorad.service.holds import Holds
from lorad.service.intake import Found, Intake
from lorad.service.lineup import Lineup, ModelAdapters
from lorad.service.name_settings import in_range, labelled
from lorad.service.names import Names
from lorad.service.outcomes import Outcomes
from lorad.service.pins import still_pinned
from lorad.service.registration import Terms
from lorad.service.tasks import Tasks
from lorad.service.tenants import unknown
from lorad.spelling import split_digest
from lorad.wire_operate import Held, HoldAsk


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a name means, for the whole life of a request.  `rev` None: the base model."""

    name: str | None
    rev: str | None
    model: str  # the base that runs it
    base: bool = False
    priority: int | None = None  # of the name; None: the base model has none


class Staged(Protocol):
    """A staging folder, whoever made the object."""

    @property
    def path(self) -> Path: ...


class AdapterService:
    """One a daemon, whatever the models.  `refresh` makes what is shown next show a change."""

    def __init__(
        self,
        names: Names,
        models: Lineup,
        intake: Intake,
        events: EventRing,
        tasks: Tasks,
        *,
        refresh: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.time,
        gate: Gate | None = None,
    ) -> None:
        self.gate = gate or Gate()
        self.on_removed: Callable[[str], None] = lambda name: None
        self.models, self.refresh = models, refresh
        self._names, self._intake = names, intake
        self._events, self._tasks, self._clock = events, tasks, clock
        self.outcomes = Outcomes(names, models, tasks, refresh)
        self.holds = Holds(self.lease, self.release)

    @property
    def draining(self) -> bool:
        """No requests are taken at all."""
        return bool(self.gate.closed)

    # ------------------------------------------------------------- for requests
    def resolve(self, model: str) -> Resolved:
        """The revision that `model` (a name, or name@digest) means now, or that is held.

        Raises model_not_found for what is unknown, quarantined or missing, draining, or what the
        engine's state is.  A cold adapter is no error: its request waits.
        """
        resolved = Resolved(None, None, model, base=True)
        if model not in self._names.models:
            name, digest = split_digest(model)
            entry = self._names.catalog.get(name)
            rev = entry.rev if entry is not None else None
            priority = entry.priority if entry is not None else None
            if name != model and (len(digest) < 8 or not (rev or "").startswith(digest)):
                rev = self.holds.find(name, digest) if len(digest) >= 8 else None
            if rev is None:
                raise unknown(model)
            resolved = Resolved(name, rev, self.models.of(rev).model, priority=priority)
            self._names.used[name] = self._clock()
        self.gate.check(resolved.name)
        self.models[resolved.model].link.check()
        return resolved

    def lease(self, rev: str) -> None:
        """Hold `rev` until `release`, whatever becomes of the names that meant it."""
        self._names.catalog.lease(rev)

    def release(self, rev: str) -> None:
        self._of(rev).revisions.release(rev)

    def hold(self, ask: HoldAsk) -> Held:
        """Let what `name` serves now be asked for as name@digest for so long, though the name
        moves; 0 seconds: let go of all that is held.  A name that is unknown holds nothing."""
        entry = self._names.catalog.get(ask.name)
        if ask.seconds <= 0:
            self.holds.let_go(ask.name)
        elif entry is not None and entry.rev is not None:
            self.holds.hold(ask.name, entry.rev, ask.seconds)
        return Held(name=ask.name, revs=self.holds.of(ask.name))

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
        model: str = "",
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
            model=model,
            replace=replace,
            pin=pin,
            priority=priority,
            labels=labels,
            dry_run=dry_run,
        )
        added = await self.take(staging, name, terms)
        return await self._loaded(added) if load and not dry_run else added

    async def load_now(self, rev: str) -> None:
        """Onto the GPU; before READY nothing is."""
        model = self.models.of(rev)
        if model.link.info is not None:
            await model.revisions.load(rev)

    async def take(self, staging: Staged, name: str, terms: Terms) -> wire.Added:
        """The same for whoever has more to say; a name that is pinned is loaded."""
        try:
            in_range(terms.priority)
            labelled(terms.labels)
            async with self._names.lock(name):
                model, found = await self._choose(StagingDir(staging.path), name, terms)
                taking = model.registration.take(StagingDir(staging.path), name, terms, found)
                added = await taking
                if added.unchanged and not terms.dry_run:
                    await model.settings.set(name, terms.pin, terms.priority, terms.labels)
        finally:
            await self.discard(staging)
        entry = self._names.catalog.get(name)
        pinned = entry is not None and entry.pinned and entry.rev == added.rev
        if pinned and not terms.dry_run:
            added = await self._loaded(added)
        await self.refresh()
        return added

    async def _loaded(self, added: wire.Added) -> wire.Added:
        """The same, on the GPU; before READY it stays where it is, and a warning says so."""
        if added.num_bytes:
            return added
        model, rev = self.models.of(added.rev), added.rev
        if (info := model.link.info) is None:
            entry = self._names.catalog.get(added.name)
            if entry is not None and entry.pinned:
                return added  # and is loaded when the base is
            warning = f"not loaded, for the base is not ready yet: loractl load {added.name}, later"
            return structs.replace(added, warnings=(*added.warnings, warning))
        there, began = model.revisions.resident(rev), asyncio.get_running_loop().time()
        await model.revisions.load(rev)
        took = asyncio.get_running_loop().time() - began
        revision = self._names.registry.revision(rev)
        seen = model.revisions.tier(rev) if model.revisions.resident(rev) else State.IDLE
        return structs.replace(
            added,
            state=seen.value,  # the engine's word on it may come a moment after its answer
            num_bytes=revision.packed_bytes(info) if revision is not None else 0,
            load_seconds=None if there else took,
        )

    async def _choose(
        self, staging: StagingDir, name: str, terms: Terms
    ) -> tuple[ModelAdapters, Found | None]:
        """The model that it is for; what is for none is filed, where that is wanted."""
        self._names.check_free(name, terms.source, replace=terms.replace)
        before = self._names.registry.get(name)
        try:
            return await choose(self.models, self._names, staging, name, terms.model, before)
        except LoradError as error:
            if terms.file_refusals and error.code == "adapter_invalid":
                await self._file(name, terms.source, error, None)
            raise

    async def quarantine(
        self, name: str, source: str, error: LoradError, *, display_name: str | None = None
    ) -> None:
        """File a folder that was refused; a name that serves goes on with what it has."""
        async with self._names.lock(name):
            await self._file(name, source, error, display_name)

    async def lose_files(self, rev: str) -> None:
        """The store lost `rev`; see Losses."""
        await self._of(rev).losses.lose_files(rev)

    # ------------------------------------------------------------- an operator's wishes
    async def load(self, names: wire.Names) -> wire.Results:
        async def one(name: str) -> None:
            rev = self._names.serving(name)
            if names.pin:
                await self._pin(name)
            await self.models.of(rev).revisions.load(rev, names.tier)

        return await self.outcomes.of("load", names, one)

    async def evict(self, names: wire.Names) -> wire.Results:
        wanted = self._names.catalog.wanted

        async def one(name: str) -> None:
            rev = self._names.serving(name)
            if wanted(rev)[0] and not names.force:
                raise still_pinned(self._names.catalog, name, rev)
            await self.models.of(rev).revisions.evict(
                rev,
                to=names.to,
                drain=names.drain_timeout_s,
                now=names.now,
                force=names.force,
            )

        if not names.all:
            return await self.outcomes.of("evict", names, one)
        held = [rev for one in self.models for rev in one.revisions.all_resident()]
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
            if names.no_load:
                return
            try:
                await self.models.of(rev).revisions.load(rev)
            except LoradError as error:
                if error.retryable:  # it is loaded once that has passed
                    raise
                raise error.told_as(f"pinned, but not loaded: {error.message}") from error

        return await self.outcomes.of("pin", names, one)

    async def unpin(self, names: wire.Names) -> wire.Results:
        async def one(name: str) -> None:
            async with self._change(name):
                await self._model(name).settings.set(name, False, None, None)

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
                self._model(name).check_pin(record.serving_rev)
            await self._model(name).settings.set(name, patch.pinned, priority, labels)
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
                await self._model(name).revisions.shelf.keep_files(rev, True)
            model, tombstone = self._model(name), None if forget else record.candidate_rev or rev
            await self._names.write(name, self._names.registry.remove(name, tombstone))
        self.gate.held.discard(name)
        self.holds.let_go(name)
        self._events.publish("adapter.removed", name=name, rev=rev or "")
        await model.registration.settle(rev, record.candidate_rev)
        await self.refresh()
        self.on_removed(name)
        return wire.Removed(name=name, rev=rev)

    def _go_on_if_it_stayed(self, name: str) -> None:
        """A disk that is full, say, kept the name, whose packing may have been left out."""
        entry = self._names.catalog.get(name)
        if entry is None or entry.candidate is None:
            return
        model = self._model(name)
        if model.link.info is not None:
            self._tasks.spawn(model.finishing.finish(entry))

    async def flush(self) -> None:
        """Write the times of last use."""
        used = dict(self._names.used)
        if used:
            await asyncio.wrap_future(self._names.registry.touch_used(used))
        for name, at in used.items():  # what came meanwhile is for the next time
            if self._names.used.get(name) == at:
                del self._names.used[name]

    # ------------------------------------------------------------- inside
    async def _file(
        self, name: str, source: str, error: LoradError, display_name: str | None
    ) -> None:
        first = self.models.first
        model = first.model if len(self.models) == 1 else ""
        await first.registration.quarantine(name, source, error, display_name, model)

    async def _pin(self, name: str) -> None:
        async with self._change(name):
            model = self._model(name)
            model.check_pin(self._names.serving(name))
            await model.settings.set(name, True, None, None)

    def _model(self, name: str) -> ModelAdapters:
        """Of a name; of one that no model of today serves, the first: nobody there knows it."""
        entry = self._names.catalog.get(name)
        return self.models.get(entry.model if entry is not None else "") or self.models.first

    def _of(self, rev: str) -> ModelAdapters:
        """The same of a revision."""
        return self.models.get(self._names.catalog.model_of(rev) or "") or self.models.first

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

"""Registration: a staged folder becomes what a name serves, without a request noticing.

Goes in: a staging folder, a name, settings.  Comes out: `wire.Added`, or LoradError with the reason
that quarantined it.  The order is fixed: inspect, store, register as candidate, pack, stand beside
the old revision, take the name.  Failing at any point leaves what served before serving.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from engine.adapters.states import State
from lorad import wire
from lorad.errors import LoradError
from lorad.registry.records import AdapterRecord, blocks_of
from lorad.registry.store import StagingDir
from lorad.service.events import EventRing
from lorad.service.intake import Found, Intake
from lorad.service.model_revisions import ModelRevisions
from lorad.service.names import Names, tenant_of
from lorad.service.seams import CheckPin, Informed

log = logging.getLogger("lorad.registration")

#: A candidate that is not resident by then takes the name anyway; requests wait for it.
FLIP_SECONDS = 60.0
#: These only mean that the new revision cannot stand beside the old one now.
_NO_MATTER = ("no_room", "conflict", "engine_restarting", "engine_stalled", "loading_base")
#: Only these say something about the content.
_ITS_FAULT = ("adapter_invalid", "load_failed", "adapter_damaged")
#: The engine went away: its next start takes it from here.
LATER = ("engine_restarting", "engine_stalled", "loading_base", "draining")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How to take a folder in.  None leaves a setting as it is (new: unpinned, priority 50)."""

    source: str
    model: str = ""  # the base that it is for; "" = the one that it fits
    replace: bool = False
    pin: bool | None = None
    priority: int | None = None
    labels: Mapping[str, str] | None = None
    dry_run: bool = False
    unless_rev: str | None = None  # this very content is not taken: an operator removed it
    file_refusals: bool = False  # quarantine what inspection refuses: nobody waits for the answer
    on_registered: Callable[[], None] = lambda: None  # it will survive a crash; packing follows


class Registration:
    """Onto one model.  Called by AdapterService with the name's lock held."""

    def __init__(
        self,
        model: str,
        names: Names,
        link: Informed,
        intake: Intake,
        revisions: ModelRevisions,
        events: EventRing,
        *,
        check_pin: CheckPin,
    ) -> None:
        self._model, self._names, self._link, self._intake = model, names, link, intake
        self._revisions, self._events = revisions, events
        self._check_pin = check_pin

    async def take(
        self, staging: StagingDir, name: str, terms: Terms, found: Found | None = None
    ) -> wire.Added:
        """All of it; before the engine is ready it ends with the registration.  `found`: it was
        inspected for this model."""
        self._names.check_free(name, terms.source, replace=terms.replace)
        found = found or await self._find(staging, name, terms)
        await self._vet_content(found.rev, name, terms)
        before = self._names.registry.get(name)
        serves = before is not None and before.stored_state == State.REGISTERED
        old = before.serving_rev if before is not None and serves else None
        waits = before.candidate_rev if before is not None else None
        unchanged = old == found.rev and waits in (None, found.rev)  # else: it is to stay after all
        unchanged &= self._intake.store.has(found.rev)
        if old not in (None, found.rev) and not terms.replace:
            raise LoradError(
                "name_taken", f"{name!r} serves other content ({old[:12]})", hint="use --replace"
            )
        if not terms.dry_run and not unchanged and found.rev != terms.unless_rev:
            await self._register(found, name, terms, before)
            if self._link.info is not None:
                waited_for = not terms.file_refusals
                with self._intake.wanted(found.rev) if waited_for else nullcontext():
                    await self.advance(name, found.rev)
        return wire.Added(
            name=name,
            rev=found.rev,
            state=self._revisions.tier(found.rev).value,
            unchanged=unchanged,
            replaced_rev=None if old == found.rev else old,
            warnings=found.manifest.warnings,
            dry_run=terms.dry_run,
        )

    async def _find(self, staging: StagingDir, name: str, terms: Terms) -> Found:
        try:
            return await self._intake.find(staging)
        except LoradError as error:
            if terms.file_refusals and error.code == "adapter_invalid":
                await self.quarantine(name, terms.source, error, None)
            raise

    def _check_content(self, rev: str) -> None:
        """Content is of one model at a time, as all that is known of it is by revision."""
        model = self._names.catalog.model_of(rev)
        label, names = self._names.catalog.label(rev), self._names.catalog.names_of(rev)
        if not model and (waiting := self._names.waiting_for(rev)) is not None:
            model, label, names = waiting.model, waiting.name, (waiting.name,)  # for a while
        if model in (None, "", self._model):
            return
        away = f"loractl rm {' '.join(names)}" if names else "again once nobody uses it there"
        raise LoradError(
            "adapter_invalid",
            f"this content is an adapter of {model} already ({label}), and not of {self._model}",
            details={"reason": "E_MODEL"},
            hint=f"{away}, or add it for {model}",
        )

    async def _vet_content(self, rev: str, name: str, terms: Terms) -> None:
        try:
            self._check_content(rev)
        except LoradError as error:
            if terms.file_refusals:
                await self.quarantine(name, terms.source, error, None)
            raise

    async def _register(
        self, found: Found, name: str, terms: Terms, before: AdapterRecord | None
    ) -> None:
        """Into the store, then the registry: from here on it is acknowledged."""
        pin = self._granted(found, name, terms)
        async with self._revisions.shelf.hold(found.rev):
            self._check_content(found.rev)  # another name may have brought it meanwhile
            revision = await self._intake.keep(found, self._packed_bytes(found))
            self._revisions.renew(found.rev)
            known = self._names.registry.revision(found.rev)
            try:
                done = await self._names.write(
                    name,
                    self._names.registry.register(
                        name,
                        tenant=tenant_of(name),
                        model=self._model,
                        source=terms.source,
                        revision=revision,
                        labels=terms.labels,
                        pin=pin,
                        priority=terms.priority,
                        as_candidate=True,
                    ),
                )
            except LoradError:
                if self._names.registry.revision(found.rev) is None:
                    await self._intake.give_up(found.rev)  # the disk is full enough without it
                raise
            if known is not None and known.text != revision.text:
                self._revisions.retell(found.rev)
            await self._revisions.shelf.keep_files(found.rev, False)
        terms.on_registered()
        mended = before is not None and before.stored_state == State.QUARANTINED
        kind = "adapter.added" if done.created or mended else "adapter.candidate"
        self._events.publish(kind, name=name, rev=found.rev, cause=terms.source.partition(":")[0])
        for old in (before.candidate_rev, before.serving_rev) if before is not None else ():
            if old is not None:
                self._revisions.consider_retiring(old)

    def _packed_bytes(self, found: Found) -> int:
        """What its packed file will take; 0 before the engine is known."""
        info, manifest = self._link.info, found.manifest
        return blocks_of(manifest.modules, info) * info.packed_block_bytes if info else 0

    def _granted(self, found: Found, name: str, terms: Terms) -> bool | None:
        """The pin that was asked for, if there is room; else no_room for whoever waits for it."""
        try:
            if terms.pin:
                self._check_pin(found.rev, found.manifest.modules)
        except LoradError as error:
            if not terms.file_refusals:
                raise
            self._events.publish("pin.refused", level="warn", name=name, message=error.message)
            return None
        return terms.pin

    async def advance(self, name: str, rev: str) -> None:
        """Pack the candidate, stand it beside what serves if that is on the GPU, then flip."""
        entry = self._names.catalog.get(name)
        if entry is None or entry.candidate != rev:
            return  # served already, or removed meanwhile
        old = entry.rev if entry.rev != rev else None
        try:
            await self._revisions.prepare(rev)
            if old is not None and self._revisions.resident(old):
                await self._load_beside(rev, old)
        except LoradError as error:
            if error.code in LATER or self._names.catalog.is_leaving(name):
                return
            if error.code in _ITS_FAULT:
                await self._reject(name, rev, error)
            raise
        await self._names.write(name, self._names.registry.promote(name, rev))
        if old is not None:
            message = f"was {old[:12]}"
            self._events.publish("adapter.replaced", name=name, rev=rev, message=message)
        await self.settle(rev, old)

    async def settle(self, *revs: str | None) -> None:
        """After a name moved: pins and priorities follow it, and what nobody means goes."""
        for rev in revs:
            if rev is None:
                continue
            try:
                await self._revisions.standing.follow(rev)
            except LoradError as error:
                if error.code not in LATER:
                    raise
            self._revisions.consider_retiring(rev)

    async def quarantine(
        self,
        name: str,
        source: str,
        error: LoradError,
        display_name: str | None,
        model: str | None = None,
    ) -> None:
        """File what was refused before it had a revision; what serves goes on.  `model` "": nobody
        knows whose it was to be."""
        reason = error.details.get("reason", error.code.upper())
        before, message = self._names.registry.get(name), error.advised
        if before is not None and (before.reason, before.reason_message) == (reason, message):
            return  # said so before
        await self._names.write(
            name,
            self._names.registry.quarantine(
                name,
                source,
                reason,
                message,
                display_name,
                tenant=tenant_of(name),
                model=self._model if model is None else model,
            ),
        )
        self._tell(name, "", reason, error)

    async def _load_beside(self, rev: str, old: str) -> None:
        """Without room for both the name flips at once, and new requests wait for the new one."""
        try:
            async with asyncio.timeout(FLIP_SECONDS):
                await self._revisions.stand_beside(rev, old)
        except TimeoutError:
            log.info("%s is not resident after %g s; it takes its name", rev[:12], FLIP_SECONDS)
        except LoradError as error:
            if error.code not in _NO_MATTER:
                raise

    async def _reject(self, name: str, rev: str, error: LoradError) -> None:
        """Clear the candidate, and quarantine the name if nothing else serves under it."""
        reason = error.details.get("reason", error.code.upper())
        change = self._names.registry.fail_candidate(name, reason, error.advised)
        await self._names.write(name, change)
        self._tell(name, rev, reason, error)
        entry = self._names.catalog.get(name)
        old = entry.rev if entry is not None else None
        await self.settle(rev, old)  # pin and priority were the name's from its registration on

    def _tell(self, name: str, rev: str, reason: str, error: LoradError) -> None:
        self._events.publish(
            "adapter.rejected",
            level="warn",
            name=name,
            rev=rev,
            cause=reason,
            message=error.advised,
        )

"""Pulls: what a reference means at its source becomes an adapter here, by the one intake.

Goes in: a `PullStart`, an operation to work on.  Comes out: a plan, or the columns of the ended
operation.  The order is fixed: resolve, check the name, fetch into a staging folder that is called
by what was resolved, hand it to `AdapterService.take`.  A pull that was cut short, by a restart or
by its source, goes on in the same folder.  Knows no HTTP; secrets stay in memory.
"""

import asyncio
import time
import weakref
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from engine.adapters.states import State
from lorad import wire
from lorad.errors import LoradError
from lorad.registry.operations import KEEP_STAGING_SECONDS
from lorad.registry.records import OperationRecord
from lorad.registry.store import StagingDir
from lorad.service.adapters import AdapterService
from lorad.service.fetching import PASSING, Asked, Fetching, folder_of
from lorad.service.intake import Intake
from lorad.service.names import Names
from lorad.service.operations import Ended, Operations, Running
from lorad.service.registration import Terms
from lorad.sources.errors import Cancelled
from lorad.sources.fetch import Resolved
from lorad.sources.reference import Reference, parse_reference
from lorad.spelling import adapter_name
from lorad.wire_operations import PulledFile, PullPlan, PullStart

KIND = "pull"


class Wish(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of a PullStart is stored.  `secret`: it had more, which is gone after a restart."""

    reference: str
    name: str = ""
    model: str = ""
    replace: bool = False
    pin: bool = False
    load: bool = False
    offline: bool = False
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """What one pull knows beyond its row, for as long as the daemon runs."""

    asked: Asked
    resolved: Resolved | None = None


class Pulls:
    """One a daemon; the work of operations of kind `pull`."""

    def __init__(
        self,
        operations: Operations,
        fetching: Fetching,
        adapters: AdapterService,
        names: Names,
        intake: Intake,
    ) -> None:
        self._operations, self._fetching = operations, fetching
        self._adapters, self._names, self._intake = adapters, names, intake
        self._given: dict[str, Given] = {}  # by operation
        self._beginning = asyncio.Lock()
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        operations.works[KIND] = self._work

    # ------------------------------------------------------------- for whoever asks
    async def plan(self, start: PullStart) -> PullPlan:
        """What a pull would fetch; nothing is written.  Raises what the pull would fail with."""
        reference = parse_reference(start.reference, start.revision)
        name = _name(start, reference)
        asked = Asked(reference, start.token, start.offline)
        resolved = await self._fetching.resolve(asked)
        if not self._present(name, resolved):
            self._names.check_free(name, resolved.reference, replace=start.replace)
        return PullPlan(
            reference=resolved.reference,
            commit=resolved.commit,
            name=name,
            files=tuple(PulledFile(name=f.name, num_bytes=f.size) for f in resolved.files),
            total_bytes=resolved.total_bytes,
        )

    async def begin(
        self, start: PullStart, *, actor: str, resolved: Resolved | None = None
    ) -> OperationRecord:
        """File the pull and start it.  The same wish while it is on its way is the same pull."""
        reference = parse_reference(start.reference, start.revision)
        wish = Wish(
            reference=reference.text,
            name=_name(start, reference),
            model=start.model,
            replace=start.replace,
            pin=start.pin,
            load=start.load,
            offline=start.offline,
            secret=bool(start.token) or reference.private,
        )
        self._names.check_legal(wish.name)
        self._names.check_model(wish.model)
        text = msgspec.json.encode(wish).decode()
        asked = Asked(reference, start.token, start.offline)
        async with self._beginning:
            for record in self._operations.live(KIND):
                known = self._given.get(record.id)
                same = known is not None and known.asked == asked
                if record.wish == text and (same or not wish.secret):
                    return record
            record = await self._operations.begin(
                KIND, reference.text, wish=text, name=wish.name, actor=actor
            )
            # its work begins with the loop's next turn: nothing was awaited since it was started
            self._given[record.id] = Given(asked, resolved)
        return record

    # ------------------------------------------------------------- the work
    async def _work(self, op: Running) -> dict[str, Any]:
        wish = msgspec.json.decode(op.record.wish, type=Wish)
        given = self._given.get(op.record.id)
        try:
            await self._sweep()
            return await self._pull(op, wish, given or _again(op.record, wish))
        except LoradError as error:
            if given is None and wish.secret and error.code == "source_denied":
                error.hint = "the token is not kept over a restart; pull it again"
            raise
        finally:
            self._given.pop(op.record.id, None)

    async def _pull(self, op: Running, wish: Wish, given: Given) -> dict[str, Any]:
        resolved = given.resolved or await self._fetching.resolve(given.asked)
        op.check()
        folder = folder_of(resolved, wish.name)
        async with self._lock(folder):  # two that mean the same, each with wishes of its own
            rev = self._present(wish.name, resolved)
            if rev:
                op.seal()
                await op.note(state="running", commit=resolved.commit)
                message = "it was here already"
            else:
                added = await self._take(op, wish, given.asked, resolved, folder)
                rev, message = added.rev, "; ".join(added.warnings)
        await self._settle(wish, rev)
        return {"rev": rev, "message": message}

    async def _take(
        self, op: Running, wish: Wish, asked: Asked, resolved: Resolved, folder: str
    ) -> wire.Added:
        """Fetch the files, then register them."""
        self._names.check_free(wish.name, resolved.reference, replace=wish.replace)
        op.progress(0, resolved.total_bytes)
        staging = await self._intake.reopen(folder, resolved.total_bytes or 0)
        await op.note(commit=resolved.commit, staging=folder)
        try:
            async with self._fetching.place(asked):
                op.check()
                await op.note(state="running")
                await self._fetching.download(asked, resolved, staging, op.progress, op.cancelled)
            op.seal()
        except (Ended, Cancelled):
            if not self._operations.stopping:  # else the next start goes on with it
                await self._adapters.discard(staging)
            raise Ended from None
        except LoradError as error:
            if error.code not in PASSING:
                await self._adapters.discard(staging)
            raise
        terms = Terms(
            source=resolved.reference, model=wish.model, replace=wish.replace, pin=wish.pin or None
        )
        return await self._adapters.take(staging, wish.name, terms)

    async def _settle(self, wish: Wish, rev: str) -> None:
        """Pins and loads that were asked for, whether it was new or not."""
        if wish.pin:
            await self._adapters.patch(wish.name, wire.AdapterPatch(pinned=True))
        if wish.pin or wish.load:
            await self._adapters.load_now(rev)

    # ------------------------------------------------------------- details
    def _present(self, name: str, resolved: Resolved) -> str:
        """The revision, if `name` has just this content already; "" where only a look can tell."""
        record = self._names.registry.get(name)
        if record is None or record.source != resolved.reference or not _fixed(resolved):
            return ""
        if record.stored_state != State.REGISTERED or record.reason is not None:
            return ""
        return record.candidate_rev or record.serving_rev or ""

    async def _sweep(self) -> None:
        """Half downloads that failed long ago, and were not asked for again."""
        for record in self._operations.given_up(KIND, time.time() - KEEP_STAGING_SECONDS):
            await self._adapters.discard(
                StagingDir(self._intake.store.staging_path(record.staging))
            )
            await self._operations.forget_staging(record)

    def _lock(self, folder: str) -> asyncio.Lock:
        lock = self._locks.get(folder)
        if lock is None:
            lock = self._locks[folder] = asyncio.Lock()
        return lock


def _name(start: PullStart, reference: Reference) -> str:
    name = start.name or adapter_name(reference.text)
    if not name:
        hint = "give it one with --name"
        raise LoradError("invalid_value", f"{reference.text} has no name in it", hint=hint)
    return name


def _again(record: OperationRecord, wish: Wish) -> Given:
    """After a restart: the same commit, though its branch may have moved."""
    reference = parse_reference(wish.reference)
    if wish.secret and reference.scheme in ("http", "https"):
        raise LoradError(
            "source_denied",
            "the secret part of its URL is not kept over a restart",
            hint="pull it again",
        )
    if reference.scheme == "hf" and record.commit:
        reference = parse_reference(f"hf:{reference.repo}", record.commit)
    if reference.scheme == "s3" and record.commit and not reference.pinned:
        reference = parse_reference(f"{reference.text}#etags={record.commit}")
    return Given(Asked(reference, offline=wish.offline))


def _fixed(resolved: Resolved) -> bool:
    """Does its reference name the content itself?"""
    return bool(resolved.commit)

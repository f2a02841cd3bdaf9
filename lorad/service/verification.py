"""Verification: is what serves what the stored files say?

Goes in: names.  Comes out: for each, what was compared and what differs.  The verifier process
works out from the stored files what the adapter must do; the engine compares that, and every
resident byte, with what is in the slot.  Decides nothing: what is found is told, and an event.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.errors import EngineError
from engine.messages import PackedManifest
from engine.verify_messages import Finding, Verified, VerifyReport
from lorad import wire
from lorad.errors import LoradError, from_engine
from lorad.service.events import EventRing
from lorad.service.intake import Intake
from lorad.service.kinds import by_bytes_alone
from lorad.service.lineup import Lineup, ModelAdapters
from lorad.service.names import Names
from lorad.service.tasks import Tasks

log = logging.getLogger("lorad.verification")

#: (model, stored folder, folder for a fresh packed file, probe file, packed file to compare) -> its
#: word.
Run = Callable[[str, Path, Path, Path, Path | None], Awaitable[Verified]]
#: Unasked, these are a finding; and these are none: it was removed, or made way.
DAMAGED = ("adapter_damaged", "adapter_invalid")
PASSED_OVER = ("conflict", "model_not_found")
#: One that is evicted while it is looked at is brought back, this many times.
TRIES = 3
HINT = "loractl evict {name} --to disk, then loractl load {name}: it is read and copied again"
#: Everything else is made from the stored files: nothing mends them.
TOKENIZER_HINT = (
    "restart lorad, which looks again where the base's tokenizer was changed; else "
    "loractl rm {name}, and add it again"
)
STORED_HINT = "loractl rm {name}, then loractl add DIR --name {name}; look at the disk"


class Verification:
    """One adapter at a time: the work is for nobody's request, and the disk's."""

    def __init__(
        self,
        names: Names,
        models: Lineup,
        intake: Intake,
        events: EventRing,
        tasks: Tasks,
        *,
        run: Run,
    ) -> None:
        self._names, self._models, self._intake = names, models, intake
        self._events, self._tasks, self._run = events, tasks, run
        self._turn = asyncio.Lock()

    async def verify(self, wish: wire.Names) -> wire.Verifications:
        """Each name that is given, or with `all` each that is on the GPU."""
        chosen = list(dict.fromkeys(wish.names))
        if wish.all:
            resident = [rev for one in self._models for rev in one.revisions.all_resident()]
            chosen = sorted(n for rev in resident for n in self._names.catalog.names_of(rev))
        elif not chosen:
            raise LoradError("invalid_value", "names is empty", param="names")
        return wire.Verifications(items=tuple([await self._item(name, wish) for name in chosen]))

    async def check(self, rev: str) -> None:
        """One that is on the GPU, unasked: what is found is told as an event, unless it makes way
        meanwhile."""
        try:
            async with self._turn:
                report = await self._examine(rev, full=False, bring=False)
        except LoradError as error:
            name = self._names.catalog.label(rev)
            if error.code in DAMAGED:
                self._tell_damage(name, rev, error.message)
            elif error.code not in PASSED_OVER:
                log.warning("%s cannot be verified: %s", name, error.message)
            return
        for name in self._names.catalog.names_of(rev):
            self._told(name, rev, report)

    async def _item(self, name: str, wish: wire.Names) -> wire.Verification:
        """One name's outcome; it goes on when the caller leaves, or runs out of time."""
        task = self._tasks.spawn(self._caught(name, wish.full))
        try:
            async with asyncio.timeout(wish.timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            return wire.Verification(
                name=name,
                ok=False,
                code="deadline_exceeded",
                message=f"not done after {wish.timeout_s:g} s; it goes on",
                hint="loractl events",
            )

    async def _caught(self, name: str, full: bool) -> wire.Verification:
        try:
            async with self._turn:
                rev = self._names.serving(name)
                report = await self._examine(rev, full=full)
        except LoradError as error:
            return wire.Verification(
                name=name, ok=False, code=error.code, message=error.message, hint=error.hint
            )
        return self._told(name, rev, report)

    async def _examine(self, rev: str, *, full: bool, bring: bool = True) -> VerifyReport:
        """`bring`: to the GPU, if it is not there."""
        store, staging = self._intake.store, await asyncio.to_thread(self._intake.store.stage)
        model = self._models.of(rev)
        model.revisions.lease(rev)
        try:
            packed = await model.revisions.files.packed(rev)
            probe, compared = staging.path / "probe", Path(packed.path) if full else None
            folders = store.path(rev), staging.path, probe, compared
            source = await self._source(model.model, *folders)
            if not (bring or model.revisions.resident(rev)):
                raise LoradError("conflict", "it made way meanwhile")
            report = await self._compare(model, packed, probe, TRIES if bring else 1)
        finally:
            model.revisions.release(rev)
            await self._intake.discard(staging)
        return _together(rev, self._with_text(rev, source), report)

    def _with_text(self, rev: str, source: Verified) -> Verified:
        """Texts are read by what the registry says: it is held against the files, too."""
        record = self._names.registry.revision(rev)
        if record is None or source.rev != rev:
            return source
        found = replace(
            record.text, num_tokens=source.num_tokens, own_tokenizer=source.own_tokenizer
        )
        if found == record.text:
            return source
        message = f"its files say: {found.told}; the registry: {record.text.told}"
        finding = Finding(what="tokenizer", message=message)
        return msgspec.structs.replace(source, findings=(*source.findings, finding))

    async def _source(
        self, model: str, folder: Path, out: Path, probe: Path, packed: Path | None
    ) -> Verified:
        try:
            return await self._run(model, folder, out, probe, packed)
        except EngineError as error:  # stored files that are refused now, or the process was ended
            raise from_engine(error) from error
        except OSError as error:
            message = f"cannot start the verifier: {error}"
            raise LoradError("internal_error", message) from error

    async def _compare(
        self, model: ModelAdapters, packed: PackedManifest, probe: Path, tries: int
    ) -> VerifyReport:
        for left in reversed(range(tries)):
            try:
                return await model.revisions.compare(packed.rev, str(probe))
            except LoradError as error:
                if error.code != "conflict" or not left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _told(self, name: str, rev: str, report: VerifyReport) -> wire.Verification:
        first = _sentence(report.findings[0]) if report.findings else ""
        record = self._names.registry.revision(rev)
        also = () if record is None else by_bytes_alone(record)
        if first:
            self._tell_damage(name, rev, first)
        else:
            message = f"{report.modules} modules, {report.bytes_checked} bytes"
            message += "".join(f", {what}" for what in also)
            self._events.publish("adapter.verified", name=name, rev=rev, message=message)
        return wire.Verification(
            name=name,
            ok=not first,
            rev=rev,
            code="adapter_damaged" if first else "",
            message=first,
            hint=_hint(name, report),
            modules=report.modules,
            worst_error=report.worst_error,
            worst_module=_where(report.worst_layer, report.worst_module),
            tolerance=report.tolerance,
            bytes_checked=report.bytes_checked,
            bytes_different=report.bytes_different,
            also=also,
            findings=tuple(
                wire.VerifyFinding(
                    what=f.what,
                    layer=f.layer if f.layer >= 0 else None,
                    module=f.module,
                    message=f.message,
                )
                for f in report.findings
            ),
        )

    def _tell_damage(self, name: str, rev: str, message: str) -> None:
        self._events.publish(
            "adapter.damaged", level="error", name=name, rev=rev, cause="verify", message=message
        )


def _together(rev: str, source: Verified, report: VerifyReport) -> VerifyReport:
    """What both found.  Stored files that are not `rev` any more say nothing of its packed file."""
    if source.rev != rev:
        source = msgspec.structs.replace(source, bytes_different=0, findings=())
    return msgspec.structs.replace(
        report,
        findings=(*source.findings, *report.findings),
        bytes_checked=report.bytes_checked + source.bytes_checked,
        bytes_different=report.bytes_different + source.bytes_different,
    )


def _hint(name: str, report: VerifyReport) -> str:
    if any(finding.what == "stored" for finding in report.findings):
        return STORED_HINT.format(name=name)
    if all(finding.what == "tokenizer" for finding in report.findings):
        return TOKENIZER_HINT.format(name=name) if report.findings else ""
    return HINT.format(name=name)


def _where(layer: int, module: str) -> str:
    return f"layer {layer} {module}" if layer >= 0 else ""


def _sentence(finding: Finding) -> str:
    """What, where, and how much."""
    what = {
        "effect": "its effect is not the stored file's",
        "resident": "its bytes on the GPU were changed",
        "packed": "its packed file is damaged",
        "stored": "its stored file is damaged",
        "tokenizer": "it is served by another tokenizer than its own files say",
    }[finding.what]
    where = _where(finding.layer, finding.module)
    return ": ".join(filter(None, (what, where, finding.message)))

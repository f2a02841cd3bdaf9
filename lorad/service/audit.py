"""Audit: who did what beside the registry's own changes, which note themselves.

Goes in: an actor and what came of its wish; loads, evictions, refusals.  Comes out: rows of the
registry, lines of the log, or both, as `admin.audit_log` says.  Noting is a step in memory, so that
a refusal takes as long for what exists as for what does not.  What repeats is counted and told once
a minute, and what is too much is counted too: nobody fills a disk with his refusals.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from lorad.errors import LoradError, RegistryUnusable
from lorad.registry.records import AuditRecord
from lorad.registry.registry import Registry

log = logging.getLogger("lorad.audit")

Where = Literal["journal", "registry", "both", "off"]

FLUSH_SECONDS = 1.0
#: So long what happens again is only counted.
REPEAT_SECONDS = 60.0
#: Rows that wait for the disk; rows that are remembered in case they repeat.
MAX_WAITING, MAX_REMEMBERED = 1000, 1000
MAX_NAME_CHARACTERS = 200

_Key = tuple[str, str, str, str]


@dataclass(slots=True)
class _Seen:
    """When it was told last, and how often it happened since."""

    told: float
    more: int
    record: AuditRecord


class Audit:
    """One a daemon.  `note` on the event loop only."""

    def __init__(
        self, registry: Registry, where: Where, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry, self._clock = registry, clock
        self._off = where == "off"
        self._waiting: list[AuditRecord] = []
        self._seen: dict[_Key, _Seen] = {}
        self._dropped = 0
        registry.changes.keep_audit = where in ("registry", "both")
        if where in ("journal", "both"):
            registry.changes.on_audit = _write_line

    def note(
        self, actor: str, action: str, name: str, result: str, *, rev: str = "", message: str = ""
    ) -> None:
        """It happened.  Rows of one connection after another are one: pids differ, uids do not."""
        if self._off:
            return
        name = name[:MAX_NAME_CHARACTERS]
        record = _row(actor, action, name, result, rev, message)
        if result == "ok":
            self._put(record)
            return
        key, now = (_without_pid(actor), action, name, result), self._clock()
        seen = self._seen.get(key)
        if seen is not None:
            seen.more += 1
        elif len(self._seen) < MAX_REMEMBERED:
            self._seen[key] = _Seen(now, 0, record)
            self._put(record)
        else:
            self._dropped += 1

    def page(
        self, limit: int, *, seconds: float, actor: str, action: str, name: str
    ) -> tuple[AuditRecord, ...]:
        """The newest `limit` that fit, newest first; of the last `seconds`, 0 = of ever."""
        after = time.time() - seconds if seconds else 0.0
        return self._registry.audit_log(limit, after=after, actor=actor, action=action, name=name)

    async def run(self) -> None:
        """Write what was noted, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """What the registry does not take now it gets later; what does not fit is counted."""
        self._tell_repeats()
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        try:
            written = asyncio.wrap_future(self._registry.audit_many(rows))
            await asyncio.shield(written)  # else a daemon that stops would lose them
        except (LoradError, RegistryUnusable) as error:
            self._waiting = rows + self._waiting
            log.debug("the audit is not written now: %s", error)

    def _put(self, record: AuditRecord) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(record)
        else:
            self._dropped += 1

    def _tell_repeats(self) -> None:
        now = self._clock()
        for key, seen in list(self._seen.items()):
            if now - seen.told < REPEAT_SECONDS:
                continue
            if seen.more:
                self._put(_counted(seen.record, seen.more))
                self._seen[key] = _Seen(now, 0, seen.record)
            else:
                del self._seen[key]
        if self._dropped and len(self._waiting) < MAX_WAITING:
            dropped, self._dropped = self._dropped, 0
            message = f"{dropped} more were refused, too many to tell one by one"
            self._waiting.append(_row("daemon", "audit", "", "dropped", "", message))


def _row(actor: str, action: str, name: str, result: str, rev: str, message: str) -> AuditRecord:
    """Its id and time are the registry's."""
    return AuditRecord(
        id=0,
        time=0.0,
        actor=actor,
        action=action,
        name=name,
        rev=rev,
        result=result,
        message=message,
    )


def _counted(record: AuditRecord, more: int) -> AuditRecord:
    text = f"{'once' if more == 1 else f'{more} times'} more within a minute"
    message = f"{record.message}; {text}" if record.message else text
    return replace(record, actor=_without_pid(record.actor), message=message)


def _without_pid(actor: str) -> str:
    before, found, after = actor.partition(" pid ")
    return f"{before} {after.partition(' ')[2]}".strip() if found else actor


def _write_line(record: AuditRecord) -> None:
    """On the writing thread, once the change is on disk."""
    name = f" {record.name}" if record.name else ""
    rev = f"@{record.rev[:12]}" if record.rev else ""
    message = f" ({record.message})" if record.message else ""
    log.info("%s: %s%s%s: %s%s", record.actor, record.action, name, rev, record.result, message)

"""Health: what an operator looks at when something is wrong, each with the next step.

Goes in: the owners that metrics are made of.  Comes out: a `wire_stream.Health`.  Reads disks and
the registry: it is made in a thread, seldom, and only while somebody looks.
"""

import os
import stat
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from lorad.disk import free_bytes
from lorad.metrics.sources import Sources
from lorad.service.events import rfc3339
from lorad.wire_stream import Check, Health

GIB = 1 << 30
#: Below these a disk is told of, as `loractl doctor` does.
SCARCE_BYTES, LEAST_BYTES = 2 * GIB, GIB // 4

_LEVELS: dict[str, Literal["ok", "warn", "error"]] = {
    "ready": "ok",
    "starting": "warn",
    "loading_base": "warn",
    "engine_restarting": "error",
    "engine_stalled": "error",
    "stopped": "error",
}


class HealthChecks:
    """`sockets`: those that clients find by their path."""

    def __init__(self, sources: Sources, *, now: Callable[[], datetime]) -> None:
        self._sources, self._now = sources, now
        self._reload_error = ""
        self._reloaded_at: str | None = None

    def note_reload(self, error: Exception | None) -> None:
        """The configuration was read anew, or refused."""
        if error is None:
            self._reload_error, self._reloaded_at = "", rfc3339(self._now())
        else:
            self._reload_error = str(error)

    def look(self) -> Health:
        """In a thread.  What cannot be looked at is itself a finding."""
        checks: list[Check] = []
        for name, look in (
            ("engine", self._engine),
            ("disk", self._disks),
            ("inbox", self._watcher),
            ("registry", self._registry),
            ("sockets", self._sockets),
            ("pins", self._pins),
        ):
            try:
                checks += look()
            except Exception as error:
                checks.append(Check(name=name, level="error", message=f"cannot be seen: {error}"))
        return Health(
            checks=tuple(checks),
            reload_error=self._reload_error,
            reloaded_at=self._reloaded_at,
        )

    def _engine(self) -> Iterator[Check]:
        several = len(self._sources.models) > 1
        for seen in (one for each in self._sources.models for one in each.engines):
            link = seen.link
            message = link.state if link.state == "ready" else f"{link.state}: {link.progress}"
            level = _LEVELS[link.state]
            if link.restarts:
                message += f", replaced {link.restarts} times"
                level = "warn" if level == "ok" else level
            hint = "loractl events --type engine" if level != "ok" else ""
            name = f"engine {seen.name}" if several else "engine"
            name += f" replica {seen.replica}" if seen.replica else ""
            yield Check(name=name, level=level, message=message, hint=hint)

    def _disks(self) -> Iterator[Check]:
        for what, folder in self._sources.folders().items():
            free = free_bytes(folder)
            scarce = free < SCARCE_BYTES
            yield Check(
                name=f"{what} disk",
                level="error" if free < LEAST_BYTES else "warn" if scarce else "ok",
                message=f"{free / GIB:.1f} GiB free for {folder}",
                hint="loractl gc --dry-run, or free space there" if scarce else "",
            )

    def _watcher(self) -> Iterator[Check]:
        watcher = self._sources.watcher()
        watch = self._sources.settings.watch
        if watcher is None:
            yield Check(name="inbox", level="ok", message="not watched: watch.mode is off")
        elif not Path(watch.dir).is_dir():
            message = f"{watch.dir} is gone: nothing new is taken from there"
            yield Check(name="inbox", level="error", message=message, hint=f"mkdir {watch.dir}")
        else:
            lost = watcher.num_overflows
            more = f", hints were lost {lost} times and all was looked at" if lost else ""
            level: Literal["ok", "warn"] = "warn" if lost else "ok"
            yield Check(name="inbox", level=level, message=f"{watcher.mode}, {watch.dir}{more}")

    def _registry(self) -> Iterator[Check]:
        registry = self._sources.registry
        errors = {f"{op} {kind}": n for (op, kind), n in dict(registry.transactions.errors).items()}
        shown = f"{registry.file_bytes() / (1 << 20):.1f} MiB"
        if not errors:
            yield Check(name="registry", level="ok", message=shown)
            return
        words = ", ".join(f"{what} {number}" for what, number in sorted(errors.items()))
        message = f"{shown}; transactions that failed: {words}"
        yield Check(name="registry", level="warn", message=message, hint="loractl registry check")

    def _sockets(self) -> Iterator[Check]:
        settings = self._sources.settings
        paths = (settings.inference.socket, settings.admin.socket)
        lost = [path for path in paths if not _is_socket(path)]
        if not lost:
            yield Check(name="sockets", level="ok", message=", ".join(paths))
        else:
            message = f"{', '.join(lost)}: gone, no new client finds it"
            yield Check(name="sockets", level="error", message=message, hint="restart lorad")

    def _pins(self) -> Iterator[Check]:
        by_rev = self._sources.picture.by_rev
        pinned = [entry for entry in self._sources.catalog if entry.pinned and entry.rev]
        away = [
            entry.name
            for entry in pinned
            if (status := by_rev.get(entry.rev or "")) is None or status.slot is None
        ]
        if not away:
            yield Check(name="pins", level="ok", message=f"{len(pinned)} pinned, all on the GPU")
            return
        shown = ", ".join(away[:3]) + (" and others" if len(away) > 3 else "")
        message = f"{len(away)} of {len(pinned)} pinned are not on the GPU: {shown}"
        yield Check(name="pins", level="warn", message=message, hint=f"loractl explain {away[0]}")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False

"""The registry's files, where no daemon is to be asked: which they are, and what is done there.

Goes in: options of the command, the configuration.  Comes out: what `lorad.registry.offline` did,
its errors as the command's.  Imports the registry only when a command is here.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from lorad.caller import Unreachable
from lorad.cli.output import json_text, note
from lorad.cli.session import Failed, Session, Usage
from lorad.errors import BadConfig, LockHeld, LoradError, StartError
from lorad.wire import ItemResult
from lorad.wire_registry import (
    Imported,
    RegistryCheck,
    RegistryEntry,
    RegistryExport,
    RegistryRestored,
)

if TYPE_CHECKING:
    from lorad.registry.offline import Place

T = TypeVar("T")


class Files:
    """`state_dir` None: those of the configuration."""

    def __init__(self, s: Session, state_dir: Path | None, store: Path | None) -> None:
        self._session, self._state, self._store = s, state_dir, store
        self._actor = f"uid:{os.getuid()}"
        if store is not None and state_dir is None:
            raise Usage("--store goes with --state-dir")

    def alone(self) -> bool:
        """No daemon answers, or folders were named: the files themselves are meant."""
        if self._state is not None:
            return True
        try:
            self._session.client.ping()
        except Unreachable as error:
            if error.kind not in ("absent", "stale"):
                raise
            note(f"no daemon answers: {self.place.state} is read", self._session.options)
            return True
        return False

    def need_alone(self) -> None:
        """Conflict while a daemon answers, whichever files were named."""
        if self._state is None and not self.alone():
            raise _conflict(f"a daemon answers at {self._session.client.host}")

    @cached_property
    def place(self) -> "Place":
        """Where the registry and its store are."""
        from lorad import config_sources, paths
        from lorad.registry.offline import Place

        if self._state is not None:
            return Place(self._state, self._store or self._state / "store")
        try:
            settings, _ = config_sources.load(None, os.environ)
            return Place(Path(settings.registry.dir), Path(settings.store.dir))
        except (BadConfig, OSError):  # what cannot be served can still be restored
            usual = paths.find(os.environ)
            return Place(usual.state, usual.data / "store")

    # ----------------------------------------------------------------- what is done there
    def check(self) -> RegistryCheck:
        from lorad.registry import checking

        place = self.place
        return told(lambda: checking.check(place.database, place.store, follows=False))

    def backup(self, target: Path) -> None:
        from lorad.registry import offline

        told(lambda: offline.need(self.place))
        told(lambda: offline.write_backup(self.place.database, target))

    def export(self) -> RegistryExport:
        from lorad.registry import offline

        return RegistryExport(items=told(lambda: offline.export(self.place)))

    def read_backup(self, file: Path) -> tuple[RegistryEntry, ...]:
        from lorad.registry import offline

        return told(lambda: offline.entries(file))

    def restore(self, file: Path) -> RegistryRestored:
        from lorad.registry import offline

        return told(lambda: offline.restore(self.place, file, actor=self._actor))

    def rebuild(self, *, cards_only: bool) -> RegistryRestored:
        from lorad.registry import offline

        return told(lambda: offline.rebuild(self.place, cards_only=cards_only, actor=self._actor))

    def take_in(self, items: Sequence[RegistryEntry], *, dry_run: bool) -> tuple[Imported, ...]:
        from lorad.registry import offline

        place = self.place
        return told(lambda: offline.take_in(place, items, actor=self._actor, dry_run=dry_run))


def told(work: Callable[[], T]) -> T:
    """What the registry raises, as the command's own failure."""
    try:
        return work()
    except LockHeld as error:
        raise _conflict(error.message) from None
    except StartError as error:
        raise _failed("registry_unusable", error.message, error.hint) from None
    except LoradError as error:
        raise _failed(error.code, error.message, error.hint) from None


def _conflict(why: str) -> Failed:
    hint = "stop it first, or loractl registry restore FILE --live"
    return _failed("conflict", f"{why}: the registry cannot be replaced under it", hint)


def _failed(code: str, message: str, hint: str) -> Failed:
    return Failed(ItemResult(name="", ok=False, code=code, message=message, hint=hint))


# ----------------------------------------------------------------- lines and bytes
def lines_of(items: Sequence[RegistryEntry]) -> Iterator[str]:
    """One JSON object each; any locale can show them."""
    for item in items:
        yield json_text(item, "ascii", indent=-1)


def read_lines(file: Path) -> tuple[RegistryEntry, ...]:
    """An export, from a file or from stdin (`-`).  Usage that names the line that is none."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Usage(f"{file} is not UTF-8 text: no export") from None
    whole = _whole(text)
    if whole is not None:
        return whole
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=RegistryEntry))
        except msgspec.MsgspecError as error:
            raise Usage(f"{file}, line {number}: no line of an export: {error}") from None
    if not found:
        raise Usage(f"{file} has no line")
    return tuple(found)


def _whole(text: str) -> tuple[RegistryEntry, ...] | None:
    """The document of `export --json`; None for lines."""
    try:
        return msgspec.json.decode(text, type=RegistryExport).items
    except msgspec.MsgspecError:
        return None


def save(data: bytes, target: Path) -> None:
    """Whole or not at all, for its owner alone."""
    temporary = target.with_name(f".{target.name}.part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)

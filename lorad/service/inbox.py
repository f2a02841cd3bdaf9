"""Inbox: what the watcher reports becomes adapters.

Goes in: settled folders and folders that are gone, from the watcher's thread.  Comes out: calls of
AdapterService, and quarantined names for what cannot be taken.  Remembers, across restarts, what
each folder looked like when it was taken, so that a start does not read every adapter again and an
operator's changes outlive the folder's `lorad.toml`.
"""

import asyncio
import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from engine.adapters.states import State
from lorad.errors import LoradError
from lorad.registry.store import StagingDir
from lorad.service.adapters import AdapterService
from lorad.service.events import EventRing
from lorad.service.intake import Intake
from lorad.service.names import INBOX as SOURCE
from lorad.service.names import Names
from lorad.service.nested import Nested, line_of
from lorad.service.registration import Terms
from lorad.service.tasks import Tasks
from lorad.watch.inbox import InboxFolder, InboxOptions

log = logging.getLogger("lorad.inbox")


class Watcher(Protocol):
    """What is needed of InboxWatcher."""

    def retry(self, folder: Path) -> None: ...


class Seen(Struct, frozen=True):
    """How a folder looked when it was taken, and what its lorad.toml said."""

    name: str
    signature: str
    options: str  # a digest
    #: The name under which it was filed, if not its own.
    filed_as: str = ""
    #: What was said of adapters' folders in it.
    nested: str = ""


class Memory:
    """`path` holds what was seen; losing it costs a second look at every folder, no more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dirty = False
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=dict[str, Seen])
            self.folders = {_folder_of(key): seen for key, seen in saved.items()}
        except (OSError, ValueError):
            self.folders = {}

    def put(self, folder: Path, seen: Seen) -> None:
        self.folders[str(folder)] = seen
        self._dirty = True

    def get(self, folder: Path) -> Seen | None:
        return self.folders.get(str(folder))

    def drop(self, folder: Path) -> None:
        self._dirty |= self.folders.pop(str(folder), None) is not None

    def save(self) -> None:
        """Write if anything changed; readers see the old or the new bytes."""
        if not self._dirty:
            return
        self._dirty = False
        temporary = self._path.with_suffix(".tmp")
        saved = {_key_of(folder): seen for folder, seen in self.folders.copy().items()}
        try:
            temporary.write_bytes(msgspec.json.encode(saved))
            os.replace(temporary, self._path)
        except OSError:
            self._dirty = True  # the next save tries again
            raise


def _key_of(folder: str) -> str:
    """A folder's name may be bytes that are no text; JSON holds text only."""
    return folder if folder.isascii() else "bytes:" + os.fsencode(folder).hex()


def _folder_of(key: str) -> str:
    kind, _, rest = key.partition(":")
    return os.fsdecode(bytes.fromhex(rest)) if kind == "bytes" else key


class Inbox:
    """`copy(folder, staging)` copies safely.  `watcher` is set once it exists."""

    def __init__(
        self,
        adapters: AdapterService,
        names: Names,
        intake: Intake,
        events: EventRing,
        tasks: Tasks,
        memory: Memory,
        *,
        copy: Callable[[Path, StagingDir], object],
        on_delete: Literal["keep", "remove"],
    ) -> None:
        self.watcher: Watcher | None = None
        self._adapters, self._names, self._intake = adapters, names, intake
        self._events, self._tasks, self._memory = events, tasks, memory
        self._copy, self._on_delete = copy, on_delete
        said = {s.filed_as or s.name: s.nested for s in memory.folders.values() if s.nested}
        self._nested = Nested(names, events, said)
        self._leaving: set[Path] = set()  # gone, and their adapters with them, once they may
        #: Of folders that could not be taken at the last attempt: their names, and the code.
        self._told: dict[Path, tuple[str, str]] = {}
        self._loop = asyncio.get_running_loop()
        self._locks: weakref.WeakValueDictionary[Path, asyncio.Lock] = weakref.WeakValueDictionary()

    # ------------------------------------------------------------- from the watcher's thread
    def on_folder(self, folder: InboxFolder) -> None:
        """A folder is whole: new, or changed since it was last reported."""
        self._from_thread(lambda: self.take(folder))

    def on_gone(self, folder: InboxFolder) -> None:
        """A folder that was reported is there no more."""
        self._from_thread(lambda: self.lose(folder.path, with_inbox=folder.with_inbox))

    # ------------------------------------------------------------- on the loop
    def known(self) -> dict[Path, str]:
        """Folders that need no second look while they are unchanged, with their signatures.

        What serves, and what an operator removed.  What was refused is looked at again: this
        program, or its settings, may think otherwise.
        """
        refused = self._names.refused()
        return {
            Path(path): "" if seen.name in refused or seen.filed_as else seen.signature
            for path, seen in self._memory.folders.items()
        }

    async def take(self, folder: InboxFolder) -> None:
        """Make it an adapter, or file why not.  Never raises for what a folder holds."""
        async with self._lock(folder.path):
            seen = self._memory.get(folder.path)
            options = _digest(folder.options)

            def registered() -> None:
                """A stop while it is packed, as thousands may be, costs no second look."""
                if seen is None or not seen.filed_as:
                    line = line_of(folder)
                    fresh = Seen(folder.name, folder.signature, options, nested=line)
                    self._memory.put(folder.path, fresh)
                if folder.path in self._leaving:  # before it is packed, which may be much work
                    self._tasks.spawn(self._remove_ahead(folder.name))

            try:
                filed_as = await self._take(folder, seen, registered)
            except (LoradError, OSError) as error:
                # A full or failing disk, a busy registry: the next rescan tries again.
                self._tell_once(folder, error)
                self._retry(folder.path)
                return
            self._waits_no_more(folder.path)
            if seen is not None and seen.filed_as not in ("", filed_as):
                await self._unfile(seen.filed_as)
            told = seen is not None and seen.nested and seen.signature == folder.signature
            line = self._nested.see(filed_as or folder.name, folder, told=bool(told))
            self._memory.put(
                folder.path, Seen(folder.name, folder.signature, options, filed_as, line)
            )

    async def _take(
        self, folder: InboxFolder, seen: Seen | None, registered: Callable[[], None]
    ) -> str:
        """The name under which it was filed as refused, "" if it was not."""
        problem = _problem(folder, self._names.models)
        if problem is not None:
            name = folder.name if folder.legal and self._is_ours(folder.name) else _made_up(folder)
            await self._file(name, folder, problem)
            return name
        try:
            self._names.check_free(folder.name, SOURCE)
        except LoradError as error:
            await self._file(_made_up(folder), folder, error)
            return _made_up(folder)
        grave = self._names.registry.tombstone(folder.name)
        same_options = seen is not None and seen.options == _digest(folder.options)
        record = self._names.registry.get(folder.name)
        # A name that was only ever quarantined has none of its folder's wishes yet.
        has_them = record is not None and (record.serving_rev or record.candidate_rev)
        options = InboxOptions() if same_options and has_them else folder.options
        terms = Terms(
            source=SOURCE,
            model=folder.options.model or "",
            replace=True,
            pin=options.pin,
            priority=options.priority,
            labels=options.labels or None,
            unless_rev=grave.digest if grave is not None else None,
            file_refusals=True,
            on_registered=registered,
        )
        try:
            staging = await self._intake.fill(lambda staging: self._copy(folder.path, staging))
        except LoradError as error:
            if error.code != "adapter_invalid":
                raise
            await self._file(folder.name, folder, error)
            return ""
        try:
            await self._adapters.take(staging, folder.name, terms)
        except LoradError as error:
            if error.code in ("insufficient_storage", "registry_busy", "not_found"):
                raise  # not_found: the same content was being collected meanwhile
            if error.code == "name_taken":
                await self._file(_made_up(folder), folder, error)
                return _made_up(folder)
            if error.code != "adapter_invalid":  # that was filed where it was found
                self._events.publish(
                    "adapter.not_loaded",
                    level="warn",
                    name=folder.name,
                    cause=error.code,
                    message=error.message,
                )
        return ""

    async def lose(self, path: Path, *, with_inbox: bool = False) -> None:
        """Its folder is gone.  What serves goes on, unless `on_delete` says otherwise.

        `with_inbox`: the inbox went, which nobody means who unmounts or moves it: all goes on.
        """
        removes = self._on_delete == "remove" and not with_inbox
        if removes and self._lock(path).locked():
            self._leaving.add(path)
            seen = self._memory.get(path)
            if seen is not None and not seen.filed_as:
                await self._remove_ahead(seen.name)
        try:
            await self._lose(path, removes=removes, with_inbox=with_inbox)
        finally:
            self._leaving.discard(path)

    async def _remove_ahead(self, name: str) -> None:
        """While its folder is still being taken.  If it fails, `_lose` comes to it once more."""
        record = self._names.registry.get(name)
        if record is not None and record.source == SOURCE:
            try:
                await self._remove(name)
            except LoradError as error:
                log.info("inbox: %s stays until it is packed: %s", name, error)

    async def _remove(self, name: str) -> None:
        try:
            await self._adapters.remove(name, forget=True)
        except LoradError as error:
            if error.code != "model_not_found":  # somebody was faster
                raise

    async def _lose(self, path: Path, *, removes: bool, with_inbox: bool) -> None:
        async with self._lock(path):
            seen = self._memory.get(path)
            self._memory.drop(path)
            self._waits_no_more(path)
            if seen is None:
                return
            self._nested.forget(seen.filed_as or seen.name)
            if seen.filed_as:
                await self._unfile(seen.filed_as)
                return
            record = self._names.registry.get(seen.name)
            if record is None or record.source != SOURCE:
                return
            if removes or record.stored_state == State.QUARANTINED:
                await self._remove(seen.name)
            else:
                cause = "inbox" if with_inbox else "deleted"
                self._events.publish("adapter.source_gone", name=seen.name, cause=cause)

    def reconsider(self, name: str) -> None:
        """`name` is free now: a folder that wanted it may be taken at the next rescan."""
        for path, seen in self._memory.folders.items():
            if seen.name == name and seen.filed_as:
                self._retry(Path(path))

    def recover(self, name: str) -> None:
        """The store lost what `name` serves: its folder, if it is here, is taken anew."""
        for path, seen in self._memory.folders.items():
            if seen.name == name and not seen.filed_as:
                self._retry(Path(path))

    # ------------------------------------------------------------- inside
    async def _file(self, name: str, folder: InboxFolder, error: LoradError) -> None:
        display = folder.display_name if name != folder.display_name else None
        await self._adapters.quarantine(name, SOURCE, error, display_name=display)

    def _tell_once(self, folder: InboxFolder, error: LoradError | OSError) -> None:
        """An event for the first of many attempts that fail for one reason."""
        code = error.code if isinstance(error, LoradError) else "internal_error"
        self._names.inbox_waits[folder.name] = str(error)
        if self._told.get(folder.path) == (folder.name, code):
            log.info("inbox: %s: %s", folder.display_name, error)
            return
        self._told[folder.path] = folder.name, code
        self._events.publish(
            "adapter.not_loaded",
            level="warn",
            name=folder.name,
            cause=code,
            message=f"{error}; it is tried again",
        )

    def _waits_no_more(self, path: Path) -> None:
        name, _ = self._told.pop(path, ("", ""))
        self._names.inbox_waits.pop(name, None)

    async def _unfile(self, name: str) -> None:
        record = self._names.registry.get(name)
        if record is not None and record.stored_state == State.QUARANTINED:
            await self._adapters.remove(name, forget=True)

    def _is_ours(self, name: str) -> bool:
        record = self._names.registry.get(name)
        return name not in self._names.models and (record is None or record.source == SOURCE)

    def _retry(self, path: Path) -> None:
        if self.watcher is not None:
            self.watcher.retry(path)

    def _from_thread(self, work: Callable[[], object]) -> None:
        def start() -> None:
            self._tasks.spawn(work())  # type: ignore[arg-type]

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:
            log.debug("the daemon has stopped; the next start sees the inbox anew")

    def _lock(self, path: Path) -> asyncio.Lock:
        lock = self._locks.get(path)
        if lock is None:
            lock = self._locks[path] = asyncio.Lock()
        return lock


def _problem(folder: InboxFolder, models: Sequence[str]) -> LoradError | None:
    """What is wrong with a folder before anybody looks at its files."""
    if not folder.legal:
        message = f"the folder {folder.display_name} has no adapter's name"
        return LoradError(
            "adapter_invalid",
            message,
            details={"reason": "E_NAME_ILLEGAL"},
            hint="rename it: [tenant/]name of a-z 0-9 . _ -, first a letter or digit",
        )
    problem = folder.problem
    if not problem and folder.options.model not in (None, *models):
        problem = f"lorad.toml: model = {folder.options.model!r} is not served here"
    if problem:
        return LoradError(
            "adapter_invalid",
            problem,
            details={"reason": "E_OPTIONS"},
            hint="mend lorad.toml; the folder is looked at again when it changes",
        )
    return None


def _made_up(folder: InboxFolder) -> str:
    """A name for a folder that cannot have its own."""
    if not folder.legal:
        return folder.name
    return f"inbox:{hashlib.sha256(os.fsencode(folder.display_name)).hexdigest()[:12]}"


def _digest(options: InboxOptions) -> str:
    words = (options.model, options.pin, options.priority, sorted(options.labels.items()))
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]

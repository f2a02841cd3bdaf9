"""Where in the inbox something happened, by watchdog.

Goes in: the inbox.  Comes out: `Hints`, whenever they are asked for.  They are only that: the
watcher looks at the disk itself, so a false hint costs a look, and a missing one waits for the
rescan.  watchdog's threads do nothing of ours but put the touched folder on a queue.

What watchdog does not say aloud is found out here: that hints were lost, that there is no watch
left for a new folder, that one of its threads has died.  docs/decisions/watchdog.md has the events
and the measurements.
"""

import errno
import logging
import os
import queue
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from watchdog.events import (
    DirAttribEvent,
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileAttribEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import ObservedWatch
from watchdog.utils import BaseThread
from watchdog.utils.bricks import SkipRepeatsQueue

#: More marks than this at once say no more than "look everywhere".
MAX_MARKS = 20_000
#: Reading is left out: the daemon's own would wake it for ever.
EVENTS: list[type[FileSystemEvent]] = [
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileAttribEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]
#: watchdog tells of a full kernel queue in this logger, and nowhere else.
_OVERFLOW_LOG = "watchdog.observers.inotify_c"


@dataclass(slots=True)
class Hints:
    """Folders of the inbox.  In `touched` something happened to a file; `moved` were made, moved or
    removed themselves."""

    touched: set[Path] = field(default_factory=set)
    moved: set[Path] = field(default_factory=set)
    overflow: bool = False  # some were lost


class Observation:
    """One inbox, observed until `close`.  `wake` is called, on any thread, when there are hints."""

    def __init__(self, inbox: Path, wake: Callable[[], None]) -> None:
        """OSError when it cannot be observed: EMFILE, no inotify instance is left; ENOSPC, no
        watch.  RuntimeError: no thread is left."""
        # One for each folder that comes back after it was moved out, with all watched paths in it.
        # Raised on watchdog's threads, where only a filter of the whole process is sure to hold.
        warnings.filterwarnings(
            "ignore", category=RuntimeWarning, module=r"watchdog\.observers\.inotify"
        )
        self._inbox, self._wake = inbox, wake
        self._marks = SkipRepeatsQueue(MAX_MARKS)
        self._lost = threading.Event()
        self._spare: ObservedWatch | None = None
        self._threads: set[threading.Thread] = set()
        before = _watchdog_threads()
        self._observer = Observer()
        self._log = _OverflowLog(self._lose)
        logging.getLogger(_OVERFLOW_LOG).addHandler(self._log)
        try:
            self._observer.start()
            # The inbox may be a link; below it watchdog follows none.
            root = os.path.realpath(inbox)
            self._observer.schedule(
                _Marker(root, self._mark), root, recursive=True, event_filter=EVENTS
            )
            self._threads = _watchdog_threads() - before
            self.need_room()
        except (OSError, RuntimeError):
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether hints can still come.  Not when the inbox was removed, or watchdog has failed."""
        return all(thread.is_alive() for thread in self._threads)

    def take(self) -> Hints:
        """What has been marked since the last time; does not wait."""
        hints = Hints(overflow=self._lost.is_set())
        if hints.overflow:
            self._lost.clear()
        with suppress(queue.Empty):
            for _ in range(MAX_MARKS):  # and no more: they may come as fast as they are taken
                relative, is_moved = self._marks.get_nowait()
                (hints.moved if is_moved else hints.touched).add(self._inbox / relative)
        return hints

    def need_room(self) -> None:
        """OSError ENOSPC when no more folders can be watched, and some may not be: watchdog keeps
        that to itself.  Found out by watching a folder more, "/" and "/proc" in turn, for no event
        that matters; the one of last time is let go only afterwards."""
        last = self._spare
        folder = "/proc" if last is not None and last.path == "/" else "/"
        try:
            self._spare = self._observer.schedule(
                FileSystemEventHandler(), folder, event_filter=[DirAttribEvent]
            )
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            return
        if last is not None:
            self._observer.unschedule(last)

    def close(self) -> None:
        """No hints and no `wake` after this."""
        logging.getLogger(_OVERFLOW_LOG).removeHandler(self._log)
        self._observer.stop()
        if self._observer.is_alive():
            self._observer.join()

    def _mark(self, relative: str, is_moved: bool) -> None:
        try:
            self._marks.put((relative, is_moved), block=False)
        except queue.Full:
            self._lost.set()
        self._wake()

    def _lose(self) -> None:
        self._lost.set()
        self._wake()


class _Marker(FileSystemEventHandler):
    """From events below `root` to marks: the folder, relative, and whether it is the folder itself
    that came or went."""

    def __init__(self, root: str, mark: Callable[[str, bool], None]) -> None:
        self._below = root.rstrip("/") + "/"
        self._mark = mark

    def on_any_event(self, event: FileSystemEvent) -> None:
        for path in map(os.fsdecode, (event.src_path, event.dest_path)):
            relative = path.removeprefix(self._below)
            if relative == path:
                continue  # the inbox itself, or no path at all
            self._mark(
                relative if event.is_directory else os.path.dirname(relative), event.is_directory
            )


class _OverflowLog(logging.Handler):
    def __init__(self, lose: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._lose = lose

    def emit(self, record: logging.LogRecord) -> None:
        self._lose()


def _watchdog_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, BaseThread)}

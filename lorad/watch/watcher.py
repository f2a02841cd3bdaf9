"""The inbox watcher: from "something happened" to "this folder is whole", on a thread of its own.

Goes in: the inbox, by hints from inotify where it works, and by looking at all of it every `rescan`
seconds always.  Comes out: `on_folder` for each new or changed adapter folder, once, when it is
whole; `on_gone` when one is there no more.  Both are called on the watcher's thread, and should
hand over quickly.  Survives a deleted, replaced or unreadable inbox and goes on by itself.  Knows
nothing of what is done with a folder.
"""

import errno
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from lorad.watch.inbox import MAX_DEPTH, InboxFolder, describe, printable
from lorad.watch.inotify import Inotify, silent_file_system
from lorad.watch.look import Scan, is_temporary, look, scan
from lorad.watch.settle import UNKNOWN, Settler, Verdict

log = logging.getLogger(__name__)

#: How often a missing inbox is looked for, and a present one for being the same directory, seconds.
CHECK_SECONDS = 1.0
#: Hints are collected for this long: a long copy makes thousands a second.
BATCH_SECONDS = 0.05
#: A polling scan may take at most this share of the time.
_SCAN_SHARE = 10

_LIMITS = {
    errno.ENOSPC: "out of inotify watches: raise fs.inotify.max_user_watches "
    "(sysctl -w fs.inotify.max_user_watches=524288)",
    errno.EMFILE: "out of inotify instances: raise fs.inotify.max_user_instances "
    "(sysctl -w fs.inotify.max_user_instances=1024)",
}


class InboxWatcher:
    """`start`, then callbacks, then `stop`.  `mode` says how it watches now: "inotify" or
    "polling"."""

    def __init__(
        self,
        inbox: Path,
        *,
        settle: float,
        rescan: float,
        on_folder: Callable[[InboxFolder], None],
        on_gone: Callable[[InboxFolder], None],
        mode: Literal["auto", "inotify", "polling"] = "auto",
        known: Mapping[Path, str] | None = None,
        on_warning: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`known`: folders reported in an earlier run with their signatures ("" if that is not
        known): they are reported again only if they differ, or as gone."""
        self.inbox = inbox
        self.mode: Literal["inotify", "polling"] = "polling"
        self.scanned = threading.Event()  # set after the first look at everything
        self._wanted = mode
        self._settle, self._rescan = settle, rescan
        self._on_folder, self._on_gone, self._on_warning = on_folder, on_gone, on_warning
        self._clock = clock
        self._settler = Settler(settle)
        for folder, signature in (known or {}).items():
            self._settler.remember(folder, signature or UNKNOWN)
        self.num_overflows = 0
        self._inotify: Inotify | None = None
        self._root: tuple[int, int] | None = None  # device and inode of the inbox that is watched
        self._next_scan = clock()
        self._scan_seconds = 0.0
        self._warned: set[str] = set()
        self._retries: deque[Path] = deque()
        self._stopping = threading.Event()
        self._scan_wanted = threading.Event()
        self._wake_lock = threading.Lock()  # so that nobody writes to a number that was closed
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="lorad-watch", daemon=True)

    # ------------------------------------------------------------- from any thread
    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when no callback can come any more.  For good."""
        self._stopping.set()
        self._nudge()
        if self._thread.is_alive():
            self._thread.join()
        self._detach()
        with self._wake_lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def rescan_now(self) -> None:
        """Look at everything now, as after SIGHUP."""
        self._scan_wanted.set()
        self._nudge()

    def retry(self, folder: Path) -> None:
        """What was done with `folder` failed for a reason that may pass (a full disk): report it
        again at the next rescan."""
        self._retries.append(folder)

    def _nudge(self) -> None:
        """End the thread's wait; nothing after `stop`."""
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------- the loop
    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.tick()
            except Exception:  # a supervisor: the next tick begins with a look at everything
                log.exception("the inbox watcher failed and goes on")
                self._next_scan = self._clock() + CHECK_SECONDS
            self._wait(self._pause())
            self._stopping.wait(min(BATCH_SECONDS, self._settle / 4))

    def tick(self) -> None:
        """One round, without waiting: attend to the inbox, follow hints, scan if it is time, report
        what is whole."""
        now = self._clock()
        if self._attend(now):
            self._follow_hints(now)
            if now >= self._next_scan or self._scan_wanted.is_set():
                self._scan_wanted.clear()
                self._scan_all(now)
        self._report(now)

    def _wait(self, seconds: float) -> None:
        """Until there is a hint or a wish, or the time is over."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify, select.POLLIN)
        poll.poll(1000 * seconds)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _pause(self) -> float:
        """Seconds until there is something to do without a hint."""
        now = self._clock()
        times = [now + min(CHECK_SECONDS, max(self._settle, 0.01)), self._settler.next_due()]
        if self._root is not None:
            times.append(self._next_scan)
        return max(0.0, min(t for t in times if t is not None) - now)

    # ------------------------------------------------------------- the inbox itself
    def _attend(self, now: float) -> bool:
        """Whether the inbox can be read; (re)attaches to it when it is another one than before."""
        try:
            status = os.stat(self.inbox)
            os.close(os.open(self.inbox, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            self._lose(error, now)
            return False
        root = (status.st_dev, status.st_ino)
        if root != self._root:
            self._detach()
            self._root = root
            self._attach()
            self._next_scan = now
            self._warned.discard("inbox")
        return True

    def _lose(self, error: OSError, now: float) -> None:
        """A missing inbox takes its folders along; an unreadable one may still hold them."""
        self._detach()
        self._root = None
        self._warn("inbox", f"the inbox {self.inbox} cannot be read ({error.strerror}); waiting")
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            for folder in self._settler.reported():
                self._settler.look(folder, "", now)

    def _attach(self) -> None:
        """Inotify if it is wanted, trusted and to be had."""
        self.mode = "polling"
        if self._wanted == "polling":
            return
        kind = silent_file_system(self.inbox) if self._wanted == "auto" else ""
        if kind:
            self._warn("mode", f"the inbox is on {kind}, where inotify misses changes: polling it")
            return
        try:
            self._inotify = Inotify()
            self.mode = "inotify"
        except OSError as error:
            self._poll_instead(error)

    def _detach(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def _poll_instead(self, error: OSError) -> None:
        self._detach()
        self.mode = "polling"
        self._next_scan = self._clock()
        why = _LIMITS.get(error.errno or 0, f"inotify failed: {error.strerror}")
        self._warn("mode", f"{why}; the inbox is polled instead")

    def _warn(self, kind: str, message: str) -> None:
        """Once, until it is over."""
        if kind not in self._warned:
            self._warned.add(kind)
            self._on_warning(message)

    # ------------------------------------------------------------- hints and scans
    def _follow_hints(self, now: float) -> None:
        """Every folder above a hint that may be an adapter has lost its quiet."""
        if self._inotify is None:
            return
        hints = self._inotify.read()
        if hints.overflow:
            self.num_overflows += 1
            self._next_scan = now
        for path in map(Path, hints.files):
            self._touch(path.parent, now)
        tops: set[Path] = set()
        for path in map(Path, hints.folders):
            if self._touch(path, now):
                # It may have come with adapters in it, for which there is no hint, or gone.
                self._see(self._walk(path), now)
                tops |= {path} if path.parent == self.inbox else set()
        if tops:
            for folder in self._settler.reported():
                if not tops.isdisjoint(folder.parents):
                    self._settler.touch(folder, now)

    def _touch(self, folder: Path, now: float) -> bool:
        """Whether `folder` can be an adapter or hold one."""
        parts = folder.relative_to(self.inbox).parts
        if not parts or any(map(is_temporary, parts)):
            return False
        for length in range(1, min(len(parts), MAX_DEPTH + 1) + 1):
            self._settler.touch(self.inbox.joinpath(*parts[:length]), now)
        return len(parts) <= MAX_DEPTH + 1

    def _walk(self, start: Path) -> Scan:
        """Scan, and watch what was walked through.  What came into a directory before it was
        watched gives no hint, so a newly watched one is looked at again; as often as directories
        nest, for one that is mounted at two places looks new for ever."""
        for _ in range(MAX_DEPTH + 2):
            result = scan(self.inbox, start)
            if not any([self._watch(folder) for folder in result.directories]):
                break
        return result

    def _watch(self, folder: Path) -> bool:
        if self._inotify is None:
            return False
        try:
            return self._inotify.watch(folder)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                self._poll_instead(error)
            return False  # gone again, or not readable

    def _scan_all(self, now: float) -> None:
        began = time.perf_counter()
        while self._retries:
            self._settler.forget(self._retries.popleft())
        try:
            result = self._walk(self.inbox)
        except OSError as error:
            return self._lose(error, now)
        self._see(result, now)
        for folder in self._settler.reported():
            if folder not in result.found and result.covers(folder):
                self._settler.look(folder, "", now)
        self._scan_seconds = time.perf_counter() - began
        self._next_scan = now + self._interval()
        self.scanned.set()

    def _interval(self) -> float:
        if self.mode == "inotify":
            return self._rescan
        return min(self._rescan, max(self._settle, _SCAN_SHARE * self._scan_seconds))

    def _see(self, result: Scan, now: float) -> None:
        for folder, signature in result.found.items():
            self._settler.look(folder, signature, now)
        for path in result.unreadable:
            self._warn(
                f"unreadable {path}", f"{self._shown(path)} cannot be read, and is left as it was"
            )
        for path in result.links:
            self._warn(f"link {path}", f"{self._shown(path)} is a symlink: copy the folder instead")

    def _shown(self, path: Path) -> str:
        return printable(str(path.relative_to(self.inbox)))

    # ------------------------------------------------------------- reports
    def _report(self, now: float) -> None:
        parents: dict[Path, bool] = {}
        for folder in self._settler.due(now):
            if self._stopping.is_set():
                return
            try:
                seen = look(self.inbox, folder, parents)
            except OSError as error:
                self._settler.postpone(folder, now)
                self._warn(
                    f"unreadable {folder}",
                    f"{self._shown(folder)} cannot be read ({error.strerror}); trying again",
                )
                continue
            verdict = self._settler.judge(folder, seen.view, now)
            if verdict is Verdict.REPORT:
                self._call(
                    self._on_folder,
                    describe(self.inbox, folder, seen.toml, seen.view.signature),
                )
            elif verdict is Verdict.GONE:
                self._call(self._on_gone, describe(self.inbox, folder, None))

    def _call(self, callback: Callable[[InboxFolder], None], folder: InboxFolder) -> None:
        try:
            callback(folder)
        except Exception:  # one folder's trouble is not the others'
            log.exception("the report of %s failed and will be repeated", folder.display_name)
            self.retry(folder.path)

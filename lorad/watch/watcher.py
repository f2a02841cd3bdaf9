"""The inbox watcher: from "something happened" to "this folder is whole", on a thread of its own.

Goes in: the inbox, by hints from watchdog where they can be had, and by looking at all of it every
`rescan` seconds always.  Comes out: `on_folder` for each new or changed adapter folder, once, when
it is whole; `on_gone` when one is there no more.  Both are called on the watcher's thread, and
should hand over quickly.  Survives a deleted, replaced or unreadable inbox and goes on by itself.
Knows nothing of what is done with a folder.
"""

import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from engine.histogram import LOAD_SECONDS, Histogram
from lorad.watch.hints import Observation
from lorad.watch.inbox import MAX_DEPTH, InboxFolder, describe, printable
from lorad.watch.look import Scan, is_temporary, look, scan
from lorad.watch.mounts import silent_file_system
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
        known): they are reported again only if they differ, or as gone.  Those of another inbox
        (`watch.dir` was changed) are not this one's to speak of."""
        self.inbox = inbox
        self.mode: Literal["inotify", "polling"] = "polling"
        self.scanned = threading.Event()  # set after the first look at everything
        self._wanted = mode
        self._settle, self._rescan = settle, rescan
        self._on_folder, self._on_gone, self._on_warning = on_folder, on_gone, on_warning
        self._clock = clock
        self._settler = Settler(settle)
        for folder, signature in (known or {}).items():
            if inbox in folder.parents:
                self._settler.remember(folder, signature or UNKNOWN)
        self.num_overflows = 0
        #: touched, moved: folders with hints; whole, gone: folders that were reported.
        self.num_events: Counter[str] = Counter()
        self.scans = Histogram(LOAD_SECONDS)  # seconds of each look at everything
        self._observation: Observation | None = None
        self._root: tuple[int, int] | None = None  # device and inode of the inbox that is watched
        self._next_scan = clock()
        self._scan_seconds = 0.0
        self._warned: set[str] = set()
        self._orphans: set[Path] = set()  # reported, and not seen since the inbox was another one
        self._retries: deque[Path] = deque()
        self._next_retry = clock()
        self._stopping = threading.Event()
        self._scan_wanted = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorad-watch", daemon=True)

    # ------------------------------------------------------------- from any thread
    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when no callback can come any more.  For good."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self._detach()

    def rescan_now(self) -> None:
        """Look at everything now, as after SIGHUP."""
        self._scan_wanted.set()
        self._woken.set()

    def retry(self, folder: Path) -> None:
        """What was done with `folder` failed for a reason that may pass (a full disk): report it
        again at the next rescan."""
        self._retries.append(folder)

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
        self._woken.wait(seconds)
        self._woken.clear()

    def _pause(self) -> float:
        """Seconds until there is something to do without a hint."""
        now = self._clock()
        times = [now + min(CHECK_SECONDS, max(self._settle, 0.01)), self._settler.next_due()]
        if self._root is not None:
            times.append(self._next_scan)
        return max(0.0, min(t for t in times if t is not None) - now)

    # ------------------------------------------------------------- the inbox itself
    def _attend(self, now: float) -> bool:
        """Whether the inbox can be read; (re)attaches to it when it is another one than before, or
        when the observation has ended: an inbox made anew can have the old one's inode."""
        try:
            status = os.stat(self.inbox)
            os.close(os.open(self.inbox, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            self._lose(error, now)
            return False
        root = (status.st_dev, status.st_ino)
        if self._observation is not None and not self._observation.alive:
            log.warning("the observation of the inbox ended, and is begun anew")
            self._orphan_all()
            self._root = None
        if root != self._root:
            if self._root is not None:
                self._orphan_all()
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
            self._orphan_all()
            for folder in self._settler.reported():
                self._settler.look(folder, "", now)

    def _orphan_all(self) -> None:
        """Whatever is not seen again went with the inbox: nobody has deleted it there."""
        self._orphans.update(self._settler.reported())

    def _attach(self) -> None:
        """Hints, if they are wanted, trusted and to be had."""
        self.mode = "polling"
        if self._wanted == "polling":
            return
        kind = silent_file_system(self.inbox) if self._wanted == "auto" else ""
        if kind:
            self._warn("mode", f"the inbox is on {kind}, where inotify misses changes: polling it")
            return
        try:
            self._observation = Observation(self.inbox, self._woken.set)
            self.mode = "inotify"
        except OSError as error:
            self._poll_instead(error)
        except RuntimeError as error:  # so threading says that there is no thread left
            self._poll_instead(OSError(errno.EAGAIN, str(error)))

    def _detach(self) -> None:
        if self._observation is not None:
            self._observation.close()
            self._observation = None

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
        if self._observation is None:
            return
        hints = self._observation.take()
        if hints.overflow:
            self.num_overflows += 1
            self._next_scan = now
        self.num_events["touched"] += len(hints.touched)
        self.num_events["moved"] += len(hints.moved)
        for folder in hints.touched:
            self._touch(folder, now)
        self._follow_moves(hints.moved, now)
        if hints.moved or hints.overflow:
            self._need_room()

    def _follow_moves(self, folders: set[Path], now: float) -> None:
        """They may have come with adapters in them, for which there is no hint, or gone."""
        for folder in folders:
            if self._touch(folder, now) and folders.isdisjoint(folder.parents):
                self._see(scan(self.inbox, folder), now)
        tops = {folder for folder in folders if folder.parent == self.inbox}
        if tops:
            for folder in self._settler.reported():
                if not tops.isdisjoint(folder.parents):
                    self._settler.touch(folder, now)

    def _need_room(self) -> None:
        try:
            if self._observation is not None:
                self._observation.need_room()
        except OSError as error:
            self._poll_instead(error)

    def _touch(self, folder: Path, now: float) -> bool:
        """Whether `folder` can be an adapter or hold one."""
        parts = folder.relative_to(self.inbox).parts
        if not parts or any(map(is_temporary, parts)):
            return False
        for length in range(1, min(len(parts), MAX_DEPTH + 1) + 1):
            self._settler.touch(self.inbox.joinpath(*parts[:length]), now)
        return len(parts) <= MAX_DEPTH + 1

    def _scan_all(self, now: float) -> None:
        began = time.perf_counter()
        self._take_retries(now)
        try:
            result = scan(self.inbox)
        except OSError as error:
            return self._lose(error, now)
        if not self.scanned.is_set() and not result.found:
            self._orphan_all()  # of an earlier run; more likely not mounted yet than all deleted
        self._see(result, now)
        for folder in self._settler.reported():
            if folder not in result.found and result.covers(folder):
                self._settler.look(folder, "", now)
        self._scan_seconds = time.perf_counter() - began
        self.scans.observe(self._scan_seconds)
        self._next_scan = now + self._interval()
        self.scanned.set()

    def _take_retries(self, now: float) -> None:
        """Each costs a copy of the folder: once in `rescan` at most, however often it scans."""
        if now >= self._next_retry:
            self._next_retry = now + self._rescan
            while self._retries:
                self._settler.forget(self._retries.popleft())

    def _interval(self) -> float:
        if self.mode == "inotify":
            return self._rescan
        return min(self._rescan, max(self._settle, _SCAN_SHARE * self._scan_seconds))

    def _see(self, result: Scan, now: float) -> None:
        self._orphans.difference_update(result.found)
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
                self.num_events["whole"] += 1
                self._call(
                    self._on_folder,
                    describe(self.inbox, folder, seen.toml, seen.view.signature, seen.nested),
                )
            elif verdict is Verdict.GONE:
                self.num_events["gone"] += 1
                gone = describe(self.inbox, folder, None)
                gone = replace(gone, with_inbox=folder in self._orphans)
                self._orphans.discard(folder)
                self._call(self._on_gone, gone)

    def _call(self, callback: Callable[[InboxFolder], None], folder: InboxFolder) -> None:
        try:
            callback(folder)
        except Exception:  # one folder's trouble is not the others'
            log.exception("the report of %s failed and will be repeated", folder.display_name)
            self.retry(folder.path)

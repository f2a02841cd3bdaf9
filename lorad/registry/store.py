"""The content-addressed store: `<rev>/` folders that appear whole or not at all, and never change.

Goes in: a staging folder that somebody filled, and the digest of what is in it.  Comes out: the
folder `store/<rev>`, read-only, on disk before `commit` returns.  Packed files join it later under
their layout's name.  Knows nothing of names, tensors or SQL; whoever fills a staging folder has
checked its content.
"""

import errno
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorad.errors import LoradError
from lorad.registry import failpoints

_REV = re.compile(r"[0-9a-f]{64}")
_LAYOUT = re.compile(r"[0-9a-z]{1,64}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class StagingDir:
    """A private folder inside the store's file system; fill it, then `commit` or `discard` it."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What `reconcile` found: leftovers that it removed, and revisions on one side only."""

    stale_staging: int
    missing: tuple[str, ...]  # known, but not here
    unknown: tuple[str, ...]  # here, but not known


class Store:
    """One directory, written by the daemon alone.  Thread-safe.

    `budget_bytes` 0 is no limit.  Every error of a full disk or budget is insufficient_storage,
    and leaves nothing behind that `path` or `revs` would show.
    """

    def __init__(self, directory: Path, *, budget_bytes: int = 0) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._staging = directory / ".staging"
        self._lock = threading.Lock()
        self._used: int | None = None  # bytes; None until counted
        with _disk("prepare the store"):
            self._staging.mkdir(mode=0o750, parents=True, exist_ok=True)

    # ------------------------------------------------------------- reading
    def path(self, rev: str) -> Path:
        """Where `rev` lies, or would lie.  ValueError unless it is 64 hex digits."""
        if not _REV.fullmatch(rev):
            raise ValueError(f"not a revision digest: {rev[:80]!r}")
        return self.directory / rev

    def has(self, rev: str) -> bool:
        return self.path(rev).is_dir()

    def packed(self, rev: str, layout: str) -> Path:
        """Where the packed file of `rev` for `layout` lies, or would lie."""
        if not _LAYOUT.fullmatch(layout):
            raise ValueError(f"not a layout id: {layout[:80]!r}")
        return self.path(rev) / f"packed-{layout}.bin"

    def revs(self) -> set[str]:
        """Every revision that is here, whole."""
        with os.scandir(self.directory) as entries:
            return {e.name for e in entries if _REV.fullmatch(e.name)}

    def used_bytes(self) -> int:
        """Bytes of all revisions, packed files included; counted once, then kept up."""
        with self._lock:
            if self._used is None:
                self._used = sum(_tree_bytes(self.directory / rev) for rev in self.revs())
            return self._used

    # ------------------------------------------------------------- writing
    def stage(self, expected_bytes: int = 0) -> StagingDir:
        """A new empty staging folder; refuses at once what the budget or the disk cannot hold."""
        self._afford(expected_bytes)
        folder = self._staging / uuid.uuid4().hex
        with _disk("stage an adapter"):
            if expected_bytes > shutil.disk_usage(self._staging).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            folder.mkdir(mode=0o750)
        return StagingDir(folder)

    def discard(self, staging: StagingDir) -> None:
        """Remove a staging folder; one that is gone already is fine."""
        _remove_tree(staging.path)

    def commit(self, staging: StagingDir, rev: str) -> Path:
        """Make the staging folder `store/<rev>`: sync files, rename, sync the rename.

        Content that is here already wins, and the staging folder is discarded.  On an error the
        staging folder stays the caller's, to commit again or to discard.
        """
        target = self.path(rev)
        if self.has(rev):
            self.discard(staging)
            return target
        size = _tree_bytes(staging.path)
        self._afford(size)
        with _disk("store an adapter"):
            _seal_folder(staging.path)
            failpoints.hit("store.before_rename")
            try:
                staging.path.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                self.discard(staging)  # the same content, a moment earlier
                return target
            failpoints.hit("store.renamed")
            _sync(self.directory)
        self._count(size)
        return target

    def seal_packed(self, rev: str, layout: str) -> int:
        """Make a packed file read-only and durable; returns its bytes.  Or FileNotFoundError."""
        path = self.packed(rev, layout)
        size = _regular_bytes(path)
        with _disk("seal a packed file"):
            path.chmod(0o440)
            _sync(path)
            _sync(path.parent)
        self._count(size)
        return size

    def remove(self, revs: Iterable[str]) -> tuple[str, ...]:
        """Take revisions away, each out of sight at once; returns those that were here."""
        removed = []
        for rev in sorted(revs):
            aside = self._staging / f"gone-{uuid.uuid4().hex}"
            size = _tree_bytes(self.path(rev)) if self.has(rev) else 0
            try:
                self.path(rev).rename(aside)
            except FileNotFoundError:
                continue
            failpoints.hit("gc.set_aside")
            _remove_tree(aside)
            self._count(-size)
            removed.append(rev)
        return tuple(removed)

    def gc(self, keep: set[str]) -> tuple[str, ...]:
        """Remove every revision outside `keep`; returns them."""
        return self.remove(self.revs() - keep)

    def reconcile(self, known: Iterable[str] = ()) -> StoreReport:
        """At start: clear leftovers of a crash and compare with the revisions that should be here.

        Only before anything is staged: every staging folder is taken for a leftover.
        """
        stale = list(self._staging.iterdir())
        for folder in stale:
            _remove_tree(folder)
        here = self.revs()
        for rev in here:
            for leftover in self.path(rev).glob("*.tmp"):
                leftover.unlink(missing_ok=True)
        wanted = set(known)
        self._used = None
        return StoreReport(len(stale), tuple(sorted(wanted - here)), tuple(sorted(here - wanted)))

    # ------------------------------------------------------------- room
    def _afford(self, num_bytes: int) -> None:
        if self.budget_bytes and self.used_bytes() + num_bytes > self.budget_bytes:
            raise LoradError(
                "insufficient_storage",
                f"the store holds {self.used_bytes()} of {self.budget_bytes} bytes, "
                f"{num_bytes} more do not fit",
                hint="remove adapters (loractl rm), or raise [store] budget",
            )

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            if self._used is not None:
                self._used += num_bytes


@contextmanager
def _disk(doing: str) -> Iterator[None]:
    """Say insufficient_storage where the system says that it is full, or not to be written to."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            first = "free space on the store's disk"
        elif error.errno in _CLOSED:
            first = "make the store's folder writable for lorad"
        else:
            raise
        raise LoradError(
            "insufficient_storage",
            f"cannot {doing}: {os.strerror(error.errno)}",
            hint=f"{first}, then repeat; nothing was changed",
        ) from error


def _seal_folder(folder: Path) -> None:
    """Make every file read-only and durable, then the folders, innermost first."""
    for parent, _folders, files in os.walk(folder, topdown=False):
        for file in files:
            path = Path(parent, file)
            _regular_bytes(path)
            path.chmod(0o440)
            _sync(path)
            failpoints.hit("store.file_synced")
        _sync(Path(parent))


def _regular_bytes(path: Path) -> int:
    """Size of a regular file; a link or device in a staging folder is a fault of who filled it."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"not a regular file: {path.name!r}")
    return status.st_size


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _folders, files in os.walk(folder):
        for file in files:
            total += os.lstat(os.path.join(parent, file)).st_size
    return total


def _remove_tree(path: Path) -> None:
    """Remove a folder or file; gone already is fine, and so is one that vanishes meanwhile."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""The content-addressed store: `<rev>/` folders that appear whole or not at all, and never change.

Goes in: a staging folder that somebody filled, and the digest of what is in it.  Comes out: the
folder `store/<rev>`, read-only, on disk before `commit` returns.  Packed files join it later under
their layout's name, and may leave again.  A revision whose source has it too may leave but for a
mark; it comes back by the same `commit`.  Knows nothing of names, tensors or SQL; whoever fills a
staging folder has checked its content, and `holdings.py` says what lies here.
"""

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from lorad import disk
from lorad.registry import failpoints
from lorad.registry.room import Room, size_of, tree_bytes

_REV = re.compile(r"[0-9a-f]{64}")
_STAGING_ID = re.compile(r"[0-9a-z-]{1,64}")
_LAYOUT = re.compile(r"[0-9a-z]{1,64}")
#: In a revision's folder: its files are where they came from, and only there.
REMOTE = "remote"
#: In front of what was set aside, to be removed.
GONE = "gone-"


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

    `budget_bytes` 0 is what the disk holds.  Every error of a full disk or budget is
    insufficient_storage, and leaves nothing behind that `path` or `revs` would show.
    """

    def __init__(self, directory: Path, *, budget_bytes: int = 0) -> None:
        self.directory = directory
        self.room = Room(directory, budget_bytes, self.revs)
        self._staging = directory / ".staging"
        self._remote: set[str] | None = None  # None until looked for
        with disk.writing("prepare the store", directory):
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
        """Bytes of all revisions, packed files included."""
        return self.room.used_bytes()

    @property
    def remote(self) -> set[str]:
        """Revisions of which only the mark is here."""
        if self._remote is None:
            folders = ((rev, self.directory / rev / REMOTE) for rev in self.revs())
            self._remote = {rev for rev, mark in folders if os.path.lexists(mark)}
        return self._remote

    # ------------------------------------------------------------- writing
    def stage(self, expected_bytes: int = 0) -> StagingDir:
        """A new empty staging folder; refuses at once what the budget or the disk cannot hold."""
        folder = self._staging / uuid.uuid4().hex
        self.room.afford(expected_bytes)
        with disk.writing("stage an adapter", self._staging, expected_bytes):
            if expected_bytes > disk.free_bytes(self._staging):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            folder.mkdir(mode=0o750)
        return StagingDir(folder)

    def staging_path(self, id: str) -> Path:
        """Where the staging folder of that id lies, or would lie."""
        if not _STAGING_ID.fullmatch(id):
            raise ValueError(f"not the id of a staging folder: {id[:80]!r}")
        return self._staging / id

    def reopen(self, id: str, expected_bytes: int = 0) -> StagingDir:
        """The staging folder of that id, as it was left, or a new one; `expected_bytes` as above,
        what lies there included."""
        folder = self.staging_path(id)
        missing = max(0, expected_bytes - tree_bytes(folder))
        self.room.afford(missing)
        with disk.writing("stage an adapter", self._staging, missing):
            if missing > disk.free_bytes(self._staging):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            folder.mkdir(mode=0o750, exist_ok=True)
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
        if self.has(rev) and rev not in self.remote:
            self.discard(staging)
            return target
        size = tree_bytes(staging.path)
        doing = disk.writing("store an adapter", self.directory, size)
        with self.room.reserve(size), doing:
            _seal_folder(staging.path)
            failpoints.hit("store.before_rename")
            if rev in self.remote:
                self._return(staging, target)
            else:
                try:
                    staging.path.rename(target)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    self.discard(staging)  # the same content, a moment earlier
                    return target
            failpoints.hit("store.renamed")
            _sync(self.directory)
            self.room.recount(rev)
        return target

    def seal_packed(self, rev: str, layout: str) -> int:
        """Make a packed file read-only and durable; returns its bytes.  Or FileNotFoundError."""
        path = self.packed(rev, layout)
        size = _regular_bytes(path)
        with disk.writing("seal a packed file", path.parent, size):
            path.chmod(0o440)
            _sync(path)
            _sync(path.parent)
        self.room.recount(rev)
        return size

    def drop_packed(self, rev: str, layouts: Iterable[str]) -> int:
        """Take these packed files of `rev` away, with their checksums; returns the bytes gained."""
        before = tree_bytes(self.path(rev))
        for layout in layouts:
            path = self.packed(rev, layout)
            # In this order: without its checksums a packed file is taken for an unfinished one.
            path.with_suffix(".sums").unlink(missing_ok=True)
            failpoints.hit("unpack.sums_gone")
            path.unlink(missing_ok=True)
        self.room.recount(rev)
        return before - tree_bytes(self.path(rev))

    def make_remote(self, rev: str) -> int:
        """Take all its files away but for a mark; returns the bytes gained.

        Nobody may be reading them.  A crash on the way leaves it as remote as it was going to be.
        """
        folder = self.path(rev)
        with disk.writing("mark a revision", folder):
            (folder / REMOTE).touch()
            _sync(folder)
        failpoints.hit("remote.marked")
        self.remote.add(rev)
        gained = tree_bytes(folder)
        _empty_remote(folder)
        self.room.recount(rev)
        return gained

    def remove(self, revs: Iterable[str]) -> tuple[str, ...]:
        """Take revisions away, each out of sight at once; returns those that were here."""
        removed = []
        for rev in sorted(revs):
            try:
                aside = self._set_aside(rev)
            except FileNotFoundError:
                continue
            failpoints.hit("gc.set_aside")
            _remove_tree(aside)
            removed.append(rev)
        return tuple(removed)

    def sweep(self) -> int:
        """Remove what earlier removals could not; returns the bytes gained."""
        gained = 0
        for path in leftovers(self):
            size = tree_bytes(path) if path.is_dir() else size_of(path)
            _remove_tree(path)
            if not os.path.lexists(path):
                gained += size
            if _REV.fullmatch(path.parent.name):
                self.room.recount(path.parent.name)
        return gained

    def gc(self, keep: set[str]) -> tuple[str, ...]:
        """Remove every revision outside `keep`; returns them."""
        return self.remove(self.revs() - keep)

    def reconcile(self, known: Iterable[str] = (), *, keep: Collection[str] = ()) -> StoreReport:
        """At start: clear leftovers of a crash and compare with the revisions that should be here.

        Only before anything is staged: every staging folder but those whose ids are in `keep` is
        taken for a leftover.
        """
        stale = [folder for folder in self._staging.iterdir() if folder.name not in keep]
        for folder in stale:
            _remove_tree(folder)
        here = self.revs()
        for rev in here:
            _tidy(self.path(rev))
        wanted = set(known)
        self.room.forget()
        return StoreReport(len(stale), tuple(sorted(wanted - here)), tuple(sorted(here - wanted)))

    # ------------------------------------------------------------- inside
    def _return(self, staging: StagingDir, target: Path) -> None:
        """Give a remote revision its files back; it is remote until all of them are here."""
        for path in staging.path.iterdir():
            path.rename(target / path.name)
        _sync(target)
        failpoints.hit("remote.filled")
        (target / REMOTE).unlink()
        _sync(target)
        self.remote.discard(target.name)
        self.discard(staging)

    def _set_aside(self, rev: str) -> Path:
        """Out of sight at once; where it is now.  FileNotFoundError if it is not here."""
        aside = self._staging / f"{GONE}{uuid.uuid4().hex}"
        self.path(rev).rename(aside)
        self.remote.discard(rev)
        self.room.recount(rev)
        return aside


def leftovers(store: Store) -> list[Path]:
    """What was set aside and is here still, and files of packers that are there no more."""
    found = list((store.directory / ".staging").glob(f"{GONE}*"))
    for rev in store.revs():
        found += [path for path in store.path(rev).glob("*.tmp") if _is_orphan(path)]
    return found


def _tidy(folder: Path) -> None:
    """Remove what a crash left in a revision's folder; one look at it where nothing is."""
    names = os.listdir(folder)
    for name in names:
        if name.endswith(".tmp"):
            (folder / name).unlink(missing_ok=True)
    if REMOTE in names:
        _empty_remote(folder)


def _empty_remote(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != REMOTE:
            _remove_tree(path)


def _is_orphan(path: Path) -> bool:
    """A file in the making bears its process's number."""
    pid = path.name.split(".")[-2]
    return not (pid.isdecimal() and Path("/proc", pid).exists())


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


def _remove_tree(path: Path) -> None:
    """Remove a folder or file; gone already is fine, and so is one that vanishes meanwhile."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

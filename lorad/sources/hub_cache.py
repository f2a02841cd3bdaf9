"""The hub's cache on this machine, in the layout that huggingface-hub documents and shares.

    models--ORG--REPO/refs/<branch or tag>          the commit that it meant last
    models--ORG--REPO/snapshots/<commit>/<name>     a link to a blob
    models--ORG--REPO/blobs/<sha256 or git id>      the files; `<id>.lorad` while one grows

Goes in: repository, commit, names.  Comes out: files that are there, and a place to put new ones.
huggingface-hub throws away what a broken download brought; here it is kept, and gone on with by
whoever holds the file's lock.  Knows nothing of the network.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lorad.sources import disk
from lorad.sources.fetch import RemoteFile
from lorad.sources.patience import Meter

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCK_SECONDS = 0.2


class HubCache:
    """`folder` is written to; `others` are looked at as well, as somebody may have filled them."""

    def __init__(self, folder: Path, others: tuple[Path, ...] = ()) -> None:
        self.folder = folder
        self._places = (folder, *(other for other in others if other != folder))

    def commit(self, repo: str, revision: str) -> str:
        """What `revision` meant when it was last asked for; "" if that is not known."""
        if _COMMIT.fullmatch(revision):
            return revision
        for place in self._places:
            with suppress(OSError, UnicodeDecodeError):
                ref = _in(place, repo) / "refs" / (revision or "main")
                commit = ref.read_text(encoding="ascii").strip()
                if _COMMIT.fullmatch(commit):
                    return commit
        return ""

    def find(self, repo: str, commit: str, name: str) -> Path | None:
        """A file of a commit: the real one, links of the cache's own followed."""
        for place in self._places:
            found = Path(os.path.realpath(_in(place, repo) / "snapshots" / commit / name))
            if found.is_file() and Path(os.path.realpath(place)) in found.parents:
                return found
        return None

    @contextmanager
    def growing(self, repo: str, commit: str, file: RemoteFile, meter: Meter) -> Iterator["Blob"]:
        """The blob of `file`, for this caller alone: waits while another fetches it."""
        key = file.sha256 or file.blob_id or f"{commit}-{file.name}"
        blobs = _in(self.folder, repo) / "blobs"
        with disk.writing(str(blobs)):
            blobs.mkdir(parents=True, exist_ok=True)
        part = blobs / f"{key}.lorad"
        while True:
            with disk.growing(part) as out:
                if _locked(out) and _still(out, part):
                    yield Blob(out, part, blobs / key)
                    return
            meter.pause(_LOCK_SECONDS)

    def link(self, repo: str, commit: str, name: str, blob: Path) -> None:
        """Make `blob` the file `name` of `commit`."""
        place = _in(self.folder, repo) / "snapshots" / commit / name
        with disk.writing(name):
            place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, lambda path: path.symlink_to(Path("../../blobs") / blob.name))

    def remember(self, repo: str, revision: str, commit: str) -> None:
        """`revision` means `commit` from now on, when nobody can be asked."""
        if not _COMMIT.fullmatch(revision):
            ref = _in(self.folder, repo) / "refs" / (revision or "main")
            with disk.writing(str(ref)):
                ref.parent.mkdir(parents=True, exist_ok=True)
                _replace(ref, lambda path: path.write_text(commit, encoding="ascii"))


class Blob:
    """A file that grows under its lock.  `out` is at no particular place."""

    def __init__(self, out: BinaryIO, part: Path, whole: Path) -> None:
        self.out = out
        self._part, self.whole = part, whole

    def keep(self) -> Path:
        """It is whole and checked: give it its name."""
        with disk.writing(self.whole.name):
            os.replace(self._part, self.whole)
        return self.whole

    def drop(self) -> None:
        """It is not what it should be: the next one starts from nothing."""
        self.out.truncate(0)
        disk.discard(self._part)


def _in(place: Path, repo: str) -> Path:
    return place / ("models--" + repo.replace("/", "--"))


def _locked(out: BinaryIO) -> bool:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still(out: BinaryIO, part: Path) -> bool:
    """Whether the locked file is what the name leads to: another may have been done with it."""
    try:
        return os.path.samestat(os.fstat(out.fileno()), os.stat(part, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """`path` anew, at once."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.lorad")
    disk.discard(fresh)
    make(fresh)
    os.replace(fresh, path)

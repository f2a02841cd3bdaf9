"""The demo's private folder, and what becomes of those whose owners were killed.

Goes in: where folders may lie.  Comes out: a fresh one, locked as long as a process lives that has
the lock: the demo, and the daemon that it started.  Knows nothing of what lies in it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "lorad-demo-"
#: Held by whoever lives there.  A folder without it is nobody's to remove: `--keep` takes it away.
LOCK = ".lock"


class Folder:
    """A new folder below `parent` (None: where temporary files lie)."""

    def __init__(self, parent: str | None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        made = self.path / f"{LOCK}-new"
        #: For `pass_fds`: who has it keeps the folder, too.
        self.lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        made.rename(self.path / LOCK)  # locked before anybody can see it by this name

    def keep(self) -> None:
        """It stays, whoever ends."""
        (self.path / LOCK).unlink(missing_ok=True)
        os.close(self.lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def clear(parent: str | None) -> list[Path]:
    """Remove what killed demos of this user left below `parent`; returns what it was."""
    cleared = []
    for path in sorted(Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*")):
        lock = _abandoned(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            cleared.append(path)
    return cleared


def _abandoned(path: Path) -> int | None:
    """The lock of a folder of this user's that nobody lives in, else None."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    if not os.fstat(lock).st_nlink:  # its owner took the lock away meanwhile: it is kept
        os.close(lock)
        return None
    return lock

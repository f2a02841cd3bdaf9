"""Room: how many bytes the store holds, and how many more it may.

Goes in: revisions that came, changed or left; bytes that are about to be written.  Comes out: what
is lacking, or insufficient_storage.  Thread-safe.  Knows no file by name: sizes are of folders.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lorad import disk
from lorad.errors import LoradError


class Room:
    """Of one store at `directory`, a folder a revision; `revs` lists them.

    `budget_bytes` 0 is what the disk holds.
    """

    def __init__(
        self, directory: Path, budget_bytes: int, revs: Callable[[], Collection[str]]
    ) -> None:
        self.budget_bytes = budget_bytes
        self._directory, self._revs = directory, revs
        self._lock = threading.Lock()
        self._sizes: dict[str, int] | None = None  # bytes of each revision; None until counted
        self._used = 0  # their sum
        self._reserved = 0  # bytes that are being written

    def used_bytes(self) -> int:
        """Bytes of all revisions; counted once, then kept up."""
        with self._lock:
            self._counted()
            return self._used

    def lacking(self, num_bytes: int, staged: int = 0) -> int:
        """Bytes that must go before `num_bytes` more have room, under the budget and on the disk;
        0 if none must.  `staged` of them are on the disk already, and only move."""
        short = over = 0
        if self.budget_bytes:
            with self._lock:
                self._counted()
                over = self._used + self._reserved + num_bytes - self.budget_bytes
        with suppress(OSError):
            short = num_bytes - staged - disk.free_bytes(self._directory)
        return max(short, over, 0)

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Room under the budget for what is being written; insufficient_storage without it."""
        with self._lock:
            self._check(num_bytes)
            self._reserved += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= num_bytes

    def afford(self, num_bytes: int) -> None:
        """Raise insufficient_storage for what is above the budget."""
        with self._lock:
            self._check(num_bytes)

    def recount(self, rev: str) -> None:
        """It came, changed or left."""
        with self._lock:
            if self._sizes is None:
                return
            self._used -= self._sizes.pop(rev, 0)
            if (folder := self._directory / rev).is_dir():
                self._sizes[rev] = tree_bytes(folder)
                self._used += self._sizes[rev]

    def forget(self) -> None:
        """Count anew when somebody asks."""
        with self._lock:
            self._sizes = None

    def _check(self, num_bytes: int) -> None:
        if not self.budget_bytes or not num_bytes:
            return
        self._counted()
        held = self._used + self._reserved
        if held + num_bytes > self.budget_bytes:
            raise LoradError(
                "insufficient_storage",
                f"the store holds {held} of {self.budget_bytes} bytes, {num_bytes} more do not fit",
                hint="remove adapters (loractl rm), or raise [store] budget",
            )

    def _counted(self) -> None:
        if self._sizes is None:
            self._sizes = {rev: tree_bytes(self._directory / rev) for rev in self._revs()}
            self._used = sum(self._sizes.values())


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; those that vanish meanwhile have none."""
    total = 0
    for parent, _folders, files in os.walk(folder):
        total += sum(size_of(Path(parent, file)) for file in files)
    return total


def size_of(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0

"""What lies in the store: of each revision its own files, and its packed files by layout.

Goes in: a store.  Comes out: sizes, times and marks, as they were at one look.  Changes nothing,
and knows no name.  Blocking: thousands of folders are looked into.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lorad.registry.store import REMOTE, Store

#: Left in a revision's folder by `rm --keep-files`: the files stay though no name points to them.
KEPT = "kept"


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One packed file and its checksums.  `written_at`: seconds since the epoch."""

    layout: str
    num_bytes: int
    written_at: float


@dataclass(frozen=True, slots=True)
class Holding:
    """One revision.  `file_bytes` are of its own files, `names` theirs."""

    rev: str
    file_bytes: int
    names: frozenset[str]
    packed: tuple[PackedFile, ...] = field(default=())

    @property
    def packed_bytes(self) -> int:
        return sum(file.num_bytes for file in self.packed)

    @property
    def num_bytes(self) -> int:
        return self.file_bytes + self.packed_bytes

    @property
    def remote(self) -> bool:
        """Only its mark is here."""
        return REMOTE in self.names


def holdings(store: Store) -> Iterator[Holding]:
    """Every revision; one that leaves meanwhile may be missing."""
    for rev in sorted(store.revs()):
        try:
            yield _look(rev, store.path(rev))
        except FileNotFoundError:
            continue


def marked(store: Store, mark: str) -> set[str]:
    """Revisions whose folder holds `mark`."""
    return {rev for rev in store.revs() if os.path.lexists(store.directory / rev / mark)}


def _look(rev: str, folder: Path) -> Holding:
    names, own, sizes, times = set(), 0, dict[str, int](), dict[str, float]()
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            stem, _, ending = entry.name.rpartition(".")
            if stem.startswith("packed-") and ending in ("bin", "sums"):
                layout = stem.removeprefix("packed-")
                sizes[layout] = sizes.get(layout, 0) + status.st_size
                times[layout] = max(times.get(layout, 0.0), status.st_mtime)
            else:
                names.add(entry.name)
                own += status.st_size
    packed = tuple(PackedFile(layout, sizes[layout], times[layout]) for layout in sorted(sizes))
    return Holding(rev, own, frozenset(names), packed)

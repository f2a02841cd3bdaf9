"""Homes: folders on a node, each of them one process' while it lives, and another's afterwards.

Goes in: where they are, and what for.  Comes out: one that nobody holds.  It is held by a lock on a
file, which the system takes back whatever the process died of; what is in it stays, so that the
next one finds adapters packed.
"""

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lorad.errors import BadConfig

MOST = 64


@dataclass(frozen=True, slots=True)
class Home:
    path: Path
    _held: int  # an open file; the lock goes with it

    def release(self) -> None:
        """Once."""
        os.close(self._held)


def free(homes: Path, kind: str) -> Iterator[Home]:
    """Every one that nobody holds; whoever takes the next one should release the last.  Raises
    BadConfig for a folder of somebody else's."""
    _check(homes)
    for number in range(MOST):
        path = homes / f"{kind}-{number}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(path / ".held", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            continue
        yield Home(path, held)


def _check(homes: Path) -> None:
    """Below /var/tmp everybody may have been there first, and whose folder it is may put another
    adapter in the place of a packed one."""
    homes.mkdir(mode=0o700, parents=True, exist_ok=True)
    for found in (homes.lstat(), homes.stat()):
        if found.st_uid not in (0, os.geteuid()):
            message = f"homes: {homes} belongs to uid {found.st_uid}, and this is {os.geteuid()}"
            raise BadConfig(message, hint="another folder on every node: --homes /var/lib/lorad")

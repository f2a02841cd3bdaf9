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

MOST = 64


@dataclass(frozen=True, slots=True)
class Home:
    path: Path
    _held: int  # an open file; the lock goes with it

    def release(self) -> None:
        """Once."""
        os.close(self._held)


def free(homes: Path, kind: str) -> Iterator[Home]:
    """Every one that nobody holds; whoever takes the next one should release the last."""
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

"""Counts: how many transactions there were, how long they took, and what went wrong.

Goes in: each read and write, from any thread.  Comes out: counters that only grow.  Knows no table.
"""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy.exc import DBAPIError

from engine.histogram import SECONDS, Histogram
from lorad import disk

Operation = Literal["read", "write"]
Kind = Literal["busy", "full", "io", "corrupt"]

_KINDS: dict[int, Kind] = {
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
}


def kind_of(error: BaseException) -> Kind | None:
    """What is wrong with the database or its disk; None: nothing, the caller was refused."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, OSError):
        return "full" if cause.errno in disk.FULL else "io"
    if not isinstance(cause, sqlite3.Error):
        return None
    code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_IOERR)
    if code == sqlite3.SQLITE_IOERR_WRITE:  # a quota or a file size limit
        return "full"
    return _KINDS.get(code & 0xFF, "io")


class Counts:
    """One a registry."""

    def __init__(self) -> None:
        self.number: Counter[str] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.seconds = {"read": Histogram(SECONDS), "write": Histogram(SECONDS)}
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self, operation: Operation) -> Iterator[None]:
        """Around one transaction, begin and commit included."""
        began = time.perf_counter()
        wrong: Kind | None = None
        try:
            yield
        except BaseException as error:
            wrong = kind_of(error)
            raise
        finally:
            seconds = time.perf_counter() - began
            with self._lock:
                self.number[operation] += 1
                self.seconds[operation].observe(seconds)
                if wrong is not None:
                    self.errors[operation, wrong] += 1

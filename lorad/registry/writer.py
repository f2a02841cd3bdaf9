"""The one thread that writes to registry.db.

Goes in: jobs, functions of an open transaction.  Comes out: futures; a result is set only after
the commit is on disk, an error only after the rollback.  Jobs run one at a time, in the order in
which they were given, each in its own `BEGIN IMMEDIATE`.  Knows no table and no file but its own.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from lorad.errors import RegistryUnusable
from lorad.registry import failpoints, sqlite
from lorad.registry.counts import Counts

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    work: Callable[[Connection], T]
    then: Callable[[T], None] | None
    future: "Future[T]"


class Writer:
    """Give it jobs from any thread; no call here waits for the disk but `close`."""

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout: float = sqlite.BUSY_TIMEOUT_SECONDS,
        counts: Counts | None = None,
    ) -> None:
        self._path = path
        self._counts = counts or Counts()
        self._engine = sqlite.writer_engine(path, busy_timeout=busy_timeout)
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="registry-writer", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[Connection], T], then: Callable[[T], None] | None = None
    ) -> "Future[T]":
        """Run `work` in one transaction, after the commit `then(result)`, then tell the future.

        The future raises what `work` raised, or registry_busy, insufficient_storage or
        RegistryUnusable.  A cancelled future's job is not begun.  `then` is not part of the change:
        an error in it is logged, and the result stands.
        """
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                future.set_exception(
                    RegistryUnusable(
                        "the registry is closed", hint="lorad is stopping; start it again"
                    )
                )
            else:
                self._jobs.put(_Job(work, then, future))
        return future

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End every job that was given, then the thread.  Repeating it is harmless."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        connection: Connection | None = None
        try:
            while (job := self._jobs.get()) is not None:
                if not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    connection = connection or self._engine.connect()
                    with self._counts.transaction("write"):
                        result = _transact(connection, job.work)
                except BaseException as error:
                    job.future.set_exception(sqlite.translate(error, self._path))
                else:
                    _after(job, result)
                    job.future.set_result(result)
        finally:
            if connection is not None:
                connection.close()
            self._engine.dispose()


def _transact(connection: Connection, work: Callable[[Connection], T]) -> T:
    with connection.begin():
        failpoints.hit("write.begun")
        result = work(connection)
        failpoints.hit("write.executed")
    failpoints.hit("write.committed")
    return result


def _after(job: _Job[T], result: T) -> None:
    if job.then is None:
        return
    try:
        job.then(result)
    except OSError as error:  # the disk's trouble, and said once already where it matters
        log.error("what follows a registry write failed, the write itself stands: %s", error)
    except Exception:
        log.exception("what follows a registry write failed; the write itself stands")

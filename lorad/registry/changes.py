"""Changes: a transaction, and all that follows it.

Goes in: functions of an open write transaction, who wants them, what comes after.  Comes out:
futures; behind each commit the cards of what it touched, its audit lines, and now and then a
backup.  Runs on the one writing thread.  Knows no command.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sqlalchemy import Connection

from lorad.registry import journal
from lorad.registry.journal import Stamp
from lorad.registry.mirror import Mirror, Passed
from lorad.registry.records import AuditRecord
from lorad.registry.store import Store
from lorad.registry.writer import Writer

T = TypeVar("T")

log = logging.getLogger(__name__)


class Changes:
    """`mirror` follows what `writer` commits; `clock`, in seconds since the epoch, stamps it."""

    def __init__(
        self, writer: Writer, mirror: Mirror, store: Store, clock: Callable[[], float]
    ) -> None:
        self.keep_audit = True  # in the table
        self.on_audit: Callable[[AuditRecord], None] = lambda record: None  # on the writing thread
        self.writer = writer
        self._mirror, self._store, self._clock = mirror, store, clock

    def make(
        self,
        work: Callable[[Connection, Stamp], T],
        actor: str,
        *,
        gone: tuple[str, ...] = (),
        after: Callable[[T], None] | None = None,
    ) -> "Future[T]":
        """One transaction, with the cards of what it touched behind it."""
        passed, told = Passed(), list[Stamp]()
        who = journal.actor_now() if actor == journal.DAEMON else actor

        def transact(connection: Connection) -> T:
            at = journal.stamp(connection, self._clock(), who, keep_audit=self.keep_audit)
            told[:] = [at]
            result = work(connection, at)
            passed.read(connection, self._store, at.generation - 1, gone)
            return result

        def follow(result: T) -> None:
            for record in told[0].written:
                self.on_audit(record)
            self._mirror.follow(passed)
            if after is not None:
                after(result)
            self._back_up_if_due()

        return self.writer.submit(transact, follow)

    def catch_up(self) -> None:
        """Let the cards see what the last process committed and did not come to tell them."""
        passed = Passed()

        def follow(behind: bool) -> None:
            if behind:
                self._mirror.follow(passed)

        self.writer.submit(lambda c: self._mirror.catch_up(c, self._store, passed), follow)
        self._back_up()

    def _back_up_if_due(self) -> None:
        if self._mirror.backup_due() and not self.writer.closed:
            self._back_up()

    def _back_up(self) -> None:
        """Behind the changes that were given so far: nobody waits for it."""
        self.writer.submit(self._mirror.back_up_if_due).add_done_callback(_log_failure)


def _log_failure(future: "Future[bool]") -> None:
    error = future.exception()
    if error is not None:
        log.warning("the registry could not be backed up: %s", error)

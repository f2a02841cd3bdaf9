"""What follows each commit: the cards of what changed, and now and then a backup.

Goes in: `Passed`, read inside the transaction.  Comes out: files beside the store and in
`backups/`.  Runs on the writing thread only.  A failure here never undoes an acknowledged change;
what could not be written is tried again with the next one.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from sqlalchemy import Connection, select

from lorad.registry import queries, tenants
from lorad.registry.backups import Backups
from lorad.registry.cards import Card, Cards, TenantsCard
from lorad.registry.models import adapters
from lorad.registry.records import RevisionRecord
from lorad.registry.store import Store

log = logging.getLogger("lorad.registry")

#: A backup follows this many changes, or the first change after so many seconds.
BACKUP_CHANGES = 500
BACKUP_SECONDS = 3600.0


class Passed:
    """What transactions left behind: filled inside one, used after its commit."""

    def __init__(self) -> None:
        self.generation = 0
        self.cards: list[Card] = []
        self.revisions: list[RevisionRecord] = []
        self.tenants: TenantsCard | None = None  # if one was changed

    def read(self, connection: Connection, store: Store, since: int, gone: Iterable[str]) -> None:
        """Every name that a transaction after `since` changed, and the `gone` ones."""
        self.generation = queries.generation(connection)
        changed = queries.changed_since(connection, since)
        self.cards = [Card(name=a.name, generation=g, adapter=a) for a, g in changed]
        self.cards += [Card(name=n, generation=self.generation, adapter=None) for n in gone]
        revs = {r for a, _ in changed for r in (a.serving_rev, a.candidate_rev) if r is not None}
        self.revisions = list(queries.revisions_by_rev(connection, store, revs).values())
        if (changed_at := tenants.changed_at(connection)) > since:
            every = tenants.every(connection)
            self.tenants = TenantsCard(generation=changed_at, tenants=every)


class Mirror:
    """The follower of one registry: `database` with its cards and backups."""

    def __init__(
        self, database: Path, cards: Cards, backups: Backups, clock: Callable[[], float]
    ) -> None:
        self._database = database
        self._cards = cards
        self.backups = backups
        self._clock = clock
        self._behind: dict[str, Card] = {}
        self._revisions: dict[str, RevisionRecord] = {}  # likewise
        self._tenants: TenantsCard | None = None  # likewise
        self._changes = 0
        self._backed_up_at = clock()

    def follow(self, passed: Passed) -> None:
        """Write the cards; a disk that is full or read-only leaves them to the next call."""
        self._changes += 1
        self._behind |= {card.name: card for card in passed.cards}
        self._revisions |= {revision.rev: revision for revision in passed.revisions}
        self._tenants = passed.tenants or self._tenants
        try:
            self._write(passed.generation)
        except OSError as error:
            log.error("cards cannot be written now, the write itself stands: %s", error)

    def _write(self, generation: int) -> None:
        for revision in self._revisions.values():
            self._cards.write_revision(revision)
        if self._tenants is not None:
            self._cards.write_tenants(self._tenants)
        self._cards.write(self._behind.values(), generation)
        self._behind.clear()
        self._revisions.clear()
        self._tenants = None

    def catch_up(self, connection: Connection, store: Store, passed: Passed) -> bool:
        """At start: fill `passed` with what the cards have not seen; False if they saw all."""
        reached = self._cards.generation()
        generation = queries.generation(connection)
        if max(self.backups.newest_generation(), 0) < generation:
            self._changes = BACKUP_CHANGES  # the last run's changes are in no backup yet
        if reached == generation:
            return False
        passed.read(connection, store, reached, self._cards.names() - _names(connection))
        return True

    def forget_revisions(self, revs: Collection[str]) -> None:
        for rev in revs:
            self._revisions.pop(rev, None)
        self._cards.drop_revisions(revs)

    def backup_due(self) -> bool:
        late = self._clock() - self._backed_up_at >= BACKUP_SECONDS
        return self._changes >= BACKUP_CHANGES or (late and self._changes > 0)

    def back_up_if_due(self, connection: Connection) -> bool:
        """Copy the database as committed, and drop the cards that only older backups needed."""
        if not self.backup_due():
            return False
        self._changes, self._backed_up_at = 0, self._clock()
        generation = queries.generation(connection)
        self.backups.take(self._database, generation, self._backed_up_at)
        self._cards.forget_removed(_names(connection), self.backups.oldest_time())
        return True


def _names(connection: Connection) -> set[str]:
    return set(connection.execute(select(adapters.c.name)).scalars())

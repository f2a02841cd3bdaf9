"""Reader: every question to the registry, each on one snapshot.

Goes in: plain values.  Comes out: frozen records.  Runs on the caller's thread, whichever that is,
and never waits for a writer.  Changes nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection

from engine.adapters.states import State
from lorad.registry import paging, queries, sqlite
from lorad.registry.counts import Counts
from lorad.registry.records import (
    AdapterRecord,
    AuditRecord,
    EventRecord,
    PackedUse,
    Packing,
    Page,
    RevisionRecord,
    Serving,
    Tombstone,
)
from lorad.registry.store import Store


class Reader:
    """`store` says where packed files are; it is not looked into."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path, self.store = path, store
        self.transactions = Counts()
        self._readers = sqlite.reader_engine(path)
        self._vocabularies: tuple[int, dict[str, tuple[int, int]]] | None = None

    def close(self) -> None:
        """End its connections."""
        self._readers.dispose()

    def get(self, name: str) -> AdapterRecord | None:
        with self._read() as connection:
            return queries.adapter(connection, name)

    def list(
        self,
        *,
        state: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        q: str | None = None,
        labels: Mapping[str, str] | None = None,
        revs: Collection[str] | None = None,
        without_revs: Collection[str] | None = None,
        sort: str = "name",
        limit: int = 100,
        cursor: str | None = None,
        packing: Packing | None = None,
    ) -> Page:
        """One page of names.

        `state` is a stored one; derived states are asked for with `revs` (names that serve one of
        them) and `without_revs`.  `model` is the one that was registered, `q` a part of the name.
        `sort` is a word of `paging.SORTS`, "-" before it turns it round; "size" is of the blocks of
        `packing`, if given.
        invalid_value for what is unknown.
        """
        with self._read() as connection:
            return paging.page(
                connection,
                state=state,
                tenant=tenant,
                model=model,
                q=q,
                labels=labels,
                revs=revs,
                without_revs=without_revs,
                sort=sort,
                limit=limit,
                cursor=cursor,
                packing=packing,
            )

    def counts(self) -> dict[State, int]:
        """Names by stored state; states without a name are absent."""
        with self._read() as connection:
            return queries.counts(connection)

    def quarantined(self) -> dict[str, int]:
        """Names that are quarantined, by reason code."""
        with self._read() as connection:
            return queries.quarantined(connection)

    def file_bytes(self) -> int:
        """Of the database and its log on the disk."""
        files = (self.path, *sqlite.companions(self.path))
        return sum(file.stat().st_size for file in files if file.exists())

    def revision(self, rev: str) -> RevisionRecord | None:
        return self.revisions((rev,)).get(rev)

    def revisions(self, revs: Iterable[str]) -> dict[str, RevisionRecord]:
        """Those of `revs` that are registered."""
        with self._read() as connection:
            return queries.revisions_by_rev(connection, self.store, revs)

    def revisions_of(self, name: str) -> tuple[str, ...]:
        """Revisions that `name` served before its present one, newest first."""
        with self._read() as connection:
            return queries.revisions_of(connection, name)

    def names_of(self, rev: str) -> tuple[str, ...]:
        """Names that serve `rev` or have it as their candidate."""
        with self._read() as connection:
            return queries.names_of(connection, rev)

    def known_revs(self) -> set[str]:
        """Every revision that is registered."""
        with self._read() as connection:
            return queries.known_revs(connection)

    def served_revs(self) -> set[str]:
        """Every revision that a registered name serves."""
        with self._read() as connection:
            return queries.served_revs(connection)

    def own_tokenizers(self) -> tuple[str, ...]:
        """Revisions with one that a registered name means, the most wanted first."""
        with self._read() as connection:
            return queries.own_tokenizers(connection)

    def vocabularies(self) -> Mapping[str, tuple[int, int]]:
        """By model, of names that serve: the most ids that one has, and how many have a tokenizer
        of their own.  Asked for with every picture of the daemon, and changed by writes alone."""
        written = self.transactions.number["write"]
        if self._vocabularies is None or self._vocabularies[0] != written:
            with self._read() as connection:
                self._vocabularies = written, queries.vocabularies(connection)
        return self._vocabularies[1]

    def unlike(self, base_text: str, model: str | None = None) -> tuple[str, ...]:
        """Revisions that names of `model` (None: of any) mean and whose tokenizer was held against
        another base's, or against none; the most wanted first."""
        with self._read() as connection:
            return queries.unlike(connection, base_text, model)

    def unused_revs(self, leased: Collection[str] = ()) -> set[str]:
        """What `collect` would take."""
        with self._read() as connection:
            return queries.unused_revs(connection, leased)

    def packed_by_use(self) -> tuple[PackedUse, ...]:
        """Every packed file, those first that were not used for longest."""
        with self._read() as connection:
            return queries.packed_by_use(connection)

    def all_serving(self) -> tuple[Serving, ...]:
        """Every name with a serving or candidate revision, and those revisions, by name."""
        with self._read() as connection:
            return queries.serving(connection, self.store)

    def pointing(self) -> tuple[AdapterRecord, ...]:
        """The same names alone: a tenth of the work."""
        with self._read() as connection:
            return queries.pointing(connection)

    def packed_files(self, layouts: Collection[str]) -> tuple[tuple[str, str, int], ...]:
        """(rev, layout, blocks) of every packed file of these layouts."""
        with self._read() as connection:
            return queries.packed_files(connection, layouts)

    def tombstone(self, name: str) -> Tombstone | None:
        """The removed content that stays away from `name`."""
        with self._read() as connection:
            return queries.tombstone(connection, name)

    def events(
        self, limit: int = 100, name: str | None = None, *, since: int = 0
    ) -> tuple[EventRecord, ...]:
        """The newest `limit` events with an id above `since`, newest first."""
        with self._read() as connection:
            return queries.event_page(connection, limit=limit, name=name, since=since)

    def audit_log(
        self,
        limit: int = 100,
        *,
        after: float = 0.0,
        actor: str = "",
        action: str = "",
        name: str = "",
    ) -> tuple[AuditRecord, ...]:
        """The newest `limit` audit rows, newest first: not before `after`, with these words in
        their actors, actions that begin so, and of this name."""
        with self._read() as connection:
            return queries.audit_page(
                connection, limit=limit, after=after, actor=actor, action=action, name=name
            )

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        try:
            with self.transactions.transaction("read"), self._readers.begin() as connection:
                yield connection
        except Exception as error:
            translated = sqlite.translate(error, self.path)
            if translated is error:
                raise
            raise translated from error

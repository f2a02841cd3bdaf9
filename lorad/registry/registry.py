"""Registry: which adapters exist, what each name means, and who changed it when.

Goes in: names, revisions and settings as plain values.  Comes out: frozen records, and futures of
changes.  Reads are those of `reader.py`; changes run on the one writing thread, each in one
transaction, and are on disk when their future has a result.  Knows the store's folders; knows
nothing of the engine, of files' content or HTTP.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from sqlalchemy import Connection

from engine.messages import PackedModule
from lorad.errors import LoradError
from lorad.registry import commands, journal, migrate, packed_rows, queries, recover, sqlite
from lorad.registry.backups import Backups
from lorad.registry.cards import Cards
from lorad.registry.changes import Changes
from lorad.registry.journal import Stamp
from lorad.registry.mirror import Mirror
from lorad.registry.operations import Operations, stagings_in_use
from lorad.registry.reader import Reader
from lorad.registry.records import (
    AuditRecord,
    Registered,
    Removed,
    RevisionRecord,
    TextFacts,
)
from lorad.registry.recover import OpenReport
from lorad.registry.store import Store, StoreReport
from lorad.registry.tenants import Tenants, touch_used
from lorad.registry.writer import Writer

FILE = "registry.db"


class Registry(Reader):
    """Opened with `Registry.open`; the daemon's lock keeps a second one out."""

    def __init__(
        self,
        path: Path,
        store: Store,
        report: OpenReport,
        mirror: Mirror,
        *,
        clock: Callable[[], float],
        busy_timeout: float,
    ) -> None:
        super().__init__(path, store)
        self.report = report
        self._mirror = mirror
        writer = Writer(path, busy_timeout=busy_timeout, counts=self.transactions)
        self.changes = Changes(writer, mirror, store, clock)
        self._change = self.changes.make
        self.operations = Operations(self._read, writer, clock)
        self.tenants = Tenants(self._read, self._change)

    @classmethod
    def open(
        cls,
        state_dir: Path,
        *,
        store: Store | None = None,
        clock: Callable[[], float] = time.time,
        busy_timeout: float = sqlite.BUSY_TIMEOUT_SECONDS,
    ) -> "Registry":
        """Open, upgrade or recover `state_dir/registry.db`; `store` None is `state_dir/store`.

        What had to be done is in `.report`.  RegistryUnusable: a newer schema, another program's
        file, a network file system, an unreadable disk; the file is untouched then.
        """
        state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        migrate.refuse_network_filesystem(state_dir)
        store = store or Store(state_dir / "store")
        cards = Cards(store.directory / ".cards")
        cards.prepare()
        backups = Backups(state_dir / "backups")
        path = state_dir / FILE
        report = recover.open_database(path, cards=cards, backups=backups, store=store, now=clock())
        mirror = Mirror(path, cards, backups, clock)
        registry = cls(path, store, report, mirror, clock=clock, busy_timeout=busy_timeout)
        registry.changes.catch_up()
        return registry

    def close(self) -> None:
        """End the changes that were given, then the threads and connections."""
        self.changes.writer.close()
        super().close()

    def backed_up_at(self) -> float:
        """When the newest backup was made, in seconds since the epoch; 0.0 without one."""
        return self._mirror.backups.newest_time()

    # ------------------------------------------------------------- changes
    def register(
        self,
        name: str,
        *,
        tenant: str | None = None,
        model: str,
        source: str,
        revision: RevisionRecord,
        labels: Mapping[str, str] | None = None,
        pin: bool | None = None,
        priority: int | None = None,
        as_candidate: bool = False,
        actor: str = "daemon",
    ) -> "Future[Registered]":
        """Point `name` at a revision whose files are in the store, at once or as its candidate.

        None leaves a setting as it is (a new name: unpinned, priority 50).  Content that serves
        already is `unchanged` and ends a candidacy.  not_found if the store lacks the files.
        """

        def work(connection: Connection, at: Stamp) -> Registered:
            if not self.store.has(revision.rev):
                text = f"the files of {revision.rev[:12]} are not in the store"
                raise LoradError("not_found", text, hint="add the adapter again")
            return commands.register(
                connection,
                at,
                name=name,
                tenant=tenant,
                model=model,
                source=source,
                labels=labels,
                pin=pin,
                priority=priority,
                revision=revision,
                as_candidate=as_candidate,
            )

        return self._change(work, actor)

    def promote(self, name: str, rev: str, *, actor: str = "daemon") -> "Future[bool]":
        """The candidate `rev` serves from now on; False if it did.  conflict for another rev."""
        return self._change(lambda c, at: commands.promote(c, at, name, rev), actor)

    def fail_candidate(
        self, name: str, reason: str, message: str, *, actor: str = "daemon"
    ) -> "Future[bool]":
        """Drop the candidate, keep the reason.  True if the name serves on; else: quarantined."""
        return self._change(
            lambda c, at: commands.fail_candidate(c, at, name, reason, message), actor
        )

    def quarantine(
        self,
        name: str,
        source: str,
        reason: str,
        message: str,
        display_name: str | None = None,
        *,
        tenant: str | None = None,
        model: str = "",
        actor: str = "daemon",
    ) -> "Future[bool]":
        """File refused content.  True if the name serves an earlier revision still, untouched."""
        return self._change(
            lambda c, at: commands.quarantine(
                c,
                at,
                name=name,
                source=source,
                reason=reason,
                message=message,
                display_name=display_name,
                tenant=tenant,
                model=model,
            ),
            actor,
        )

    def condemn(
        self, name: str, rev: str, reason: str, message: str, *, actor: str = "daemon"
    ) -> "Future[bool]":
        """Quarantine what serves; pointers stay.  False if `name` serves another revision."""
        return self._change(
            lambda c, at: commands.condemn(c, at, name, rev, reason, message), actor
        )

    def mark_missing(
        self, name: str, rev: str | None = None, *, actor: str = "daemon"
    ) -> "Future[bool]":
        """Its files are gone; pointers stay.  False if nothing changed.

        With `rev` only if that is what it serves when the change is made.
        """
        return self._presence(name, False, actor, rev)

    def mark_present(self, name: str, *, actor: str = "daemon") -> "Future[bool]":
        """Its files are back.  False if nothing changed."""
        return self._presence(name, True, actor)

    def set_pin(self, name: str, pinned: bool, *, actor: str = "daemon") -> "Future[bool]":
        """False if it was so already."""
        return self._settings(name, actor, pin=pinned)

    def set_priority(self, name: str, priority: int, *, actor: str = "daemon") -> "Future[bool]":
        """0 to 100, else invalid_value.  False if it was so already."""
        return self._settings(name, actor, priority=priority)

    def set_labels(
        self, name: str, labels: Mapping[str, str], *, actor: str = "daemon"
    ) -> "Future[bool]":
        """Replace all labels.  False if they were so already."""
        return self._settings(name, actor, labels=labels)

    def remove(
        self, name: str, tombstone: str | None = None, *, actor: str = "daemon"
    ) -> "Future[Removed]":
        """Forget a name; `tombstone` is the digest of content that stays away from it."""
        return self._change(
            lambda c, at: commands.remove(c, at, name, tombstone), actor, gone=(name,)
        )

    def record_packed(
        self,
        rev: str,
        layout: str,
        num_blocks: int,
        true_bytes: int,
        *,
        modules: Sequence[PackedModule] | None = None,
        actor: str = "packer",
    ) -> "Future[None]":
        """The packed file of `rev` for `layout` is in the store, whole.  Made read-only here.
        `modules`: what it holds, where that is something else than was registered."""

        def work(connection: Connection, at: Stamp) -> None:
            self.store.seal_packed(rev, layout)
            packed_rows.record_packed(
                connection,
                at,
                rev=rev,
                layout=layout,
                num_blocks=num_blocks,
                true_bytes=true_bytes,
                modules=modules,
            )

        return self._change(work, actor)

    def note_texts(self, found: Mapping[str, TextFacts]) -> "Future[tuple[str, ...]]":
        """Whose tokenizer each revision has, found in its stored files; returns those of which
        something else was known."""
        given = dict(found)
        return self._change(lambda c, at: commands.note_texts(c, at, given), journal.DAEMON)

    def forget_packed(
        self, rev: str, layouts: Collection[str], *, actor: str = "daemon"
    ) -> "Future[None]":
        """These packed files of `rev` leave the store; a later start does not look for them."""
        return self._change(lambda c, at: packed_rows.forget_packed(c, at, rev, layouts), actor)

    def touch_used(self, used: Mapping[str, float]) -> "Future[None]":
        """Times of last use, by name, batched by the caller; losing a batch is fine."""
        return self.changes.writer.submit(lambda c: commands.touch_used(c, used))

    def touch_tenants(
        self, names: Mapping[str, float], keys: Mapping[str, float]
    ) -> "Future[None]":
        """The same of tenants and key ids."""
        return self.changes.writer.submit(lambda c: touch_used(c, names, keys))

    def audit(
        self,
        action: str,
        *,
        actor: str,
        name: str = "",
        rev: str = "",
        result: str = "ok",
        message: str = "",
    ) -> "Future[None]":
        """One audit row for what the registry did not do itself, such as a refusal."""
        return self._change(
            lambda c, at: journal.write_audit(c, at, action, name, rev, result, message), actor
        )

    def audit_many(self, rows: Iterable[AuditRecord]) -> "Future[None]":
        """Several at once, each on the word of its own actor; ids and times are given here."""
        given = tuple(rows)

        def work(connection: Connection, at: Stamp) -> None:
            for r in given:
                journal.write_audit_of(
                    connection, at, r.actor, r.action, r.name, r.rev, r.result, r.message
                )

        return self._change(work, journal.DAEMON)

    # ------------------------------------------------------------- store and registry together
    def reconcile(self) -> "Future[StoreReport]":
        """At start, before anything is staged: make store and registry agree.

        Names whose files are gone become missing, lost packed files are forgotten, and revisions
        that no row knows (a crash before their registration) are removed, unless the registry was
        just recovered and may have forgotten them.  Folders that operations will go on filling
        stay.
        """

        def work(connection: Connection, at: Stamp) -> StoreReport:
            report = self.store.reconcile(
                queries.known_revs(connection), keep=stagings_in_use(connection, at.now)
            )
            commands.settle_files(connection, at, self.store, report.missing)
            return report

        def after(report: StoreReport) -> None:
            if not self.report.recovered:
                self.store.remove(report.unknown)

        return self._change(work, "daemon", after=after)

    def collect(self, leased: Collection[str] = ()) -> "Future[tuple[str, ...]]":
        """Remove revisions that no name points to and nobody has leased; returns them."""

        def after(revs: tuple[str, ...]) -> None:
            self.store.remove(revs)
            self._mirror.forget_revisions(revs)

        return self._change(
            lambda c, at: commands.drop_unused(c, at, set(leased)), "daemon", after=after
        )

    # ------------------------------------------------------------- pieces
    def _presence(
        self, name: str, present: bool, actor: str, only: str | None = None
    ) -> "Future[bool]":
        return self._change(
            lambda c, at: commands.set_presence(c, at, name, present=present, only=only), actor
        )

    def _settings(
        self,
        name: str,
        actor: str,
        *,
        labels: Mapping[str, str] | None = None,
        pin: bool | None = None,
        priority: int | None = None,
    ) -> "Future[bool]":
        return self._change(
            lambda c, at: commands.change_settings(
                c, at, name, labels=labels, pin=pin, priority=priority
            ),
            actor,
        )

"""What is done to a registry while no daemon runs: restore, rebuild, export, import.

Goes in: a state directory and its store.  Comes out: a registry that the next start takes as it is,
and what was lost on the way.  `restore`, `rebuild` and `take_in` hold the state's lock, or raise
LockHeld.  What was there before is kept aside, never deleted.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace
from sqlalchemy import update

from lorad.errors import LoradError, RegistryUnusable
from lorad.registry import backups as copies
from lorad.registry import commands, migrate, queries, recover, sqlite, tenants
from lorad.registry.backups import Backups
from lorad.registry.cards import Cards
from lorad.registry.checking import need_backup
from lorad.registry.entries import entry_of, failed, outcome
from lorad.registry.lock import state_lock
from lorad.registry.models import adapters
from lorad.registry.registry import FILE, Registry
from lorad.registry.store import Store
from lorad.wire_registry import Imported, RegistryEntry, RegistryRestored


@dataclass(frozen=True, slots=True)
class Place:
    """Where a registry lives."""

    state: Path
    store: Path

    @property
    def database(self) -> Path:
        return self.state / FILE


def entries(file: Path) -> tuple[RegistryEntry, ...]:
    """Every name of a backup, by name; the file stays as it is, of whatever schema.

    RegistryUnusable for what is none.
    """
    need_backup(file)
    with tempfile.TemporaryDirectory(prefix="lorad-") as folder:
        copy = Path(folder) / FILE
        sqlite.backup(file, copy, lambda: None)
        migrate.upgrade(copy, migrate.inspect(copy).version)
        engine = sqlite.reader_engine(copy)
        try:
            with engine.connect() as connection:
                found = [adapter for adapter, _ in queries.changed_since(connection, -1)]
        finally:
            engine.dispose()
    return tuple(entry_of(adapter) for adapter in sorted(found, key=lambda a: a.name))


def restore(place: Place, file: Path, *, actor: str) -> RegistryRestored:
    """Put a copy of `file` in the registry's place."""
    need_backup(file)
    with state_lock(place.state):
        store = Store(place.store)
        cards = Cards(place.store / ".cards")
        cards.prepare()
        building = place.state / f"{FILE}.building"
        copies.remove_database(building)
        sqlite.backup(file, building, lambda: None)
        migrate.upgrade(building, migrate.inspect(building).version)
        # ahead of every card: they follow what is restored, and do not come back over it
        _move_ahead(building, cards.generation() + 1)
        copies.sync(building)
        before = _tenants(cards)
        kept = recover.set_aside(place.database, time.time(), "before")
        os.replace(building, place.database)
        copies.sync(place.state)
        done = _opened(place, store, actor, "registry.restore", kept, file)
        return replace(done, lost=(*_tenants_lost(before, _tenants(cards)), *done.lost))


def rebuild(place: Place, *, cards_only: bool, actor: str) -> RegistryRestored:
    """Make the registry anew, of the newest good backup and the cards, or of the cards alone."""
    with state_lock(place.state):
        store = Store(place.store)
        cards = Cards(place.store / ".cards")
        cards.prepare()
        backups = Backups(place.state / ("no-backups" if cards_only else "backups"))
        if not (backups.newest_first() or cards.generation()):
            raise RegistryUnusable(
                f"there is nothing to rebuild from: no backup in {place.state / 'backups'}, "
                f"no card in {place.store / '.cards'}",
                hint="loractl registry restore FILE, or add the adapters again",
            )
        report = recover.OpenReport()
        kept = recover.set_aside(place.database, time.time(), "before")
        recover.rebuild(place.database, report, cards=cards, backups=backups, store=store)
        told = _opened(place, store, actor, "registry.rebuild", kept, report.restored_from)
        lost = [*report.lost, *told.lost]
        if report.rebuilt:
            lost.insert(0, "history, events, audit, operations and what rm took from the inbox")
        else:
            lost.insert(0, "events and audit since that backup")
        return replace(told, lost=tuple(lost))


def export(place: Place) -> tuple[RegistryEntry, ...]:
    """Every name of the registry as it is; RegistryUnusable without one."""
    need(place)
    return entries(place.database)


def need(place: Place) -> None:
    """RegistryUnusable where there is no registry."""
    if migrate.inspect(place.database).kind is migrate.Kind.ABSENT:
        raise RegistryUnusable(
            f"there is no registry at {place.database}",
            hint="--state-dir names the directory of a lorad that has run",
        )


def take_in(
    place: Place, items: Iterable[RegistryEntry], *, actor: str, dry_run: bool = False
) -> tuple[Imported, ...]:
    """Settings of names that are here, and names whose revision the store still has."""
    with state_lock(place.state):
        registry = Registry.open(place.state, store=Store(place.store))
        try:
            return tuple(_take_one(registry, place, item, actor, dry_run) for item in items)
        finally:
            registry.close()


def _take_one(
    registry: Registry, place: Place, item: RegistryEntry, actor: str, dry_run: bool
) -> Imported:
    before = registry.get(item.name)
    facts = None
    if before is None and item.rev and registry.store.has(item.rev):
        cards = Cards(place.store / ".cards")
        facts = registry.revision(item.rev) or cards.read_revision(item.rev)
    told = outcome(item, before, creatable=facts is not None)
    if dry_run or told.action in ("unchanged", "lacking"):
        return told
    try:
        if facts is not None:
            registry.register(
                item.name,
                tenant=item.tenant,
                model=item.model,
                source=item.source,
                revision=facts,
                labels=item.labels,
                pin=item.pinned,
                priority=item.priority,
                actor=actor,
            ).result()
        else:
            registry.set_pin(item.name, item.pinned, actor=actor).result()
            registry.set_priority(item.name, item.priority, actor=actor).result()
            registry.set_labels(item.name, item.labels, actor=actor).result()
    except LoradError as error:
        return failed(item, error)
    return told


# ----------------------------------------------------------------- pieces
def _move_ahead(database: Path, generation: int) -> None:
    engine = sqlite.writer_engine(database)
    try:
        with engine.begin() as connection:
            ahead = max(generation, queries.generation(connection) + 1)
            connection.execute(update(adapters).values(generation=ahead))
            commands.set_generation(connection, ahead)
            tenants.restore(connection, tenants.every(connection), ahead)
    finally:
        engine.dispose()


def _opened(
    place: Place, store: Store, actor: str, action: str, kept: Path | None, source: Path | None
) -> RegistryRestored:
    """Open it once as a start does, so that cards follow and what is missing is known."""
    registry = Registry.open(place.state, store=store)
    try:
        message = f"from {source.name}" if source else "from the cards"
        registry.audit(action, actor=actor, message=message).result()
        names = sum(registry.counts().values())
        here, known = store.revs(), registry.known_revs()
        lacking = [
            f"{record.name}: the files of {record.serving_rev[:12]} are not in the store"
            for record in registry.pointing()
            if record.serving_rev is not None and record.serving_rev not in here
        ]
    finally:
        registry.close()
    unnamed = len(here - known)
    notes = [f"{unnamed} revisions in the store belong to no name; a start removes them"]
    return RegistryRestored(
        names=names,
        kept_aside=str(kept) if kept else None,
        restored_from=str(source) if source else None,
        lost=tuple(lacking),
        notes=tuple(notes if unnamed else ()),
    )


def _tenants(cards: Cards) -> set[str]:
    """Names of tenants, as their card has them; none where it cannot be read."""
    try:
        card = cards.read_tenants()
    except (OSError, msgspec.MsgspecError):
        return set()
    return {tenant.name for tenant in card.tenants} if card else set()


def _tenants_lost(before: set[str], after: set[str]) -> Iterator[str]:
    if before - after:
        yield f"tenants that the backup does not know: {', '.join(sorted(before - after))}"
    if before and not after:
        yield "the last tenant: whoever reaches the inference socket may use every adapter"


def write_backup(database: Path, target: Path) -> None:
    """One consistent copy of a registry as `target`, while others write; whole or not at all."""
    temporary = target.with_name(f".{target.name}.part")
    copies.remove_database(temporary)
    try:
        with sqlite.translating(database):
            sqlite.backup(database, temporary, lambda: None)
        os.chmod(temporary, 0o600)
        copies.sync(temporary)
        os.replace(temporary, target)
        copies.sync(target.parent)
    finally:
        copies.remove_database(temporary)

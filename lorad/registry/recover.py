"""Opens registry.db whatever state it is in, and says what it had to do.

Goes in: the path, the cards, the backups, the store.  Comes out: a registry of the newest schema
and an `OpenReport`.  A broken file is kept aside as `.corrupt-TIME`; in its place comes the newest
good backup, or an empty one, and over it every card that is newer.  Nothing is ever an empty
start in silence, and nothing is deleted.
"""

import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
from sqlalchemy import Connection, Engine

from engine.adapters.states import State
from lorad.registry import backups as copies
from lorad.registry import commands, failpoints, migrate, queries, sqlite, tenants
from lorad.registry.backups import Backups
from lorad.registry.cards import Card, Cards
from lorad.registry.models import SCHEMA_VERSION
from lorad.registry.records import AdapterRecord, RevisionRecord
from lorad.registry.store import Store

Level = Literal["info", "warn", "error"]


@dataclass(slots=True)
class OpenReport:
    """What opening did.  `messages` is for people: level, text."""

    created: bool = False
    upgraded_from: int | None = None
    kept_aside: Path | None = None  # the broken file
    restored_from: Path | None = None  # a backup
    rebuilt: bool = False  # from the cards alone
    names_restored: list[str] = field(default_factory=list)
    names_removed: list[str] = field(default_factory=list)
    tenants_restored: bool = False
    lost: list[str] = field(default_factory=list)
    unnamed_revs: list[str] = field(default_factory=list)  # in the store, no name points there

    @property
    def recovered(self) -> bool:
        """Something was wrong, and an operator should know."""
        return bool(
            self.kept_aside
            or self.restored_from
            or self.rebuilt
            or self.names_restored
            or self.names_removed
            or self.tenants_restored
            or self.lost
        )

    def messages(self) -> tuple[tuple[Level, str], ...]:
        said: list[tuple[Level, str]] = []
        if self.kept_aside:
            said.append(("error", f"registry.db was damaged; it is kept as {self.kept_aside}"))
        if self.restored_from:
            said.append(("error", f"the registry was restored from {self.restored_from.name}"))
        if self.rebuilt:
            text = "the registry was rebuilt from the store; history, events and audit are lost"
            said.append(("error", text))
        if self.names_restored:
            text = f"{len(self.names_restored)} adapters were restored beside the database"
            said.append(("warn", text))
        if self.tenants_restored:
            said.append(("warn", "the tenants and their keys were restored beside the database"))
        if self.names_removed:
            said.append(("warn", f"{len(self.names_removed)} removed adapters stay removed"))
        said += [("error", text) for text in self.lost]
        if self.unnamed_revs:
            text = f"{len(self.unnamed_revs)} revisions in the store belong to no name"
            said.append(("warn", text))
        if self.upgraded_from is not None:
            said.append(("info", f"schema {self.upgraded_from} was upgraded to {SCHEMA_VERSION}"))
        return tuple(said)


def open_database(
    path: Path, *, cards: Cards, backups: Backups, store: Store, now: float
) -> OpenReport:
    """Make `path` a registry of the newest schema that holds every change the cards know.

    RegistryUnusable, with the file untouched, for a newer schema or another program's database.
    """
    report = OpenReport()
    found = migrate.inspect(path)
    if found.kind is migrate.Kind.ABSENT:
        if not (backups.newest_first() or cards.generation() or store.revs()):
            migrate.upgrade(path, 0)
            report.created = True
            return report
        set_aside(path, now)
        rebuild(path, report, cards=cards, backups=backups, store=store)
    elif found.kind is migrate.Kind.CORRUPT:
        report.kept_aside = set_aside(path, now)
        rebuild(path, report, cards=cards, backups=backups, store=store)
    else:
        if found.version < SCHEMA_VERSION:
            backups.take(path, _generation(path), now)
            failpoints.hit("migrate.backed_up")
            migrate.upgrade(path, found.version)
            report.upgraded_from = found.version
        if _generation(path) < cards.generation():  # it went back in time: its WAL is gone
            _lay_over(path, report, cards=cards, store=store)
    return report


def set_aside(path: Path, now: float, why: str = "corrupt") -> Path | None:
    """Rename the database and its companions; returns where the database went, if there was one."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    kept = path.with_name(f"{path.name}.{why}-{stamp}")
    number = 0
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.{why}-{stamp}-{number}")
    moved = None
    # the WAL goes first: left alone with a new database it would be played into it
    for source, target in zip(sqlite.companions(path), sqlite.companions(kept), strict=True):
        if source.exists():
            source.rename(target)
    if path.exists():
        path.rename(kept)
        moved = kept
    copies.sync(path.parent)
    failpoints.hit("recover.moved_aside")
    return moved


def rebuild(
    path: Path, report: OpenReport, *, cards: Cards, backups: Backups, store: Store
) -> None:
    """Build beside, then rename: a kill leaves no registry, and the next start builds again."""
    building = path.with_name(f"{path.name}.building")
    copies.remove_database(building)
    version = 0
    for backup in backups.newest_first():
        if copies.good(backup):
            shutil.copyfile(backup, building)
            version = migrate.inspect(building).version
            report.restored_from = backup
            break
    report.rebuilt = version == 0
    migrate.upgrade(building, version)
    _lay_over(building, report, cards=cards, store=store)
    copies.sync(building)
    failpoints.hit("recover.built")
    os.replace(building, path)
    copies.sync(path.parent)


def _generation(path: Path) -> int:
    engine = sqlite.reader_engine(path)
    try:
        with engine.connect() as connection:
            return queries.generation(connection)
    finally:
        engine.dispose()


def _lay_over(path: Path, report: OpenReport, *, cards: Cards, store: Store) -> None:
    """Write every card that is newer than the database into it, in one transaction."""
    engine = sqlite.writer_engine(path)
    try:
        _lay_cards(engine, report, cards, store)
    except Exception as error:
        translated = sqlite.translate(error, path)
        if translated is error:
            raise
        raise translated from error
    finally:
        engine.dispose()


def _lay_cards(engine: Engine, report: OpenReport, cards: Cards, store: Store) -> None:
    found, broken = cards.read()
    report.lost += [f"the card {name} cannot be read" for name in broken]
    here = store.revs()
    with engine.begin() as connection:
        reached = queries.generation(connection)
        for card in (c for c in found if c.generation > reached):
            if card.adapter is None:
                if commands.discard_name(connection, card.name):
                    report.names_removed.append(card.name)
                continue
            facts = _facts(card, cards, queries.revisions_by_rev(connection, store, _revs(card)))
            record = _reachable(card.adapter, here, {f.rev for f in facts})
            if record is None:
                report.lost.append(f"{card.name}: nothing is known of its revision any more")
                continue
            commands.restore(connection, card.generation, record, facts)
            report.names_restored.append(card.name)
        _lay_tenants(connection, report, cards, reached)
        commands.set_generation(connection, max(reached, cards.generation()) + 1)
        report.unnamed_revs = sorted(here - queries.live_revs(connection))


def _lay_tenants(connection: Connection, report: OpenReport, cards: Cards, reached: int) -> None:
    """Without its tenants a registry would let everybody use everything."""
    try:
        card = cards.read_tenants()
    except (OSError, msgspec.MsgspecError):
        report.lost.append("the tenants' card cannot be read: look at loractl tenant ls")
        return
    if card is not None and card.generation > reached:
        tenants.restore(connection, card.tenants, card.generation)
        report.tenants_restored = True


def _revs(card: Card) -> tuple[str, ...]:
    assert card.adapter is not None
    both = (card.adapter.serving_rev, card.adapter.candidate_rev)
    return tuple(rev for rev in both if rev is not None)


def _facts(card: Card, cards: Cards, known: dict[str, RevisionRecord]) -> Iterable[RevisionRecord]:
    """Facts of the card's revisions, from the database if it has them, else from their cards."""
    read = [known.get(rev) or cards.read_revision(rev) for rev in _revs(card)]
    return [revision for revision in read if revision is not None]


def _reachable(record: AdapterRecord, here: set[str], known: set[str]) -> AdapterRecord | None:
    """The record with only such pointers as lead somewhere; None if it leads nowhere."""
    serving = record.serving_rev if record.serving_rev in known else None
    candidate = record.candidate_rev if record.candidate_rev in known & here else None
    if record.stored_state is State.QUARANTINED:
        return replace(record, serving_rev=serving, candidate_rev=candidate)
    if serving is None and candidate is None:
        return None
    gone = serving is not None and serving not in here
    state = State.MISSING if gone else record.stored_state
    return replace(record, serving_rev=serving, candidate_rev=candidate, stored_state=state)

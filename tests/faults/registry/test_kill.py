"""kill -9 at random moments and at every named place: nothing acknowledged is lost."""

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lorad.registry.cards import Cards
from lorad.registry.queries import generation, known_revs
from lorad.registry.registry import Registry

#: Places that a working registry passes; the others belong to recovery and have tests of their own.
PLACES = (
    "store.file_synced",
    "store.before_rename",
    "store.renamed",
    "write.begun",
    "register.revision_inserted",
    "write.executed",
    "write.committed",
    "cards.written",
    "backup.copied",
    "gc.set_aside",
)


class Victim:
    """One state directory, its child, and the model of what should be in it."""

    def __init__(self, folder: Path, child: ModuleType, forker: Any) -> None:
        self.folder = folder
        self.child, self.forker = child, forker
        self.model = child.Model()
        self.acknowledged = self.applied_unacknowledged = 0
        self.generation = self.audited = 0

    def kill(
        self,
        seed: float,
        *,
        after: float | None,
        working: bool = True,
        failpoint: str = "",
        nth: int = 1,
    ) -> None:
        """Kill a child `after` seconds of work, or of its life; or at the nth pass of a place."""
        (self.folder / "journal").unlink(missing_ok=True)
        order = {
            "dir": str(self.folder),
            "seed": seed,
            "failpoint": failpoint,
            "nth": nth,
            "task": "work_and_collect" if failpoint == "gc.set_aside" else "work",
        }
        status = self.forker.run(order, kill_after=after, working=working)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        self.check()

    def check(self) -> None:
        """What is there is the model after every acknowledged change, and maybe some more."""
        journal = self.folder / "journal"
        lines = journal.read_text().splitlines() if journal.exists() else []
        intents = [json.loads(line[2:]) for line in lines if line.startswith(">")]
        acknowledged = len(lines) - len(intents)
        states = [self.model]
        for op in intents:
            states.append(self.child.apply(states[-1], op))
        registry = Registry.open(self.folder / "state")
        try:
            assert not registry.report.recovered, registry.report
            _store_is_whole(registry)
            seen, tenants = _picture(registry), _keys(registry.tenants.all())
            changes = _generation(registry) - self.generation + self.model.changes
            fitting = [
                n
                for n in range(acknowledged, len(states))
                if (_wanted(states[n]), states[n].tenants, states[n].changes)
                == (seen, tenants, changes)
            ]
            assert fitting, _explain(states[acknowledged:], {**seen, **tenants}, changes)
            self.model = states[fitting[0]]
            self.acknowledged += acknowledged
            self.applied_unacknowledged += fitting[0] - acknowledged
            newest = registry.audit_log(1)
            assert newest == () or newest[0].id == self.audited + changes - states[0].changes
            assert not registry.reconcile().result().missing
            _registry_and_store_agree(registry)
            self.generation = _generation(registry)
            audit = registry.audit_log(1)
            self.audited = audit[0].id if audit else 0
        finally:
            registry.close()
        _cards_follow(self.folder / "state", seen, tenants)


def _keys(records: Any) -> dict[str, str]:
    """Tenant -> the id of its one key, whose digest is that of the id here."""
    for record in records:
        for key in record.keys:
            assert key.digest == hashlib.sha256(key.id.encode()).hexdigest()
    return {record.name: ",".join(key.id for key in record.keys) for record in records}


def _wanted(model: Any) -> dict[str, Any]:
    return {name: vars(value) for name, value in model.names.items()}


def _picture(registry: Registry) -> dict[str, Any]:
    return {
        a.name: {
            "state": str(a.stored_state),
            "serving": a.serving_rev,
            "candidate": a.candidate_rev,
            "pinned": a.pinned,
            "priority": a.priority,
            "labels": dict(a.labels),
            "reason": a.reason,
        }
        for a in registry.list(limit=1000).items
    }


def _generation(registry: Registry) -> int:
    with registry._read() as connection:
        return generation(connection)


def _store_is_whole(registry: Registry) -> None:
    """Before anything is cleaned: what is visible is complete, and is what its name says."""
    for rev in registry.store.revs():
        files = sorted(registry.store.path(rev).iterdir())
        assert len(files) == 2, files
        for file in files:
            assert hashlib.sha256(file.read_bytes()).hexdigest() == rev
            assert file.stat().st_mode & 0o222 == 0


def _registry_and_store_agree(registry: Registry) -> None:
    with registry._read() as connection:
        assert known_revs(connection) == registry.store.revs()
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
    assert list((registry.store.directory / ".staging").iterdir()) == []


def _cards_follow(state: Path, seen: dict[str, Any], tenants: dict[str, str]) -> None:
    folder = Cards(state / "store" / ".cards")
    card = folder.read_tenants()
    assert _keys(card.tenants if card else ()) == tenants
    cards, broken = folder.read()
    there = {card.name: card.adapter for card in cards if card.adapter is not None}
    assert broken == []
    serving = {name: record.serving_rev for name, record in there.items()}
    assert serving == {name: record["serving"] for name, record in seen.items()}


def _explain(states: list[Any], seen: dict[str, Any], changes: int) -> str:
    wanted = [f"{state.changes}: {_wanted(state)}" for state in states]
    return "\n".join([f"{changes} changes: {seen}", *wanted])


def _kills(victim: Victim, count: int, seed: int) -> None:
    """Half at random moments, half at a named place."""
    rng = random.Random(seed)
    for number in range(count):
        if number % 8 == 1:
            victim.kill(rng.random(), after=rng.uniform(0.0, 0.03), working=False)
        elif number % 2:
            victim.kill(rng.random(), after=rng.uniform(0.0, 0.1))
        else:
            place = PLACES[number // 2 % len(PLACES)]
            often = place not in ("backup.copied", "gc.set_aside")
            nth = rng.randint(1, 12) if often else 1
            victim.kill(rng.random(), failpoint=place, nth=nth, after=None)
    assert victim.acknowledged > count
    more = victim.applied_unacknowledged
    print(f"{count} kills, {victim.acknowledged} acknowledged changes, {more} beyond them")


#: Each passes all places; more of them are slow.
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.late) for seed in range(2, 5))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_registry_loses_no_acknowledged_change(
    tmp_path: Path, child: ModuleType, forker: Any, seed: int
) -> None:
    _kills(Victim(tmp_path, child, forker), 20, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_five_hundred_kills_lose_no_acknowledged_change(
    tmp_path: Path, child: ModuleType, forker: Any, seed: int
) -> None:
    _kills(Victim(tmp_path, child, forker), 50, seed)


def test_a_lost_acknowledged_change_would_be_noticed(
    tmp_path: Path, child: ModuleType, forker: Any
) -> None:
    """The check itself can fail: undo one acknowledged change, and it says so."""
    victim = Victim(tmp_path, child, forker)
    victim.kill(7, failpoint="write.begun", nth=30, after=None)
    (tmp_path / "journal").unlink()
    registry = Registry.open(tmp_path / "state")
    registry.remove(next(iter(victim.model.names))).result()
    registry.close()
    with pytest.raises(AssertionError):
        victim.check()

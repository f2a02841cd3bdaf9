"""What one load asks of the step loop: as much beside a thousand residents as beside thirty."""

import itertools
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.adapters.host import HostCache
from engine.adapters.residency import Residency
from engine.adapters.slots import SlotTable
from engine.layout import MODULES
from engine.memory.pool import BlockPool
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer
from engine.messages import AddRevision, Load, PackedManifest, PackedModule

BLOCK, BLOCKS = 64, 40
LAYERS = 4
IN_RAM = 24
#: Calls of Python functions; one load took 224 of them when this was written.
MOST_CALLS = 240


class Copier:
    """Copies end with the next poll."""

    def __init__(self, pool: BlockPool, host: HostCache) -> None:
        self.pool, self.host, self.begun = pool, host, []

    def start(self, rev, blocks) -> None:
        self.host.hold(rev)
        self.pool.take_fences(blocks)
        self.begun.append(rev)

    def poll(self) -> list[str]:
        ended, self.begun = self.begun, []
        for rev in ended:
            self.host.let_go(rev)
        return ended


class Fleet:
    """Residency with its real neighbours, but for the copies; room for `room` adapters."""

    def __init__(self, folder: Path, room: int) -> None:
        num_blocks = room * BLOCKS + 500
        self.pool = BlockPool(num_blocks)
        prefix = PrefixIndex(self.pool, 16, time.monotonic)
        memory = Reclaimer(self.pool, prefix, kv_floor=500)
        size = IN_RAM * BLOCKS * BLOCK
        self.host = HostCache(block_bytes=BLOCK, budget_bytes=size)
        self.residency = Residency(
            slots=SlotTable(room + 8),
            host=self.host,
            copier=Copier(self.pool, self.host),
            room=memory,
            clock=time.monotonic,
            block_bytes=BLOCK,
            bytes_in_flight=size,
        )
        self._file = folder / "packed.bin"
        self._file.write_bytes(bytes(BLOCK * BLOCKS))
        self._ids, self._steps = itertools.count(1), itertools.count(1)

    def add(self, number: int) -> str:
        modules = tuple(PackedModule(n, name, 16, 1.0) for n in range(LAYERS) for name in MODULES)
        manifest = PackedManifest(
            rev=f"{number:064x}",
            path=str(self._file),
            layout="",
            num_blocks=BLOCKS,
            true_bytes=BLOCK * BLOCKS,
            max_rank=16,
            changes_kv=True,
            modules=modules,
        )
        self.residency.command(AddRevision(command_id=next(self._ids), manifest=manifest))
        return manifest.rev

    def load(self, revs, tier="gpu") -> None:
        for rev in revs:
            self.residency.command(Load(command_id=next(self._ids), rev=rev, tier=tier))
        limit = time.monotonic() + 20
        while self.residency.busy:
            assert time.monotonic() < limit, "loads do not end"
            self.step()

    def step(self) -> None:
        self.residency.advance()
        self.residency.take_answers()
        self.residency.take_events()
        self.pool.stamp = f"step {next(self._steps)}"


@pytest.fixture
def make(tmp_path):
    fleets = []

    def make(room: int) -> Fleet:
        fleets.append(Fleet(tmp_path, room))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.host.close()


def calls_of_loads(fleet: Fleet, room: int) -> list[int]:
    """Python functions that are called for each of eight loads, each into room that another has
    to leave, from host memory."""
    revs = [fleet.add(n) for n in range(room + 8)]
    for n in range(0, room, 16):
        fleet.load(revs[n : min(n + 16, room)])
    fleet.load(revs[room:], "ram")
    counts = []

    def note(frame, event, arg) -> None:
        counts[-1] += event == "call"

    for rev in revs[room:]:
        counts.append(0)
        sys.setprofile(note)
        fleet.load([rev])
        sys.setprofile(None)
        assert fleet.residency.state(rev) == "idle"
    assert sum(r.resident for r in fleet.residency.revisions()) == room, "one left for each"
    return counts


def test_a_load_is_as_much_work_beside_a_thousand_residents_as_beside_thirty(make) -> None:
    few, many = calls_of_loads(make(30), 30), calls_of_loads(make(1000), 1000)
    assert sorted(many)[4] <= sorted(few)[4] + 5
    assert sorted(many)[4] < MOST_CALLS


def test_adapters_that_are_alike_share_their_modules(make) -> None:
    fleet = make(2)
    revs = [fleet.add(n) for n in range(3)]
    first, *others = [fleet.residency.manifest(rev) for rev in revs]
    assert all(other.modules is first.modules for other in others)
    assert [other.rev for other in others] == revs[1:]


def test_modules_that_differ_stay_as_they_are(make) -> None:
    fleet = make(2)
    fleet.add(0)
    own = fleet.residency.manifest(f"{0:064x}")
    odd = replace(own, rev="odd", modules=(replace(own.modules[0], scaling=2.0), *own.modules[1:]))
    fleet.residency.command(AddRevision(command_id=99, manifest=odd))
    assert fleet.residency.manifest("odd") == odd

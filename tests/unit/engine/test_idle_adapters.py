"""Idle adapters in order: the same victims as if all were ranked each time, for the work of few."""

import random

import pytest

from engine.adapters.slots import SlotRow, SlotTable
from engine.memory.costs import Costs, Line
from engine.memory.pool import BlockPool
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer

POLICIES = ("cost", "lru", "fifo", "lfu")


class Source:
    """The owner of residency, as far as room goes: a slot table, and who has a host copy."""

    def __init__(self, policy: str, *, slots: int, blocks: int = 200) -> None:
        self.now = 1000.0
        self.table = SlotTable(slots)
        self.pool = BlockPool(blocks)
        prefix = PrefixIndex(self.pool, 4, lambda: self.now)
        costs = Costs(copy=Line(0.5, 1.0), read=Line(2.0, 10.0))
        self.memory = Reclaimer(self.pool, prefix, policy=policy, costs=costs)  # type: ignore[arg-type]
        self.memory.bind(self)
        self.copies: set[str] = set()
        self.evicted: list[str] = []
        self.num_ranked = 0
        rank = self.memory.adapter_rank

        def counted(adapter, now):
            self.num_ranked += 1
            return rank(adapter, now)

        self.memory.adapter_rank = counted

    def take_changed(self):
        return self.table.take_changed()

    def evict_idle(self, rev: str, cause: str) -> None:
        self.pool.release(self.table.free(self.table.find(rev)))
        self.copies.discard(rev)
        self.evicted.append(rev)

    def priority_of(self, identity: str) -> int:
        return 50

    def in_ram(self, rev: str) -> bool:
        return rev in self.copies

    def load(self, rev: str, count: int, **more) -> SlotRow | None:
        """It comes up at once; None without room."""
        needs = not self.table.num_free
        blocks = self.memory.take_adapter(count, rev, need_slot=needs, now=self.now)
        if blocks is None:
            return None
        more = {"pinned": False, "priority": 50} | more
        row = self.table.claim(rev, blocks, now=self.now, **more)
        self.copies.add(rev)
        row.ready = True
        self.table.note(row)
        return row

    def by_hand(self) -> list[SlotRow]:
        """Who may leave for a load, the next one first, from a look at all of them."""
        self.memory.log_seconds.clear()
        rows = [row for row in self.table.idle() if not row.awaited]
        rank = self.memory.adapter_rank
        return sorted(rows, key=lambda row: (rank(row, self.now), row.generation))


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_leaves_is_who_comes_first_when_all_are_ranked_anew(policy):
    draw = random.Random(7)
    shop = Source(policy, slots=24)
    loaded = 0

    def some_row() -> SlotRow:
        return draw.choice(list(shop.table.rows.values()))

    def step(what: str) -> None:
        row = some_row() if shop.table.rows else None
        if what == "load" or row is None:
            nonlocal loaded
            expected, before = shop.by_hand(), len(shop.evicted)
            loaded += 1
            priority = draw.choice((40, 50, 50, 50))
            shop.load(f"r{loaded}", draw.choice((2, 4, 4, 12)), priority=priority)
            left = shop.evicted[before:]
            assert left == [row.rev for row in expected[: len(left)]]
        elif what == "run":
            if row.refs:
                shop.table.release(row)
            else:
                shop.table.acquire(row, shop.now)
        elif what == "await":
            row.awaited = not row.awaited
            shop.table.note(row)
        elif what == "mark":
            shop.table.mark(row, pinned=draw.random() < 0.1, priority=draw.choice((40, 50)))
        elif what == "hold":
            row.hold, row.held_until = draw.random(), shop.now + draw.choice((5.0, 60.0))
            shop.table.note(row)
        elif what == "lose":
            shop.copies.discard(row.rev)
        else:
            shop.memory.note_load(draw.uniform(0.5, 90.0), draw.choice((2, 4, 12)))
            shop.memory.note_return(draw.random() < 0.7)

    for _ in range(2500):
        shop.now += draw.choice((0.25, 1.0, 3.0))
        step(draw.choice(("load", "load", "run", "run", "await", "mark", "hold", "lose", "cost")))
        if shop.now % 16.0 < 0.5:
            shop.table.check()
            shop.memory.check()
    assert len(shop.evicted) > 200


@pytest.mark.parametrize("policy", POLICIES)
def test_a_load_looks_at_one_adapter_of_each_kind_however_many_there_are(policy):
    shop = Source(policy, slots=1000, blocks=4000)
    for n in range(1000):
        shop.load(f"r{n}", 4)
    for n in range(0, 1000, 3):
        shop.copies.discard(f"r{n}")  # nobody is told
    shop.load("first", 4)  # each that lost its copy is looked at once, when it comes first
    for n in range(50):
        shop.num_ranked = 0
        assert shop.load(f"new{n}", 4)
        assert shop.num_ranked <= 2, "one with a host copy, one without"
    assert len(shop.evicted) == 51


def test_another_policy_ranks_those_that_are_here_already():
    shop = Source("lru", slots=2)
    for rev in ("old", "new"):
        shop.now += 10.0
        shop.load(rev, 4)
    row = shop.table.find("old")
    shop.table.acquire(row, shop.now + 1.0)
    shop.table.release(row)
    shop.memory.policy = "fifo"
    shop.load("next", 4)
    assert shop.evicted == ["old"]


def test_a_host_copy_that_came_back_unsaid_is_found_out():
    shop = Source("cost", slots=2)
    shop.load("a", 4)
    shop.copies.clear()
    shop.memory.check()
    shop.copies.add("a")
    with pytest.raises(AssertionError, match="nobody spoke of"):
        shop.memory.check()


def test_idle_blocks_are_known_without_looking_at_each_adapter():
    shop = Source("cost", slots=8, blocks=40)
    rows = [shop.load(f"r{n}", 4) for n in range(8)]
    assert shop.memory.kv_room(None) == 40 and shop.memory.kv_room("r3") == 36
    shop.table.acquire(rows[0], shop.now)
    shop.table.mark(rows[1], pinned=True, priority=50)
    assert shop.memory.kv_room(None) == 32 and shop.memory.kv_room("r0") == 32
    assert shop.memory.take_kv(9, "r2") is not None
    assert shop.evicted == ["r3"], "its own stays"
    shop.memory.check()

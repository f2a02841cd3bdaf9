"""Reclaimer and recency: who gives way, what never does."""

import math
from dataclasses import dataclass, field

import pytest

from engine.memory.costs import Costs, Line
from engine.memory.pool import BlockPool, Owner
from engine.memory.prefix import PrefixIndex
from engine.memory.reclaim import Reclaimer
from engine.recency import HALF_LIFE_SECONDS, Usage


@dataclass(eq=False)
class Adapter:
    rev: str
    blocks: list[int]
    usage: Usage
    loaded_at: float
    priority: int = 50
    awaited: bool = False
    served: int = 0
    hold: float = 0.0
    held_until: float = -math.inf
    generation: int = 0
    idle: bool = True


@dataclass
class Shop:
    """A pool with idle adapters and cached KV.  It is the AdapterSource too."""

    num_blocks: int = 20
    kv_floor: int = 0
    adapter_floor: int = 0
    policy: str = "cost"
    now: float = 0.0
    adapters: list[Adapter] = field(default_factory=list)
    gone: list[Adapter] = field(default_factory=list)
    evicted: list[tuple[str, str]] = field(default_factory=list)
    priorities: dict[str, int] = field(default_factory=dict)
    on_disk: set[str] = field(default_factory=set)  # without a host copy

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.prefix = PrefixIndex(self.pool, 4, lambda: self.now)
        self.memory = Reclaimer(
            self.pool,
            self.prefix,
            policy=self.policy,
            kv_floor=self.kv_floor,
            adapter_floor=self.adapter_floor,
            # A KV block costs 4, an adapter's 1, or 11 of one that is only on disk.
            costs=Costs(token_seconds=1.0, copy=Line(0.0, 1.0), read=Line(0.0, 10.0)),
        )
        self.memory.bind(self)

    def take_changed(self):
        return [*self.adapters, *self.gone]

    def evict_idle(self, rev, cause) -> None:
        adapter = next(a for a in self.adapters if a.rev == rev)
        self.adapters.remove(adapter)
        self.gone.append(adapter)
        adapter.idle = False
        self.pool.release(adapter.blocks)
        self.evicted.append((rev, cause))

    def priority_of(self, identity):
        return self.priorities.get(identity, 50)

    def in_ram(self, rev):
        return rev not in self.on_disk

    def adapter(self, rev, count, *, used=1, loaded_at=0.0, **more) -> Adapter:
        usage = Usage(self.now)
        for _ in range(used - 1):
            usage.touch(self.now)
        blocks = self.pool.allocate(count, Owner.ADAPTER)
        turn = len(self.adapters) + len(self.gone)
        self.adapters.append(Adapter(rev, blocks, usage, loaded_at, generation=turn, **more))
        return self.adapters[-1]

    def cache(self, tokens, identity="base", activation=0) -> list[int]:
        found = self.prefix.match([*tokens, 0], identity, activation=activation)
        blocks = found + self.pool.allocate(len(tokens) // 4 - len(found), Owner.KV)
        chain = self.prefix.keys(tokens, len(blocks), [], identity, "", activation)
        for i, block in enumerate(blocks):
            self.prefix.enter(chain, i, block, identity, activation)
        self.prefix.release(blocks)
        return blocks

    def left(self) -> list[str]:
        return [rev for rev, _ in self.evicted]


def test_free_blocks_are_taken_before_anybody_leaves():
    shop = Shop()
    shop.adapter("a", 4)
    shop.cache([1] * 16)
    assert len(shop.memory.take_kv(12, None)) == 12
    assert shop.left() == [] and shop.pool.counts.kv_cached == 4


def test_of_equally_used_things_the_one_cheaper_to_bring_back_goes():
    shop = Shop()
    shop.adapter("a", 4)
    shop.cache([1] * 64)
    assert shop.memory.take_kv(3, None) is not None
    assert shop.left() == ["a"] and shop.pool.counts.kv_cached == 16


def test_expected_reuse_outweighs_the_cost_of_bringing_back():
    shop = Shop()
    shop.adapter("hot", 4, used=10)
    shop.cache([1] * 64)
    assert shop.memory.take_kv(3, None) is not None
    assert shop.left() == [] and shop.pool.counts.kv_cached == 13


def test_priority_comes_before_cost():
    shop = Shop()
    shop.adapter("hot and unimportant", 4, used=100, priority=10)
    shop.adapter("important", 4, priority=90)
    shop.cache([1] * 48)
    assert shop.memory.take_kv(3, None) is not None
    assert shop.left() == ["hot and unimportant"]
    assert shop.memory.take_kv(1 + 12, None) is not None
    assert shop.left() == ["hot and unimportant"], "cached KV of priority 50 went before it"


def test_kv_of_a_revision_has_the_priority_of_that_revision():
    shop = Shop(priorities={"vip": 90})
    shop.cache([1] * 40, "vip")
    shop.cache([2] * 40)
    assert shop.memory.take_kv(10, None) is not None
    assert len(shop.prefix.find([1] * 41, "vip")) == 10


def test_adapters_with_queued_requests_leave_last():
    shop = Shop()
    shop.adapter("awaited", 4, priority=10, awaited=True)
    shop.adapter("other", 4, used=100, priority=90)
    shop.cache([1] * 48)
    assert shop.memory.take_kv(16, None) is not None
    assert shop.left() == ["other"]
    assert shop.memory.take_kv(4, None) is not None
    assert shop.left() == ["other", "awaited"]


def test_the_sequences_own_adapter_is_never_taken_for_its_kv():
    shop = Shop(num_blocks=8)
    shop.adapter("own", 4)
    assert shop.memory.take_kv(5, "own") is None
    assert shop.left() == []
    assert shop.memory.take_kv(5, None) is not None


def test_asking_for_too_much_changes_nothing():
    shop = Shop(num_blocks=8)
    shop.adapter("a", 4)
    held = shop.memory.take_kv(3, None)
    assert held and shop.memory.take_kv(6, None) is None
    assert shop.memory.take_adapter(6, "b", need_slot=False) is None
    assert shop.left() == [] and shop.pool.num_free == 1


@pytest.mark.parametrize(
    ("policy", "first"), [("cost", "rare"), ("lru", "old"), ("fifo", "first in"), ("lfu", "rare")]
)
def test_each_policy_picks_its_own_victim(policy, first):
    shop = Shop(policy=policy)
    shop.adapter("old", 4, used=9, loaded_at=2.0)
    shop.now = 60.0
    shop.adapter("rare", 4, loaded_at=3.0)
    shop.now = 61.0
    shop.adapter("first in", 4, used=5, loaded_at=1.0)
    assert shop.memory.take_adapter(9, "new", need_slot=False) is not None
    assert shop.evicted == [(first, policy)]


def test_adapters_never_take_the_floor_of_kv():
    shop = Shop(kv_floor=10)
    shop.adapter("a", 6)
    assert shop.memory.take_adapter(5, "b", need_slot=False) is not None
    assert shop.left() == ["a"], "ten blocks are free, and are not for adapters"
    assert shop.memory.take_adapter(6, "c", need_slot=False) is None
    assert not shop.memory.fits_adapter(11, beside=0)
    assert shop.memory.fits_adapter(10, beside=0)


def test_running_kv_never_takes_the_floor_of_adapters():
    shop = Shop(adapter_floor=6)
    assert shop.memory.take_kv(15, None) is None
    assert shop.memory.take_kv(14, None) is not None
    assert shop.memory.take_adapter(6, "a", need_slot=False) is not None


def test_adapters_within_their_floor_stay_while_cached_kv_can_go():
    shop = Shop(adapter_floor=4)
    shop.adapter("a", 4)
    shop.cache([1] * 64)
    assert shop.memory.take_kv(10, None) is not None
    assert shop.left() == []


@pytest.mark.parametrize(
    ("floor", "gone", "cached"),
    [
        (3, [], 15),  # both fit the floor: cached KV lies on room of theirs
        (2, ["a"], 16),  # without "a" they hold no less than the floor
        (0, ["a"], 16),
    ],
)
def test_an_adapter_takes_the_room_of_its_floor_from_cached_kv_and_not_from_another(
    floor, gone, cached
):
    shop = Shop(adapter_floor=floor)
    shop.adapter("a", 1)
    shop.cache([1] * 64)  # a block of it costs more than one of "a"
    shop.pool.allocate(2, Owner.KV)  # of somebody who runs
    assert shop.pool.num_free == 1
    assert shop.memory.take_adapter(2, "b", need_slot=False) is not None
    assert (shop.left(), shop.pool.counts.kv_cached) == (gone, cached)


def test_a_missing_slot_makes_an_adapter_leave_though_blocks_are_free():
    shop = Shop()
    shop.adapter("a", 2)
    assert shop.memory.take_adapter(2, "b", need_slot=True) is not None
    assert shop.left() == ["a"]
    assert shop.memory.take_adapter(2, "c", need_slot=True) is None, "nobody is idle"


def test_loads_leave_adapters_with_queued_requests_alone():
    shop = Shop(num_blocks=6)
    shop.adapter("awaited", 4, awaited=True)
    assert shop.memory.take_adapter(4, "b", need_slot=False) is None
    shop.memory.reserve("b", 4)
    assert shop.memory.take_adapter(4, "b", need_slot=False) is not None
    assert shop.left() == ["awaited"]


def test_a_starving_adapter_leaves_one_that_has_just_come_up_to_its_requests():
    for served, now, taken in ((False, 0.9, False), (True, 0.9, True), (False, 1.1, True)):
        shop = Shop(num_blocks=6)
        shop.adapter("fresh", 4, awaited=True, served=served)
        shop.memory.reserve("b", 4)
        blocks = shop.memory.take_adapter(4, "b", need_slot=False, now=now)
        assert (blocks is not None) == taken, (served, now)


def test_reserved_room_is_for_one_revision_alone():
    shop = Shop(num_blocks=10)
    shop.memory.reserve("starving", 6)
    assert shop.memory.kv_room(None, admission=True) == 4
    assert shop.memory.kv_room(None) == 10, "sequences that run may grow"
    assert shop.memory.take_adapter(5, "other", need_slot=False) is None
    assert shop.memory.take_adapter(6, "starving", need_slot=False) is not None
    shop.memory.reserve(None)
    assert shop.memory.kv_room(None, admission=True) == 4


def test_measurements_correct_the_assumed_costs():
    costs = Costs(token_seconds=1.0, copy=Line(0.0, 1.0), read=Line(5.0, 1.0))
    for _ in range(100):
        costs.observe_prefill(2.0, 1000)
        costs.copy.observe(8.0, 2)
        costs.read.observe(0.5, 2)
    assert costs.token_seconds == pytest.approx(0.002, rel=0.1)
    assert costs.to_load(2, in_ram=True) == pytest.approx(8.0, rel=0.1)
    assert costs.to_load(2, in_ram=False) == pytest.approx(8.5, rel=0.1)


def test_loads_of_several_sizes_tell_what_a_load_costs_whatever_its_size():
    line = Line(0.0, 41e-6)
    for _ in range(400):
        for blocks in (10, 40, 160):
            line.observe(0.005 + 50e-6 * blocks, blocks)
    assert line.fixed == pytest.approx(0.005, rel=0.1)
    assert line.each == pytest.approx(50e-6, rel=0.1)


def test_a_host_copy_is_worth_as_much_as_host_memory_is_seen_to_keep():
    costs = Costs(copy=Line(0.0, 1.0), read=Line(0.0, 10.0))
    assert costs.to_return(2, in_ram=True) == 2.0
    for _ in range(100):
        costs.observe_return(kept=False)
    assert costs.to_return(2, in_ram=True) == pytest.approx(22.0, rel=0.01)
    assert costs.to_return(2, in_ram=False) == 22.0
    assert costs.to_load(2, in_ram=True) == 2.0, "what is there now is there"


def test_uses_age_and_the_order_of_heat_does_not_depend_on_when_one_looks():
    often, late = Usage(0.0), Usage(0.0)
    for _ in range(3):
        often.touch(0.0)
    assert often.count == 4.0
    late.touch(HALF_LIFE_SECONDS)
    assert late.count == pytest.approx(1.5)
    assert often.heat > late.heat
    late.touch(HALF_LIFE_SECONDS)
    assert often.heat < late.heat, "2.5 uses now against 4 a half-life ago"


def test_blocks_of_activated_loras_leave_before_the_base_blocks_under_them() -> None:
    """However cheap those are: without them nothing behind them could be found."""
    shop = Shop(num_blocks=8, priorities={"base": 0})
    first = shop.cache(range(16), "one", activation=8)
    second = shop.cache(range(16), "two", activation=8)
    assert first[:2] == second[:2] and shop.pool.num_free == 2
    taken = shop.memory.take_kv(5, None)
    assert not {*first[:2]} & {*taken} and len({*first[2:], *second[2:]} & {*taken}) == 3
    taken += shop.memory.take_kv(3, None)
    shop.prefix.check()
    assert len(taken) == 8 and len(shop.prefix) == 0


def test_what_goes_on_from_an_evicted_base_block_is_not_evicted_twice() -> None:
    """A base block whose own copy of a successor is in use gives way with what lies behind it."""
    shop = Shop(num_blocks=8, priorities={"base": 0, "rev": 90})
    tokens = range(16)
    cached = shop.cache(range(8))
    chain = shop.prefix.keys(tokens, 4, [], "rev", "", 8)
    own = shop.pool.allocate(2, Owner.KV)
    for i, block in enumerate(own, start=2):
        shop.prefix.enter(chain, i, block, "rev", 8)
    shop.prefix.release(own[1:])  # its end is cached, its middle in use
    other = shop.cache([9] * 4, "rev")
    taken = shop.memory.take_kv(7, None)
    assert taken is not None and {*cached, own[1], *other} <= {*taken}
    shop.prefix.check()
    assert shop.pool.num_free == 0 and len(shop.prefix) == 0


# ------------------------------------------------------------------- what bringing back costs
def test_one_that_is_only_on_disk_is_dearer_than_one_with_a_host_copy():
    shop = Shop(on_disk={"disk"})
    shop.adapter("disk", 4)
    shop.now = 100.0
    shop.adapter("ram", 4, used=5)
    assert shop.memory.take_adapter(13, "new", need_slot=False) is not None
    assert shop.left() == ["ram"], "five times as hot, and eleven times as cheap to bring back"


def test_a_host_memory_that_keeps_nothing_makes_no_difference():
    shop = Shop(on_disk={"disk"})
    for _ in range(200):
        shop.memory.note_return(kept=False)
    shop.adapter("disk", 4)
    shop.adapter("ram", 4, used=2)
    assert shop.memory.take_adapter(13, "new", need_slot=False) is not None
    assert shop.left() == ["disk"]


def test_of_equally_used_adapters_the_large_one_goes_where_loads_have_a_fixed_part():
    shop = Shop()
    shop.memory.costs.copy = Line(10.0, 1.0)
    shop.adapter("small", 2)
    shop.adapter("large", 8)
    assert shop.memory.take_adapter(11, "new", need_slot=False) is not None
    assert shop.left() == ["large"]


def test_a_count_of_uses_ages():
    """What was popular yesterday left last for ever, when counts were compared as they were."""
    shop = Shop(policy="lfu")
    shop.adapter("once popular", 4, used=100)
    shop.now = 8 * HALF_LIFE_SECONDS
    shop.adapter("new", 4, used=2)
    assert shop.memory.take_adapter(13, "x", need_slot=False) is not None
    assert shop.left() == ["once popular"]


def test_one_that_nobody_has_used_goes_first():
    shop = Shop()
    shop.adapter("used", 4)
    shop.now = 1000.0
    shop.adapter("unused", 4).usage = Usage(shop.now, count=0.0)
    assert shop.memory.take_adapter(13, "x", need_slot=False) is not None
    assert shop.left() == ["unused"]


@pytest.mark.parametrize("policy", ["cost", "lru", "fifo", "lfu"])
def test_a_hold_makes_others_go_first_until_it_ends(policy):
    for now, first in ((50.0, "other"), (60.0, "held")):
        shop = Shop(policy=policy)
        shop.adapter("held", 4, hold=1.0, held_until=60.0)
        shop.now = 1.0
        shop.adapter("other", 4, loaded_at=1.0)
        shop.now = now
        assert shop.memory.take_adapter(13, "new", need_slot=False) is not None
        assert shop.left() == [first], now


def test_a_hold_does_not_keep_one_before_others_that_are_used_much_more():
    shop = Shop()
    shop.adapter("held", 4, hold=1.0, held_until=60.0)
    shop.adapter("hot", 4, used=3)
    shop.adapter("of less priority", 4, used=3, priority=10)
    assert shop.memory.take_adapter(9, "a", need_slot=False) is not None
    assert shop.memory.take_adapter(4, "b", need_slot=False) is not None
    assert shop.left() == ["of less priority", "held"]


@pytest.mark.parametrize(("repeats", "left"), [(False, []), (True, ["used once"])])
def test_blocks_of_prompts_that_nobody_repeats_do_not_put_an_adapter_out(repeats, left):
    """They did: a block that was computed once counted as much as an adapter that was used once."""
    shop = Shop(num_blocks=40)

    def prompts(first, count):
        for n in range(first, first + count):
            blocks = shop.memory.take_kv(4, None)
            chain = shop.prefix.keys([n] * 16, 4, [], "base", "")
            for i, block in enumerate(blocks):
                shop.prefix.enter(chain, i, block, "base")
            shop.prefix.release(blocks)
            if repeats:
                found = shop.prefix.find([n] * 17, "base")
                shop.prefix.note("", 17, found, chain, 1.0)
            shop.now += 0.01

    prompts(0, 200)
    shop.pool.release(shop.memory.take_kv(4, None))
    shop.adapter("used once", 4)
    assert shop.prefix.reuse.expectation == 1.0 if repeats else shop.prefix.reuse.expectation < 0.1
    shop.pool.check()
    prompts(200, 20)
    assert shop.left() == left


# ------------------------------------------------------------------- however many there are
def test_a_shortage_looks_at_the_identities_that_have_changed_and_at_no_others():
    shop = Shop(num_blocks=4000)
    for n in range(1000):
        shop.now += 1.0
        shop.cache([n] * 16, f"r{n}")
    shop.memory.take_kv(1, None)
    looked_at = []
    oldest = shop.prefix.oldest
    shop.prefix.oldest = lambda identity: looked_at.append(identity) or oldest(identity)
    for _ in range(7):
        shop.memory.take_kv(1, None)
    assert looked_at == ["r0"] * 4 + ["r1"] * 3, "each after it has lost one"
    shop.prefix.share(shop.prefix.find([3] * 17, "r3"))
    shop.memory.take_kv(1, None)
    assert set(looked_at) == {"r0", "r1", "r3"}, "one that is in use again"
    shop.memory.check()


def test_cached_kv_follows_the_priority_of_its_revision():
    shop = Shop(num_blocks=12, priorities={"a": 40})
    for rev in ("a", "b", "c"):
        shop.cache([1] * 16, rev)

    def left() -> list[int]:
        return [len(shop.prefix.find([1] * 17, rev)) for rev in "abc"]

    assert shop.memory.take_kv(1, None) and left() == [3, 4, 4]
    shop.priorities["c"] = 10
    shop.memory.reprice("c")
    assert shop.memory.take_kv(2, None) and left() == [3, 4, 2]
    shop.priorities["b"] = 10
    with pytest.raises(AssertionError, match="b: 50"):
        shop.memory.check()

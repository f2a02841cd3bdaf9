"""PrefixIndex: what is found, what is never found, and who leaves first."""

import gc

import pytest

from engine.memory.pool import BlockPool, Owner
from engine.memory.prefix import Entry, PrefixIndex, block_key, root_key


class Cache:
    """An index of 4-token blocks, and sequences that pass through it."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.now = 0.0
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, 4, lambda: self.now)

    def compute(self, tokens, identity="base", salt="", activation=0) -> list[int]:
        """A sequence computes `tokens` and stays; returns its blocks."""
        found = self.index.match(tokens, identity, salt, activation)
        count = len(tokens) // 4
        blocks = found + self.pool.allocate(count - len(found), Owner.KV)
        chain: list[bytes] = []
        self.index.keys(tokens, count, chain, identity, salt, activation)
        for i in range(len(found), count):
            self.index.enter(chain, i, blocks[i], identity, activation)
        self.index.check()
        return blocks

    def pass_through(self, tokens, identity="base", salt="", activation=0) -> list[int]:
        """The same, and it leaves."""
        self.now += 1
        blocks = self.compute(tokens, identity, salt, activation)
        self.index.release(blocks)
        self.index.check()
        return blocks

    def hit(self, tokens, identity="base", salt="", activation=0) -> int:
        return len(self.index.find(tokens, identity, salt, activation=activation))

    def evict_oldest(self, identity="base") -> int:
        entry = self.index.oldest(identity)
        assert entry is not None
        self.index.evict(entry)
        self.index.check()
        return entry.block


@pytest.fixture
def cache() -> Cache:
    return Cache()


ABC = list(range(12))


def test_a_prefix_is_found_block_by_block(cache):
    blocks = cache.pass_through(ABC)
    assert cache.index.find([*ABC, 99], "base") == blocks
    assert cache.index.find([*ABC[:8], 99, 98, 97, 96, 95], "base") == blocks[:2]
    assert cache.index.find([99, *ABC], "base") == []


def test_a_full_hit_still_computes_at_least_one_token(cache):
    cache.pass_through(ABC)
    assert cache.hit(ABC) == 2
    assert cache.hit(ABC[:8]) == 1
    assert cache.hit(ABC[:1]) == 0
    assert cache.hit([]) == 0


def test_a_partial_block_is_never_entered(cache):
    cache.pass_through(ABC[:7])
    assert cache.hit(ABC) == 1


@pytest.mark.parametrize("other", [("rev", ""), ("base", "tenant"), ("base\0", ""), ("bas", "e")])
def test_nothing_is_shared_between_identities_or_salts(cache, other):
    cache.pass_through(ABC)
    assert cache.hit(ABC, *other) == 0


def test_identity_and_salt_cannot_be_shifted_into_each_other():
    assert root_key("ab", "c") != root_key("a", "bc")
    assert root_key("", "a") != root_key("a", "")


def test_a_key_depends_on_every_token_and_on_all_that_came_before():
    root = root_key("base", "")
    assert block_key(root, [1, 2]) != block_key(root, [2, 1])
    assert block_key(root, [1, 2]) != block_key(block_key(root, [1, 2]), [1, 2])
    assert block_key(root, [1]) != block_key(root, [1 + 2**32])


def test_two_sequences_that_computed_the_same_file_it_once(cache):
    first = cache.compute(ABC)
    chain = cache.index.keys(ABC, 3, [], "base", "")
    second = cache.pool.allocate(3, Owner.KV)
    for i in range(3):
        cache.index.enter(chain, i, second[i], "base")
    cache.index.release(second)
    assert cache.pool.num_free == 32 - 3, "the second copy is free again"
    assert cache.index.find([*ABC, 1], "base") == first


def test_leaves_are_evicted_before_parents(cache):
    blocks = cache.pass_through(ABC)
    assert [cache.evict_oldest() for _ in range(3)] == blocks[::-1]
    assert cache.index.oldest("base") is None
    assert cache.pool.num_free == 32


def test_the_least_recently_used_leaf_goes_first(cache):
    one = cache.pass_through([1] * 4)
    two = cache.pass_through([2] * 4)
    cache.pass_through([1] * 8)
    assert cache.evict_oldest() == two[0]
    assert cache.evict_oldest() != one[0], "it has a successor"


def test_a_block_in_use_is_never_offered(cache):
    cache.compute(ABC)
    assert cache.index.oldest("base") is None


def test_a_cached_parent_under_a_block_in_use_can_still_go(cache):
    """Two sequences computed the same first block; only the later one's second block is filed."""
    first = cache.compute(ABC[:4])
    chain = cache.index.keys(ABC, 2, [], "base", "")
    own = cache.pool.allocate(2, Owner.KV)
    cache.index.enter(chain, 0, own[0], "base")
    cache.index.enter(chain, 1, own[1], "base")
    cache.index.release(first)
    assert cache.evict_oldest() == first[0]
    assert cache.hit(ABC) == 0 and len(cache.index) == 0
    cache.index.release(own)
    assert cache.pool.num_free == 32


def test_a_block_whose_parent_was_evicted_is_not_filed(cache):
    blocks = cache.pass_through(ABC[:4])
    chain = cache.index.keys(ABC, 2, [], "base", "")
    cache.evict_oldest()
    own = cache.pool.allocate(1, Owner.KV)
    cache.index.enter(chain, 1, own[0], "base")
    cache.index.release(own)
    assert cache.pool.num_free == 32 and blocks


def test_dropping_an_identity_frees_its_cache_and_leaves_the_others(cache):
    cache.pass_through(ABC, "rev")
    held = cache.compute([5] * 8, "rev")
    cache.pass_through(ABC, "base")
    cache.index.drop("rev")
    cache.index.check()
    assert cache.hit([*ABC, 1], "rev") == 0 and cache.hit([*ABC, 1], "base") == 3
    cache.index.release(held)
    assert cache.pool.num_free == 32 - 3
    assert cache.index.identities() == ["base"]


def test_a_very_long_chain_can_be_evicted_from_its_root():
    cache = Cache(5000)
    tokens = list(range(4 * 4000))
    blocks = cache.compute(tokens)
    entry = cache.index._by_block[blocks[0]]
    cache.index.release(blocks)
    cache.index.evict(entry)
    assert cache.pool.num_free == 5000


def test_a_hot_block_does_not_pile_up_stale_entries(cache):
    for _ in range(1000):
        cache.pass_through(ABC)
    assert len(cache.index._oldest["base"]) < 200
    assert len(cache.index) == 3


# ----------------------------------------------------------------- activated LoRAs
LONG = list(range(21))


@pytest.mark.parametrize("activation", range(1, 20))
def test_blocks_before_an_activation_are_the_bases_and_no_others(cache, activation):
    before = activation // 4
    cache.pass_through(LONG, "rev", activation=activation)
    assert cache.hit(LONG) == cache.hit(LONG, "other", activation=activation) == before
    assert cache.hit(LONG, "rev") == 0, "the same revision, active from the first row"
    assert cache.hit(LONG, "rev", activation=activation) == 5
    assert cache.hit(LONG, "rev", "salt", activation) == 0
    assert set(cache.index.identities()) == ({"base"} if before else set()) | {"rev"}


def test_an_activated_lora_finds_what_the_base_computed(cache):
    blocks = cache.pass_through(LONG)
    assert cache.index.find(LONG, "rev", activation=9) == blocks[:2]
    assert cache.pass_through(LONG, "rev", activation=9)[:2] == blocks[:2]
    assert cache.hit(LONG) == 5


def test_blocks_after_other_activations_are_other_blocks():
    """The tokens are equal, and so is the revision: what one has generated another may be sent."""
    cache = Cache(128)
    for activation in range(20):
        cache.pass_through(LONG, "rev", activation=activation)
        others = [cache.hit(LONG, "rev", activation=other) for other in range(activation + 1, 20)]
        assert all(hit <= (activation + 1 + i) // 4 for i, hit in enumerate(others))
        assert cache.hit(LONG, "rev", activation=activation) == 5


def test_an_adapter_that_changes_no_kv_shares_all_blocks_wherever_it_is_activated(cache):
    blocks = cache.pass_through(LONG)
    assert cache.index.find(LONG, "base", activation=9) == blocks


def test_what_leaves_waits_for_no_collection(cache):
    """A collection runs between two steps: entries point to each other, and must not in a ring."""

    def entries() -> int:
        return sum(type(o) is Entry for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = entries()
        for turn in range(3):
            cache.pass_through(range(100 * turn, 100 * turn + 12), identity="rev")
        assert len(cache.index) == 9
        cache.evict_oldest("rev")
        cache.index.drop("rev")
        assert entries() == before
    finally:
        gc.enable()


def test_a_dropped_revision_leaves_the_base_blocks_that_it_went_on_from(cache):
    base = cache.pass_through(LONG, "rev", activation=9)[:2]
    held = cache.compute(LONG, "rev", activation=13)
    cache.index.drop("rev")
    cache.index.check()
    assert cache.index.find(LONG, "rev", activation=9) == base
    assert cache.hit(LONG) == 3 and cache.hit(LONG, "rev", activation=13) == 3
    cache.index.release(held)
    assert [cache.evict_oldest() for _ in range(3)][1:] == base[::-1], "leaves again"
    assert cache.pool.num_free == 32


def test_a_base_block_that_a_cached_one_continues_is_not_offered_before_it(cache):
    blocks = cache.pass_through(LONG, "rev", activation=9)
    assert cache.index.oldest("base") is None
    assert [cache.evict_oldest("rev") for _ in range(3)] == blocks[:1:-1]
    assert [cache.evict_oldest() for _ in range(2)] == blocks[1::-1]


def test_an_evicted_base_block_takes_along_what_went_on_from_it(cache):
    blocks = cache.pass_through(LONG, "rev", activation=9)
    cache.index.evict(cache.index._by_block[blocks[0]])
    cache.index.check()
    assert len(cache.index) == 0 and cache.pool.num_free == 32
    assert cache.index.identities() == []

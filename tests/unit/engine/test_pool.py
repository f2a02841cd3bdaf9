"""BlockPool: references, kept blocks, fences."""

import pytest

from engine.memory.pool import BlockPool, Owner, PoolCounts


def test_a_block_freed_twice_is_our_own_fault():
    pool = BlockPool(4)
    blocks = pool.allocate(2, Owner.KV)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks[:1])


def test_allocating_more_than_is_free_is_refused_and_takes_nothing():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="4 blocks asked, 3 free"):
        pool.allocate(4, Owner.ADAPTER)
    assert pool.num_free == 3
    pool.check()


def test_a_shared_block_is_free_when_its_last_user_leaves():
    pool = BlockPool(2)
    (block,) = pool.allocate(1, Owner.KV)
    pool.share([block])
    pool.release([block])
    assert pool.counts == PoolCounts(free=1, kv_active=1, kv_cached=0, adapter=0)
    pool.release([block])
    assert pool.num_free == 2
    pool.check()


def test_only_kv_is_shared_or_kept():
    pool = BlockPool(2)
    (block,) = pool.allocate(1, Owner.ADAPTER)
    with pytest.raises(AssertionError, match="holds no KV"):
        pool.share([block])
    with pytest.raises(AssertionError, match="holds no KV"):
        pool.keep(block)


def test_a_kept_block_stays_as_cache_until_it_is_forgotten():
    pool = BlockPool(2)
    (block,) = pool.allocate(1, Owner.KV)
    pool.keep(block)
    assert pool.release([block]) == [block]
    assert pool.is_cached(block) and pool.num_free == 1
    pool.share([block])
    assert not pool.is_cached(block)
    pool.forget(block)
    assert pool.refs(block) == 1, "forgotten while in use: it stays with its user"
    pool.release([block])
    assert pool.num_free == 2
    pool.check()


def test_counts_add_up_to_the_pool():
    pool = BlockPool(10)
    pool.allocate(3, Owner.ADAPTER)
    kv = pool.allocate(4, Owner.KV)
    pool.keep(kv[0])
    pool.release(kv[:2])
    assert pool.counts == PoolCounts(free=4, kv_active=2, kv_cached=1, adapter=3)
    pool.check()


def test_a_fence_is_handed_to_the_next_owner_once():
    pool = BlockPool(2)
    blocks = pool.allocate(2, Owner.ADAPTER)
    pool.fence(blocks, "copy")
    pool.release(blocks)
    taken = pool.allocate(2, Owner.KV)
    assert pool.take_fences(taken) == ("copy",)
    assert pool.take_fences(taken) == ()


def test_a_freed_block_carries_the_stamp_of_the_work_launched_before_it():
    pool = BlockPool(2)
    first, second = pool.allocate(2, Owner.KV)
    pool.stamp = "step 1"
    pool.release([first])
    pool.stamp = "step 2"
    pool.fence([second], "copy")
    pool.release([second])
    taken = pool.allocate(2, Owner.ADAPTER)
    assert taken == [first, second], "first freed, first reused"
    assert pool.take_fences([first]) == ("step 1",)
    assert pool.take_fences([second]) == ("copy", "step 2")


def test_the_blocks_of_an_adapter_are_in_a_row_in_whatever_order_they_were_freed():
    pool = BlockPool(8)
    pool.release(reversed(pool.allocate(8, Owner.KV)))  # as a sequence leaves its own
    assert pool.allocate(4, Owner.KV) == [7, 6, 5, 4], "first freed, first reused"
    assert pool.allocate(4, Owner.ADAPTER) == [0, 1, 2, 3]


def test_a_block_that_comes_and_goes_waits_for_the_last_step_which_ends_after_the_others():
    pool = BlockPool(2)
    for step in ("step 1", "step 2", "step 2"):
        pool.stamp = step
        pool.release(pool.allocate(2, Owner.KV))
    assert pool.take_fences(pool.allocate(2, Owner.ADAPTER)) == ("step 2",)


def test_of_blocks_that_many_steps_have_freed_the_last_step_is_waited_for():
    pool = BlockPool(40)
    blocks = pool.allocate(40, Owner.KV)
    pool.fence(blocks[7:9], "copy")
    for step in (*range(20), *range(39, 19, -1)):  # the last to be launched has freed the 21st
        pool.stamp = f"step {step}"
        pool.release([blocks[step]])
    assert pool.take_fences(pool.allocate(40, Owner.ADAPTER)) == ("copy", "step 20")


def test_without_a_stamp_a_block_keeps_the_one_that_it_has():
    pool = BlockPool(1)
    pool.stamp = "step 1"
    pool.release(pool.allocate(1, Owner.KV))
    pool.stamp = None
    pool.release(pool.allocate(1, Owner.KV))
    assert pool.take_fences(pool.allocate(1, Owner.ADAPTER)) == ("step 1",)


def test_an_adapter_gives_back_just_its_own_blocks():
    pool = BlockPool(4)
    kv, own = pool.allocate(1, Owner.KV), pool.allocate(2, Owner.ADAPTER)
    pool.stamp = "step 1"
    pool.give_back(own)
    pool.check()
    assert pool.counts == PoolCounts(free=3, kv_active=1, kv_cached=0, adapter=0)
    for wrong in (own, kv):
        with pytest.raises(AssertionError):
            pool.give_back(wrong)
    assert pool.take_fences(pool.allocate(3, Owner.ADAPTER)) == ("step 1",)


def test_check_finds_a_lost_block():
    pool = BlockPool(2)
    pool.allocate(1, Owner.KV)
    pool._refs[0] = 0
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "twice in the free list"),
        (lambda pool: pool._free.append(0), "differ"),
        (lambda pool: pool._free.pop(), "differ"),
        (lambda pool: pool._owner.__setitem__(3, Owner.KV), "differ"),
        (lambda pool: pool._owner.__setitem__(slice(2, 4), [None, Owner.KV]), "owned and free"),
        (lambda pool: pool._refs.__setitem__(3, 1), "references to free blocks"),
        (lambda pool: pool._refs.__setitem__(0, -1), "-1 references"),
        (lambda pool: pool._refs.__setitem__(1, 2), "adapter block 1: 2 references"),
        (lambda pool: pool._kept.add(1), "adapter block 1"),
        (lambda pool: pool._kept.add(3), "are kept"),
        (lambda pool: setattr(pool, "_num_cached", 0), "counts drifted"),
        (lambda pool: setattr(pool, "_num_adapter", 2), "counts drifted"),
    ],
)
def test_check_finds_what_does_not_fit_together(spoil, found):
    pool = BlockPool(6)
    pool.allocate(1, Owner.KV)
    pool.allocate(1, Owner.ADAPTER)
    (cached,) = pool.allocate(1, Owner.KV)
    pool.keep(cached)
    pool.release([cached])
    pool.check()
    spoil(pool)
    with pytest.raises(AssertionError, match=found):
        pool.check()

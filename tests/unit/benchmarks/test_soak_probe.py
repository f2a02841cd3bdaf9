"""What a process tells of itself while it is soaked."""

import soak_probe

from engine.memory.pool import BlockPool, Owner
from engine.memory.prefix import PrefixIndex


def test_what_the_prefix_cache_has_for_its_blocks_is_no_object_that_grows() -> None:
    """A card's pool fills for longer than a run takes, and would look like a leak."""
    pool = BlockPool(1200)
    index = PrefixIndex(pool, 4, lambda: 0.0)
    before = soak_probe._counts()
    for first in range(100):
        tokens, chain = [first] * 40, []
        index.keys(tokens, 10, chain, "base", "")
        for n, block in enumerate(pool.allocate(10, Owner.KV)):
            index.enter(chain, n, block, "base")
    after = soak_probe._counts()
    assert after["cache_entries"] - before["cache_entries"] == 1000
    assert after["objects"] - before["objects"] < 100

"""Reclaimer: who gives way when blocks are short.

Goes in: how many blocks a sequence or an adapter needs.  Comes out: the blocks, after the cheapest
victims have left, or None with nothing changed.  Victims are cached KV that no sequence uses and
idle adapters that are not pinned; both are ranked by one cost, expected reuse x seconds to bring
back / blocks, within priority.  `memory/costs.py` knows the seconds.  Knows nothing of requests,
files or copies.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from engine.config import EvictionPolicy
from engine.memory.costs import Costs
from engine.memory.pool import BlockPool, Owner
from engine.memory.prefix import Entry, PrefixIndex
from engine.recency import HALF_LIFE_SECONDS, Usage


class IdleAdapter(Protocol):
    """A resident, unpinned adapter without running requests: a row of the slot table."""

    @property
    def rev(self) -> str: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def priority(self) -> int: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def loaded_at(self) -> float: ...
    @property
    def awaited(self) -> bool:
        """Requests for it are queued: it goes last."""
        ...

    @property
    def served(self) -> int:
        """Requests that have run on it since it came up."""
        ...

    @property
    def hold(self) -> float:
        """0 to 1: how much others are evicted before it, until `held_until`."""
        ...

    @property
    def held_until(self) -> float: ...


class AdapterSource(Protocol):
    """Whoever owns residency."""

    def idle(self) -> Iterable[IdleAdapter]: ...
    def evict_idle(self, rev: str, cause: str) -> None: ...
    def priority_of(self, identity: str) -> int: ...
    def in_ram(self, rev: str) -> bool:
        """Host memory has a copy of it now."""
        ...


#: A starving adapter leaves one that came up this lately to its queued requests.  If it took the
#: place at once, it would lose it as fast to the next that starves: nobody would ever be served.
GRACE_SECONDS = 1.0

#: Which of two idle adapters goes first, given log2 of what they cost; smaller goes.
POLICIES: dict[EvictionPolicy, Callable[[IdleAdapter, float], float]] = {
    "cost": lambda adapter, cost: cost,
    "lru": lambda adapter, cost: adapter.usage.last,
    "fifo": lambda adapter, cost: adapter.loaded_at,
    "lfu": lambda adapter, cost: adapter.usage.heat,  # a count that ages
}
#: What a hold of 1 adds: as if it were used twice as often, or a half-life later.  Enough where all
#: are used alike; one that is used more than twice as often still stays before it.
HOLDS: dict[EvictionPolicy, float] = {
    "cost": 1.0,
    "lru": HALF_LIFE_SECONDS,
    "fifo": HALF_LIFE_SECONDS,
    "lfu": 1.0,
}


class Reclaimer:
    """Hands out blocks of `pool`.  `bind` gives it the owner of adapters before its first use.

    `kv_floor` blocks are never held by adapters; `adapter_floor` blocks are never held by running
    sequences, and while adapters hold less, cached KV makes way before them: for KV and for another
    adapter alike.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixIndex,
        *,
        policy: EvictionPolicy = "cost",
        kv_floor: int = 0,
        adapter_floor: int = 0,
        costs: Costs | None = None,
    ) -> None:
        self.pool = pool
        self.prefix = prefix
        self.policy = policy
        self.kv_floor = kv_floor
        self.adapter_floor = adapter_floor
        self.costs = costs or Costs()
        #: (blocks, whether in host memory) -> log2 of seconds a block, within one shortage.
        self.log_seconds: dict[tuple[int, bool], float] = {}
        self._adapters: AdapterSource
        self._reserved_for: str | None = None
        self._reserved = 0

    def bind(self, adapters: AdapterSource) -> None:
        """Who knows the idle adapters, and evicts them."""
        self._adapters = adapters

    # ------------------------------------------------------------- reserving
    def reserve(self, rev: str | None, blocks: int = 0) -> None:
        """Hold `blocks` back from new sequences and other adapters until `rev` has them."""
        self._reserved_for, self._reserved = rev, blocks

    @property
    def reserved_for(self) -> str | None:
        return self._reserved_for

    # ------------------------------------------------------------- KV
    @property
    def kv_limit(self) -> int:
        """Blocks that running sequences may hold together."""
        return self.pool.num_blocks - self.adapter_floor

    def kv_room(self, keep: str | None, *, admission: bool = False) -> int:
        """Blocks that `take_kv` could give while `keep` stays resident.

        Admission respects what is reserved; growth of a running sequence does not.
        """
        counts = self.pool.counts
        idle = sum(len(a.blocks) for a in self._adapters.idle() if a.rev != keep)
        room = counts.free + counts.kv_cached + idle - (self._reserved if admission else 0)
        return min(room, self.kv_limit - counts.kv_active)

    def take_kv(self, count: int, keep: str | None) -> list[int] | None:
        """`count` blocks for a sequence on `keep` (None = base), or None."""
        if self.pool.counts.kv_active + count > self.kv_limit:
            return None
        if self.pool.num_free < count:
            if self.kv_room(keep) < count:
                return None
            victims = _Victims(self, [a for a in self._adapters.idle() if a.rev != keep])
            while self.pool.num_free < count:
                victims.evict_cheapest(self.adapter_floor)
        return self.pool.allocate(count, Owner.KV)

    # ------------------------------------------------------------- adapters
    def fits_adapter(self, count: int, beside: int) -> bool:
        """Whether `count` blocks could ever be had while `beside` blocks of others are fixed."""
        return count + beside + self.kv_floor <= self.pool.num_blocks

    def take_adapter(
        self, count: int, rev: str, *, need_slot: bool, now: float = math.inf
    ) -> list[int] | None:
        """`count` blocks for `rev`, or None.  `need_slot`: somebody has to leave a slot as well.

        Adapters whose requests are queued stay, unless the room is reserved for `rev`; and then
        those that came up less than GRACE_SECONDS before `now` and are have served nobody.
        """
        urgent = self._reserved_for == rev
        late = now - GRACE_SECONDS
        idle = [
            a
            for a in self._adapters.idle()
            if a.rev != rev and (not a.awaited or (urgent and (a.served or a.loaded_at <= late)))
        ]
        idle_blocks = sum(len(a.blocks) for a in idle)
        counts = self.pool.counts
        reserved = 0 if urgent else self._reserved
        excess = counts.adapter + reserved + count - (self.pool.num_blocks - self.kv_floor)
        room = counts.free + counts.kv_cached + idle_blocks - reserved
        if (need_slot and not idle) or excess > idle_blocks or room < count:
            return None
        victims = _Victims(self, idle)
        if need_slot:
            excess -= victims.evict_adapter()
        while excess > 0:
            excess -= victims.evict_adapter()
        while self.pool.num_free < count:
            victims.evict_cheapest(self.adapter_floor - count)  # which it holds itself then
        return self.pool.allocate(count, Owner.ADAPTER)

    def lacks_running_kv(self, count: int) -> bool:
        """`count` blocks are not to be had while all sequences go on, whatever is evicted."""
        counts = self.pool.counts
        idle = sum(len(a.blocks) for a in self._adapters.idle())
        return counts.free + counts.kv_cached + idle < count

    def note_load(self, seconds: float, blocks: int) -> None:
        """A copy of `blocks` blocks took `seconds`."""
        self.costs.copy.observe(seconds, blocks)

    def note_read(self, seconds: float, blocks: int) -> None:
        """A read of `blocks` blocks into host memory took `seconds`."""
        self.costs.read.observe(seconds, blocks)

    def note_return(self, kept: bool) -> None:
        """An adapter that left the GPU with a host copy comes back; whether the copy was kept."""
        self.costs.observe_return(kept)

    def give_back(self, blocks: Sequence[int]) -> None:
        """An adapter leaves its blocks; its copy has ended."""
        self.pool.release(blocks)

    def forget(self, identity: str) -> None:
        """Drop cached KV of a revision that is gone."""
        self.prefix.drop(identity)

    def check(self) -> None:
        """Raise AssertionError unless both floors hold."""
        counts = self.pool.counts
        assert counts.kv_active <= self.kv_limit, "KV below the adapters' floor"
        assert counts.adapter + self.kv_floor <= self.pool.num_blocks, "adapters below KV's floor"

    def place_of(self, rev: str) -> tuple[int, int]:
        """When an adapter would make way, 1 = the next, and of how many; 0: it would not."""
        now, idle = self.prefix.clock(), list(self._adapters.idle())
        own = next((self.adapter_rank(a, now) for a in idle if a.rev == rev), None)
        if own is None:
            return 0, len(idle)
        return 1 + sum(self.adapter_rank(a, now) < own for a in idle), len(idle)

    # ------------------------------------------------------------- ranking, for _Victims
    def adapter_rank(self, adapter: IdleAdapter, now: float) -> tuple[bool, int, float]:
        """Order in which adapters leave."""
        value = POLICIES[self.policy](adapter, self._cost_of_block(adapter))
        if adapter.held_until > now:
            value += HOLDS[self.policy] * adapter.hold
        return adapter.awaited, adapter.priority, value

    def adapter_cost(self, adapter: IdleAdapter) -> tuple[bool, int, float]:
        """Order between adapters and KV: log2 of the cost of one block."""
        return adapter.awaited, adapter.priority, self._cost_of_block(adapter)

    def _cost_of_block(self, adapter: IdleAdapter) -> float:
        """Asked for every idle adapter at once, and most are of one size: seconds are kept for the
        shortage.  With 1,000 of them the step of a load took 0.85 ms, and takes 0.53 (2 cores)."""
        kind = len(adapter.blocks), self._adapters.in_ram(adapter.rev)
        seconds = self.log_seconds.get(kind)
        if seconds is None:
            blocks = max(kind[0], 1)
            whole = self.costs.to_return(blocks, in_ram=kind[1])
            seconds = self.log_seconds[kind] = math.log2(max(whole, 1e-9) / blocks)
        return adapter.usage.heat + seconds

    def prefix_cost(self, entry: Entry) -> tuple[bool, int, float]:
        """The same for a cached block."""
        seconds = self.costs.to_compute(self.prefix.block_size)
        priority = self._adapters.priority_of(entry.identity)
        return False, priority, entry.usage.heat + math.log2(seconds)

    def evict_adapter(self, adapter: IdleAdapter) -> None:
        """Take the GPU from one adapter."""
        self._adapters.evict_idle(adapter.rev, self.policy)


class _Victims:
    """The candidates of one shortage, in order; dies with it."""

    def __init__(self, owner: Reclaimer, adapters: list[IdleAdapter]) -> None:
        self._owner = owner
        owner.log_seconds.clear()
        now = owner.prefix.clock()
        self._adapters = [(owner.adapter_rank(a, now), n, a) for n, a in enumerate(adapters)]
        heapq.heapify(self._adapters)  # the next one first
        self._prefixes: list[tuple[tuple[bool, int, float], bytes, Entry]] = []
        self._offered: set[bytes] = set()  # keys in `_prefixes`
        self._looked = False  # into the prefix cache

    def evict_adapter(self) -> int:
        """The next adapter goes; returns its blocks."""
        *_, adapter = heapq.heappop(self._adapters)
        blocks = len(adapter.blocks)
        self._owner.evict_adapter(adapter)
        return blocks

    def evict_cheapest(self, adapter_floor: int = 0) -> None:
        """Whatever costs least goes: one cached block, or one adapter."""
        if not self._looked:
            self._looked = True
            for identity in self._owner.prefix.identities():
                self._offer(identity)
        self._skip_those_gone()
        if self._adapters and (not self._prefixes or self._adapter_is_cheaper(adapter_floor)):
            self.evict_adapter()
            return
        entry = self._pop()
        self._owner.prefix.evict(entry)
        self._offer(entry.identity)
        if entry.parent is not None and entry.parent.identity != entry.identity:
            self._offer(entry.parent.identity)  # maybe its last successor was in the way

    def _adapter_is_cheaper(self, floor: int) -> bool:
        *_, adapter = self._adapters[0]
        if self._owner.pool.counts.adapter - len(adapter.blocks) < floor:
            return False
        return self._owner.adapter_cost(adapter) < self._prefixes[0][0]

    def _skip_those_gone(self) -> None:
        """One that continued an evicted block of another identity went with it."""
        while self._prefixes and not self._owner.prefix.holds(self._prefixes[0][2]):
            self._offer(self._pop().identity)

    def _pop(self) -> Entry:
        _, key, entry = heapq.heappop(self._prefixes)
        self._offered.discard(key)
        return entry

    def _offer(self, identity: str) -> None:
        entry = self._owner.prefix.oldest(identity)
        if entry is not None and entry.key not in self._offered:
            self._offered.add(entry.key)
            heapq.heappush(self._prefixes, (self._owner.prefix_cost(entry), entry.key, entry))

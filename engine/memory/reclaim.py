"""Reclaimer: who gives way when blocks are short.

Goes in: how many blocks a sequence or an adapter needs.  Comes out: the blocks, after the cheapest
victims have left, or None with nothing changed.  Victims are cached KV that no sequence uses and
idle adapters that are not pinned; both are ranked by one cost, expected reuse x seconds to bring
back / blocks, within priority.  `memory/costs.py` knows the seconds.  Knows nothing of requests,
files or copies.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.config import EvictionPolicy
from engine.memory.cached_kv import CachedKv
from engine.memory.costs import Costs
from engine.memory.idle_adapters import HOLDS, POLICIES, IdleAdapter, IdleAdapters, Rank
from engine.memory.pool import BlockPool, Owner
from engine.memory.prefix import Entry, PrefixIndex


class AdapterSource(Protocol):
    """Whoever owns residency."""

    def take_changed(self) -> Iterable[IdleAdapter]:
        """Those that have become idle, or are idle no more, or leave sooner or later than before,
        since the last call; each once."""
        ...

    def evict_idle(self, rev: str, cause: str) -> None: ...
    def priority_of(self, identity: str) -> int: ...
    def in_ram(self, rev: str) -> bool:
        """Host memory has a copy of it now."""
        ...


#: A starving adapter leaves one that came up this lately to its queued requests.  If it took the
#: place at once, it would lose it as fast to the next that starves: nobody would ever be served.
GRACE_SECONDS = 1.0


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
        self._policy: EvictionPolicy = policy
        self.kv_floor = kv_floor
        self.adapter_floor = adapter_floor
        self.costs = costs or Costs()
        #: (blocks, whether in host memory) -> log2 of seconds a block, within one shortage.
        self.log_seconds: dict[tuple[int, bool], float] = {}
        self._adapters: AdapterSource
        self._idle: IdleAdapters
        self._kv: CachedKv
        self._reserved_for: str | None = None
        self._reserved = 0

    def bind(self, adapters: AdapterSource) -> None:
        """Who knows the idle adapters, and evicts them."""
        self._adapters = adapters
        self._idle = IdleAdapters(self._policy, adapters.in_ram)
        self._kv = CachedKv(self.prefix, adapters.priority_of)

    @property
    def policy(self) -> EvictionPolicy:
        """Which of the adapters leave first."""
        return self._policy

    @policy.setter
    def policy(self, policy: EvictionPolicy) -> None:
        known = self.idle
        self._policy, self._idle = policy, IdleAdapters(policy, self._adapters.in_ram)
        for adapter in known:
            self._idle.update(adapter)

    @property
    def idle(self) -> IdleAdapters:
        """As of now."""
        for adapter in self._adapters.take_changed():
            self._idle.update(adapter)
        return self._idle

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
        counts, idle = self.pool.counts, self.idle.blocks
        if (kept := self._idle.find(keep)) is not None:
            idle -= len(kept.blocks)
        room = counts.free + counts.kv_cached + idle - (self._reserved if admission else 0)
        return min(room, self.kv_limit - counts.kv_active)

    def take_kv(self, count: int, keep: str | None) -> list[int] | None:
        """`count` blocks for a sequence on `keep` (None = base), or None."""
        if self.pool.counts.kv_active + count > self.kv_limit:
            return None
        if self.pool.num_free < count:
            if self.kv_room(keep) < count:
                return None
            kept = self._idle.find(keep)
            with self._idle.without([kept] if kept else []):
                victims = _Victims(self, self._idle, self._kv, awaited=True)
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
        urgent, idle = self._reserved_for == rev, self.idle
        spared = [own] if (own := idle.find(rev)) else []
        if urgent:
            late = now - GRACE_SECONDS
            spared += [a for a in idle.awaited.values() if not a.served and a.loaded_at > late]
        if not spared:  # usually, and a load's bookkeeping is dearest where it is seldom needed
            return self._take_adapter(count, urgent, need_slot)
        with idle.without(spared):
            return self._take_adapter(count, urgent, need_slot)

    def _take_adapter(self, count: int, urgent: bool, need_slot: bool) -> list[int] | None:
        idle, counts, reserved = self._idle, self.pool.counts, 0 if urgent else self._reserved
        excess = counts.adapter + reserved + count - (self.pool.num_blocks - self.kv_floor)
        blocks = idle.blocks - (0 if urgent else idle.awaited_blocks)
        nobody = len(idle) == (0 if urgent else len(idle.awaited))
        room = counts.free + counts.kv_cached + blocks - reserved
        if (need_slot and nobody) or excess > blocks or room < count:
            return None
        if need_slot or excess > 0 or counts.free < count:
            victims = _Victims(self, idle, self._kv, awaited=urgent)
            if need_slot:
                excess -= victims.evict_adapter()
            while excess > 0:
                excess -= victims.evict_adapter()
            while self.pool.num_free < count:
                victims.evict_cheapest(self.adapter_floor - count)  # which it holds itself then
        return self.pool.allocate(count, Owner.ADAPTER)

    def lacks_running_kv(self, count: int) -> bool:
        """`count` blocks are not to be had while all sequences go on, whatever is evicted."""
        counts, idle = self.pool.counts, self.idle.blocks
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
        self.pool.give_back(blocks)

    def reprice(self, identity: str) -> None:
        """The priority of KV under `identity` may be another than before."""
        self._kv.reprice(identity)

    def forget(self, identity: str) -> None:
        """Drop cached KV of a revision that is gone."""
        self.prefix.drop(identity)

    def check(self) -> None:
        """Raise AssertionError unless both floors hold."""
        counts = self.pool.counts
        assert counts.kv_active <= self.kv_limit, "KV below the adapters' floor"
        assert counts.adapter + self.kv_floor <= self.pool.num_blocks, "adapters below KV's floor"
        self.idle.check()
        self._kv.check()

    def place_of(self, rev: str) -> tuple[int, int]:
        """When an adapter would make way, 1 = the next, and of how many; 0: it would not."""
        now, idle = self.prefix.clock(), self.idle
        if (adapter := idle.find(rev)) is None:
            return 0, len(idle)
        own = self.adapter_rank(adapter, now)
        return 1 + sum(self.adapter_rank(a, now) < own for a in idle), len(idle)

    # ------------------------------------------------------------- ranking, for _Victims
    def adapter_rank(self, adapter: IdleAdapter, now: float) -> Rank:
        """Order in which adapters leave."""
        value = POLICIES[self.policy](adapter, self._cost_of_block(adapter))
        if adapter.held_until > now:
            value += HOLDS[self.policy] * adapter.hold
        return adapter.awaited, adapter.priority, value

    def adapter_cost(self, adapter: IdleAdapter) -> Rank:
        """Order between adapters and KV: log2 of the cost of one block."""
        return adapter.awaited, adapter.priority, self._cost_of_block(adapter)

    def _cost_of_block(self, adapter: IdleAdapter) -> float:
        """Several are asked for in one shortage, and most are of one size: seconds are kept."""
        kind = len(adapter.blocks), self._adapters.in_ram(adapter.rev)
        seconds = self.log_seconds.get(kind)
        if seconds is None:
            blocks = max(kind[0], 1)
            whole = self.costs.to_return(blocks, in_ram=kind[1])
            seconds = self.log_seconds[kind] = math.log2(max(whole, 1e-9) / blocks)
        return adapter.usage.heat + seconds

    def prefix_cost(self, entry: Entry) -> Rank:
        """The same for a cached block."""
        seconds = self.costs.to_compute(self.prefix.block_size)
        priority = self._adapters.priority_of(entry.identity)
        return False, priority, entry.usage.heat + math.log2(seconds)

    def evict_adapter(self, adapter: IdleAdapter) -> None:
        """Take the GPU from one adapter."""
        self._adapters.evict_idle(adapter.rev, self.policy)


class _Victims:
    """The candidates of one shortage, in order; dies with it.  `awaited`: adapters whose requests
    are queued may leave too."""

    def __init__(
        self, owner: Reclaimer, idle: IdleAdapters, cached: CachedKv, *, awaited: bool
    ) -> None:
        self._owner = owner
        self._awaited = awaited
        owner.log_seconds.clear()
        self._now = owner.prefix.clock()
        self._idle = idle
        self._idle.end_holds(self._now)
        self._cached = cached

    def evict_adapter(self) -> int:
        """The next adapter goes; returns its blocks."""
        adapter = self._next()
        assert adapter is not None, "room was promised and is not there"
        return self._evict(adapter)

    def evict_cheapest(self, adapter_floor: int = 0) -> None:
        """Whatever costs least goes: one cached block, or one adapter."""
        adapter, entry = self._next(), self._cached.first()
        if adapter and (entry is None or self._is_cheaper(adapter, entry, adapter_floor)):
            self._evict(adapter)
            return
        assert entry is not None, "room was promised and is not there"
        self._owner.prefix.evict(entry)

    def _next(self) -> IdleAdapter | None:
        adapter = self._idle.first(lambda a: self._owner.adapter_rank(a, self._now))
        return adapter if adapter and (self._awaited or not adapter.awaited) else None

    def _evict(self, adapter: IdleAdapter) -> int:
        self._idle.remove(adapter)
        self._owner.evict_adapter(adapter)
        return len(adapter.blocks)

    def _is_cheaper(self, adapter: IdleAdapter, entry: Entry, floor: int) -> bool:
        if self._owner.pool.counts.adapter - len(adapter.blocks) < floor:
            return False
        return self._owner.adapter_cost(adapter) < self._owner.prefix_cost(entry)

"""One consistent picture of the engine, for people and metrics.

Goes in: the owners of everything and the counters, between two steps.  Comes out: plain messages.
Changes nothing, and knows nothing of how it is shown.
"""

import os
from dataclasses import dataclass
from typing import Any

from engine.adapters.host import HostCache
from engine.adapters.residency import Residency
from engine.adapters.revision import Revision
from engine.adapters.slots import SlotTable
from engine.adapters.states import State
from engine.memory.pool import BlockPool
from engine.memory.prefix import PrefixIndex
from engine.stats import Stats
from engine.status_messages import EngineSnapshot, PoolStatus, PrefixStatus, RevisionStatus


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sequences of one revision, or of the base model."""

    running: int = 0
    waiting: int = 0


def _moving(r: Revision, now: float, host: HostCache) -> dict[str, Any]:
    """Of one that comes or goes; of all others nothing, for there may be thousands."""
    moving: dict[str, Any] = {}
    if r.state is State.LOADING:
        if r.load_began is not None:
            moving["load_source"], moving["load_seconds"] = r.load_source, now - r.load_began
        if r.reading:
            moving["arrived_bytes"] = host.arrived(r.rev)
    if r.drain is not None:
        moving["drain_cause"], moving["drain_seconds"] = r.drain.cause, now - r.since
        if r.drain.deadline is not None:
            moving["drain_left_seconds"] = r.drain.deadline - now
    return moving


@dataclass(frozen=True, slots=True)
class Painter:
    """Holds the owners; `paint` asks them."""

    pool: BlockPool
    prefix: PrefixIndex
    slots: SlotTable
    host: HostCache
    residency: Residency
    stats: Stats
    block_size: int
    block_bytes: int

    def paint(
        self,
        *,
        now: float,
        everybody: Traffic,
        base: Traffic,
        preemptions: int,
        late_masks: int,
        passes: int,
    ) -> EngineSnapshot:
        """The picture at `now` (seconds of the residency's clock)."""
        return EngineSnapshot(
            step=self.stats.steps,
            running=everybody.running,
            waiting=everybody.waiting,
            pool=self._pool(),
            slots_total=self.slots.num_slots,
            slots_used=len(self.slots.rows),
            ram_used_bytes=self.host.used_bytes,
            ram_limit_bytes=self.host.limit_bytes,
            revisions=tuple(self._revision(r, now) for r in self.residency.revisions()),
            base=self._base(base),
            prefix=self._prefix(),
            generated_tokens=self.stats.generated_tokens,
            prompt_tokens=self.stats.prompt_tokens,
            pooled_tokens=self.stats.pooled_tokens,
            preemptions=preemptions,
            late_masks=late_masks,
            forward_passes=passes,
            thrashes=self.residency.num_thrashes,
            pid=os.getpid(),
            base_steps=self.stats.base_steps.status(),
            lora_steps=self.stats.lora_steps.status(),
        )

    def _pool(self) -> PoolStatus:
        counts = self.pool.counts
        idle = sum(
            len(row.blocks) for row in self.slots.rows.values() if row.ready and not row.refs
        )
        return PoolStatus(
            total=self.pool.num_blocks,
            free=counts.free,
            kv_active=counts.kv_active,
            kv_cached=counts.kv_cached,
            adapter_active=counts.adapter - idle,
            adapter_idle=idle,
            block_bytes=self.block_bytes,
            block_size=self.block_size,
        )

    def _prefix(self) -> PrefixStatus:
        reuse, total = self.prefix.reuse, self.prefix.reuse.total
        return PrefixStatus(
            query_tokens=total.asked,
            hit_tokens=total.hit,
            lost_tokens=total.lost,
            saved_seconds=total.saved_seconds,
            found_blocks=reuse.found.trimmed(),
            lost_blocks=reuse.lost.trimmed(),
            reuse_distances=reuse.found.total + reuse.lost.total,
            evicted_blocks=reuse.num_evicted,
        )

    def _revision(self, r: Revision, now: float) -> RevisionStatus:
        hits = self.prefix.reuse.of(r.rev)
        row, num_bytes = r.row, r.num_blocks * self.block_bytes
        return RevisionStatus(
            rev=r.rev,
            state=r.state,
            slot=row.slot if row else None,
            pinned=r.pinned,
            priority=r.priority,
            max_rank=r.manifest.max_rank,
            gpu_bytes=num_bytes if row else 0,
            ram_bytes=num_bytes if self.host.ready(r.rev) else 0,
            num_blocks=r.num_blocks,
            leases=r.leases,
            running=r.running,
            waiting=r.waiting,
            loads=r.num_loads,
            evictions=r.num_evictions,
            thrashes=r.num_thrashes,
            idle_seconds=None if r.last_used is None else now - r.last_used,
            loaded_seconds=now - r.loaded_at if row and r.loaded_at is not None else None,
            prefix_query_tokens=hits.asked,
            prefix_hit_tokens=hits.hit,
            prefix_lost_tokens=hits.lost,
            prefix_saved_seconds=hits.saved_seconds,
            generated_tokens=self.stats.generated_by_rev[r.rev],
            draft_tokens=self.stats.drafted_by_rev[r.rev],
            accepted_tokens=self.stats.accepted_by_rev[r.rev],
            pooled_tokens=self.stats.pooled_by_rev[r.rev],
            error=r.error,
            **_moving(r, now, self.host),
        )

    def _base(self, traffic: Traffic) -> RevisionStatus:
        hits = self.prefix.reuse.of("")
        return RevisionStatus(
            rev="",
            state=State.ACTIVE if traffic.running else State.IDLE,
            leases=traffic.running + traffic.waiting,
            running=traffic.running,
            waiting=traffic.waiting,
            prefix_query_tokens=hits.asked,
            prefix_hit_tokens=hits.hit,
            prefix_lost_tokens=hits.lost,
            prefix_saved_seconds=hits.saved_seconds,
            generated_tokens=self.stats.generated_by_rev[None],
            draft_tokens=self.stats.drafted_by_rev[None],
            accepted_tokens=self.stats.accepted_by_rev[None],
            pooled_tokens=self.stats.pooled_by_rev[None],
        )

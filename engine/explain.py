"""Explainer: everything that decides whether one revision is served now, as plain numbers.

Goes in: the owners of everything and a revision, between two steps.  Comes out: an `Explanation`.
Changes nothing; takes one look at each slot, each group of the queue and each running sequence.
Knows nothing of names, and puts nothing into words: `lorad/service/explain.py` does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.adapters.residency import Residency
from engine.adapters.revision import Revision
from engine.adapters.slots import SlotRow
from engine.adapters.states import State
from engine.memory.reclaim import Reclaimer
from engine.status_messages import CostInputs, Explanation, Holder, RoomStatus

#: Holders that are named: the largest of those that cannot make way now.
MOST_HOLDERS = 8
#: The chance of reuse is told for this long.
CHANCE_SECONDS = 60.0


class Patience(Protocol):
    """Of the scheduler's limits, or of a configuration; seconds."""

    @property
    def starve_after(self) -> float: ...


class Line(Protocol):
    """Who decides what runs next: the scheduler, or the queue of an engine that pools."""

    @property
    def limits(self) -> Patience: ...
    def turn_of(self, rev: str | None) -> tuple[int, int]: ...
    def tokens_left(self, rev: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Explainer:
    """Holds the owners; `explain` asks them."""

    residency: Residency
    memory: Reclaimer
    scheduler: Line
    clock: Callable[[], float]
    block_bytes: int

    def explain(self, rev: str) -> Explanation | None:
        """None: the revision is unknown."""
        revision = self.residency.find(rev)
        if revision is None:
            return None
        now, drain = self.clock(), revision.drain
        turn, turns = self.scheduler.turn_of(rev)
        starving = self.memory.reserved_for == rev
        victim = self.residency.draining_for_room if starving else None
        return Explanation(
            rev=rev,
            state=revision.state,
            state_seconds=now - revision.since,
            removing=revision.removing,
            in_ram=self.residency.in_ram(rev),
            reading=revision.reading,
            running=revision.running,
            waiting=revision.waiting,
            queue_turn=turn,
            queue_turns=turns,
            wanted_seconds=_age(revision.wanted_since, now),
            blocked_seconds=_age(revision.blocked_since, now),
            starve_after=self.scheduler.limits.starve_after,
            starving=starving,
            victim=victim.rev if victim else "",
            victim_tokens=self.scheduler.tokens_left(victim.rev) if victim else 0,
            hopeless=self.residency.hopeless(rev),
            load_seconds=self._load_seconds(revision),
            eta_seconds=self._eta(revision, now),
            drain_cause=drain.cause if drain else "",
            drain_for=(drain.room_for or "") if drain else "",
            drain_seconds=drain.deadline - now if drain and drain.deadline is not None else None,
            tokens_left=self.scheduler.tokens_left(rev),
            room=self._room(rev),
            cost=self._cost(revision, now),
            error=revision.error,
        )

    def _load_seconds(self, revision: Revision) -> float:
        """From the tier where it is, if nothing is in the way."""
        if revision.resident:
            return 0.0
        in_ram = self.residency.in_ram(revision.rev)
        return self.memory.costs.to_load(revision.num_blocks, in_ram=in_ram)

    def _eta(self, revision: Revision, now: float) -> float | None:
        """Seconds until it is up, for one that is on its way: what began before it comes first."""
        if revision.state is not State.LOADING:
            return None
        costs = self.memory.costs
        ahead = self.residency.bytes_ahead(revision.rev) / self.block_bytes
        line = costs.read if revision.reading else costs.copy
        left = line.of(revision.num_blocks) + ahead * line.each - (now - revision.since)
        after = costs.copy.of(revision.num_blocks) if revision.reading else 0.0
        return max(left, 0.0) + after

    def _room(self, rev: str) -> RoomStatus:
        counts = self.memory.pool.counts
        rows = self.residency.slots.rows.values()
        idle = [row for row in self.residency.slots.idle() if not row.awaited and row.rev != rev]
        held = [row for row in rows if row.rev != rev and (row.refs or row.pinned or row.awaited)]
        held.sort(key=lambda row: len(row.blocks), reverse=True)
        return RoomStatus(
            total=self.memory.pool.num_blocks,
            free=counts.free,
            kv_active=counts.kv_active,
            kv_cached=counts.kv_cached,
            kv_floor=self.memory.kv_floor,
            idle=sum(len(row.blocks) for row in idle),
            num_idle=len(idle),
            free_slots=self.residency.slots.num_free,
            reserved_for=self.memory.reserved_for or "",
            holders=tuple(map(self._holder, held[:MOST_HOLDERS])),
            num_holders=len(held),
        )

    def _holder(self, row: SlotRow) -> Holder:
        return Holder(
            rev=row.rev,
            blocks=len(row.blocks),
            running=row.refs,
            pinned=row.pinned,
            draining=row.draining,
            tokens_left=self.scheduler.tokens_left(row.rev),
        )

    def _cost(self, revision: Revision, now: float) -> CostInputs:
        place, victims = self.memory.place_of(revision.rev)
        blocks, row = revision.num_blocks, revision.row
        rate = revision.usage.rate(now)
        in_ram = self.residency.in_ram(revision.rev)
        seconds = self.memory.costs.to_return(blocks, in_ram=in_ram)
        return CostInputs(
            policy=self.memory.policy,
            pinned=revision.pinned,
            priority=revision.priority,
            uses=revision.usage.at(now),
            uses_a_second=rate,
            reuse_chance=1.0 - math.exp(-rate * CHANCE_SECONDS),
            return_seconds=seconds,
            blocks=blocks,
            num_bytes=blocks * self.block_bytes,
            saved=rate * seconds / max(blocks * self.block_bytes, 1),
            place=place,
            victims=victims,
            loads=revision.num_loads,
            evictions=revision.num_evictions,
            thrashes=revision.num_thrashes,
            held_seconds=max(row.held_until - now, 0.0) if row and row.hold else 0.0,
        )


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else now - since

"""SlotTable: which revision sits in which slot, who runs on it, and who may leave.

Goes in: revisions with the blocks claimed for them.  Comes out: slot numbers.  Pure bookkeeping:
knows nothing of tiers, requests or where blocks come from.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.recency import Usage


@dataclass(slots=True, eq=False)
class SlotRow:
    """One revision on the GPU, or on its way there (`ready` False: its copy is not complete)."""

    slot: int
    rev: str
    blocks: Sequence[int]
    pinned: bool
    priority: int
    usage: Usage
    loaded_at: float
    generation: int  # differs whenever the slot was given anew
    ready: bool = False
    draining: bool = False  # takes no new requests
    awaited: bool = False  # requests for it are queued
    served: int = 0  # requests that have run on it since it came up
    hold: float = 0.0  # 0 to 1: evicted after others, until `held_until` (`adapters/thrash.py`)
    held_until: float = -math.inf
    refs: int = 0  # requests with rows running
    freed: bool = False

    @property
    def idle(self) -> bool:
        """It may leave: ready, nobody running, not pinned."""
        return self.ready and not (self.refs or self.pinned or self.freed)


class SlotTable:
    """`num_slots` slots.  Misuse raises AssertionError.

    Who writes into a row what decides whether it is idle, or when it leaves, says so with `note`.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.rows: dict[int, SlotRow] = {}
        self._by_rev: dict[str, SlotRow] = {}
        self._free = list(range(num_slots))  # a heap: low slots first
        self._generation = 0
        self.num_pinned = self.pinned_blocks = 0
        self._changed: dict[SlotRow, None] = {}  # in order of their first change

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, rev: str) -> SlotRow | None:
        """The row of `rev`, whether ready or not."""
        return self._by_rev.get(rev)

    def claim(
        self,
        rev: str,
        blocks: Sequence[int],
        *,
        pinned: bool,
        priority: int,
        now: float,
        usage: Usage | None = None,
    ) -> SlotRow:
        """Give `rev` a free slot.  Ask `num_free` first.  `usage`: what is known of it."""
        assert rev not in self._by_rev, f"{rev} has a slot"
        self._generation += 1
        row = SlotRow(
            slot=heapq.heappop(self._free),
            rev=rev,
            blocks=tuple(blocks),
            pinned=pinned,
            priority=priority,
            usage=usage or Usage(now),
            loaded_at=now,
            generation=self._generation,
        )
        self.rows[row.slot] = self._by_rev[rev] = row
        self._count_pin(row, pinned)
        return row

    def free(self, row: SlotRow) -> Sequence[int]:
        """Empty a slot that nobody runs on; returns the blocks that were in it."""
        assert row.refs == 0, f"slot {row.slot} has {row.refs} running requests"
        del self.rows[row.slot], self._by_rev[row.rev]
        heapq.heappush(self._free, row.slot)
        self._count_pin(row, -row.pinned)
        row.freed = True
        self.note(row)
        return row.blocks

    def mark(self, row: SlotRow, *, pinned: bool, priority: int) -> None:
        """Its revision was pinned or unpinned, or has another priority."""
        self._count_pin(row, pinned - row.pinned)
        row.pinned, row.priority = pinned, priority
        self.note(row)

    def note(self, row: SlotRow) -> None:
        """Whether `row` is idle, or when it leaves, may have changed."""
        self._changed[row] = None

    def take_changed(self) -> Iterable[SlotRow]:
        """Rows that were noted since the last call, idle or not, each once."""
        if not self._changed:
            return ()
        changed, self._changed = self._changed, {}
        return changed

    def acquire(self, row: SlotRow, now: float) -> None:
        """A request starts running on the row."""
        assert row.ready and not row.draining, f"slot {row.slot} takes no requests"
        if not row.refs:
            self.note(row)
        row.refs += 1
        row.served += 1
        row.usage.touch(now)

    def release(self, row: SlotRow) -> None:
        """A request has no more rows running."""
        assert row.refs > 0, f"slot {row.slot} is released twice"
        row.refs -= 1
        if not row.refs:
            self.note(row)

    def idle(self) -> Iterator[SlotRow]:
        """Rows that may leave.  Looks at all: who needs the next one keeps them in order."""
        return (r for r in self.rows.values() if r.idle)

    def running(self) -> Iterator[SlotRow]:
        """Rows that could be drained: running, not pinned, not draining yet."""
        return (r for r in self.rows.values() if r.refs and not r.pinned and not r.draining)

    def check(self) -> None:
        """Raise AssertionError unless slots, rows and blocks agree."""
        assert sorted([*self.rows, *self._free]) == list(range(self.num_slots)), "slot lost"
        assert {r.rev: r for r in self.rows.values()} == self._by_rev
        blocks = [b for r in self.rows.values() for b in r.blocks]
        assert len(blocks) == len(set(blocks)), "a block in two slots"
        assert all(r.ready or not r.refs for r in self.rows.values()), "running before ready"
        pins = [len(r.blocks) for r in self.rows.values() if r.pinned]
        assert (len(pins), sum(pins)) == (self.num_pinned, self.pinned_blocks), "pins drifted"

    def _count_pin(self, row: SlotRow, more: int) -> None:
        self.num_pinned += more
        self.pinned_blocks += more * len(row.blocks)

"""The drainer: no adapter waits for ever behind others that run.

Goes in: which revision starves, and who runs.  Comes out: at most one victim to drain, who has to
give way now (`Relief`), and whom the next seat and the next room belong to (`guests`).  Four acts,
each only if the one before was not enough:

1. From `starve_after` on the room of the starving one is reserved: idle adapters and cached KV go.
2. One victim that runs takes no more requests, and leaves when its last one has ended.
3. After `starve_after` once more the victim's requests are preempted: they go on later, from the KV
   that is still cached of them.  Nobody's request is ever aborted.
4. When the adapter is up, its first request has the next free seat; and if there is none by then,
   one that ranks last gives way.

Whoever runs has a turn of `starve_after`, and of GRACE_SECONDS at least, before it can be made to
give way, or adapters that all starve would push each other out for ever.  So one that starves alone
starts within two `starve_after` and its load; of many, each waits for as many turns.  Knows nothing
of blocks, tokens or steps.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.adapters.residency import Residency, Starving
from engine.adapters.slots import SlotRow
from engine.memory.reclaim import GRACE_SECONDS
from engine.sequence import Sequence as Seq


@dataclass(frozen=True, slots=True)
class Relief:
    """Sequences on `rev` give way now; None: the one that ranks last does, whatever it runs on."""

    rev: str | None


class Drainer:
    """`remaining`: steps until a revision's running requests have ended, at most."""

    def __init__(
        self,
        residency: Residency,
        starve_after: float,
        remaining: Callable[[str], int],
        clock: Callable[[], float],
    ) -> None:
        self._residency = residency
        self._starve_after = starve_after
        self._turn = max(starve_after, GRACE_SECONDS)
        self._remaining = remaining
        self._clock = clock
        self._due: dict[str, float] = {}  # who starves or starved, and when others must give way
        self._stuck: str | None = None  # a guest that found no seat or memory in the last pass

    @property
    def guests(self) -> dict[str | None, float]:
        """Revisions that starved, have a slot now, and have served nobody since; and from when on
        others give way to their first request."""
        slots = self._residency.slots
        return {rev: due for rev, due in self._due.items() if slots.find(rev) is not None}

    def act(self) -> Relief | None:
        """Once a step."""
        if self._due:
            waits = self._residency.awaits_first
            self._due = {rev: due for rev, due in self._due.items() if waits(rev)}
        starving = self._residency.starving(self._starve_after)
        reserved_before = self._residency.reserve_for(starving.rev if starving else None)
        if starving is None:
            return None
        due = self._due_of(starving)
        if not reserved_before:
            return None  # what is idle goes first
        victim = self._drain_somebody(starving.rev)
        return self._relief(starving.rev, victim) if self._clock() >= due else None

    def note_stuck(self, rev: str | None) -> None:
        """The first request of a guest, who is due, found no seat or no memory in this pass."""
        self._stuck = rev

    def who_gives_way(self, running: Sequence[Seq]) -> list[Seq]:
        """Once a step, of those that run, by rank: who leaves now, in this order.  With a victim
        all that are on it; for a guest that was stuck the one that ranks last of those that have
        run long enough."""
        relief, stuck = self.act(), self._stuck
        self._stuck = None
        leaving: list[Seq] = []
        if stuck in self.guests or (relief is not None and relief.rev is None):
            long = (seq for seq in reversed(running) if self.has_run_enough(seq.admitted_at))
            leaving += islice(long, 1)
        if relief is not None and relief.rev is not None:
            on_it = [seq for seq in reversed(running) if seq.rev == relief.rev]
            leaving += [seq for seq in on_it if seq not in leaving]
        return leaving

    def has_run_enough(self, since: float) -> bool:
        """Whether one that came up at `since` may be made to give way."""
        return since <= self._clock() - self._turn

    def _due_of(self, starving: Starving) -> float:
        """Its own load is nobody else's fault: victims have their time from when it was done.

        Once said it stays, or one that loses its slot while it waits for a seat would begin anew.
        """
        patience = self._starve_after
        due = max(starving.since + 2 * patience, starving.blocked_since + patience)
        if not starving.asked:
            return float("inf")
        return self._due.setdefault(starving.rev, due)

    def _drain_somebody(self, rev: str) -> SlotRow | None:
        """The victim that drains for `rev`; one at a time."""
        victim = self._residency.draining_for_room
        if victim is None:
            rows = self._residency.slots.running()
            victim = choose_victim(rows, self._remaining, self._fresh)
            if victim is not None:
                self._residency.drain_for(rev, victim.rev)
        return victim

    def _relief(self, rev: str, victim: SlotRow | None) -> Relief | None:
        if victim is not None:
            return None if self._fresh(victim) else Relief(victim.rev)
        # Nothing but the base runs, or pinned ones: it may be their KV that takes the room.
        return Relief(None) if self._residency.lacks_running_kv(rev) else None

    def _fresh(self, row: SlotRow) -> bool:
        return not self.has_run_enough(row.loaded_at)


def choose_victim(
    rows: Iterable[SlotRow], remaining: Callable[[str], int], fresh: Callable[[SlotRow], bool]
) -> SlotRow | None:
    """The lowest priority goes; rather none that just came up; then whose requests end soonest."""
    return min(rows, key=lambda row: (row.priority, fresh(row), remaining(row.rev)), default=None)

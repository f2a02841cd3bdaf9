"""Who is next: the waiting queue in VTC order, and the drainer that bounds starvation.

Goes in: sequences that wait, tokens that were served, a clock's word on who starves.  Comes out:
the order of admission, and at most one victim to drain.  Knows nothing of blocks or steps.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from engine.adapters.residency import Residency
from engine.adapters.slots import SlotRow
from engine.sequence import Sequence

#: A generated token costs a decode row each; prompt rows are computed many at a time (VTC's 1 : 2).
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0

#: Sequences of one priority on one revision (None = base); served in order of arrival.
Group = tuple[int, str | None]


class TokenCounters:
    """Virtual token counters, one per revision: whoever was served least is next.

    A revision that returns is lifted to the least of those that stayed, so that idling earns no
    credit.
    """

    def __init__(self) -> None:
        self._served: dict[str | None, float] = {}
        self._live: Counter[str | None] = Counter()

    def enter(self, rev: str | None) -> None:
        """A sequence arrives."""
        if not self._live[rev]:
            least = min((self._served[r] for r in self._live if r != rev), default=0.0)
            self._served[rev] = max(self._served.get(rev, 0.0), least)
        self._live[rev] += 1

    def leave(self, rev: str | None) -> None:
        """A sequence has ended."""
        self._live[rev] -= 1
        if not self._live[rev]:
            del self._live[rev]

    def charge(self, rev: str | None, *, prompt: int = 0, generated: int = 0) -> None:
        """Tokens served."""
        self._served[rev] += prompt * PROMPT_WEIGHT + generated * GENERATED_WEIGHT

    def served(self, rev: str | None) -> float:
        """Weighted tokens, comparable between revisions only."""
        return self._served.get(rev, 0.0)

    def forget(self, rev: str) -> None:
        """The revision is gone, unless it was added again and has requests already."""
        if rev not in self._live:
            self._served.pop(rev, None)


class WaitingQueue:
    """Sequences that are not running, grouped so that a cold adapter is skipped in one go."""

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._groups: dict[Group, OrderedDict[str, Sequence]] = {}
        self._tokens: dict[Group, int] = {}
        #: As they were counted: one that was preempted with a row under way gets its token here.
        self._counted: dict[str, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, seq: Sequence) -> None:
        """A new sequence."""
        group = _group(seq)
        self._groups.setdefault(group, OrderedDict())[seq.request_id] = seq
        self._tokens[group] = self._tokens.get(group, 0) + len(seq.tokens)
        self._counted[seq.request_id] = len(seq.tokens)
        self._count += 1

    def push_back(self, seq: Sequence) -> None:
        """A preempted sequence: before the new ones of its group.  Push the newest first."""
        self.push(seq)
        self._groups[_group(seq)].move_to_end(seq.request_id, last=False)

    def remove(self, seq: Sequence) -> None:
        """It was admitted, or has ended."""
        group = _group(seq)
        members = self._groups[group]
        del members[seq.request_id]
        self._tokens[group] -= self._counted.pop(seq.request_id)
        self._count -= 1
        if not members:
            del self._groups[group], self._tokens[group]

    def num_tokens(self, counts: Callable[[str | None], bool]) -> int:
        """Tokens of all who wait for a revision that `counts`."""
        return sum(n for (_, rev), n in self._tokens.items() if counts(rev))

    def of_revision(self, rev: str | None) -> list[Sequence]:
        """Everybody who waits for `rev`."""
        return [s for group, m in self._groups.items() if group[1] == rev for s in m.values()]

    def walk(self) -> "QueueWalk":
        """One pass over the queue, best first."""
        return QueueWalk(self._groups, self._counters)


class QueueWalk:
    """A pass: `next` gives the best candidate; its group is out unless `again` is said."""

    def __init__(
        self, groups: dict[Group, OrderedDict[str, Sequence]], counters: TokenCounters
    ) -> None:
        self._groups = groups
        self._counters = counters
        self._heap = [self._entry(group) for group in groups]
        heapq.heapify(self._heap)

    def next(self) -> Sequence | None:
        """Highest priority, then least served, then longest waiting."""
        if not self._heap:
            return None
        *_, group = heapq.heappop(self._heap)
        return next(iter(self._groups[group].values()))

    def again(self, seq: Sequence) -> None:
        """`seq` was admitted; its group stays in the pass, at its new place."""
        group = _group(seq)
        if group in self._groups:
            heapq.heappush(self._heap, self._entry(group))

    def _entry(self, group: Group) -> tuple[int, float, int, Group]:
        head = next(iter(self._groups[group].values()))
        return -group[0], self._counters.served(group[1]), head.order, group


class Drainer:
    """Makes room for a cold adapter that waited too long behind running ones.

    Room is reserved first; only if idle adapters and cached KV do not suffice, one running victim
    at a time stops taking requests.  Both are undone when the starving one is served or gone.
    """

    def __init__(
        self, residency: Residency, starve_after: float, remaining: Callable[[str], int]
    ) -> None:
        self._residency = residency
        self._starve_after = starve_after
        self._remaining = remaining  # steps until a revision's running requests have ended, at most

    def act(self) -> None:
        """Once a step."""
        rev = self._residency.starving(self._starve_after)
        reserved_before = self._residency.reserve_for(rev)
        if rev is None or not reserved_before or self._residency.draining_for_room:
            return
        victim = choose_victim(self._residency.slots.running(), self._remaining)
        if victim is not None:
            self._residency.drain_for(rev, victim)


def choose_victim(rows: Iterable[SlotRow], remaining: Callable[[str], int]) -> str | None:
    """The lowest priority goes, and of those the one whose requests end soonest."""
    best = min(rows, key=lambda row: (row.priority, remaining(row.rev)), default=None)
    return best.rev if best else None


def _group(seq: Sequence) -> Group:
    return seq.priority, seq.rev

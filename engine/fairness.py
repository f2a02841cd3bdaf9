"""Who is next: the waiting queue, by priority, then in VTC order of tenants and their adapters.

Goes in: sequences that wait, tokens that were served.  Comes out: the order of admission.  Knows
nothing of blocks, steps or clocks; who would wait too long so is `engine/drainer.py`'s concern.
"""

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from engine.sequence import POOLED, Sequence

#: A generated token costs a decode row each; prompt rows are computed many at a time (VTC's 1 : 2).
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0

NOBODY: Mapping[str | None, float] = MappingProxyType({})

#: Sequences of one priority, tenant and revision (None = base), that generate or, last, are pooled;
#: served in order of arrival.
Group = tuple[int, str, str | None, bool]

K = TypeVar("K", bound=Hashable)


class Shares(Generic[K]):
    """Virtual token counters of those who share something: whoever was served least is next.

    Who returns is lifted to the least of those that stayed, or to where the last one left, so that
    idling earns no credit.
    """

    def __init__(self) -> None:
        self.served: dict[K, float] = {}
        self.live: Counter[K] = Counter()
        self._left_at = 0.0

    def enter(self, who: K) -> None:
        """A sequence arrives."""
        if who not in self.live:
            least = min((self.served[other] for other in self.live), default=self._left_at)
            self.served[who] = max(self.served.get(who, 0.0), least)
        self.live[who] += 1

    def leave(self, who: K) -> None:
        """A sequence has ended."""
        self.live[who] -= 1
        if not self.live[who]:
            del self.live[who]
            if not self.live:
                self._left_at = self.served[who]

    def forget(self, who: K) -> None:
        """It is gone, unless it is back and has sequences already."""
        if who not in self.live:
            self.served.pop(who, None)


class TokenCounters:
    """What was served, tenants among each other and each one's revisions among themselves.

    A tenant with many adapters so gets no more than one with a single one (hierarchical VTC).
    """

    def __init__(self) -> None:
        self._tenants: Shares[str] = Shares()
        self._within: dict[str, Shares[str | None]] = {}

    def enter(self, tenant: str, rev: str | None) -> None:
        """A sequence arrives."""
        self._tenants.enter(tenant)
        self._within.setdefault(tenant, Shares()).enter(rev)

    def leave(self, tenant: str, rev: str | None) -> None:
        """A sequence has ended."""
        self._tenants.leave(tenant)
        self._within[tenant].leave(rev)

    def charge(
        self,
        tenant: str,
        rev: str | None,
        *,
        prompt: int = 0,
        generated: int = 0,
        weight: float = 1.0,
    ) -> None:
        """Tokens served; who weighs more is charged less for them."""
        tokens = prompt * PROMPT_WEIGHT + generated * GENERATED_WEIGHT
        self.note(tenant, rev, tokens / weight)

    def note(self, tenant: str, rev: str | None, tokens: float) -> None:
        """The same, weighted already: once a sequence in each step, so it is kept short."""
        self._tenants.served[tenant] += tokens
        self._within[tenant].served[rev] += tokens

    def served(self, tenant: str, rev: str | None) -> tuple[float, float]:
        """Weighted tokens of the tenant, and of the revision within it: smaller is next."""
        within = self._within.get(tenant)
        mine = within.served.get(rev, 0.0) if within is not None else 0.0
        return self._tenants.served.get(tenant, 0.0), mine

    def forget(self, rev: str) -> None:
        """The revision is gone, unless it was added again and has requests already."""
        for tenant, within in list(self._within.items()):
            within.forget(rev)
            within.forget(POOLED + rev)
            if not within.served:
                del self._within[tenant]
                self._tenants.forget(tenant)

    def accounts(self) -> set[tuple[str, str | None]]:
        """Whose tokens are remembered."""
        return {(tenant, rev) for tenant, within in self._within.items() for rev in within.served}


class WaitingQueue:
    """Sequences that are not running, grouped so that a cold adapter is skipped in one go."""

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._groups: dict[Group, OrderedDict[str, Sequence]] = {}
        self._tokens: dict[Group, int] = {}
        #: As they were counted: one that was preempted with a row under way gets its token here.
        self._counted: dict[str, int] = {}
        self._count = 0
        #: Of those who wait, how many are to generate.
        self.num_generating = 0

    def __len__(self) -> int:
        return self._count

    def push(self, seq: Sequence) -> None:
        """A new sequence."""
        group = _group(seq)
        self._groups.setdefault(group, OrderedDict())[seq.request_id] = seq
        self._tokens[group] = self._tokens.get(group, 0) + len(seq.tokens)
        self._counted[seq.request_id] = len(seq.tokens)
        self._count += 1
        self.num_generating += seq.pooled is None

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
        self.num_generating -= seq.pooled is None
        if not members:
            del self._groups[group], self._tokens[group]

    def num_tokens(self, counts: Callable[[str | None], bool]) -> int:
        """Tokens of all who wait to generate with a revision that `counts`."""
        tokens = self._tokens.items()
        return sum(n for (_, _, rev, pooled), n in tokens if not pooled and counts(rev))

    def of_revision(self, rev: str | None) -> list[Sequence]:
        """Everybody who waits for `rev`."""
        return [s for group, m in self._groups.items() if group[2] == rev for s in m.values()]

    def walk(self, first: Mapping[str | None, float] = NOBODY) -> "QueueWalk":
        """One pass over the queue, best first; whoever waits for one of `first` is best, and of
        these the one with the smallest number."""
        return QueueWalk(self._groups, self._counters, first)


#: Smaller is better; no two have the same order of arrival.  Of two that were served alike, what is
#: pooled comes after what is generated.
_Entry = tuple[float, int, tuple[float, float], bool, int, Group]


class QueueWalk:
    """A pass: `next` gives the best candidate; its group is out unless `again` is said."""

    def __init__(
        self,
        groups: dict[Group, OrderedDict[str, Sequence]],
        counters: TokenCounters,
        first: Mapping[str | None, float],
    ) -> None:
        self._groups = groups
        self._counters = counters
        self._first = first
        self._heap = [self._entry(group) for group in groups]
        heapq.heapify(self._heap)

    def next(self) -> Sequence | None:
        """Highest priority, then the tenant and the adapter served least, then longest waiting.

        Whoever was admitted in this pass is charged for all groups of its tenant, so a place is
        looked at again before it counts: it can only have become a later one.
        """
        while self._heap:
            entry = heapq.heappop(self._heap)
            group = entry[-1]
            now = self._entry(group)
            if now == entry:
                return next(iter(self._groups[group].values()))
            heapq.heappush(self._heap, now)
        return None

    def turn_of(self, rev: str | None) -> tuple[int, int]:
        """When the first request of `rev` is looked at, 1 = next, and of how many groups; 0: none
        waits."""
        order = [entry[-1][2] for entry in sorted(self._heap)]
        return (order.index(rev) + 1 if rev in order else 0), len(order)

    def again(self, seq: Sequence) -> None:
        """`seq` was admitted; its group stays in the pass, at its new place."""
        group = _group(seq)
        if group in self._groups:
            heapq.heappush(self._heap, self._entry(group))

    def _entry(self, group: Group) -> _Entry:
        priority, tenant, rev, pooled = group
        head = next(iter(self._groups[group].values()))
        served = self._counters.served(tenant, head.account)
        return self._first.get(rev, math.inf), -priority, served, pooled, head.order, group


def _group(seq: Sequence) -> Group:
    return seq.priority, seq.tenant, seq.rev, seq.pooled is not None

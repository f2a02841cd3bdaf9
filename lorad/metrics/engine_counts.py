"""EngineCounts: what the engine has counted, as if it had never been restarted.

Goes in: snapshots, each with the counters of the process that made it.  Comes out: the same
counters summed up over all processes, so that none ever falls.  What a process counted after its
last snapshot, a second at the most, is lost with it.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from itertools import zip_longest
from operator import attrgetter

from engine.status_messages import EngineSnapshot, HistogramStatus, RevisionStatus, StepsStatus
from lorad.service.meter import BASE, KINDS, Kind

STEPS = ("seconds", "batch_tokens", "adapters", "lora_bytes")
#: Revision -> the adapter's name, or None for one that is not counted any more.
NameOf = Callable[[str], str | None]
#: Of a revision, in this order: prefix tokens looked up and found, tokens of drafts and right ones.
Told = tuple[int, int, int, int]
NOTHING: Told = (0, 0, 0, 0)
#: In C: it is asked of every adapter at every scrape.
_told: Callable[[RevisionStatus], Told] = attrgetter(
    "prefix_query_tokens", "prefix_hit_tokens", "draft_tokens", "accepted_tokens"
)


class Summed:
    """Counts and total of one histogram, added up."""

    def __init__(self, counts: Sequence[int] = (), total: float = 0.0) -> None:
        self.counts, self.total = tuple(counts), total

    def plus(self, counts: Sequence[int], total: float) -> "Summed":
        pairs = zip_longest(self.counts, counts, fillvalue=0)
        return Summed(tuple(a + b for a, b in pairs), self.total + total)


class Totals:
    """All that has no adapter label."""

    def __init__(self) -> None:
        self.preemptions = self.late_masks = self.evicted_blocks = 0
        self.saved_seconds = 0.0
        self.distances = Summed()  # blocks by powers of two
        self.steps = {kind: {field: Summed() for field in STEPS} for kind in KINDS}

    def plus(self, snapshot: EngineSnapshot) -> "Totals":
        """A new one with what one process has counted."""
        prefix, more = snapshot.prefix, Totals()
        more.preemptions = self.preemptions + snapshot.preemptions
        more.late_masks = self.late_masks + snapshot.late_masks
        more.evicted_blocks = self.evicted_blocks + prefix.evicted_blocks
        more.saved_seconds = self.saved_seconds + prefix.saved_seconds
        both = Summed(prefix.found_blocks).plus(prefix.lost_blocks, 0.0)
        more.distances = self.distances.plus(both.counts, prefix.reuse_distances)
        each: dict[Kind, StepsStatus] = {"base": snapshot.base_steps, "lora": snapshot.lora_steps}
        for kind, steps in each.items():
            for field in STEPS:
                told: HistogramStatus = getattr(steps, field)
                more.steps[kind][field] = self.steps[kind][field].plus(told.counts, told.total)
        return more


class EngineCounts:
    """Of one model's engines.  `take` each snapshot, on the event loop; the rest is for one other
    thread.  `base`: whose counters those of the base are."""

    def __init__(self, base: str = BASE) -> None:
        self._base = base
        self.asked: Counter[tuple[str, ...]] = Counter()  # (name,) -> prefix tokens looked up
        self.hit: Counter[tuple[str, ...]] = Counter()
        self.drafted: Counter[tuple[str, ...]] = Counter()  # (name,) -> tokens of drafts
        self.accepted: Counter[tuple[str, ...]] = Counter()
        self._by_name = self.asked, self.hit, self.drafted, self.accepted
        self._names: set[str] = set()  # of those
        self._last: EngineSnapshot | None = None
        self._ended: deque[EngineSnapshot] = deque()  # the last one of each process that is gone
        self._before = Totals()  # of those
        self._seen: dict[str, Told] = {}  # revision -> what this process has counted

    def take(self, snapshot: EngineSnapshot) -> None:
        """The newest snapshot; nothing is copied."""
        if self._last is not None and self._last.pid != snapshot.pid:
            self._ended.append(self._last)
        self._last = snapshot

    def totals(self, name_of: NameOf) -> Totals:
        """Up to now; brings the counts by name up to date too."""
        last = self._last
        while self._ended:
            ended = self._ended.popleft()
            self._before = self._before.plus(ended)
            self._add(ended, name_of)
            self._seen.clear()
            if ended is last:  # a new one came in between: it is looked at the next time
                return self._before
        if last is None:
            return self._before
        self._add(last, name_of)
        return self._before.plus(last)

    def keep(self, names: Set[str]) -> None:
        """Forget every adapter that is not among `names`."""
        gone = self._names - names - {self._base}
        for counts in self._by_name:
            for name in gone:
                counts.pop((name,), None)
        self._names -= gone

    def _add(self, snapshot: EngineSnapshot, name_of: NameOf) -> None:
        self._add_one(snapshot.base, self._base)
        for status in snapshot.revisions:
            # Most have not been asked since: their names are not looked for.
            asked = status.prefix_query_tokens or status.draft_tokens
            if not asked or self._seen.get(status.rev) == _told(status):
                continue
            if (name := name_of(status.rev)) is not None:
                self._add_one(status, name)

    def _add_one(self, status: RevisionStatus, name: str) -> None:
        seen, now = self._seen.get(status.rev, NOTHING), _told(status)
        self._seen[status.rev] = now
        shown = len(now) if status.draft_tokens else 2  # no series of drafts where there are none
        for counts, before, count in zip(self._by_name[:shown], seen, now, strict=False):
            counts[name,] += count - before
        self._names.add(name)

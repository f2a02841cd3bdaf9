"""Slots: a row for each name that is resident, loading or draining, with its last minute.

Goes in: every snapshot, for the windows; and the catalog, when somebody looks.  Comes out: `Slot`s
by name.  Of adapters that are not on the GPU nothing is kept but what they had counted so far.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from engine.adapters.states import State
from engine.status_messages import EngineSnapshot, RevisionStatus
from lorad.board.sharing import NameRates
from lorad.service.catalog import Catalog
from lorad.service.names import tenant_of
from lorad.service.whose import Whose
from lorad.wire_stream import WINDOW_SECONDS, Slot

HELD = frozenset({State.LOADING, State.ACTIVE, State.IDLE, State.DRAINING})
#: Of `hits_history`: so many numbers, each of so many seconds.
BUCKETS, BUCKET_SECONDS = 12, 5.0
#: Counters of revisions that the engine has forgotten are swept up every so many snapshots.
_SWEEP = 60

#: Tokens: looked up in the prefix cache, found there, generated, guessed ahead, guessed right, of
#: inputs of which vectors or scores are made.
Counts = tuple[int, int, int, int, int, int]
_NOTHING: Counts = (0, 0, 0, 0, 0, 0)


class SlotWindows:
    """What each revision did within the window: what changed in a second is kept, no more."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Counts] = {}  # engine, revision
        self._frames: deque[tuple[float, dict[str, Counts]]] = deque()
        self._sums: dict[str, Counts] = {}
        self._hits: dict[str, tuple[int, int]] = {}  # of the bucket that fills
        self._buckets: deque[dict[str, tuple[int, int]]] = deque(maxlen=BUCKETS)
        self._bucket_began: float | None = None
        self._histories: dict[str, tuple[int | None, ...]] = {}
        self._pids: dict[str, int] = {}  # by engine
        self._ticks = 0
        self._began: float | None = None
        self._now = 0.0

    def tick(
        self,
        now: float,
        snapshot: EngineSnapshot | None,
        held: Sequence[RevisionStatus],
        engine: str = "",
    ) -> None:
        """`now` in seconds of a monotonic clock; `held`: of the snapshot's revisions.  Of several
        engines that may hold the same revision, once for each, by its name."""
        self._began = now if self._began is None else self._began
        self._now = now
        self._pass_time(now)
        if snapshot is None:
            return
        before = self._pids.get(engine, 0)
        if snapshot.pid != before:
            if snapshot.pid and before:  # another process, whose counters begin anew
                self._last = {key: each for key, each in self._last.items() if key[0] != engine}
            self._pids[engine] = snapshot.pid
        frame = dict(self._changes(held, engine))
        if frame:
            self._frames.append((now, frame))
            for rev, grown in frame.items():
                self._sums[rev] = _plus(self._sums.get(rev, _NOTHING), grown)
                asked, found = self._hits.get(rev, (0, 0))
                if grown[0]:
                    self._hits[rev] = asked + grown[0], found + grown[1]
        self._ticks += 1
        if self._ticks % _SWEEP == 0:
            known = {status.rev for status in snapshot.revisions}
            self._last = {
                key: counts
                for key, counts in self._last.items()
                if key[0] != engine or key[1] in known
            }

    def sum_of(self, rev: str) -> tuple[int, int, int]:
        """Tokens over the window: looked up, found, generated."""
        return self._sums.get(rev, _NOTHING)[:3]

    def drafts_of(self, rev: str) -> tuple[int, int]:
        """Tokens over the window that were guessed ahead, and those that were right."""
        return self._sums.get(rev, _NOTHING)[3:5]

    def tokens_per_second(self, rev: str) -> float:
        """Generated, and of inputs that are pooled."""
        span = min(self._now - (self._began or 0.0), WINDOW_SECONDS)
        sums = self._sums.get(rev, _NOTHING)
        return round((sums[2] + sums[5]) / span, 2) if span > 0 else 0.0

    def hits_history(self, rev: str) -> tuple[int | None, ...]:
        """Percent, of buckets that are full; () if none of them was asked for."""
        return self._histories.get(rev, ())

    def _history(self, rev: str) -> tuple[int | None, ...]:
        found = [bucket.get(rev) for bucket in self._buckets]
        return tuple(None if f is None else round(100 * f[1] / f[0]) for f in found)

    def _changes(self, held: Sequence[RevisionStatus], engine: str) -> Iterator[tuple[str, Counts]]:
        last = self._last
        for status in held:
            if status.slot is None:
                continue
            rev, key = status.rev, (engine, status.rev)
            counts = (
                status.prefix_query_tokens,
                status.prefix_hit_tokens,
                status.generated_tokens,
                status.draft_tokens,
                status.accepted_tokens,
                status.pooled_tokens,
            )
            before = last.get(key, _NOTHING)
            if any(map(operator.lt, counts, before)):  # one engine of several has begun anew
                before = _NOTHING
            if counts != before:
                last[key] = counts
                yield rev, _minus(counts, before)

    def _pass_time(self, now: float) -> None:
        while self._frames and self._frames[0][0] <= now - WINDOW_SECONDS:
            for rev, grown in self._frames.popleft()[1].items():
                left = _minus(self._sums[rev], grown)
                if left == _NOTHING:
                    del self._sums[rev]
                else:
                    self._sums[rev] = left
        began = now if self._bucket_began is None else self._bucket_began
        while now - began >= BUCKET_SECONDS:
            self._buckets.append(self._hits)
            self._hits = {}
            began += BUCKET_SECONDS
            if now - began > BUCKETS * BUCKET_SECONDS:  # the machine slept
                began = now
        if began != self._bucket_began:  # once in BUCKET_SECONDS, and not for each that looks
            asked = {rev for bucket in self._buckets for rev in bucket}
            self._histories = {rev: self._history(rev) for rev in asked}
        self._bucket_began = began


def held_of(snapshot: EngineSnapshot | None) -> list[RevisionStatus]:
    """Of thousands that the engine may know, those that are resident, on their way, or leased; in
    the order of slots.  Made once for a snapshot."""
    if snapshot is None:
        return []
    held = [
        s for s in snapshot.revisions if s.slot is not None or s.leases or s.state == State.LOADING
    ]
    held.sort(key=lambda s: (s.slot is None, s.slot or 0, s.rev))
    return held


def rows(
    held: Sequence[RevisionStatus],
    block_bytes: Callable[[str], int],
    catalog: Catalog,
    windows: SlotWindows,
    whose: Whose,
    rates: NameRates,
    *,
    several: bool = False,
    places: Callable[[str], tuple[str, ...]] = lambda rev: (),
) -> dict[str, Slot]:
    """By name; one that loads into host memory comes last.  `block_bytes`: of a revision's
    engine; `whose` and `rates` tell names of one revision apart.  `several`: each row says of which
    model it is; `places`: on which replicas."""
    found: dict[str, Slot] = {}
    for status in held:
        if status.state not in HELD:
            continue
        names, block = catalog.names_of(status.rev), block_bytes(status.rev)
        model = (catalog.model_of(status.rev) or "") if several else ""
        for name in names:
            entry = catalog.get(name)
            assert entry is not None, f"{name} is a name of {status.rev}, and no name"
            wanted = entry.pinned, entry.priority
            mine = whose.of(name, status, names)
            row = _row(name, mine, windows, block, model, *wanted)
            if len(names) > 1:
                row = structs.replace(row, tokens_per_second=rates.tokens_per_second(name))
            found[name] = structs.replace(row, replicas=places(status.rev))
        if not names:
            label = catalog.label(status.rev)
            wanted = status.pinned, status.priority
            row = _row(label, status, windows, block, model, *wanted)
            found[label] = structs.replace(row, replicas=places(status.rev))
    return found


def _row(
    name: str,
    status: RevisionStatus,
    windows: SlotWindows,
    block_bytes: int,
    model: str,
    pinned: bool,
    priority: int,
) -> Slot:
    rev = status.rev
    query_tokens, hit_tokens, generated = windows.sum_of(rev)
    drafted, accepted = windows.drafts_of(rev)
    loading = status.state == State.LOADING
    arrived, seconds = status.arrived_bytes, status.load_seconds
    size = status.num_blocks * block_bytes
    return Slot(
        name=name,
        model=model,
        rev=rev,
        slot=status.slot,
        state=status.state,
        pinned=pinned,
        priority=priority,
        rank=status.max_rank,
        gpu_bytes=status.gpu_bytes,
        ram_bytes=status.ram_bytes,
        tenant=tenant_of(name),
        running=status.running,
        waiting=status.waiting,
        tokens_per_second=windows.tokens_per_second(rev),
        query_tokens=query_tokens,
        hit_tokens=hit_tokens,
        life_query_tokens=status.prefix_query_tokens,
        life_hit_tokens=status.prefix_hit_tokens,
        life_lost_tokens=status.prefix_lost_tokens,
        saved_seconds=round(status.prefix_saved_seconds, 3),
        hits_history=windows.hits_history(rev),
        draft_tokens=drafted,
        accepted_tokens=accepted,
        tokens_per_draw=tokens_per_draw(generated, accepted),
        life_draft_tokens=status.draft_tokens,
        life_accepted_tokens=status.accepted_tokens,
        loads=status.loads,
        evictions=status.evictions,
        thrashes=status.thrashes,
        idle_seconds=status.idle_seconds,
        load_source=status.load_source if loading else "",
        load_seconds=seconds if loading else 0.0,
        load_fraction=_fraction(arrived, size) if loading else None,
        load_bytes_per_second=arrived / seconds if loading and arrived and seconds else None,
    )


def _fraction(arrived: int | None, size: int) -> float | None:
    return min(arrived / size, 1.0) if arrived is not None and size else None


def tokens_per_draw(generated: int, accepted: int) -> float | None:
    """Tokens that a step tells of one sequence: the one that it draws, and the guesses that were
    right.  None where nothing was drawn."""
    draws = generated - accepted
    return round(generated / draws, 2) if draws > 0 else None


def _plus(a: Counts, b: Counts) -> Counts:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5]


def _minus(a: Counts, b: Counts) -> Counts:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3], a[4] - b[4], a[5] - b[5]

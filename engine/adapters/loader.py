"""Loader: moves single revisions up and down the tiers, within a budget of bytes in flight.

Goes in: a revision that should move.  Comes out: its next state, later, when the read or the copy
has ended.  Never waits.  Knows nothing of requests, commands or order: `adapters/residency.py`
decides who moves, and what it means.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import Literal, NamedTuple

from engine.adapters.revision import Journal, Revision
from engine.adapters.slots import SlotTable
from engine.adapters.states import State
from engine.adapters.thrash import Thrash
from engine.adapters.tiers import READERS, CopyEngine, HostDone, HostTier, Room
from engine.errors import NoRoom

#: A load that takes longer than this does not count against the limit any more: it waits for a disk
#: or a server, and not for its share of what the others use.
LATE_SECONDS = 0.25
#: As many at the most: each that is late keeps a reader, and some have to be left for the others.
MOST_LATE = READERS - 2

#: Worth of host copies; priorities, 0 to 100, lie between.
LEAST_WORTH, MOST_WORTH = -1, 101


class Pinned(NamedTuple):
    """Rows that are pinned, and their blocks."""

    num: int
    blocks: int


class InFlight:
    """Bytes under way.  One load may always start, however large it is, and none for ever keeps
    the others from starting."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float]) -> None:
        self._limit = limit_bytes
        self._clock = clock
        self._loads: dict[str, tuple[int, float]] = {}  # bytes, start; the oldest first

    def __bool__(self) -> bool:
        return bool(self._loads)

    def begin(self, rev: str, num_bytes: int) -> None:
        self._loads[rev] = num_bytes, self._clock()

    def end(self, rev: str) -> None:
        del self._loads[rev]

    def before(self, rev: str) -> int:
        """Bytes of those that began earlier."""
        revs = takewhile(lambda other: other != rev, self._loads)
        return sum(self._loads[other][0] for other in revs)

    def fits(self, num_bytes: int) -> bool:
        """Whether a load of `num_bytes` may start beside those under way."""
        if not self._loads:
            return True
        late, excused, counted = self._clock() - LATE_SECONDS, 0, 0
        for size, start in self._loads.values():
            if start <= late and excused < MOST_LATE:
                excused += 1
            else:
                counted += size
        return not counted or counted + num_bytes <= self._limit


class Loader:
    """Reads and copies have a budget each: a slow read does not hold up what is read already."""

    def __init__(
        self,
        *,
        slots: SlotTable,
        host: HostTier,
        copier: CopyEngine,
        room: Room,
        journal: Journal,
        clock: Callable[[], float],
        block_bytes: int,
        bytes_in_flight: int,
        thrash_window: float,
    ) -> None:
        self.slots = slots
        self.host = host
        self.copier = copier
        self.room = room
        self.journal = journal
        self._clock = clock
        self._block_bytes = block_bytes
        self._reads = InFlight(bytes_in_flight, clock)
        self._copies = InFlight(bytes_in_flight, clock)
        self.thrash = Thrash(thrash_window)

    @property
    def busy(self) -> bool:
        """Reads or copies are under way."""
        return bool(self._reads or self._copies)

    def size(self, revision: Revision) -> int:
        """Bytes of the packed file."""
        return revision.num_blocks * self._block_bytes

    def pinned(self) -> Pinned:
        """Of the rows that never give way."""
        return Pinned(self.slots.num_pinned, self.slots.pinned_blocks)

    def bytes_ahead(self, revision: Revision) -> int:
        """Of reads, or copies, that began before the one of `revision`."""
        return (self._reads if revision.reading else self._copies).before(revision.rev)

    def hopeless(
        self,
        revision: Revision,
        pinned: Pinned,
        goal: Literal["gpu", "ram"] | None = None,
    ) -> str:
        """Why `revision` can never reach its goal beside `pinned` ones, or ""."""
        if self.size(revision) > self.host.limit_bytes and not self.host.ready(revision.rev):
            return (
                f"its {self.size(revision)} bytes exceed ram_cache ({self.host.limit_bytes} bytes)"
            )
        if (goal or revision.goal) != "gpu":
            return ""
        if not self.room.fits_adapter(revision.num_blocks, pinned.blocks):
            return (
                f"{revision.num_blocks} blocks do not fit beside {pinned.blocks} pinned ones "
                "and the KV floor; unpin another or enlarge the pool"
            )
        if pinned.num >= self.slots.num_slots:
            return f"all {pinned.num} slots are pinned; unpin another"
        return ""

    # ------------------------------------------------------------- up
    def read(self, revision: Revision) -> None:
        """Registered -> loading: start the read, unless host memory or the budget is full now."""
        size = self.size(revision)
        if self.host.ready(revision.rev):
            self.host.protect(revision.rev, True)
            self.journal.move(revision, State.RAM, revision.load_cause)
            return
        if not self._reads.fits(size):
            return
        if not self.host.want(revision.rev, revision.manifest.path, size):
            return
        self.host.protect(revision.rev, True)
        self.appraise(revision)
        self._note_return(revision, kept=False)
        self._reads.begin(revision.rev, size)
        revision.reading = True
        if revision.goal == "gpu":
            revision.load_began, revision.load_source = self._clock(), "disk"
        self.journal.move(revision, State.LOADING, revision.load_cause)

    def end_read(self, revision: Revision, done: HostDone) -> None:
        """Loading -> ram, or registered if the read failed or never began."""
        revision.reading = False
        self._reads.end(revision.rev)
        if done.error:
            revision.load_began = None
            cause = "damaged" if done.damaged else "error"
            self.journal.move(revision, State.REGISTERED, cause, done.error)
        elif done.cancelled:
            self.journal.move(revision, State.REGISTERED, "cancel")
        else:
            self.room.note_read(done.seconds, revision.num_blocks)
            self.journal.move(revision, State.RAM, revision.load_cause)

    def copy(self, revision: Revision) -> str:
        """Ram -> loading: claim blocks and a slot and start the copy, if there is room now.

        Returns why the copy cannot be started; then nothing is claimed.
        """
        if not self.host.ready(revision.rev):
            self.journal.move(revision, State.REGISTERED, "lru")
            return ""
        self.host.protect(revision.rev, True)
        if not self._copies.fits(self.size(revision)):
            return ""
        blocks = self.room.take_adapter(
            revision.num_blocks,
            revision.rev,
            need_slot=not self.slots.num_free,
            now=self._clock(),
        )
        if blocks is None:
            if revision.blocked_since is None:
                revision.blocked_since = self._clock()
            return ""
        row = self.slots.claim(
            revision.rev,
            blocks,
            pinned=revision.pinned,
            priority=revision.priority,
            now=self._clock(),
            usage=revision.usage,
        )
        try:
            self.copier.start(revision.rev, blocks)
        except NoRoom as error:  # this one's trouble: everybody else's step goes on
            self.room.give_back(self.slots.free(row))
            return error.message
        revision.row = row
        self._note_return(revision, kept=True)
        self._copies.begin(revision.rev, self.size(revision))
        revision.copying, revision.cut_short = True, False
        if revision.load_began is None:
            revision.load_began, revision.load_source = self._clock(), "ram"
        self.journal.move(revision, State.LOADING, revision.load_cause)
        return ""

    def end_copy(self, revision: Revision) -> None:
        """Loading -> idle; or, if it is to leave again, the blocks go back now and not before."""
        row, now = revision.row, self._clock()
        assert row is not None, f"a copy of {revision.rev} ended without a slot"
        revision.copying = False
        self._copies.end(revision.rev)
        # Removed and added again meanwhile, it is wanted after all, and is copied once more.
        if revision.cut_short or revision.evicts or (revision.removing and not revision.leases):
            revision.load_began = None
            self.leave_gpu(revision, "cancel")
            return
        self.host.protect(revision.rev, False)
        self.room.note_load(now - revision.since, len(row.blocks))
        row.ready = True
        row.loaded_at = revision.loaded_at = now
        revision.num_loads += 1
        away = self.thrash.returned(revision, row, now)
        self.slots.note(row)
        self.appraise(revision)
        source = revision.load_source
        self.journal.move(revision, State.IDLE, revision.load_cause, away=away, source=source)
        revision.load_began = None

    # ------------------------------------------------------------- down
    def leave_gpu(self, revision: Revision, cause: str) -> None:
        """Empty the slot: -> ram, or registered if the host copy is gone or not wanted."""
        row = revision.row
        assert row is not None and not revision.copying, f"{revision.rev} is not on the GPU"
        self.room.give_back(self.slots.free(row))
        if revision.evict_to_disk:
            self.host.drop(revision.rev)
        self.host.protect(revision.rev, False)
        in_ram = self.host.ready(revision.rev)
        self.journal.move(revision, State.RAM if in_ram else State.REGISTERED, cause)
        revision.row, revision.drain = None, None
        if row.ready:
            revision.num_evictions += 1
            self.thrash.left(revision, cause, self._clock())
            revision.left_copy = in_ram
        self.host.touch(revision.rev)  # it was in use until now, if not from here
        self.appraise(revision)

    def leave_ram(self, revision: Revision, cause: str) -> None:
        """Ram -> registered."""
        revision.left_copy = False
        self.host.drop(revision.rev)
        self.journal.move(revision, State.REGISTERED, cause)

    def notice_lost(self, revision: Revision) -> None:
        """Host memory has evicted it to make room for another."""
        if revision.row is not None:
            self.slots.note(revision.row)  # it is dearer now
        elif revision.state is State.RAM and not self.host.ready(revision.rev):
            self.journal.move(revision, State.REGISTERED, "lru")

    def appraise(self, revision: Revision) -> None:
        """Tell host memory what a copy there is worth.

        That of a pinned one is kept longest, for it is needed for sure; but once it is on the GPU,
        which it never leaves by itself, nobody needs a copy less.
        """
        worth = revision.priority
        if revision.pinned:
            worth = LEAST_WORTH if revision.resident else MOST_WORTH
        self.host.appraise(revision.rev, worth)

    def _note_return(self, revision: Revision, *, kept: bool) -> None:
        """It is on its way up again: did host memory keep what it had when it left the GPU?"""
        if revision.left_copy:
            self.room.note_return(kept)
        revision.left_copy = False

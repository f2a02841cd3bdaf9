"""Residency: the one owner of which revision is in which tier.

Goes in: commands (add, remove, load, evict, set), and requests' leases and slot references.  Comes
out: slots to run on, an AdapterEvent for every transition, exactly one Answer for every command,
and the revisions whose queued requests have to fail.  `advance`, once a step, is the only place
where loads begin and end.  Torch-free; knows nothing of sequences, tokens or names.

A *lease* lasts from a request's arrival to its end and keeps the revision known.  A *slot
reference* lasts while the request has rows running and keeps the revision on the GPU.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.adapters.loader import Loader
from engine.adapters.movements import Movements, row_of
from engine.adapters.orders import AdapterCommand, Orders
from engine.adapters.revision import Drain, Journal, Revision
from engine.adapters.slots import SlotRow, SlotTable
from engine.adapters.states import State
from engine.adapters.tiers import CopyEngine, HostDone, HostTier, Room
from engine.messages import AdapterEvent, Answer, PackedManifest
from engine.vocabulary import Vocabulary

__all__ = ["CopyEngine", "HostDone", "HostTier", "Residency", "Room"]

#: Priority of KV under the identity "base".
BASE_PRIORITY = 50
#: What waiting as long as `starve_after` once more is worth to one that starves, in points of
#: priority: the more urgent go first, and none of them for ever.
POINTS_BY_AGE = 10


@dataclass(frozen=True, slots=True)
class Starving:
    """A revision that waits for room.  Times are the injected clock's."""

    rev: str
    since: float  # its requests wait, and none of them runs
    blocked_since: float  # it could come up at once, but for the room
    asked: bool  # by requests; a Load alone is no reason to interrupt anybody


class Residency:
    """See the module.  `block_bytes` is the pool's; a host copy has `shards` blocks for each of
    those; `layout`, `base`, `max_rank` and `vocabulary` bound files if they are given."""

    def __init__(
        self,
        *,
        slots: SlotTable,
        host: HostTier,
        copier: CopyEngine,
        room: Room,
        clock: Callable[[], float],
        block_bytes: int,
        shards: int = 1,
        bytes_in_flight: int,
        thrash_window: float = 60.0,
        layout: str = "",
        base: str = "",
        max_rank: int = 0,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.slots = slots
        self.host = host
        self._copier = copier
        self._room = room
        self._clock = clock
        self._journal = Journal(clock, block_bytes)
        self._loader = Loader(
            slots=slots,
            host=host,
            copier=copier,
            room=room,
            journal=self._journal,
            clock=clock,
            block_bytes=block_bytes * shards,
            bytes_in_flight=bytes_in_flight,
            thrash_window=thrash_window,
        )
        self._moves = Movements(self._loader, self._journal, clock)
        self._revisions = self._moves.revisions
        self._orders = Orders(self._moves, layout, base, max_rank, clock, vocabulary)
        room.bind(self)

    def command(self, command: AdapterCommand) -> None:
        """Carry out, or begin, a command about revisions.  It gets one Answer, now or later."""
        self._orders.carry_out(command)

    # ------------------------------------------------------------- requests
    def knows(self, rev: str) -> bool:
        """Whether requests for `rev` are taken."""
        revision = self._revisions.get(rev)
        return revision is not None and not revision.removing

    def identity(self, rev: str | None) -> str:
        """Under which KV of `rev` is cached; the only place where this is decided."""
        return "base" if rev is None else self._revisions[rev].identity

    def manifest(self, rev: str) -> PackedManifest:
        """What is in a known revision."""
        return self._revisions[rev].manifest

    def state(self, rev: str) -> State:
        """Of a known revision."""
        return self._revisions[rev].state

    def lease(self, rev: str, priority: int) -> None:
        """A request for a known revision arrives; it is wanted at once.  Ask `knows` first."""
        revision = self._revisions[rev]
        revision.leases += 1
        revision.demand = max(revision.demand, priority)
        self._moves.refresh(revision)

    def end_lease(self, rev: str) -> None:
        """The request has ended; its slot reference, if any, was released before."""
        revision = self._revisions[rev]
        assert revision.waiting > 0, f"{rev}: a lease ends twice"
        revision.leases -= 1
        revision.last_used = self._clock()
        self._moves.refresh(revision)
        self._moves.dispose(revision)

    def can_acquire(self, rev: str) -> bool:
        """Resident, and not draining."""
        row = self._revisions[rev].row
        return row is not None and row.ready and not row.draining

    def acquire(self, rev: str) -> int:
        """A leased request starts running: its slot.  Ask `can_acquire` first."""
        revision = self._revisions[rev]
        row = row_of(revision)
        self.slots.acquire(row, self._clock())
        self._loader.thrash.used(row)
        if revision.state is State.IDLE:
            self._journal.move(revision, State.ACTIVE, "request")
        self._moves.refresh(revision)
        return row.slot

    def release(self, rev: str) -> None:
        """A running request ends or is preempted; the last one out completes a drain."""
        revision = self._revisions[rev]
        self.slots.release(row_of(revision))
        revision.last_used = self._clock()
        if not revision.running:
            if revision.drain is not None:
                self._moves.leave_gpu(revision, revision.drain.cause)
            else:
                self._journal.move(revision, State.IDLE, "request")
        self._moves.refresh(revision)

    # ------------------------------------------------------------- the step
    @property
    def busy(self) -> bool:
        """Something here needs `advance`, though no sequence may be running."""
        return self._loader.busy or bool(self._moves.wanted or self._moves.drains)

    def advance(self) -> None:
        """Take in ended reads and copies, then start what there is room for.  Never waits."""
        for done in self.host.poll():
            self._moves.end_read(self._revisions[done.rev], done)
        for rev in self._copier.poll():
            self._moves.end_copy(self._revisions[rev])
        self._moves.raise_wanted()
        for rev in self.host.take_lost():
            if (revision := self._revisions.get(rev)) is not None:
                self._loader.notice_lost(revision)

    def overdue(self) -> list[str]:
        """Drained revisions whose running requests have to be aborted now."""
        now = self._clock()
        deadlines = ((rev, r.drain.deadline) for rev, r in self._moves.drains.items() if r.drain)
        return [rev for rev, deadline in deadlines if deadline is not None and deadline <= now]

    def take_failures(self) -> list[tuple[str, str, str]]:
        """(rev, code, message) of revisions whose queued requests end with that error."""
        failures, self._moves.failures = self._moves.failures, []
        return failures

    def take_gone(self) -> list[str]:
        """Revisions that are not known any more."""
        gone, self._moves.gone = self._moves.gone, []
        return gone

    def take_events(self) -> list[AdapterEvent]:
        """Transitions since the last call."""
        return self._journal.take_events()

    def take_answers(self) -> list[Answer]:
        """Answers since the last call."""
        return self._journal.take_answers()

    # ------------------------------------------------------------- making room (AdapterSource)
    def take_changed(self) -> Iterable[SlotRow]:
        """Rows of which it has changed whether, or when, they may leave."""
        return self.slots.take_changed()

    def evict_idle(self, rev: str, cause: str) -> None:
        """Somebody else needs the room."""
        revision = self._revisions[rev]
        self._moves.leave_gpu(revision, cause)
        self._moves.refresh(revision)

    def priority_of(self, identity: str) -> int:
        """Of KV cached under `identity`; what nobody can ask for any more goes first."""
        if identity == "base":
            return BASE_PRIORITY
        revision = self._revisions.get(identity)
        return revision.priority if revision and not revision.removing else 0

    def in_ram(self, rev: str) -> bool:
        """Whether one that leaves the GPU now can come back from host memory."""
        return self.host.ready(rev)

    # ------------------------------------------------------------- starvation
    def starving(self, starve_after: float) -> Starving | None:
        """Who waits since `starve_after` seconds and finds no room, the most urgent of them.

        Urgent is who has priority; but all get more urgent as they wait, so that those who arrive
        later go past only so often.
        """
        latest, late = self._clock() - starve_after, []
        for r in self._moves.wanted.values():
            since = r.wanted_since if r.hungry_since is None else r.hungry_since
            if r.blocked_since is not None and since is not None and since <= latest:
                urgency = r.demand - POINTS_BY_AGE * since / starve_after
                late.append((-urgency, since, r))
        if not late:
            return None
        _, since, first = min(late, key=lambda entry: entry[:2])
        assert first.blocked_since is not None
        return Starving(first.rev, since, first.blocked_since, first.waiting > 0)

    def lacks_running_kv(self, rev: str) -> bool:
        """It has no room though all that is idle were gone: sequences hold what it needs."""
        return self._room.lacks_running_kv(self._revisions[rev].num_blocks)

    def awaits_first(self, rev: str) -> bool:
        """Requests for `rev` are queued, and none has run since it came up, if it has."""
        revision = self._revisions.get(rev)
        if revision is None or not revision.waiting:
            return False
        return revision.row is None or not revision.row.served

    def reserve_for(self, rev: str | None) -> bool:
        """Hold room back for `rev` alone; True if it was so before.  Drains for others end."""
        if self._room.reserved_for == rev:
            return True
        for revision in list(self._moves.drains.values()):
            if revision.drain and revision.drain.room_for:
                self._moves.undrain(revision)
        self._room.reserve(rev, self._revisions[rev].num_blocks if rev else 0)
        return False

    @property
    def draining_for_room(self) -> SlotRow | None:
        """The victim that is draining already."""
        victims = (r.row for r in self._moves.drains.values() if r.drain and r.drain.room_for)
        return next(victims, None)

    def drain_for(self, rev: str, victim: str) -> None:
        """Stop admitting to `victim`; when its last request leaves, `rev` gets the room."""
        self._moves.drain(self._revisions[victim], Drain("starvation", None, room_for=rev))

    # ------------------------------------------------------------- showing
    def revisions(self) -> Iterable[Revision]:
        """Every known revision, to be read only."""
        return self._revisions.values()

    def find(self, rev: str) -> Revision | None:
        """One of them, to be read only."""
        return self._revisions.get(rev)

    def hopeless(self, rev: str) -> str:
        """Why a known revision can never have room on the GPU, or ""."""
        revision = self._revisions[rev]
        if revision.resident:
            return ""
        return self._loader.hopeless(revision, self._loader.pinned(), goal="gpu")

    def bytes_ahead(self, rev: str) -> int:
        """Of reads, or copies, that began before that of `rev`."""
        return self._loader.bytes_ahead(self._revisions[rev])

    @property
    def num_thrashes(self) -> int:
        """How often an adapter came back within `thrash_window` of making way."""
        return self._loader.thrash.total

    def check(self) -> None:
        """Raise AssertionError unless records, slots and wants agree."""
        self._moves.check()

"""Movements: who wants to go up, who is draining, and what follows when a move ends.

Goes in: decisions of `adapters/residency.py` (requests, the step) and `adapters/orders.py`
(commands), which share this one set of records.  Comes out: moves carried out by the Loader, with
answers, events and failures where somebody waits for them.  Knows nothing of sequences.
"""

from collections.abc import Callable

from engine.adapters.loader import Loader, Pinned
from engine.adapters.revision import Drain, Journal, Revision
from engine.adapters.slots import SlotRow
from engine.adapters.states import State
from engine.adapters.tiers import HostDone

ON_GPU = frozenset({State.ACTIVE, State.IDLE, State.DRAINING})


class Movements:
    """Every known revision.  `refresh` follows each change of leases, commands or state."""

    def __init__(self, loader: Loader, journal: Journal, clock: Callable[[], float]) -> None:
        self.loader = loader
        self.journal = journal
        self.clock = clock
        self.revisions: dict[str, Revision] = {}
        self.wanted: dict[str, Revision] = {}  # somebody waits for them, and they have no slot
        self.drains: dict[str, Revision] = {}
        self.failures: list[tuple[str, str, str]] = []  # rev, code, message
        self.gone: list[str] = []

    # ------------------------------------------------------------- up
    def turn(self, revision: Revision) -> tuple[bool, int, float]:
        """Who is raised first: the one with a reservation, then by priority, then the oldest."""
        first = revision.rev == self.loader.room.reserved_for
        return not first, -revision.demand, revision.wanted_since or 0.0

    def raise_wanted(self) -> None:
        """Start every load that there is room for.

        One that has just failed is wanted still, by requests that are about to hear of it.
        """
        if not self.wanted:
            return
        pinned = self.loader.pinned()
        failed = {rev for rev, _, _ in self.failures}
        for revision in sorted(self.wanted.values(), key=self.turn):
            if revision.goal and not revision.reading and revision.rev not in failed:
                self._raise(revision, pinned)

    def end_read(self, revision: Revision, done: HostDone) -> None:
        """A read has ended; what was waiting for it goes on, fails, or is undone."""
        self.loader.end_read(revision, done)
        revision.error = done.error
        if done.error:
            self.fail(revision, "adapter_damaged" if done.damaged else "load_failed", done.error)
        if revision.evicts:
            self.finish_evict(revision, "cancel")
        self.settle_loads(revision)
        self.refresh(revision)
        if revision.goal is None:  # nobody waits for it any more: others may have its place
            self.loader.host.protect(revision.rev, False)
        self.dispose(revision)

    def end_copy(self, revision: Revision) -> None:
        """A copy has ended."""
        self.loader.end_copy(revision)
        self.journal.answer_evicts(revision)
        self.settle_loads(revision)
        self.refresh(revision)
        self.dispose(revision)

    def fail(self, revision: Revision, code: str, message: str) -> None:
        """It cannot come up: its Loads and its queued requests end with `code`."""
        self.journal.answer_loads(revision, code, message)
        self._forget_want(revision)
        if revision.waiting:
            self.failures.append((revision.rev, code, message))

    def settle_loads(self, revision: Revision) -> None:
        """Answer the Loads whose tier is reached."""
        on_gpu = revision.state in ON_GPU and not row_of(revision).draining
        in_ram = revision.state is State.RAM or revision.state in ON_GPU
        for load in list(revision.loads):
            if on_gpu or (in_ram and load.tier == "ram"):
                revision.loads.remove(load)
                self.journal.answer(load.command_id)

    # ------------------------------------------------------------- down
    def finish_evict(self, revision: Revision, cause: str) -> None:
        """Nobody runs on it: down to the tier that was asked for."""
        if revision.row is not None:
            self.leave_gpu(revision, cause)
            return
        if revision.state is State.RAM and revision.evict_to_disk:
            self.loader.leave_ram(revision, cause)
        self.journal.answer_evicts(revision)

    def leave_gpu(self, revision: Revision, cause: str) -> None:
        """Empty its slot now, and with that end its drain."""
        self.drains.pop(revision.rev, None)
        self.loader.leave_gpu(revision, cause)
        self.journal.answer_evicts(revision)

    def drain(self, revision: Revision, drain: Drain) -> None:
        """A running revision takes no more requests; its last one empties the slot."""
        row_of(revision).draining = True
        if revision.state is not State.DRAINING:
            self.journal.move(revision, State.DRAINING, drain.cause)
        revision.drain = drain
        self.drains[revision.rev] = revision

    def undrain(self, revision: Revision) -> None:
        """It may stay after all."""
        row_of(revision).draining = False
        revision.drain = None
        del self.drains[revision.rev]
        self.journal.move(revision, State.ACTIVE, "undrain")
        self.settle_loads(revision)

    def dispose(self, revision: Revision) -> None:
        """The end of a removed revision: no lease, and nothing of it on its way."""
        busy = revision.leases or revision.reading or revision.copying
        if not revision.removing or busy:
            return
        if revision.row is not None:
            self.leave_gpu(revision, "remove")
        if revision.state is State.RAM:
            self.loader.leave_ram(revision, "remove")
        self._forget_want(revision)
        self.journal.answer_evicts(revision)
        if revision.identity != "base":
            self.loader.room.forget(revision.identity)
        del self.revisions[revision.rev]
        self.gone.append(revision.rev)
        self.journal.answer_removes(revision)

    # ------------------------------------------------------------- wants
    def refresh(self, revision: Revision) -> None:
        """Bring what follows from leases, commands and state up to date."""
        if not revision.waiting:
            revision.demand = 0
        row = revision.row
        if row is not None and row.awaited != (revision.waiting > 0):
            row.awaited = not row.awaited
            self.loader.slots.note(row)
        if not revision.waiting or revision.running:
            revision.hungry_since = None
        elif revision.hungry_since is None:
            revision.hungry_since = self.clock()
        if revision.goal is None:
            self._forget_want(revision)
        elif revision.rev not in self.wanted:
            self.wanted[revision.rev] = revision
            revision.wanted_since = self.clock()

    def _forget_want(self, revision: Revision) -> None:
        if self.wanted.pop(revision.rev, None) is not None:
            revision.wanted_since = revision.blocked_since = None
            if revision.row is None:
                revision.load_began = None
            if revision.reading:
                if not revision.evicts:  # these say in which tier it is to end
                    self.loader.host.cancel(revision.rev)
            elif revision.row is None:
                self.loader.host.protect(revision.rev, False)

    def _raise(self, revision: Revision, pinned: Pinned) -> None:
        reason = self.loader.hopeless(revision, pinned)
        if reason:
            self.fail(revision, "no_room", reason)
            return
        if revision.state is State.REGISTERED:
            self.loader.read(revision)
        if revision.state is State.RAM:
            self.settle_loads(revision)
            if revision.goal == "gpu" and (problem := self.loader.copy(revision)):
                self.fail(revision, "load_failed", problem)
            self.refresh(revision)

    # ------------------------------------------------------------- checking
    def check(self) -> None:
        """Raise AssertionError unless records, slots and wants agree."""
        slots = self.loader.slots
        slots.check()
        assert all(row.rev in self.revisions for row in slots.rows.values())
        assert all(r.goal for r in self.wanted.values()), "wanted without a goal"
        for rev, revision in self.revisions.items():
            row, state = revision.row, revision.state
            assert slots.find(rev) is row, f"{rev}: slot table and record differ"
            assert revision.waiting >= 0, f"{rev}: more running than leases"
            ready = row is not None and row.ready
            assert ready == (state in ON_GPU), f"{rev}: {state} with {row}"
            assert revision.copying == (row is not None and not ready), f"{rev}: copy and row"
            assert (state is State.LOADING) == (revision.reading or revision.copying)
            assert state is not State.ACTIVE or revision.running
            assert state is not State.IDLE or not revision.running
            assert (revision.drain is not None) == (rev in self.drains)
            assert (state is State.DRAINING) == (revision.drain is not None)
            on_its_way = revision.leases or revision.reading or revision.copying
            assert not revision.removing or on_its_way, f"{rev}: removed, and still here"


def row_of(revision: Revision) -> SlotRow:
    """The slot of a revision that has one."""
    assert revision.row is not None, f"{revision.rev} has no slot"
    return revision.row

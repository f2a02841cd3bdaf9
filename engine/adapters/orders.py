"""Orders: the daemon's commands about revisions.

Goes in: AddRevision, RemoveRevision, Load, Evict, SetRevision.  Comes out: exactly one Answer for
each, at once or when the move that it asks for has ended.  Knows nothing of requests.
"""

from collections.abc import Callable

from msgspec.structs import replace

from engine.adapters.movements import Movements
from engine.adapters.revision import Drain, PendingLoad, Revision
from engine.adapters.states import State
from engine.layout import stream_id
from engine.messages import AddRevision, Evict, Load, PackedModule, RemoveRevision, SetRevision
from engine.recency import Usage
from engine.vocabulary import Vocabulary

#: Sorts of adapters whose modules are kept to be shared.
MOST_SHARED = 256

AdapterCommand = AddRevision | RemoveRevision | Load | Evict | SetRevision


class Orders:
    """Carries commands out on `movements`.

    `layout`, if not "", is what packed files must have, with `base` for those that depend on the
    base's weights; `max_rank`, if not 0, what is served; `vocabulary`, which token ids there are.
    """

    def __init__(
        self,
        movements: Movements,
        layout: str,
        base: str,
        max_rank: int,
        clock: Callable[[], float],
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._moves = movements
        self._journal = movements.journal
        self._layout = layout
        self._base = base
        self._max_rank = max_rank
        self._clock = clock
        self._vocabulary = vocabulary
        self._shared: dict[tuple[PackedModule, ...], tuple[PackedModule, ...]] = {}

    def carry_out(self, command: AdapterCommand) -> None:
        """Begin any of them."""
        match command:
            case AddRevision():
                self._add(command)
            case RemoveRevision():
                self._remove(command)
            case Load():
                self._load(command)
            case Evict():
                self._evict(command)
            case SetRevision():
                self._set(command)

    def _add(self, command: AddRevision) -> None:
        manifest, known = command.manifest, self._moves.revisions
        wanted = stream_id(self._layout, self._base, manifest.modules)
        if self._layout and manifest.layout != wanted:
            self._journal.answer(
                command.command_id,
                "load_failed",
                f"packed for layout {manifest.layout}, this engine reads {wanted}",
            )
            return
        if self._max_rank and manifest.max_rank > self._max_rank:
            self._journal.answer(
                command.command_id,
                "load_failed",
                f"rank {manifest.max_rank} exceeds max_rank = {self._max_rank} of this engine",
            )
            return
        if self._vocabulary and (wrong := self._vocabulary.problem(manifest)):
            self._journal.answer(command.command_id, "load_failed", wrong)
            return
        revision = known.get(manifest.rev)
        if revision is None:
            revision = Revision(
                replace(manifest, modules=self._share(manifest.modules)),
                command.priority,
                pinned=False,
                since=self._clock(),
                usage=Usage(self._clock(), count=0.0),
            )
            known[manifest.rev] = revision
        else:
            # Of what is known its text alone may be told otherwise; who has arrived keeps the old.
            text = {"num_tokens": manifest.num_tokens, "tokenizer": manifest.tokenizer}
            revision.manifest = replace(revision.manifest, **text)
            if revision.removing:
                revision.removing = False
                self._journal.answer_removes(revision, "conflict", "added again meanwhile")
        self._mark(command, revision)

    def _share(self, modules: tuple[PackedModule, ...]) -> tuple[PackedModule, ...]:
        """The modules of another that are equal, if there is one: adapters of a fleet are alike,
        and hundreds of modules each are most of what ten thousand of them take here."""
        if len(self._shared) >= MOST_SHARED:
            self._shared.clear()
        return self._shared.setdefault(modules, modules)

    def _set(self, command: SetRevision) -> None:
        revision = self._known(command.command_id, command.rev)
        if revision is not None:
            self._mark(command, revision)

    def _load(self, command: Load) -> None:
        revision = self._known(command.command_id, command.rev)
        if revision is not None:
            if not revision.resident:
                revision.usage.touch(self._clock())  # somebody expects requests for it
            revision.loads.append(PendingLoad(command.command_id, command.tier))
            self._moves.settle_loads(revision)
            self._moves.refresh(revision)

    def _evict(self, command: Evict) -> None:
        revision = self._known(command.command_id, command.rev)
        if revision is None:
            return
        if revision.pinned and not command.force:
            self._journal.answer(command.command_id, "pinned", "it is pinned; unpin it or force")
            return
        revision.evicts.append(command.command_id)
        revision.evict_to_disk |= command.to == "disk"
        self._journal.answer_loads(revision, "conflict", "evicted meanwhile")
        if revision.state is State.LOADING:
            self._cancel_copy(revision)
        elif revision.running:
            seconds = 0.0 if command.abort_running else command.drain_timeout
            self._drain(revision, self._clock() + seconds)
        else:
            self._moves.finish_evict(revision, "manual")
        self._moves.refresh(revision)

    def _remove(self, command: RemoveRevision) -> None:
        revision = self._known(command.command_id, command.rev, removing=True)
        if revision is None:
            return
        revision.removing = True
        self._moves.loader.room.reprice(revision.identity)
        revision.removes.append(command.command_id)
        self._journal.answer_loads(revision, "model_not_found", "removed meanwhile")
        if not revision.leases:
            self._cancel_copy(revision)
        self._moves.refresh(revision)
        self._moves.dispose(revision)

    def _known(self, command_id: int, rev: str, *, removing: bool = False) -> Revision | None:
        revision = self._moves.revisions.get(rev)
        if revision is None or (revision.removing and not removing):
            self._journal.answer(command_id, "model_not_found", f"revision {rev[:12]} is unknown")
            return None
        return revision

    def _cancel_copy(self, revision: Revision) -> None:
        """The blocks stay claimed until the copy engine says that it has ended."""
        if revision.copying:
            revision.cut_short = True
            self._moves.loader.copier.cancel(revision.rev)

    def _drain(self, revision: Revision, deadline: float) -> None:
        """Two Evicts of one revision: the sooner deadline counts."""
        earlier = revision.drain.deadline if revision.drain else None
        deadline = deadline if earlier is None else min(deadline, earlier)
        self._moves.drain(revision, Drain("manual", deadline))

    def _mark(self, command: AddRevision | SetRevision, revision: Revision) -> None:
        pinned, priority, refusal = command.pinned, command.priority, ""
        if pinned and not revision.pinned:
            refusal = self._pin_refusal(revision)
        self._moves.loader.room.reprice(revision.identity)
        revision.priority = priority
        revision.pinned = revision.pinned if refusal else pinned
        row = revision.row
        if row is not None:
            self._moves.loader.slots.mark(row, pinned=revision.pinned, priority=priority)
        self._moves.loader.appraise(revision)
        if revision.pinned and revision.drain and revision.drain.room_for:
            self._moves.undrain(revision)
        self._journal.answer(command.command_id, "no_room" if refusal else "", refusal)

    def _pin_refusal(self, revision: Revision) -> str:
        """Pins leave a slot, if there are several, and room for the KV floor plus the largest
        revision that is known here; the daemon minds those that are registered.
        """
        revisions = self._moves.revisions.values()
        all_pinned = [r for r in revisions if r.pinned or r is revision]
        num_slots = self._moves.loader.slots.num_slots
        if len(all_pinned) >= num_slots > 1:
            return f"it would leave none of {num_slots} slots to others; unpin another"
        pinned = sum(r.num_blocks for r in all_pinned)
        largest = max(r.num_blocks for r in revisions)
        if self._moves.loader.room.fits_adapter(largest, beside=pinned):
            return ""
        return (
            f"{pinned} pinned blocks leave no room for the KV floor and the largest adapter "
            f"({largest} blocks); unpin another or enlarge the pool"
        )

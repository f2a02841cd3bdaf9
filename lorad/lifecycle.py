"""What an adapter's state reads, and what the engine should know: pure functions of two pictures.

Goes in: what the registry stores of names, and what the engine reports of revisions.  Comes out:
the state that people are shown, and the difference between what the engine knows and what it
should know after a restart of either side.  Knows neither SQL nor the engine's messages on the
wire; whoever calls sends the commands.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.adapters.states import RESIDENT, State
from engine.messages import RevisionStatus

_AWAY = frozenset({State.QUARANTINED, State.MISSING})


class Name(Protocol):
    """The part of the registry's AdapterRecord that decides anything here."""

    @property
    def stored_state(self) -> State: ...
    @property
    def serving_rev(self) -> str | None: ...
    @property
    def candidate_rev(self) -> str | None: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def priority(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A revision that the engine should know; pin and priority are the most of its names."""

    rev: str
    pinned: bool
    priority: int


@dataclass(frozen=True, slots=True)
class Diff:
    """Commands that bring the engine there, each tuple in the order of its revisions."""

    add: tuple[Wanted, ...]  # AddRevision
    change: tuple[Wanted, ...]  # SetRevision
    load: tuple[str, ...]  # Load: pinned, and on no way to the GPU
    remove: tuple[str, ...]  # RemoveRevision

    def __bool__(self) -> bool:
        return bool(self.add or self.change or self.load or self.remove)


def shown_state(name: Name, status: RevisionStatus | None) -> State:
    """The printed state of a name; `status` is what the engine says of its serving revision.

    quarantined and missing are the registry's word, even while a copy serves on from memory.
    """
    if name.stored_state in _AWAY or status is None or name.serving_rev is None:
        return name.stored_state
    return State(status.state)


def answerable(name: Name) -> bool:
    """A request for it may run or wait; False is 404, as for a name that nobody knows."""
    return name.stored_state not in _AWAY and name.serving_rev is not None


def wanted(names: Iterable[Name]) -> dict[str, Wanted]:
    """What the engine should know, by revision: all that names serve or wait for, files at hand."""
    found: dict[str, Wanted] = {}
    for name in names:
        if name.stored_state in _AWAY:
            continue
        for rev in (name.serving_rev, name.candidate_rev):
            if rev is None:
                continue
            other = found.get(rev, Wanted(rev, False, 0))
            found[rev] = Wanted(
                rev, name.pinned or other.pinned, max(name.priority, other.priority)
            )
    return found


def difference(
    want: Mapping[str, Wanted],
    known: Iterable[RevisionStatus],
    *,
    packed: Container[str],
    keep: Container[str] = (),
) -> Diff:
    """From what the engine knows to `want`.

    `packed` holds the revisions with a file of the engine's layout: others wait for the packer.
    `keep` is not removed though unwanted: leased, or missing but resident still.
    """
    there = {status.rev: status for status in known}
    ready = [w for _, w in sorted(want.items()) if w.rev in packed or w.rev in there]
    return Diff(
        add=tuple(w for w in ready if w.rev not in there),
        change=tuple(w for w in ready if w.rev in there and _differs(w, there[w.rev])),
        load=tuple(w.rev for w in ready if w.pinned and not _rising(there.get(w.rev))),
        remove=tuple(rev for rev in sorted(there) if rev not in want and rev not in keep),
    )


def _differs(want: Wanted, status: RevisionStatus) -> bool:
    return (want.pinned, want.priority) != (status.pinned, status.priority)


def _rising(status: RevisionStatus | None) -> bool:
    """Resident, or on its way there."""
    return status is not None and (status.state in RESIDENT or State(status.state) is State.LOADING)

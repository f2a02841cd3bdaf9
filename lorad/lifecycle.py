"""What an adapter's state reads: a pure function of two pictures.

Goes in: what the registry stores of a name, and what the engine reports of its serving revision.
Comes out: the state that people are shown.  Knows neither SQL nor commands.
"""

from typing import Protocol

from engine.adapters.states import State
from engine.status_messages import RevisionStatus

_AWAY = frozenset({State.QUARANTINED, State.MISSING})


class Name(Protocol):
    """The part of the registry's AdapterRecord that decides anything here."""

    @property
    def stored_state(self) -> State: ...
    @property
    def serving_rev(self) -> str | None: ...


def shown_state(name: Name, status: RevisionStatus | None, *, remote: bool = False) -> State:
    """The printed state of a name; `status` is what the engine says of its serving revision, and
    `remote` that its files are only where they came from.

    quarantined and missing are the registry's word, even while a copy serves on from memory.
    """
    if name.stored_state in _AWAY or name.serving_rev is None:
        return name.stored_state
    state = State(status.state) if status is not None else name.stored_state
    return State.REMOTE if remote and state is State.REGISTERED else state

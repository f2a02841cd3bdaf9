"""What a state reads, and what the engine should know."""

from dataclasses import dataclass

import pytest

from engine.adapters.states import State
from engine.status_messages import RevisionStatus
from lorad.lifecycle import shown_state


@dataclass(frozen=True)
class Name:
    stored_state: State = State.REGISTERED
    serving_rev: str | None = "r1"
    candidate_rev: str | None = None
    pinned: bool = False
    priority: int = 50


def _status(rev: str, state: str = "idle", **facts: object) -> RevisionStatus:
    return RevisionStatus(rev=rev, state=state, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["registered", "ram", "loading", "active", "idle", "draining"])
def test_a_registered_name_shows_the_engines_word(state: str) -> None:
    assert shown_state(Name(), _status("r1", state)) == state


def test_the_registrys_word_stands_where_the_engine_knows_nothing_or_may_not_be_asked() -> None:
    assert shown_state(Name(), None) is State.REGISTERED
    assert shown_state(Name(State.MISSING), _status("r1")) is State.MISSING
    assert shown_state(Name(State.QUARANTINED, None), None) is State.QUARANTINED

"""The one table of transitions."""

import pytest

from engine.adapters.states import TRANSITIONS, State, check


def test_every_state_can_be_left_and_reached():
    reached = {after for follow in TRANSITIONS.values() for after in follow}
    assert set(TRANSITIONS) == set(State) == reached
    assert all(before not in follow for before, follow in TRANSITIONS.items())


@pytest.mark.parametrize("before", [State.REGISTERED, State.MISSING])
def test_files_may_be_left_where_they_came_from_and_be_fetched_again(before):
    check(before, State.REMOTE)
    check(State.REMOTE, State.REGISTERED)


@pytest.mark.parametrize("before", [State.ACTIVE, State.IDLE, State.LOADING, State.RAM])
def test_what_is_in_memory_is_never_remote(before):
    with pytest.raises(AssertionError, match="illegal"):
        check(before, State.REMOTE)

"""What a state reads, and what the engine should know."""

from dataclasses import dataclass

import pytest

from engine.adapters.states import State
from engine.messages import RevisionStatus
from lorad.lifecycle import Diff, Wanted, answerable, difference, shown_state, wanted


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


def test_only_a_registered_name_with_a_serving_revision_answers() -> None:
    assert answerable(Name())
    assert not answerable(Name(serving_rev=None, candidate_rev="r2"))
    assert not answerable(Name(State.MISSING))
    assert not answerable(Name(State.QUARANTINED, None))


def test_one_revision_under_many_names_has_any_pin_and_the_highest_priority() -> None:
    names = [Name(priority=10), Name(pinned=True, priority=20), Name(priority=90)]
    assert wanted(names) == {"r1": Wanted("r1", True, 90)}


def test_candidates_are_wanted_and_missing_or_quarantined_names_want_nothing() -> None:
    names = [
        Name(serving_rev="r1", candidate_rev="r2"),
        Name(State.MISSING, "r3"),
        Name(State.QUARANTINED, None),
    ]
    assert set(wanted(names)) == {"r1", "r2"}


def test_a_fresh_engine_is_told_everything_and_loads_the_pinned() -> None:
    want = wanted([Name(serving_rev="r2", pinned=True), Name(serving_rev="r1", priority=7)])
    found = difference(want, [], packed={"r1", "r2"})
    assert found.add == (Wanted("r1", False, 7), Wanted("r2", True, 50))
    assert found.load == ("r2",) and not found.change and not found.remove


def test_what_is_not_packed_for_the_engine_waits_for_the_packer() -> None:
    want = wanted([Name(pinned=True)])
    assert not difference(want, [], packed=set())


def test_an_engine_that_knows_all_is_told_nothing() -> None:
    want = wanted([Name(pinned=True, priority=60)])
    known = [_status("r1", "active", pinned=True, priority=60)]
    found = difference(want, known, packed={"r1"})
    assert found == Diff((), (), (), ()) and not found


def test_changed_settings_are_sent_and_a_pinned_revision_on_its_way_is_not_loaded_twice() -> None:
    want = wanted([Name(pinned=True, priority=60)])
    found = difference(want, [_status("r1", "loading", priority=60)], packed={"r1"})
    assert found.change == (Wanted("r1", True, 60),) and found.load == ()
    found = difference(want, [_status("r1", "ram", pinned=True, priority=60)], packed={"r1"})
    assert found.load == ("r1",)


def test_what_nobody_wants_is_removed_unless_it_is_kept() -> None:
    known = [_status("r1"), _status("r2"), _status("r3")]
    found = difference(wanted([Name()]), known, packed={"r1"}, keep={"r3"})
    assert found.remove == ("r2",)

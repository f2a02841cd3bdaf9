"""Whose sequences are whose, where names share a revision."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.status_messages import RevisionStatus
from lorad.service.whose import Whose

NAMES = ("a", "b", "c")


def requests(*asked):
    """(name, whether it has got something)"""
    for name, begun in asked:
        yield SimpleNamespace(rev="r", begun=begun), SimpleNamespace(name=name)


def shares(crowd, running, waiting, names=NAMES):
    status = RevisionStatus(rev="r", state="active", running=running, waiting=waiting)
    whose = Whose(list(crowd))
    found = [whose.of(name, status, names) for name in names]
    return [(one.running, one.waiting) for one in found]


@pytest.mark.parametrize(
    ("asked", "engine", "expected"),
    [
        ([("b", True), ("b", True)], (2, 0), [(0, 0), (2, 0), (0, 0)]),
        # One that has got nothing yet may run too; who waits is among them.
        ([("a", True), ("b", False)], (2, 0), [(1, 0), (1, 0), (0, 0)]),
        ([("a", True), ("b", False), ("c", False)], (2, 1), [(1, 0), (1, 0), (0, 1)]),
        # Several answers of one request.
        ([("c", True)], (4, 2), [(0, 0), (0, 0), (4, 2)]),
        # It has ended here, and the engine's picture is a moment old.
        ([], (1, 1), [(1, 1), (0, 0), (0, 0)]),
    ],
)
def test_names_that_share_content_share_its_sequences_by_who_asked(asked, engine, expected):
    assert shares(requests(*asked), *engine) == expected


def test_a_name_that_has_its_content_alone_has_all_and_nobody_is_looked_at():
    def nobody():
        raise AssertionError("the crowd was looked at")
        yield

    status = RevisionStatus(rev="r", state="active", running=2)
    assert Whose(nobody()).of("a", status, ("a",)) is status


def test_requests_of_what_a_name_meant_before_are_not_counted():
    crowd = [(SimpleNamespace(rev="old", begun=True), SimpleNamespace(name="b"))]
    crowd += [(SimpleNamespace(rev=None, begun=True), SimpleNamespace(name=None))]
    assert shares([*crowd, *requests(("c", True))], 1, 0) == [(0, 0), (0, 0), (1, 0)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=12),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_all_names_together_have_what_the_engine_says(asked, running, waiting):
    found = shares(requests(*asked), running, waiting)
    assert [sum(column) for column in zip(*found, strict=True)] == [running, waiting]
    assert all(min(pair) >= 0 for pair in found)

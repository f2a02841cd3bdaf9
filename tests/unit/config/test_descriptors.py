"""How many files may be open, and how many of them may be connections."""

import resource

import pytest

from lorad import descriptors


@pytest.fixture
def limits(monkeypatch):
    """The process's limits as a list [soft, hard]."""
    held = [256, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda what: tuple(held))
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: held.__setitem__(slice(2), new))
    return held


def test_the_soft_limit_is_lifted_to_the_hard_one(limits):
    assert descriptors.raise_limit() == 4096
    assert limits == [4096, 4096]


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 1 << 30])
def test_no_more_is_asked_for_than_is_of_use(limits, hard):
    limits[1] = hard
    assert descriptors.raise_limit() == descriptors.ENOUGH
    assert limits == [descriptors.ENOUGH, hard]


def test_a_limit_that_is_high_enough_is_left_alone(limits):
    limits[:] = [1 << 20, 1 << 20]
    assert descriptors.raise_limit() == 1 << 20
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert descriptors.raise_limit() == descriptors.ENOUGH
    assert limits[0] == resource.RLIM_INFINITY


def test_a_limit_that_cannot_be_lifted_is_lived_with(limits, monkeypatch):
    def refuse(what, new):
        raise ValueError("not permitted")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert descriptors.raise_limit() == 256


@pytest.mark.parametrize(
    ("limit", "held"), [(65536, 1024), (2112, 1024), (2110, 1023), (256, 96), (128, 32), (10, 8)]
)
def test_connections_leave_descriptors_for_everything_else(limit, held):
    assert descriptors.connections(1024, limit, listeners=2) == held


def test_a_share_that_is_smaller_than_wanted_is_said_aloud(limits, caplog):
    assert descriptors.share(1024, listeners=2) == 1024
    assert not caplog.records
    limits[:] = [256, 256]
    assert descriptors.share(1024, listeners=2) == 96
    assert "LimitNOFILE" in caplog.text

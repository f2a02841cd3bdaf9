"""Loads, evictions and drains, from transitions as the engine tells them."""

import pytest

from engine.messages import AdapterEvent
from lorad.metrics.churn import Churn


@pytest.fixture
def churn():
    names = {"r1": ("a", True), "old": ("a", False)}
    return Churn(names.get, set())


def event(rev, before, after, cause, **fields):
    return AdapterEvent(rev=rev, before=before, after=after, cause=cause, **fields)


def test_a_load_counts_once_with_its_bytes_and_its_whole_time(churn):
    churn.take(event("r1", "registered", "loading", "request"))
    churn.take(event("r1", "loading", "ram", "request", num_bytes=100))
    churn.take(event("r1", "ram", "loading", "request"))
    end = {"source": "disk", "load_seconds": 0.5, "num_bytes": 100}
    churn.take(event("r1", "loading", "idle", "request", **end))
    assert churn.loads == {("a", "disk"): 1}
    assert churn.load_bytes == 100
    assert churn.load_seconds["disk"].total == 0.5
    assert not +churn.thrashes and not churn.evictions


def test_a_load_soon_after_making_way_is_thrash(churn):
    fields = {"source": "ram", "load_seconds": 0.01, "away_seconds": 3.0}
    churn.take(event("r1", "loading", "idle", "request", **fields))
    assert churn.thrashes == {("a",): 1}


def test_evictions_bear_their_reason(churn):
    churn.take(event("r1", "idle", "ram", "cost"))
    churn.take(event("r1", "draining", "ram", "starvation"))
    churn.take(event("r1", "idle", "registered", "manual"))
    churn.take(event("old", "idle", "registered", "remove"))
    churn.take(event("unknown", "idle", "ram", "cost"))
    churn.take(event("r1", "loading", "ram", "cancel"))  # it was never there
    churn.take(event("r1", "ram", "registered", "lru"))  # nor is this the GPU
    assert churn.evictions == {
        ("a", "cost"): 1,
        ("a", "drain"): 1,
        ("a", "manual"): 1,
        ("a", "replace"): 1,
    }


def test_failed_loads_are_told_apart(churn):
    churn.take(event("r1", "loading", "registered", "error", message="no such file"))
    churn.take(event("r1", "loading", "registered", "damaged"))
    assert churn.failures == {"load_failed": 1, "adapter_damaged": 1}


def test_a_drain_ends_as_done_aborted_or_undone(churn):
    drained = churn._drained
    for cause, after, end in (
        ("manual", "ram", "manual"),
        ("starvation", "ram", "starvation"),
        ("starvation", "active", "undrain"),
    ):
        churn.take(event("r1", "active", "draining", cause))
        churn.take(event("r1", "draining", after, end, seconds=2.0))
    assert churn.drains() == {
        ("manual", "done"): 1,
        ("drain", "done"): 1,
        ("drain", "undone"): 1,
    }
    churn.take(event("r1", "active", "draining", "manual"))
    churn.take(event("r1", "draining", "ram", "manual", seconds=30.0))
    drained.add("r1")  # its requests hear of it after the transition
    assert churn.drains()["manual", "aborted"] == 1
    assert not drained
    assert sum(churn.drain_seconds.counts) == 4


def test_a_removed_name_is_forgotten(churn):
    churn.take(event("r1", "idle", "ram", "cost"))
    churn.keep({"b"})
    assert not churn.evictions

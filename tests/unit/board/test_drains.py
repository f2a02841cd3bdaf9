"""What runs down, and how far it is."""

import pytest

from lorad.board.drains import Drains
from lorad.service.catalog import Catalog, Entry
from lorad.service.gate import HELD, STOPPING, Gate


class Requests:
    """As many as a test says."""

    def __init__(self):
        self.counts = {}

    def running(self, name=None):
        return self.counts.get(name, 0)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def requests():
    return Requests()


@pytest.fixture
def catalog():
    return Catalog([Entry("sql", "r1"), Entry("bible", "r2")])


@pytest.fixture
def drains(gate, requests, catalog):
    return Drains(gate, requests, catalog, lambda: 30.0)


def test_nothing_drains(drains, told):
    assert drains.look(0.0, [told.status("r1", state="active", leases=3)]) == {}


def test_a_held_name_shows_what_is_left_of_what_it_began_with(drains, gate, requests):
    requests.counts["sql"] = 4
    drains.begin("sql", 10.0)
    gate.held.add("sql")
    requests.counts["sql"] = 1
    drain = drains.look(15.0, [])["sql"]
    assert (drain.begun_with, drain.running, drain.seconds) == (4, 1, 5.0)
    assert (drain.held, drain.cause, drain.limit_seconds) == (True, "operator", None)
    gate.held.clear()
    assert drains.look(16.0, []) == {}
    requests.counts["sql"] = 2
    gate.held.add("sql")
    drains.begin("sql", 20.0)
    assert drains.look(20.0, [])["sql"].begun_with == 2


def test_the_daemon_is_held_by_an_operator_or_stops_within_its_limit(drains, gate, requests):
    requests.counts[None] = 3
    gate.closed = HELD
    held = drains.look(1.0, [])[""]
    assert (held.held, held.limit_seconds, held.running) == (True, None, 3)
    gate.closed = STOPPING
    stopping = drains.look(2.0, [])[""]
    assert (stopping.held, stopping.limit_seconds, stopping.cause) == (False, 30.0, "stop")


def test_an_evicted_revision_drains_until_its_deadline(drains, told):
    before = told.status("r1", state="active", leases=3)
    drains.begin_revision("r1", before, 10.0)
    now = told.status(
        "r1",
        state="draining",
        leases=1,
        drain_cause="manual",
        drain_seconds=4.0,
        drain_left_seconds=26.0,
    )
    drain = drains.look(14.0, [now])["sql"]
    assert (drain.rev, drain.next_rev, drain.cause) == ("r1", "", "manual")
    assert (drain.begun_with, drain.running) == (3, 1)
    assert (drain.seconds, drain.limit_seconds) == (4.0, 30.0)


def test_one_that_gives_way_to_a_starving_one_says_so(drains, told):
    now = told.status("r1", state="draining", leases=1, drain_cause="starvation", drain_seconds=1.0)
    assert drains.look(14.0, [now])["sql"].cause == "drain"


def test_a_replaced_revision_names_what_replaces_it(drains, catalog, told):
    catalog.put(Entry("sql", "r9"))
    old = told.status("r1", state="active", leases=2)
    drain = drains.look(10.0, [old])["sql@r1"]
    assert (drain.next_rev, drain.cause, drain.running) == ("r9", "replace", 2)
    later = drains.look(12.5, [told.status("r1", state="active", leases=1)])["sql@r1"]
    assert (later.begun_with, later.running, later.seconds) == (2, 1, 2.5)


def test_of_a_held_name_whose_revision_drains_too_the_operators_word_is_told(drains, gate, told):
    gate.held.add("sql")
    now = told.status("r1", state="draining", leases=1, drain_cause="manual", drain_seconds=1.0)
    assert drains.look(1.0, [now])["sql"].held


def test_where_nobody_looks_only_the_latest_are_known(drains, told):
    for n in range(2000):
        drains.begin_revision(f"{n:012x}", told.status("r1", leases=n), float(n))
    assert len(drains._begun) == 256
    last = told.status(f"{1999:012x}", state="draining", leases=1)
    [drain] = drains.look(2000.0, [last]).values()
    assert drain.begun_with == 1999
    assert len(drains._begun) == 1

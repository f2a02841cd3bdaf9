"""Rows of requests and tenants, from a crowd of requests that a test makes."""

from types import SimpleNamespace

import pytest

from lorad.board.requests import RequestRows, client_of
from lorad.board.tenants import TenantRows
from lorad.service.ask import Count
from lorad.service.generation import Generation as Real
from lorad.service.live import Crowd, Live
from lorad.service.tenants import Account, Caller, Tenant
from lorad.wire_stream import MAX_REQUESTS
from lorad.wire_tenants import Key
from lorad.wire_tenants import Tenant as Known


class Generation:
    """What rows look at."""

    endpoint, begun, most_tokens = Real.endpoint, Real.begun, Real.most_tokens

    def __init__(self, id, *, chat=True, max_tokens=None, answers=1, tokens=0, started=True):
        self.id, self.rev = id, "r1"
        self.ask = SimpleNamespace(chat=chat, max_tokens=max_tokens, n=answers)
        self.choices = [SimpleNamespace(started=started) for _ in range(answers)]
        self.tokens = tokens

    def usage(self):
        return Count(prompt=7, completion=self.tokens, cached=3)


def enter(crowd, generation, *, tenant="acme", who="uid 1000 pid 7", received=0.0):
    account = Account(Tenant(tenant), 40, Caller(None, who))
    crowd.enter(generation, Live("acme/sql", account, received))
    return generation


@pytest.fixture
def crowd():
    return Crowd()


def test_a_request_is_told_with_who_asked_and_how_far_it_is(crowd):
    enter(crowd, Generation("g1", max_tokens=100, answers=2, tokens=30), received=4.0)
    row = RequestRows(crowd).look(10.0)["g1"]
    assert (row.adapter, row.rev, row.tenant, row.client) == ("acme/sql", "r1", "acme", "uid 1000")
    assert (row.state, row.endpoint, row.age_seconds) == ("running", "chat_completions", 6.0)
    assert (row.prompt_tokens, row.cached_tokens, row.generated_tokens) == (7, 3, 30)
    assert (row.max_tokens, row.priority, row.tokens_per_second) == (200, 40, 5.0)


def test_one_without_an_answer_is_queued_and_a_silent_completion_has_sixteen_tokens(crowd):
    enter(crowd, Generation("g1", chat=False, started=False))
    row = RequestRows(crowd).look(1.0)["g1"]
    assert (row.state, row.max_tokens, row.tokens_per_second) == ("queued", 16, 0.0)


def test_how_fast_it_is_now_is_seen_from_look_to_look(crowd):
    rows, generation = RequestRows(crowd), enter(crowd, Generation("g1", tokens=10))
    assert rows.look(10.0)["g1"].tokens_per_second == 1.0
    generation.tokens = 90
    assert rows.look(10.5)["g1"].tokens_per_second == 1.0  # too soon to say
    assert rows.look(12.0)["g1"].tokens_per_second == 40.0


def test_the_longest_running_are_told_and_not_more_than_so_many(crowd):
    for number in range(MAX_REQUESTS + 20):
        enter(crowd, Generation(f"g{number}"))
    rows = list(RequestRows(crowd).look(1.0))
    assert (len(rows), rows[0], rows[-1]) == (MAX_REQUESTS, "g0", f"g{MAX_REQUESTS - 1}")


@pytest.mark.parametrize(
    ("who", "client"),
    [
        ("uid 1000 pid 7", "uid 1000"),
        ("uid 1000 pid 7 key ab12cd34", "key ab12cd34"),
        ("tcp key ci", "key ci"),
        ("unknown peer", "unknown peer"),
        ("", ""),
    ],
)
def test_clients_are_told_apart_by_key_or_uid(who, client):
    assert client_of(who) == client


# ----------------------------------------------------------------- tenants
def test_what_a_tenant_used_within_a_minute_includes_requests_that_run(crowd):
    rows, generation = TenantRows(crowd), enter(crowd, Generation("g1", tokens=0))
    rows.tick(0.0)
    generation.tokens = 113
    enter(crowd, Generation("g2", started=False))
    crowd.of("acme").refused += 1
    rows.tick(59.0)
    row = rows.look()["acme"]
    assert (row.running, row.waiting) == (1, 1)
    assert row.requests_per_minute == 2.0
    assert row.refused_per_minute == 1.0
    assert row.tokens_per_minute == 127.0  # two prompts and an answer
    crowd.leave(generation)
    rows.tick(60.0)
    assert rows.look()["acme"].running == 0


def test_without_tenants_those_that_did_nothing_are_left_out(crowd):
    rows, generation = TenantRows(crowd), enter(crowd, Generation("g1"))
    rows.tick(0.0)
    crowd.leave(generation)
    for second in range(1, 70):
        rows.tick(float(second))
    assert rows.look() == {}


def test_those_that_are_set_up_are_shown_with_their_limits(crowd):
    rows = TenantRows(crowd)
    known = Known(
        name="acme",
        adapters=("acme/*",),
        base=True,
        uids=(),
        rpm=60,
        tokens_per_minute=1000,
        queue=5,
        max_priority=70,
        weight=2.0,
        keys=(Key(id="ab12cd34", created_at=""),),
        created_at="",
    )
    rows.know([known])
    enter(crowd, Generation("g1"), tenant="")
    rows.tick(0.0)
    row = rows.look()["acme"]
    assert (row.rpm, row.tpm, row.queue, row.weight, row.max_priority) == (60, 1000, 5, 2.0, 70)
    assert (row.keys, row.adapters, list(rows.look())) == (("ab12cd34",), ("acme/*",), ["acme"])

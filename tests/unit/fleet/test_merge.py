"""Pictures of several members as one: what is added, what is not, and what cannot be."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from lorad.errors import LoradError
from lorad.fleet import exposition, merge, merge_board
from lorad.fleet.members import Member
from lorad.fleet.table import Entry, Table
from lorad.routing import affinity
from lorad.wire_status import PoolPicture, PrefixPicture, ReplicaStatus
from lorad.wire_stream import (
    Board,
    Check,
    Churn,
    Drain,
    Load,
    Loaded,
    RequestRow,
    Spread,
    TenantRow,
)
from tests.fakes.small_daemons import row, status_of

TIME = "2026-01-01T00:00:00Z"


def member(name, state="ready", reason=""):
    return Member(name, state, "1", affinity.Replica(name=name, alive=True, waiting={}), reason)


def board_of(**parts):
    return Board(sequence=1, time=TIME, interval_seconds=0, status=status_of("a"), **parts)


def merged(**boards):
    return merge_board.board(boards, status_of("g"), (), TIME)


def test_pools_of_one_block_size_are_added_in_blocks_and_others_in_bytes():
    one = PoolPicture(total=10, free=4, block_bytes=8, block_size=16)
    assert merge.pool([one, None, one]) == replace(one, total=20, free=8)
    other = PoolPicture(total=2, free=1, block_bytes=32, block_size=64)
    assert merge.pool([one, other]) == PoolPicture(total=144, free=64, block_bytes=1)
    assert merge.pool([None]) is None and merge.pool([]) is None


def test_distances_of_prefixes_are_added_place_by_place():
    one, other = PrefixPicture(found_blocks=(1, 2), hit_tokens=3), PrefixPicture(found_blocks=(4,))
    assert merge.prefix([one, other]) == PrefixPicture(found_blocks=(5, 2), hit_tokens=3)


def test_replicas_of_a_member_bear_its_name_and_models_are_told_apart():
    several = (ReplicaStatus(name="0", state="ready"), ReplicaStatus(name="1", state="stopped"))
    status = status_of("a")
    (tiny,) = status.models
    embed = replace(tiny, name="embed", slots_total=2)
    status = replace(status, models=(replace(tiny, replicas=several), embed))
    found = merge.models({"a": status, "b": status_of("b")}, [member("a"), member("b")], {})
    assert [(m.name, m.slots_total) for m in found] == [("tiny", 16), ("embed", 2)]
    assert [(r.name, r.state) for r in found[0].replicas] == [
        ("a/0", "ready"),
        ("a/1", "stopped"),
        ("b", "ready"),
    ]
    assert [(r.name, r.state) for r in found[1].replicas] == [("a", "ready"), ("b", "lost")]


def test_without_any_answer_there_is_still_a_status():
    own = status_of("g", state="engine_restarting", reason="a lost: gone", models=())
    found = merge.status(own, {}, [member("a", "lost", "gone")], {"poet": "registered"})
    assert (found.state, found.adapters) == ("engine_restarting", {"registered": 1})


def test_a_row_of_another_revision_than_the_tables_is_not_told_of_the_name():
    table = Table(entries={"poet": Entry(name="poet", content="c", rev="new", model="tiny")})
    old = {"poet": row("poet", "old", state="active", running=3)}
    (shown,) = merge.listed(table, old)
    assert (shown.rev, shown.state, shown.running) == ("new", "registered", 0)
    assert merge.states(table, old) == {"poet": "registered"}


def test_an_unknown_sort_is_refused_and_missing_values_go_first():
    rows = [row("b", "r", last_used_at=TIME), row("a", "r"), row("c", "r")]
    with pytest.raises(LoradError, match="unknown sort"):
        merge.page(rows, sort="colour")
    assert [r.name for r in merge.page(rows, sort="last_used").items] == ["a", "c", "b"]
    assert merge.page(rows, sort="-last_used").items[0].name == "b"


def test_of_percentiles_the_worst_stands_and_rates_are_added():
    one = Load(tokens_per_second=2.0, queue=Spread(count=3, p50=1.0, p99=2.0))
    other = Load(tokens_per_second=1.0, queue=Spread(count=1, p50=4.0), tokens_history=(1.0, 2.0))
    found = merged(a=board_of(load=replace(one, tokens_history=(5.0,))), b=board_of(load=other))
    assert found.load.tokens_per_second == 3.0
    assert found.load.queue == Spread(count=4, p50=4.0, p99=2.0)
    assert found.load.tokens_history == (1.0, 7.0), "the newest is last"


def test_churn_of_all_falls_together_at_its_newest():
    loaded = {"name": "poet", "source": "disk", "num_bytes": 1, "seconds": 1.0}
    one = Churn(loads=(1, 2), top=(("poet", 3),), reasons={"room": 1})
    late = Churn(
        loads=(5,), top=(("poet", 1), ("clerk", 2)), recent=(Loaded(**loaded, ago_seconds=1),)
    )
    early = replace(one, recent=(Loaded(**loaded, ago_seconds=9),))
    found = merged(a=board_of(churn=early), b=board_of(churn=late)).churn
    assert (found.loads, found.top) == ((1, 7), (("poet", 4), ("clerk", 2)))
    assert [load.ago_seconds for load in found.recent] == [1, 9] and found.reasons == {"room": 1}


def test_rows_of_requests_say_whose_they_are_and_tenants_and_drains_are_added():
    request = RequestRow(
        id="r1",
        adapter="poet",
        rev="r",
        state="running",
        endpoint="chat",
        age_seconds=1.0,
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=1,
        max_tokens=None,
        tokens_per_second=1.0,
        priority=50,
        tenant="",
        client="",
    )
    tenants = {"acme": TenantRow(name="acme", running=2, rpm=60)}
    drains = {"poet": Drain(name="poet", running=1, begun_with=3, seconds=4.0)}
    one = board_of(requests={"r1": request}, num_requests=1, tenants=tenants, drains=drains)
    other = replace(request, id="r2", replica="0", age_seconds=5.0)
    found = merged(a=one, b=replace(one, requests={"r2": other}))
    assert {r.id: r.replica for r in found.requests.values()} == {"r1": "a", "r2": "b/0"}
    assert list(found.requests) == ["r2", "r1"] and found.num_requests == 2
    assert (found.tenants["acme"].running, found.tenants["acme"].rpm) == (4, 60)
    assert (found.drains["poet"].running, found.drains["poet"].begun_with) == (2, 6)


def test_checks_name_the_members_that_are_not_ready_and_what_members_find():
    found = merge_board.checks([member("a"), member("b", "lost", "gone")], "the table is damaged")
    assert [(c.name, c.level) for c in found] == [("member b", "error"), ("catalog", "error")]
    assert merge_board.checks([member("a")], "")[0].level == "ok"
    bad = Check(name="disk", level="warn", message="nearly full")
    good = Check(name="engine", level="ok", message="fine")
    one = board_of()
    one = replace(one, health=replace(one.health, checks=(good, bad)))
    checks = merge_board.board({"a": one}, status_of("g"), found, TIME).health.checks
    assert [c.name for c in checks] == ["member b", "catalog", "a: disk"]


def test_series_without_labels_and_with_get_the_members_name():
    page = '# HELP x Many.\n# TYPE x counter\nx 1\nx{a="b c"} 2\nx{} 3\n# EOF\n'
    text = exposition.merged({"m": page, "n": "# HELP x Others.\n# TYPE x counter\nx 5\n"})
    assert text.splitlines() == [
        "# HELP x Many.",
        "# TYPE x counter",
        'x{member="m"} 1',
        'x{member="m",a="b c"} 2',
        'x{member="m"} 3',
        'x{member="n"} 5',
    ]


def test_the_gateways_own_metrics_are_those_that_are_documented():
    text = exposition.own((), 0, 0, 0)
    own = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    page = (Path(__file__).parents[3] / "docs/howto/gateway.md").read_text()
    assert own == set(re.findall(r"lorad_gateway_\w+", page))

"""Deltas: what the one has and what the other should have, for boards of all kinds."""

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, json, to_builtins
from msgspec.structs import replace

from lorad import wire_status
from lorad.board.delta import TOLERANCE_SECONDS, difference
from lorad.board_apply import aged, apply
from lorad.wire_stream import (
    Board,
    Check,
    Churn,
    Delta,
    Drain,
    Health,
    Load,
    Loaded,
    Machine,
    RequestRow,
    Slot,
    TenantRow,
)

some = settings(max_examples=40, deadline=None)
START = datetime(2026, 1, 1, tzinfo=UTC)
ages = st.integers(0, 50).map(float)
names = st.sampled_from(["a", "b", "c/d", "\u202e\n<x>"])
few = st.integers(0, 2)

slots = st.builds(
    Slot,
    name=names,
    rev=st.just("r"),
    slot=st.none() | few,
    state=st.sampled_from(["idle", "active", "loading", "draining"]),
    pinned=st.booleans(),
    priority=few,
    rank=st.none(),
    gpu_bytes=few,
    idle_seconds=st.none() | ages,
    load_seconds=ages,
    hits_history=st.sampled_from([(), (None, 5)]),
)
requests = st.builds(
    RequestRow,
    id=names,
    adapter=names,
    rev=st.just("r"),
    state=st.sampled_from(["queued", "running"]),
    endpoint=st.just("completions"),
    age_seconds=ages,
    prompt_tokens=few,
    cached_tokens=few,
    generated_tokens=few,
    max_tokens=st.none(),
    tokens_per_second=st.just(0.0),
    priority=few,
    tenant=st.just(""),
    client=st.just(""),
)
statuses = st.builds(
    wire_status.Status,
    **{
        "uptime_seconds": ages,
        "running": few,
        "adapters": st.dictionaries(names, few, max_size=2),
        "pool": st.just(wire_status.PoolPicture()),
        "inbox": st.none(),
    },
    **{
        name: st.just("" if kind == "s" else 0)
        for kind, words in {
            "s": "version instance_id state reason base model device device_name dtype "
            "inference_socket admin_socket state_dir",
            "n": "pid max_model_len slots_total slots_used pinned waiting ram_used_bytes "
            "ram_limit_bytes generated_tokens prompt_tokens forward_passes preemptions",
        }.items()
        for name in words.split()
    },
)
loads = st.builds(
    Loaded, name=names, source=st.just("ram"), num_bytes=few, seconds=ages, ago_seconds=ages
)
boards = st.builds(
    Board,
    sequence=st.integers(1, 9),
    time=st.integers(0, 20_000).map(lambda ms: _time(ms / 1000)),
    interval_seconds=st.just(1.0),
    status=statuses,
    load=st.builds(Load, query_tokens=few),
    machine=st.builds(Machine, daemon_rss_bytes=few),
    churn=st.builds(Churn, thrashes=few, recent=st.lists(loads, max_size=2).map(tuple)),
    health=st.builds(
        Health,
        checks=st.lists(
            st.builds(Check, name=names, level=st.just("ok"), message=st.just("")), max_size=2
        ).map(tuple),
    ),
    slots=st.dictionaries(names, slots, max_size=3),
    drains=st.dictionaries(names, st.builds(Drain, name=names, seconds=ages), max_size=2),
    requests=st.dictionaries(names, requests, max_size=3),
    num_requests=few,
    tenants=st.dictionaries(names, st.builds(TenantRow, name=names, running=few), max_size=2),
)


def _time(seconds):
    moment = START + timedelta(seconds=seconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def flat(value, path=()):
    """Every leaf of a board by its path."""
    if isinstance(value, dict):
        return {leaf for k, v in value.items() for leaf in flat(v, (*path, k))}
    if isinstance(value, list | tuple):
        return {leaf for n, v in enumerate(value) for leaf in flat(v, (*path, n))}
    return {(path, value)}


def alike(one, other):
    """The same, but for ages that differ by no more than nobody sees."""
    leaves = dict(flat(to_builtins(one))), dict(flat(to_builtins(other)))
    assert leaves[0].keys() == leaves[1].keys()
    for path, value in leaves[0].items():
        expected = leaves[1][path]
        if path[-1].__class__ is str and path[-1].endswith("seconds"):
            near = TOLERANCE_SECONDS + 1e-6
            assert value is expected is None or abs(value - expected) <= near, path
        else:
            assert value == expected, path


@some
@given(boards, boards)
def test_applying_what_differs_makes_the_one_board_the_other(known, now):
    if now.time < known.time:
        known, now = now, known
    delta = difference(known, now)
    told = json.decode(json.encode(delta), type=Delta)  # as a reader gets it
    after = apply(known, told)
    expected = replace(now, sequence=known.sequence + 1)
    if delta.churn is UNSET:  # its ages are told with its news alone
        expected = replace(expected, churn=after.churn)
    alike(after, expected)


@some
@given(boards, st.integers(0, 5000))
def test_a_board_that_only_grew_older_differs_in_nothing(board, milliseconds):
    seconds = milliseconds / 1000
    then = datetime.fromisoformat(board.time) - START
    later = replace(aged(board, seconds), time=_time(then.total_seconds() + seconds))
    delta = difference(board, later)
    assert set(to_builtins(delta)) == {"sequence", "time"}


@some
@given(boards, slots.filter(lambda row: row.idle_seconds is not None and row.idle_seconds > 5))
def test_an_age_that_began_anew_is_told(board, row):
    before = replace(board, slots={"a": row})
    after = replace(before, slots={"a": replace(row, idle_seconds=0.25)})
    assert difference(before, after).slots["a"].idle_seconds == 0.25

"""Merge of boards: one dashboard over all members, as `merge.py` has it of the rest.

Goes in: the boards of those that answered.  Comes out: one.  Rates and counts are added; of
percentiles the worst member's stands, since they cannot be added.  Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from msgspec.structs import fields, replace

from lorad.fleet.members import Member
from lorad.fleet.merge import BEST, added, columns
from lorad.wire_status import Status
from lorad.wire_stream import (
    MAX_REQUESTS,
    Board,
    Check,
    Churn,
    Drain,
    Health,
    Load,
    Machine,
    RequestRow,
    Slot,
    Spread,
    TenantRow,
)

RECENT_LOADS = 32
TOP_NAMES = 8
_HELD = ("active", "idle", "draining")
_SPREADS = ("first_token", "inter_token", "queue")
_SLOT_SUMS = (
    *("gpu_bytes", "ram_bytes", "running", "waiting", "tokens_per_second", "query_tokens"),
    *("hit_tokens", "life_query_tokens", "life_hit_tokens", "life_lost_tokens", "saved_seconds"),
    *("draft_tokens", "accepted_tokens", "life_draft_tokens", "life_accepted_tokens", "loads"),
    *("evictions", "thrashes"),
)
_TENANT_SUMS = ("running", "waiting", "requests_per_minute", "tokens_per_minute")


def board(boards: Mapping[str, Board], status: Status, checks: Sequence[Check], time: str) -> Board:
    """`checks`: the gateway's own, which go first."""
    each = list(boards.values())
    requests = _requests(boards)
    return Board(
        sequence=1,
        time=time,
        interval_seconds=0.0,
        status=status,
        load=_load([one.load for one in each]),
        machine=_machine([one.machine for one in each]),
        churn=_churn([one.churn for one in each]),
        health=_health(boards, checks),
        slots=_slots(boards),
        drains=_drains(boards),
        requests=requests,
        num_requests=sum(one.num_requests for one in each),
        tenants=_tenants(each),
    )


def checks(members: Sequence[Member], trouble: str) -> list[Check]:
    """Of the cluster itself."""
    found = []
    for member in members:
        if member.state != "ready":
            level: Any = "error" if member.state == "lost" else "warn"
            message = f"{member.name} is {member.state}: {member.reason}"
            found.append(Check(name=f"member {member.name}", level=level, message=message))
    if trouble:
        found.append(Check(name="catalog", level="error", message=trouble))
    return found or [Check(name="members", level="ok", message=f"{len(members)} take requests")]


def _load(loads: Sequence[Load]) -> Load:
    counts = [
        f.name for f in fields(Load) if f.name not in (*_SPREADS, "tokens_history")
    ]  # all of them add up
    histories = [one.tokens_history[::-1] for one in loads]
    history = tuple(map(sum, zip_longest(*histories, fillvalue=0.0)))[::-1]
    spreads = {name: _spread([getattr(one, name) for one in loads]) for name in _SPREADS}
    given: dict[str, Any] = added(loads, counts) | spreads
    return Load(**given, tokens_history=history)


def _spread(spreads: Sequence[Spread]) -> Spread:
    def worst(name: str) -> float | None:
        return max((v for one in spreads if (v := getattr(one, name)) is not None), default=None)

    return Spread(
        count=sum(one.count for one in spreads),
        p50=worst("p50"),
        p90=worst("p90"),
        p99=worst("p99"),
    )


def _machine(machines: Sequence[Machine]) -> Machine:
    """Bytes and cores are added; how busy GPUs are is the mean of those that tell."""
    sums = ("daemon_cpu", "daemon_rss_bytes", "engine_cpu", "engine_rss_bytes")
    busy = [one.gpu_busy for one in machines if one.gpu_busy is not None]
    used = [one.gpu_used_bytes for one in machines if one.gpu_used_bytes is not None]
    total = [one.gpu_total_bytes for one in machines if one.gpu_total_bytes is not None]
    return Machine(
        **added(machines, (*sums, "host_used_bytes", "host_total_bytes")),
        gpu_busy=sum(busy) / len(busy) if busy else None,
        gpu_used_bytes=sum(used) if used else None,
        gpu_total_bytes=sum(total) if total else None,
    )


def _churn(churns: Sequence[Churn]) -> Churn:
    reasons, top = Counter[str](), Counter[str]()
    for one in churns:
        reasons.update(one.reasons)
        top.update(dict(one.top))
    recent = (load for one in churns for load in one.recent)
    return Churn(
        loads=_latest([one.loads for one in churns]),
        evictions=_latest([one.evictions for one in churns]),
        thrashes=sum(one.thrashes for one in churns),
        reasons=dict(reasons),
        top=tuple(top.most_common(TOP_NAMES)),
        load_bytes=sum(one.load_bytes for one in churns),
        recent=tuple(nsmallest(RECENT_LOADS, recent, key=attrgetter("ago_seconds"))),
    )


def _latest(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Added so that the newest, which is last, falls together."""
    return columns([row[::-1] for row in rows])[::-1]


def _health(boards: Mapping[str, Board], own: Sequence[Check]) -> Health:
    found = list(own)
    for member, one in boards.items():
        found += [
            replace(check, name=f"{member}: {check.name}", message=f"{member}: {check.message}")
            for check in one.health.checks
            if check.level != "ok"
        ]
    errors = [f"{m}: {b.health.reload_error}" for m, b in boards.items() if b.health.reload_error]
    return Health(checks=tuple(found), reload_error="; ".join(errors))


def _slots(boards: Mapping[str, Board]) -> dict[str, Slot]:
    rows: dict[str, list[tuple[str, Slot]]] = {}
    for member, one in boards.items():
        for name, slot in one.slots.items():
            rows.setdefault(name, []).append((member, slot))
    return {name: _slot(pairs) for name, pairs in rows.items()}


def _slot(pairs: Sequence[tuple[str, Slot]]) -> Slot:
    rows = [slot for _, slot in pairs]
    best = min(rows, key=lambda row: BEST.index(row.state) if row.state in BEST else len(BEST))
    idle = [row.idle_seconds for row in rows if row.idle_seconds is not None]
    places: list[str] = []
    for member, row in pairs:
        own = [member] if row.state in _HELD else []
        places += [f"{member}/{one}" for one in row.replicas] or own
    return replace(
        best,
        **added(rows, _SLOT_SUMS),
        pinned=any(row.pinned for row in rows),
        idle_seconds=min(idle) if idle else None,
        replicas=tuple(places),
    )


def _drains(boards: Mapping[str, Board]) -> dict[str, Drain]:
    """The same name drains on several: what has to end is added."""
    found: dict[str, Drain] = {}
    for one in boards.values():
        for key, row in one.drains.items():
            old = found.get(key)
            found[key] = row if old is None else _drain(old, row)
    return found


def _drain(old: Drain, row: Drain) -> Drain:
    return replace(
        old if old.seconds >= row.seconds else row,
        running=old.running + row.running,
        begun_with=old.begun_with + row.begun_with,
    )


def _requests(boards: Mapping[str, Board]) -> dict[str, RequestRow]:
    rows = [
        (id, replace(row, replica=f"{member}/{row.replica}" if row.replica else member))
        for member, one in boards.items()
        for id, row in one.requests.items()
    ]
    return dict(nsmallest(MAX_REQUESTS, rows, key=lambda pair: -pair[1].age_seconds))


def _tenants(boards: Sequence[Board]) -> dict[str, TenantRow]:
    found: dict[str, list[TenantRow]] = {}
    for one in boards:
        for name, row in one.tenants.items():
            found.setdefault(name, []).append(row)
    names = (*_TENANT_SUMS, "refused_per_minute")
    return {name: replace(rows[0], **added(rows, names)) for name, rows in found.items()}

"""Merge: what members say of themselves, as one daemon with a replica for each would say it.

Goes in: the pictures of those that answered, why the others did not, the catalog's table.  Comes
out: the same Structs.  A member's name is its replica's; of one that has replicas itself they are
`member/0` and so on.  Counts are added, and what cannot be added is of whom it says.  Pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet.members import Member
from lorad.fleet.table import Entry, Table
from lorad.wire_status import ModelStatus, PoolPicture, PrefixPicture, ReplicaStatus, Status

S = TypeVar("S", bound=Struct)

#: Where an adapter is, of all members: the first of these that one says.
BEST = ("active", "idle", "draining", "loading", "ram", "registered", "remote")
_NEAREST = ("ready", "draining", "engine_stalled", "loading_base", "starting")
_ROW_SUMS = (
    *("running", "waiting", "loads", "evictions", "thrashes", "prefix_query_tokens"),
    *("prefix_hit_tokens", "prefix_lost_tokens", "prefix_saved_seconds", "generated_tokens"),
    *("draft_tokens", "accepted_tokens"),
)
_OF_FIRST = (
    *("base", "model", "device", "device_name", "dtype", "max_model_len", "tasks", "pooling"),
)
_SUMS = (
    *("slots_total", "slots_used", "running", "waiting", "ram_used_bytes", "ram_limit_bytes"),
    *("generated_tokens", "prompt_tokens", "forward_passes", "engine_restarts"),
)
_OWN = ("name", "state", "reason")
SORTS = ("name", "tenant", "state", "pinned", "priority", "created", "last_used", "rank", "size")


# ----------------------------------------------------------------- the cluster
def status(
    own: Status, said: Mapping[str, Status], members: Sequence[Member], states: Mapping[str, str]
) -> Status:
    """`own`: what the gateway says of itself; `states`: where each name of the catalog is."""
    if not said:
        return replace(own, adapters=dict(Counter(states.values())))
    first = next(iter(said.values()))
    each = list(said.values())
    return replace(
        own,
        **{name: getattr(first, name) for name in _OF_FIRST},
        **added(each, (*_SUMS, "pinned", "preemptions", "thrashes")),
        pool=pool([one.pool for one in each]) or PoolPicture(),
        prefix=prefix([one.prefix for one in each]),
        adapters=dict(Counter(states.values())),
        drained=tuple(sorted({*own.drained, *(name for one in each for name in one.drained)})),
        models=models(said, members, states),
    )


def mixed(said: Mapping[str, Status]) -> list[str]:
    """Models of which members have different bases, in words: answers are then of either."""
    found: dict[str, dict[str, str]] = {}
    for member, one in said.items():
        for model in one.models:
            if model.fingerprint:
                found.setdefault(model.name, {}).setdefault(model.fingerprint, member)
    return [
        f"{' and '.join(sorted(each.values()))} serve different bases as {name}"
        for name, each in found.items()
        if len(each) > 1
    ]


def models(
    said: Mapping[str, Status], members: Sequence[Member], states: Mapping[str, str]
) -> tuple[ModelStatus, ...]:
    """Each with a replica for every member, in the order in which the first one has them."""
    rows: dict[str, dict[str, ModelStatus]] = {}
    for name, one in said.items():
        for model in one.models:
            rows.setdefault(model.name, {})[name] = model
    alone = len(rows) == 1
    return tuple(_model(each, members, len(states) if alone else None) for each in rows.values())


def _model(
    each: Mapping[str, ModelStatus], members: Sequence[Member], count: int | None
) -> ModelStatus:
    found = list(each.values())
    best = min(found, key=lambda one: _place(_NEAREST, one.state))
    replicas: list[ReplicaStatus] = []
    for member in members:
        if (one := each.get(member.name)) is not None:
            replicas += _replicas(member, one)
        else:
            replicas.append(ReplicaStatus(name=member.name, state="lost", reason=member.reason))
    return replace(
        best,
        **added(found, _SUMS),
        num_adapters=max(one.num_adapters for one in found) if count is None else count,
        most_extra_tokens=max(one.most_extra_tokens for one in found),
        own_tokenizers=max(one.own_tokenizers for one in found),
        pool=pool([one.pool for one in found]),
        prefix=prefix([one.prefix for one in found]),
        replicas=tuple(replicas),
    )


def _replicas(member: Member, one: ModelStatus) -> list[ReplicaStatus]:
    if one.replicas:
        return [replace(each, name=f"{member.name}/{each.name}") for each in one.replicas]
    away = member.state != "ready" and one.state == "ready"  # it drains, or takes the catalog in
    row = ReplicaStatus(
        name=member.name,
        state=member.state if away else one.state,
        reason=member.reason if away else one.reason,
        **{f.name: getattr(one, f.name) for f in fields(ReplicaStatus) if f.name not in _OWN},
    )
    return [row]


# ----------------------------------------------------------------- adapters
def slots(pages: Mapping[str, wire.SlotPage]) -> wire.SlotPage:
    """A row for each name that is resident or loading anywhere."""
    return wire.SlotPage(
        items=tuple(together({name: page.items for name, page in pages.items()}).values()),
        slots_total=sum(page.slots_total for page in pages.values()),
        slots_used=sum(page.slots_used for page in pages.values()),
    )


def together(rows: Mapping[str, Iterable[wire.Adapter]]) -> dict[str, wire.Adapter]:
    """By name; `rows` by member."""
    found: dict[str, list[tuple[str, wire.Adapter]]] = {}
    for member, items in rows.items():
        for row in items:
            found.setdefault(row.name, []).append((member, row))
    return {name: _row(pairs) for name, pairs in found.items()}


def _row(pairs: Sequence[tuple[str, wire.Adapter]]) -> wire.Adapter:
    rows = [row for _, row in pairs]
    best = min(rows, key=lambda row: _place(BEST, row.state))
    idle = [row.idle_seconds for row in rows if row.idle_seconds is not None]
    places = tuple(
        place
        for member, row in pairs
        for place in (
            [f"{member}/{one}" for one in row.replicas]
            or ([member] if row.state in ("active", "idle", "draining") else [])
        )
    )
    return replace(
        best,
        **added(rows, _ROW_SUMS),
        idle_seconds=min(idle) if idle else None,
        last_used_at=max((row.last_used_at for row in rows if row.last_used_at), default=None),
        pinned=any(row.pinned for row in rows),
        replicas=places,
    )


def listed(table: Table, live: Mapping[str, wire.Adapter]) -> list[wire.Adapter]:
    """Every name of the catalog, with what members say of its revision."""
    return [row_of(entry, live.get(name)) for name, entry in table.entries.items()]


def row_of(entry: Entry, live: wire.Adapter | None) -> wire.Adapter:
    """One that no member has, or has on no GPU, is registered."""
    given: dict[str, Any] = {
        "name": entry.name,
        "tenant": entry.name.partition("/")[0] if "/" in entry.name else None,
        "model": entry.model,
        "pinned": entry.pin,
        "priority": 50 if entry.priority is None else entry.priority,
        "rev": entry.rev,
        "candidate_rev": None,
        "source": entry.source,
        "labels": dict(entry.labels),
        "created_at": entry.created_at,
    }
    if live is not None and live.rev == entry.rev:
        return replace(live, **given | {"model": live.model})
    return wire.Adapter(
        **given,
        state="registered",
        rank=entry.rank,
        num_bytes=entry.num_bytes,
        targets=entry.targets,
        reason=None,
        reason_message=None,
        last_used_at=None,
    )


def page(
    rows: Iterable[wire.Adapter],
    *,
    state: str | None = None,
    tenant: str | None = None,
    model: str | None = None,
    q: str | None = None,
    sort: str = "name",
    limit: int = 100,
    cursor: str | None = None,
) -> wire.AdapterPage:
    """As a daemon's list; the cursor is the place of the next row."""
    word = sort.removeprefix("-")
    if word not in SORTS:
        message = f"unknown sort {sort!r}; known: {', '.join(SORTS)}"
        raise LoradError("invalid_value", message, param="sort")
    found = [
        row
        for row in rows
        if state in (None, row.state)
        and tenant in (None, row.tenant)
        and model in (None, row.model)
        and (q or "") in row.name
    ]
    found.sort(key=attrgetter("name"))
    column = {"created": "created_at", "last_used": "last_used_at", "size": "num_bytes"}
    key = attrgetter(column.get(word, word))
    found.sort(key=lambda row: (key(row) is not None, key(row) or 0), reverse=sort != word)
    begin = int(cursor) if cursor and cursor.isdecimal() and len(cursor) < 10 else 0
    end = begin + limit
    more = str(end) if end < len(found) else None
    return wire.AdapterPage(items=tuple(found[begin:end]), total=len(found), cursor=more)


def states(table: Table, live: Mapping[str, wire.Adapter]) -> dict[str, str]:
    """Of every name of the catalog, where it is."""
    return {
        name: row.state
        if (row := live.get(name)) is not None and row.rev == entry.rev
        else "registered"
        for name, entry in table.entries.items()
    }


# ----------------------------------------------------------------- arithmetic
def added(rows: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def pool(pools: Sequence[PoolPicture | None]) -> PoolPicture | None:
    """In blocks, if all have blocks of one size; else in bytes."""
    found = [one for one in pools if one is not None and one.block_bytes]
    if not found:
        return next((one for one in pools if one is not None), None)
    counts = ("total", "free", "kv_active", "kv_cached", "adapter_active", "adapter_idle")
    if len({(one.block_bytes, one.block_size) for one in found}) == 1:
        return replace(found[0], **added(found, counts))
    each = {n: sum(getattr(one, n) * one.block_bytes for one in found) for n in counts}
    return PoolPicture(**each, block_bytes=1)


def prefix(pictures: Sequence[PrefixPicture]) -> PrefixPicture:
    counts = ("query_tokens", "hit_tokens", "lost_tokens", "saved_seconds")
    return PrefixPicture(
        **added(pictures, counts),
        found_blocks=columns([one.found_blocks for one in pictures]),
        lost_blocks=columns([one.lost_blocks for one in pictures]),
    )


def columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Added place by place."""
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def _place(order: Sequence[str], word: str) -> int:
    return order.index(word) if word in order else len(order)

"""Delta: what a reader has to be told, whose board is the one and should be the other.

Goes in: two boards.  Comes out: a `wire_stream.Delta` such that `board_apply.apply` makes the one
the other.  An age that has grown with the time between them is no difference; one that has not (it
began anew, or was wrong by more than is seen) is.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import fields

from lorad.board_apply import MAPS, seconds_between
from lorad.wire_status import Status
from lorad.wire_stream import Board, Churn, Delta, Drain, Loaded, RequestRow, Slot, TenantRow

S = TypeVar("S", bound=Struct)

#: An age that is off by less is shown as it should be.
TOLERANCE_SECONDS = 0.5

_AGES: dict[type[Struct], tuple[str, ...]] = {
    Status: ("uptime_seconds",),
    Slot: ("idle_seconds", "load_seconds"),
    Drain: ("seconds",),
    RequestRow: ("age_seconds",),
    TenantRow: (),
}
Values = Callable[[Any], tuple[Any, ...]]


def _still(kind: type[Struct]) -> Values:
    """All that is no age."""
    names = [field.name for field in fields(kind) if field.name not in _AGES[kind]]
    return attrgetter(*names)


_STILL: dict[type[Struct], Values] = {kind: _still(kind) for kind in _AGES}


def difference(known: Board, now: Board) -> Delta:
    """`known` is what the reader has.  `now` has a sequence of its own, which does not count."""
    seconds = seconds_between(known.time, now.time)
    given: dict[str, Any] = {}
    gone: dict[str, tuple[str, ...]] = {}
    for name, differs in _DIFFERS.items():
        if differs(getattr(known, name), getattr(now, name), seconds):
            given[name] = getattr(now, name)
    for name in MAPS:
        before, after = getattr(known, name), getattr(now, name)
        if changed := _changed(before, after, seconds):
            given[name] = changed
        if left := tuple(key for key in before if key not in after):
            gone[name] = left
    return Delta(sequence=known.sequence + 1, time=now.time, gone=gone, **given)


def _changed(before: Mapping[str, S], after: Mapping[str, S], seconds: float) -> dict[str, S]:
    return {
        key: row
        for key, row in after.items()
        if (old := before.get(key)) is None or _row_differs(old, row, seconds)
    }


def _row_differs(before: Struct, after: Struct, seconds: float) -> bool:
    kind = type(after)
    still = _STILL[kind]
    if bool(still(before) != still(after)):
        return True
    return any(_age_differs(before, after, name, seconds) for name in _AGES[kind])


def _age_differs(before: Any, after: Any, name: str, seconds: float) -> bool:
    old: float | None = getattr(before, name)
    new: float | None = getattr(after, name)
    if old is None or new is None:
        return old is not new
    if name == "load_seconds" and after.state != "loading":
        return old != new
    return abs(old + seconds - new) > TOLERANCE_SECONDS


def _churn_differs(before: Churn, after: Churn, seconds: float) -> bool:
    return _without_ages(before) != _without_ages(after)


def _without_ages(churn: Churn) -> tuple[Any, ...]:
    recent = [_without_age(load) for load in churn.recent]
    counts = (churn.loads, churn.evictions, churn.thrashes, churn.load_bytes)
    return (*counts, churn.reasons, churn.top, recent)


def _without_age(load: Loaded) -> tuple[Any, ...]:
    return load.name, load.source, load.num_bytes, load.seconds


def _differs(before: object, after: object, seconds: float) -> bool:
    return before != after


_DIFFERS: dict[str, Callable[[Any, Any, float], bool]] = {
    "status": _row_differs,
    "load": _differs,
    "machine": _differs,
    "churn": _churn_differs,
    "health": _differs,
    "num_requests": _differs,
}

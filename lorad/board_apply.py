"""What a reader of the live stream does with its messages: a board, and what comes after it.

Goes in: a `Board`, and a `Delta`, an `EventItem` or seconds.  Comes out: a new board; the one that
was given is as it was.  Rows that a delta leaves out have grown older meanwhile, and are shown so.
Knows no socket, and nothing of how a board is made.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from lorad.wire import EventItem
from lorad.wire_stream import Board, Churn, Delta, Drain, RequestRow, Slot

T = TypeVar("T")

#: Parts of a board that a delta replaces as a whole, where it has them.
WHOLE = ("status", "load", "machine", "churn", "health", "num_requests")
#: Parts that are rows by key.
MAPS = ("slots", "drains", "requests", "tenants")
#: So many events a board holds; whoever wants more keeps them, or asks for /admin/v1/events.
MAX_EVENTS = 100


def apply(board: Board, delta: Delta) -> Board:
    """The board as it is with `delta`.  ValueError if it is not the delta after `board`.

    Then a message was lost, and all must be read anew.
    """
    if delta.sequence != board.sequence + 1:
        raise ValueError(f"delta {delta.sequence} does not follow board {board.sequence}")
    given = {name: part for name in WHOLE if (part := getattr(delta, name)) is not UNSET}
    seconds = seconds_between(board.time, delta.time)
    older = aged(board, seconds, but=given)
    for name in MAPS:
        new, gone = getattr(delta, name), delta.gone.get(name, ())
        if new or gone:
            given[name] = _merged(getattr(older, name), new, gone)
    return replace(older, sequence=delta.sequence, time=delta.time, **given)


def with_event(board: Board, item: EventItem) -> Board:
    """The board with one more event, the oldest forgotten."""
    return replace(board, events=(*board.events, item)[-MAX_EVENTS:])


def aged(board: Board, seconds: float, *, but: Iterable[str] = ()) -> Board:
    """The same board, `seconds` later: every age has grown.  `time` stays: that of the news.

    `but`: parts that are left as they are.
    """
    if not seconds:
        return board
    left = frozenset(but)
    parts: dict[str, Any] = {}
    for name, older in _OLDER.items():
        if name not in left:
            parts[name] = older(getattr(board, name), seconds)
    return replace(board, **parts)


def seconds_between(before: str, after: str) -> float:
    """Of two times as the wire has them, never less than 0; nor more, where one of them is none."""
    then, now = _moment(before), _moment(after)
    return 0.0 if then is None or now is None else max((now - then).total_seconds(), 0.0)


def _moment(time: str) -> datetime | None:
    """One without a zone is UTC's."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return None
    return then if then.tzinfo else then.replace(tzinfo=UTC)


def older_slot(row: Slot, seconds: float) -> Slot:
    loading = row.state == "loading"
    if row.idle_seconds is None and not loading:
        return row
    return replace(
        row,
        idle_seconds=None if row.idle_seconds is None else row.idle_seconds + seconds,
        load_seconds=row.load_seconds + seconds if loading else row.load_seconds,
    )


def older_drain(row: Drain, seconds: float) -> Drain:
    return replace(row, seconds=row.seconds + seconds)


def older_request(row: RequestRow, seconds: float) -> RequestRow:
    return replace(row, age_seconds=row.age_seconds + seconds)


def older_churn(churn: Churn, seconds: float) -> Churn:
    recent = tuple(replace(load, ago_seconds=load.ago_seconds + seconds) for load in churn.recent)
    return replace(churn, recent=recent)


def _rows(older: Callable[[T, float], T]) -> Callable[[Mapping[str, T], float], dict[str, T]]:
    return lambda rows, seconds: {key: older(row, seconds) for key, row in rows.items()}


_OLDER: dict[str, Callable[[Any, float], Any]] = {
    "status": lambda status, s: replace(status, uptime_seconds=status.uptime_seconds + s),
    "churn": older_churn,
    "slots": _rows(older_slot),
    "drains": _rows(older_drain),
    "requests": _rows(older_request),
}


def _merged(rows: Mapping[str, T], new: Mapping[str, T], gone: Iterable[str]) -> dict[str, T]:
    """Rows keep their places; new ones come last."""
    merged = dict(rows)
    for key in gone:
        merged.pop(key, None)
    merged.update(new)
    return merged

"""The table of slots: every name that is resident, loading or draining.

Goes in: the board's slots.  Comes out: cells.  A state is a word before it is a colour.
"""

from collections.abc import Callable, Mapping
from functools import cache

from msgspec.structs import replace

from lorad.tui.draw import (
    UNKNOWN,
    Glyphs,
    age,
    bar,
    count,
    duration,
    percent,
    rate,
    ratio,
    size,
    sparkline,
)
from lorad.tui.grid import Column, Grid
from lorad.tui.model import Listing
from lorad.tui.panel import Line, Span
from lorad.tui.places import places_column
from lorad.wire_stream import Board, Slot

STATE_INKS: Mapping[str, str] = {
    "active": "good",
    "loading": "busy",
    "draining": "warn",
    "drained": "warn",
    "quarantined": "bad",
    "missing": "bad",
}
#: Columns of the terminal below which those of the table are in shorter forms, and from which on
#: there are more of them.
NARROW, ROOMY, WIDE = 76, 100, 150
_ONLY_WIDE = ("hits", "saved", "loads", "evict")
_HISTORY = 12
_LOW_HIT = 0.25

Cell = Callable[[str, Slot, Glyphs], Line]


def fields_of(key: str, row: Slot) -> Mapping[str, str]:
    """What a filter can ask for: `state:idle`, `pin:yes`, `tenant:acme`, `model:tiny`."""
    return {
        "state": row.state,
        "pin": "yes" if row.pinned else "no",
        "tenant": row.tenant or "",
        "model": row.model,
        "rev": row.rev,
        "slot": "" if row.slot is None else str(row.slot),
        "rank": "" if row.rank is None else str(row.rank),
    }


#: What is looked for comes first: the busiest, the largest, the best.
SORTS: Mapping[str, Callable[[str, Slot], object]] = {
    "slot": lambda key, row: (row.slot is None, row.slot or 0),
    "name": lambda key, row: key,
    "model": lambda key, row: row.model,
    "rev": lambda key, row: row.rev,
    "state": lambda key, row: _attention(row),
    "pin": lambda key, row: not row.pinned,
    "prio": lambda key, row: -row.priority,
    "rank": lambda key, row: -(row.rank or 0),
    "vram": lambda key, row: -row.gpu_bytes,
    "run": lambda key, row: -row.running,
    "wait": lambda key, row: -row.waiting,
    "hit": lambda key, row: _best_first(row.hit_tokens, row.query_tokens),
    "life": lambda key, row: _best_first(row.life_hit_tokens, row.life_query_tokens),
    "saved": lambda key, row: -row.saved_seconds,
    "right": lambda key, row: _best_first(row.accepted_tokens, row.draft_tokens),
    "tok/draw": lambda key, row: -(row.tokens_per_draw or 0.0),
    "tok/s": lambda key, row: -row.tokens_per_second,
    "loads": lambda key, row: -row.loads,
    "evict": lambda key, row: -row.evictions,
    "idle": lambda key, row: -(_idle(row) or 0.0),
}


def _best_first(hit: int, asked: int) -> float:
    """And last of all what was not asked."""
    share = ratio(hit, asked)
    return 1.0 if share is None else -share


def _attention(row: Slot) -> tuple[int, float, int]:
    """First what somebody waits for, then what comes or goes, then what runs, the hottest of each;
    at last what is idle, the last used first.  So no row moves but for a reason."""
    rank = 0 if row.waiting else 1 if row.state not in ("active", "idle") else 2
    if rank == 2 and not row.running:
        unused = row.idle_seconds is None
        return 4 if unused else 3, row.idle_seconds or 0.0, row.slot or 0
    return rank, -row.tokens_per_second, row.slot or 0


def _idle(row: Slot) -> float | None:
    """What runs is not idle, however long ago it was last heard of."""
    return 0.0 if row.running else row.idle_seconds


def listing() -> Listing[Slot]:
    return Listing(fields_of, SORTS, "state", leads=True)


def told_of(board: Board) -> Mapping[str, Slot]:
    """The board's slots; what an operator drains says so, though it is on the GPU and may be used
    again."""
    held = {drain.name for drain in board.drains.values() if drain.held and drain.name}
    if not held:
        return board.slots
    return {
        key: replace(row, state="draining" if row.running else "drained")
        if row.name in held and row.state in ("active", "idle")
        else row
        for key, row in board.slots.items()
    }


# ----------------------------------------------------------------- cells
def state_cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
    return ((row.state, STATE_INKS.get(row.state, "")),)


def pin_cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
    return (("P", "strong") if row.pinned else ("-", "faint"),)


def hit_cell(width: int) -> Cell:
    """The hit rate of the last minute behind a bar; of a load how far it is, and from where."""

    def cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
        if row.state == "loading":
            tier = row.load_source or "wait"
            if row.load_fraction is None:
                return ((tier.rjust(width), "busy"),)
            return (
                *bar_spans(row.load_fraction, width - 5, glyphs, "busy"),
                (f"{tier:>5}", "busy"),
            )
        share = ratio(row.hit_tokens, row.query_tokens)
        if share is None:
            return ((UNKNOWN.rjust(width), "faint"),)
        ink = "warn" if share < _LOW_HIT else "fill"
        return (*bar_spans(share, width - 5, glyphs, ink), (f"{percent(share):>5}", ""))

    return cell


def bar_spans(share: float | None, width: int, glyphs: Glyphs, ink: str = "fill") -> Line:
    """A bar, its rest in an ink of its own."""
    drawn = bar(share, width, glyphs)
    start, end = drawn.find(glyphs.rest), drawn.rfind(glyphs.rest) + 1
    if start < 0:
        return ((drawn, ink),)
    return ((drawn[:start], ink), (drawn[start:end], "rest"), (drawn[end:], ink))


def _plain(text: Callable[[Slot], str], ink: str = "") -> Cell:
    return lambda key, row, glyphs: ((text(row), ink),)


def _number(value: Callable[[Slot], float], text: Callable[[float], str] = str) -> Cell:
    """Noughts stand back."""

    def cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
        number = value(row)
        return ((text(number), "" if number else "faint"),)

    return cell


def right_cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
    """Of the tokens that were guessed ahead within the minute, how many were right."""
    share = ratio(row.accepted_tokens, row.draft_tokens)
    return ((percent(share), "faint" if share is None else ""),)


def draw_cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
    """Tokens that a step tells of a sequence."""
    return ((rate(row.tokens_per_draw), "" if row.accepted_tokens else "faint"),)


def hits_cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
    """The hit rate as it went, each cell of some seconds; a gap where nothing was asked."""
    return ((sparkline(row.hits_history, _HISTORY, glyphs, top=100), "kv_cached"),)


@cache
def slot_columns(
    room: int,
    *,
    several: bool = False,
    replicas: Column[Slot] | None = None,
    drafts: bool = False,
) -> tuple[Column[Slot], ...]:
    """All of them: of `room` 3 with what only a wide screen has place for, of 1 and 0 shortened.
    `several`: there is more than one model; `replicas`: where rows are, if one of them has several
    engines; `drafts`: tokens are guessed ahead."""
    pin, hit, name = ((1, 5, 20), (1, 9, 28), (3, 13, 22), (3, 19, 30))[room]
    life = _plain(lambda r: percent(ratio(r.life_hit_tokens, r.life_query_tokens)), "faint")
    columns: tuple[Column[Slot], ...] = (
        Column("slot", "SLOT", 4, _plain(lambda r: _or(r.slot), "faint")),
        Column("name", "NAME", name, lambda key, row, glyphs: ((key, ""),), grow=True),
        Column("rev", "REV", 6, _plain(lambda r: r.rev[:6], "faint"), drop=2),
        Column("state", "STATE", 9, state_cell),
        Column("pin", "PIN"[:pin], pin, pin_cell),
        Column("prio", "PRIO", 4, _plain(lambda r: str(r.priority)), right=True, drop=3),
        Column("rank", "RANK", 4, _plain(lambda r: _or(r.rank)), right=True, drop=4),
        Column("vram", "VRAM", 5, _plain(lambda r: size(r.gpu_bytes)), right=True, drop=5),
        Column("run", "RUN", 4, _number(lambda r: r.running), right=True),
        Column("wait", "WAIT", 4, _number(lambda r: r.waiting), right=True),
        Column("hit", "HIT 60s"[: max(3, hit - 2)].rjust(hit), hit, hit_cell(hit), falls=True),
        Column("hits", "HISTORY".rjust(_HISTORY), _HISTORY, hits_cell, drop=8),
        Column("life", "LIFE", 5, life, right=True, drop=7),
        Column("saved", "SAVED", 6, _number(lambda r: r.saved_seconds, _saved), True, drop=9),
        Column("tok/s", "TOK/S", 5, _number(lambda r: r.tokens_per_second, rate), True, drop=6),
        Column("loads", "LOADS", 5, _number(lambda r: r.loads, count), True, drop=10),
        Column("evict", "EVICT", 5, _number(lambda r: r.evictions, count), True, drop=11),
        Column("idle", "IDLE", 5, _plain(lambda r: age(_idle(r)), "faint"), True, drop=1),
    )
    if drafts:
        guessed = (
            Column("right", "RIGHT", 5, right_cell, right=True, drop=7),
            Column("tok/draw", "TOK/DRAW", 8, draw_cell, right=True, drop=8),
        )
        at = next(n for n, column in enumerate(columns) if column.key == "tok/s")
        columns = (*columns[:at], *guessed, *columns[at:])
    if replicas is not None:
        columns = (*columns[:2], replicas, *columns[2:])
    if several:
        model = Column("model", "MODEL", 12, _plain(lambda r: r.model, "faint"), drop=1)
        columns = (*columns[:2], model, *columns[2:])
    return columns if room == 3 else tuple(c for c in columns if c.key not in _ONLY_WIDE)


def _saved(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def _or(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)


# ----------------------------------------------------------------- the panel
class SlotsPanel(Grid[Slot]):
    """The table, and in its frame how many there are."""

    def __init__(self) -> None:
        super().__init__(listing(), slot_columns(2), id="slots")

    def show(self) -> None:
        """Take the rows of the board."""
        board = self.top.shown
        self.listing.show(told_of(board) if board is not None else {})
        self.repaint()

    def columns_at(self, width: int) -> tuple[Column[Slot], ...]:
        room = sum(width >= least for least in (NARROW, ROOMY, WIDE))
        rows = self.listing.rows.values()
        on = places_column(lambda row: row.replicas, rows)
        return slot_columns(
            3 if self.wide else room,
            several=any(row.model for row in rows),
            replicas=on if any(row.replicas for row in rows) else None,
            drafts=any(row.life_draft_tokens for row in rows),
        )

    def title(self) -> Line:
        board = self.top.shown
        if board is None:
            return (("SLOTS", "title"),)
        status = board.status
        rows = self.listing.rows.values()
        said: list[Span] = [("SLOTS", "title")]
        said.append((f"  {status.slots_used}/{status.slots_total} used", ""))
        if status.pinned:
            said.append((f"  {status.pinned} pinned", ""))
        for state in ("draining", "drained"):
            if number := sum(row.state == state for row in rows):
                said.append((f"  {number} {state}", "warn"))
        return tuple(said)

    def empty(self) -> str:
        board = self.top.shown
        if board is None:
            return "waiting for the first data"
        if self.listing.filter_text and board.slots:
            return f"none of {len(board.slots)} matches the filter; esc clears it"
        return "no adapter is on the GPU; the first request for one loads it"

    def ink_of(self, key: str, row: Slot) -> str:
        return "faint" if row.state == "idle" else ""

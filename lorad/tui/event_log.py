"""Screen 5: everything that happened since the dashboard was opened, the newest first.

Goes in: the model's events.  Comes out: a table that follows the newest while its first row is
selected, and stays where one reads otherwise.
"""

from collections.abc import Mapping, Sequence

from textual.app import ComposeResult

from lorad.spelling import split_digest
from lorad.tui.draw import Glyphs, clock
from lorad.tui.drawer import Detail
from lorad.tui.facts import EventFact
from lorad.tui.grid import Column, Grid
from lorad.tui.model import GAP, MAX_EVENTS, Listing
from lorad.tui.panel import Line, Span
from lorad.tui.view import View
from lorad.wire import EventItem

LEVEL_INKS = {"info": "faint", "warn": "warn", "error": "bad"}
_NARROW = 90


class EventsView(View):
    """The whole log."""

    key, view_name = "5", "Events"

    def compose(self) -> ComposeResult:
        yield EventLog()

    def show(self) -> None:
        self.query_one(EventLog).show()

    @property
    def target(self) -> str:
        row = self.query_one(EventLog).listing.row
        return "" if row is None else split_digest(row.name)[0]

    def detail(self) -> Detail | None:
        row = self.query_one(EventLog).listing.row
        return None if row is None else EventFact(row.type, row)


def fields_of(key: str, row: EventItem) -> Mapping[str, str]:
    """`type:slot` is every type that begins so."""
    return {
        "type": row.type,
        "level": row.level,
        "name": row.name,
        "adapter": row.name,
        "cause": row.cause,
        "replica": row.replica,
        "rev": row.rev,
    }


class EventListing(Listing[EventItem]):
    """In the order of time, by numbers that only go up."""

    def __init__(self) -> None:
        super().__init__(fields_of, {}, "time")
        self.follows = True
        self.num_new = 0  # since it followed last
        self._newest = 0
        self._seen = 0
        self._taken: tuple[int, int, str] | None = None

    def text_of(self, key: str, row: EventItem) -> str:
        return f"{row.name} {row.type} {row.replica} {row.message} {row.cause}"

    def take(self, events: Sequence[EventItem], first: int) -> None:
        """`first` is the number of the oldest."""
        self._newest = first + len(events) - 1
        taken = (first, self._newest, self.filter_text)
        if taken != self._taken:
            self._taken = taken
            newest = range(self._newest, first - 1, -1)
            rows = zip(newest, reversed(events), strict=True)
            self.show({str(number): event for number, event in rows})
        if self.follows:
            self._seen = self._newest
        self.num_new = self._newest - self._seen

    def show(self, rows: Mapping[str, EventItem]) -> None:
        self.rows = rows
        self.keys = [key for key, row in rows.items() if self.matches(key, row)]
        if self.follows or self.selected not in rows:
            self.select_place(0 if self.follows else self.place)
        elif self.selected in self.keys:
            self._place = self.keys.index(self.selected)
        else:
            self.select_place(self.place)
        if not self.keys:
            self.selected = None

    def select_place(self, place: int) -> None:
        super().select_place(place)
        self.follows = self.place == 0
        if self.follows:
            self._seen, self.num_new = self._newest, 0

    def order_next(self, columns: Sequence[str]) -> None:
        """There is one order."""


class EventLog(Grid[EventItem]):
    listing: EventListing

    def __init__(self) -> None:
        super().__init__(EventListing(), _COLUMNS, id="event-log")
        self.title_first = True
        self.bottom = True

    def show(self) -> None:
        model = self.top.model
        self.listing.take(model.events, model.first_event)
        if self.listing.follows:
            model.looked()
        self.repaint()

    def columns_at(self, width: int) -> tuple[Column[EventItem], ...]:
        return _SHORT if width < _NARROW and not self.wide else _COLUMNS

    def title(self) -> Line:
        listing = self.listing
        said: list[Span] = [("EVENTS", "title"), (f"  {len(listing.keys)}", "")]
        if listing.filter_text:
            said.append((f" of {len(listing.rows)}", ""))
        if len(listing.rows) >= MAX_EVENTS:
            said.append(("  older ones: loractl events --since", "faint"))
        return tuple(said)

    def note(self) -> Line:
        listing = self.listing
        said: list[Span] = []
        if listing.filter_text:
            said += [("filter ", "faint"), (f"{listing.filter_text}  ", "strong")]
        if listing.follows:
            return (*said, ("following", "good"))
        if listing.num_new:
            said.append((f"{listing.num_new} new  ", "strong"))
        return (*said, (self.span_text(), "faint"), ("  g follows", "faint"))

    def empty(self) -> str:
        if self.top.shown is None:
            return "waiting for the first data"
        if self.listing.filter_text and self.listing.rows:
            return f"none of {len(self.listing.rows)} matches the filter; esc clears it"
        return "nothing happened yet"

    def ink_of(self, key: str, row: EventItem) -> str:
        return "warn" if row.type == GAP else ""


# ----------------------------------------------------------------- cells
def _level(key: str, row: EventItem, glyphs: Glyphs) -> Line:
    return ((row.level.upper(), LEVEL_INKS.get(row.level, "")),)


def _type(key: str, row: EventItem, glyphs: Glyphs) -> Line:
    return ((row.type, LEVEL_INKS.get(row.level, "") if row.level != "info" else ""),)


def _loud_type(key: str, row: EventItem, glyphs: Glyphs) -> Line:
    """With its level, where that is no column of its own."""
    if row.level == "info":
        return ((row.type, ""),)
    return ((f"{row.level.upper()} ", LEVEL_INKS.get(row.level, "")), (row.type, ""))


def _said(key: str, row: EventItem, glyphs: Glyphs) -> Line:
    if row.type == GAP:
        return ((f"--- {row.message or 'some events are gone'} ---", "warn"),)
    where = f"replica {row.replica} " if row.replica else ""
    gap = " " if row.message and row.cause else ""
    cause = f"{gap}({row.cause})" if row.cause else ""
    return ((where, ""), (row.message, ""), (cause, "faint"))


_TIME: Column[EventItem] = Column("time", "TIME", 8, lambda k, r, g: ((clock(r.time), "faint"),))
_NAME: Column[EventItem] = Column("name", "ADAPTER", 26, lambda k, r, g: ((r.name, "name"),))
_COLUMNS: tuple[Column[EventItem], ...] = (
    _TIME,
    Column("level", "LEVEL", 5, _level),
    Column("type", "TYPE", 19, _type),
    _NAME,
    Column("rev", "REV", 6, lambda k, r, g: ((r.rev[:6], "faint"),), drop=1),
    Column("said", "WHAT", 20, _said, grow=True),
)
_SHORT: tuple[Column[EventItem], ...] = (
    _TIME,
    Column("type", "TYPE", 17, _loud_type),
    Column("name", "ADAPTER", 18, lambda k, r, g: ((r.name, "name"),)),
    Column("said", "WHAT", 8, _said, grow=True),
)

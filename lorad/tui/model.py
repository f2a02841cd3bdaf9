"""What the dashboard shows, as plain data.  No Textual, no socket.

Goes in: the messages of a source, and the time.  Comes out: the board as it is by now, how old it
is, the events with how many of them are new, and which rows changed.  `Listing` is one table over
such rows: filtered, sorted, with one of them selected by its key.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lorad.board_apply import MAPS, aged, apply
from lorad.tui.filtering import Filter, parse
from lorad.tui.messages import Changed, Ended, Happened, Lost, Message, Whole
from lorad.wire import EventItem
from lorad.wire_stream import Board, Delta

R = TypeVar("R")

MAX_EVENTS = 2000
#: Ages grow by themselves for so long, then there has to be news.
MAX_GROWTH_SECONDS = 10.0
#: Types of events that the dashboard itself tells.
RESTARTED, RETURNED = "daemon.restarted", "link.returned"
#: Told to one reader: some events are gone before it could read them.
GAP = "gap"


@dataclass(frozen=True, slots=True)
class Link:
    """The connection: `why` "" is up.  Times are of the model's clock."""

    why: str = "connecting"
    since: float = 0.0
    retry_at: float | None = None
    final: bool = False  # nothing will follow

    @property
    def up(self) -> bool:
        return not self.why


@dataclass(slots=True)
class Diff:
    """What a message changed: rows by map and key, and whether anything else did."""

    rows: dict[str, set[str]] = field(default_factory=dict)
    rest: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """The board of one moment."""

    board: Board
    came: float  # when the last of it came
    events: tuple[EventItem, ...]
    num_events: int  # ever, by then


class Model:
    """One writer: whoever drains the source's messages.  `clock` counts seconds up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.link = Link(since=clock())
        self._board: Board | None = None
        self._came = 0.0
        self._events: deque[EventItem] = deque(maxlen=MAX_EVENTS)
        self._last_event = 0
        self.num_new = 0  # events since somebody looked
        self.num_events = 0  # ever
        self._frozen: Picture | None = None

    # ------------------------------------------------------------- what is shown
    @property
    def frozen(self) -> bool:
        return self._frozen is not None

    @property
    def live(self) -> bool:
        """What is shown is what is: it is of use to ask the daemon for more."""
        return self.link.up and not self.frozen

    def now(self) -> float:
        return self._clock()

    @property
    def board(self) -> Board | None:
        """As it came, or as it was frozen; None until something came."""
        return self._frozen.board if self._frozen else self._board

    def shown(self) -> Board | None:
        """The board with its ages as they are now; they stand still while frozen or cut off."""
        if self._frozen or self._board is None or not self.link.up:
            return self.board
        # A daemon that tells nothing may be stuck: its adapters do not idle more and more by that.
        return aged(self._board, min(self._clock() - self._came, MAX_GROWTH_SECONDS))

    @property
    def events(self) -> tuple[EventItem, ...]:
        """Oldest first."""
        return self._frozen.events if self._frozen else tuple(self._events)

    @property
    def first_event(self) -> int:
        """The number of the oldest of `events`; they are counted from 1, across restarts."""
        return (self._frozen.num_events if self._frozen else self.num_events) + 1 - len(self.events)

    def age(self) -> float:
        """Seconds since the newest data that is shown came."""
        return self._clock() - (self._frozen.came if self._frozen else self._came)

    def lost_seconds(self) -> float:
        return 0.0 if self.link.up else self._clock() - self.link.since

    def retry_seconds(self) -> float | None:
        at = self.link.retry_at
        return None if at is None else max(0.0, at - self._clock())

    # ------------------------------------------------------------- what people do
    def freeze(self) -> bool:
        """Stop what is shown where it is, or go on; True if it stands still now."""
        if self._frozen:
            self._frozen = None
        elif (board := self.shown()) is not None:
            self._frozen = Picture(board, self._came, tuple(self._events), self.num_events)
        return self.frozen

    def looked(self) -> None:
        """Somebody saw the newest events."""
        if not self._frozen:
            self.num_new = 0

    def tell(self, type: str, message: str, *, name: str = "", level: Any = "info") -> None:
        """An event of the dashboard's own, between those of the daemon."""
        if self._board is not None:
            time = self._board.time
            self._event(EventItem(id=0, time=time, level=level, type=type, name=name,
                                  message=message))  # fmt: skip

    # ------------------------------------------------------------- what comes
    def take(self, message: Message) -> Diff:
        """Rows that are new, changed or gone by it."""
        match message:
            case Whole(board):
                return self._whole(board)
            case Changed(delta):
                return self._changed(delta)
            case Happened(event):
                self._event(event)
            case Lost(why, retry):
                since = self.link.since if not self.link.up else self._clock()
                self.link = Link(why, since, self._clock() + retry)
            case Ended(why):
                self.link = Link(why, self._clock(), final=True)
        return Diff(rest=True)

    def _whole(self, board: Board) -> Diff:
        before, away = self._board, self.lost_seconds()
        if before is not None and before.status.instance_id != board.status.instance_id:
            self._last_event, self.num_new = 0, 0
            said = f"pid {board.status.pid}; what is counted begins anew"
            self._tell(board, RESTARTED, said, level="warn")
        elif before is not None and not self.link.up:
            self._tell(board, RETURNED, f"after {away:.0f} s")
        diff = Diff(rest=True)
        now = self._clock()
        for part in MAPS:
            old = getattr(before, part) if before is not None else {}
            new = getattr(board, part)
            keys = old.keys() | new.keys()
            diff.rows[part] = {key for key in keys if old.get(key) != new.get(key)}
        self._board, self._came, self.link = board, now, Link("", now)
        for event in board.events:
            self._event(event)
        if before is None:
            self.num_new = 0
        return diff

    def _changed(self, delta: Delta) -> Diff:
        if self._board is None:
            return Diff()
        diff = Diff(rest=True)
        for part in MAPS:
            diff.rows[part] = {*getattr(delta, part), *delta.gone.get(part, ())}
        try:
            self._board, self._came = apply(self._board, delta), self._clock()
        except ValueError as error:  # the source lost a message: what follows cannot be right
            self.link = Link(f"gap: {error}", self._clock())
        return diff

    def _event(self, event: EventItem) -> None:
        if event.type != GAP:  # its id is that of the reader, not one of its own
            if 0 < event.id <= self._last_event:
                return  # it was on the board already
            self._last_event = max(self._last_event, event.id)
        self._events.append(event)
        self.num_new += 1
        self.num_events += 1

    def _tell(self, board: Board, type: str, message: str, *, level: Any = "info") -> None:
        self._event(EventItem(id=0, time=board.time, level=level, type=type, message=message))


class Listing(Generic[R]):
    """One table's rows in order, and which of them is selected, by key.

    `fields` gives what the filter can ask of a row; `sorts` maps columns to keys of sorting.  With
    `leads` the first row is the selected one, whichever it is, until another is chosen: for an
    order in which rows change their places by themselves.
    """

    def __init__(
        self,
        fields: Callable[[str, R], Mapping[str, str]],
        sorts: Mapping[str, Callable[[str, R], Any]],
        sort: str,
        *,
        leads: bool = False,
    ) -> None:
        self._fields, self._sorts = fields, sorts
        self._can_lead = self.leads = leads
        self.sort, self.reverse = sort, False
        self.filter_text = ""
        self._filter = Filter()
        self.rows: Mapping[str, R] = {}
        self.keys: list[str] = []
        self.selected: str | None = None
        self._place = 0  # of the selected, for when it goes

    def show(self, rows: Mapping[str, R]) -> None:
        """Take rows; order and selection follow."""
        self.rows = rows
        key_of = self._sorts[self.sort]
        kept = [k for k, row in rows.items() if self.matches(k, row)]
        kept.sort()  # so that equal ones keep their places
        kept.sort(key=lambda k: key_of(k, rows[k]), reverse=self.reverse)
        self.keys = kept
        if self.leads and kept:
            self._place, self.selected = 0, kept[0]
        elif self.selected in rows and self.selected in kept:
            self._place = kept.index(self.selected)
        elif kept:
            self._place = min(self._place, len(kept) - 1)
            self.selected = kept[self._place]
        else:
            self.selected = None

    def matches(self, key: str, row: R) -> bool:
        return self._filter.matches(self.text_of(key, row), self._fields(key, row))

    def text_of(self, key: str, row: R) -> str:
        """Where the filter looks for a word."""
        return key

    @property
    def place(self) -> int:
        """Where the selected row is; 0 if there is none."""
        return self._place if self.keys else 0

    @property
    def row(self) -> R | None:
        return None if self.selected is None else self.rows.get(self.selected)

    def narrow(self, text: str) -> None:
        """Filter by it from now on; "" shows all."""
        self.filter_text, self._filter = text, parse(text)
        self.show(self.rows)

    def order_by(self, column: str) -> bool:
        """Sort by a column, the other way round if it is sorted by that; False: it cannot be."""
        if column not in self._sorts:
            return False
        self.reverse = not self.reverse if column == self.sort else False
        self.sort = column
        self.show(self.rows)
        return True

    def order_next(self, columns: Sequence[str]) -> None:
        """By the next of these columns that can be sorted by."""
        able = [column for column in columns if column in self._sorts] or [self.sort]
        place = able.index(self.sort) + 1 if self.sort in able else 0
        self.sort, self.reverse = able[place % len(able)], False
        self.show(self.rows)

    def move(self, by: int) -> None:
        """The selection, by so many rows; it stops at both ends."""
        self.select_place(self.place + by)

    def to_top(self) -> None:
        """Select what comes first, and what comes first later if rows change their places."""
        self.select_place(0)
        self.leads = self._can_lead

    def select_place(self, place: int) -> None:
        self.leads = False
        if self.keys:
            self._place = max(0, min(place, len(self.keys) - 1))
            self.selected = self.keys[self._place]

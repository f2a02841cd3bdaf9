"""Screen 2: every adapter that is registered, a page at a time, filtered and sorted by the daemon.

Goes in: what the office answers.  Comes out: a table, and what of a filter the daemon does not look
after.  The page in sight is asked for anew every interval, while the last answer is not too slow.
"""

from collections.abc import Callable

from textual.app import ComposeResult

from lorad import wire
from lorad.tui.acts import Subject
from lorad.tui.details import subject_of
from lorad.tui.draw import UNKNOWN, Glyphs, age, count, cut, percent, ratio, since, size
from lorad.tui.grid import Column, Grid
from lorad.tui.office import Answer, Client
from lorad.tui.paging import SORTS, STATES, Ask, Pages
from lorad.tui.panel import Line, Span, wide
from lorad.tui.places import places_column
from lorad.tui.slots import STATE_INKS
from lorad.tui.view import View

Row = wire.Adapter
_EARLY = 0.9  # of an interval: pictures are not that even


class AdaptersView(View):
    """All names, not only those that are on the GPU."""

    key, view_name = "2", "Adapters"

    def compose(self) -> ComposeResult:
        yield AdaptersPanel()

    def subject(self, name: str) -> Subject | None:
        row = self.query_one(AdaptersPanel).listing.rows.get(name)
        return None if row is None else subject_of(row)

    def show(self) -> None:
        self.query_one(AdaptersPanel).show()


class AdaptersPanel(Grid[Row]):
    """The page in sight."""

    listing: Pages

    def __init__(self) -> None:
        super().__init__(Pages(), _COLUMNS, id="adapters")
        self.title_first = True
        self.bottom = True
        self.error = ""
        self._asked: Ask | None = None  # on its way
        self._asked_at = float("-inf")

    # ------------------------------------------------------------- asking
    def show(self) -> None:
        """A picture is due: ask again, unless what is shown stands still."""
        due = self.top.model.now() - self._asked_at >= self.top.interval * _EARLY
        if due and self._asked is None and self.top.model.live:
            self._ask()
        super().repaint()

    def repaint(self, *, all: bool = False) -> int:
        """After every move: perhaps another page is in sight now."""
        if self.listing.due and self._asked != self.listing.ask() and self.is_attached:
            self._ask()
        return super().repaint(all=all)

    def _ask(self) -> None:
        office, asked = self.top.office, self.listing.ask()
        if office is None or self.listing.half_typed or not self.top.model.link.up:
            return
        self._asked, self._asked_at = asked, self.top.model.now()

        def call(client: Client) -> wire.AdapterPage:
            return client.adapters(
                state=asked.state,
                tenant=asked.tenant,
                q=asked.q,
                sort=asked.sort,
                limit=asked.limit,
                cursor=asked.cursor,
            )

        office.ask("adapters", call, lambda answer: self._take(asked, answer))

    def _take(self, asked: Ask, answer: Answer[wire.AdapterPage]) -> None:
        if self._asked == asked:
            self._asked = None
        self.error = answer.error
        if answer.value is not None:
            self.listing.take(asked, answer.value)
        else:
            self.listing.due = False  # it is asked again at the next picture
        self.repaint()

    # ------------------------------------------------------------- moving
    def action_edge(self, by: int) -> None:
        self.listing.edge(by)
        self.repaint()

    def _sort_at(self, x: int) -> None:
        before = (self.listing.sort, self.listing.reverse)
        super()._sort_at(x)
        if before == (self.listing.sort, self.listing.reverse):
            self.top.say("the daemon does not sort by this column")

    # ------------------------------------------------------------- telling
    def columns_at(self, width: int) -> tuple[Column[Row], ...]:
        board = self.top.shown
        if board is None:
            return columns("")
        models = board.status.models
        on = places_column(lambda row: row.replicas, self.listing.rows.values(), drop=2)
        replicas = on if any(one.replicas for one in models) else None
        return columns(board.time, several=len(models) > 1, replicas=replicas)

    def title(self) -> Line:
        pages = self.listing
        said: list[Span] = [("ADAPTERS", "title")]
        if self.top.office is None:
            return tuple(said)
        if pages.num_items:
            last = pages.first_number + pages.num_items - 1
            of = f"  {pages.first_number}-{last} of {pages.total}"
            said.append((of, ""))
        elif not pages.due:
            said.append(("  0", ""))
        if pages.due and pages.num_items:
            said.append(("  asking", "busy"))
        return tuple(said)

    def note(self) -> Line:
        """What is wrong first, then the filter, then the sort; as much as there is room for."""
        pages, room = self.listing, self.size.width - wide(self.title()) - 10
        if self.error:
            return ((cut(self.error, room, self.glyphs), "bad"),)
        falls = SORTS[pages.sort].startswith("-")
        mark = self.glyphs.down if falls is not pages.reverse else self.glyphs.up
        parts: list[Line] = [(("sort ", "faint"), (f"{pages.sort.upper()} {mark}", ""))]
        if pages.filter_text:
            parts.insert(0, (("filter ", "faint"), (f"{pages.filter_text}  ", "strong")))
        if pages.unknown:
            parts.insert(0, ((f"no state {pages.unknown}  ", "warn"),))
        elif pages.here:
            parts.insert(0, ((f"{pages.here} within the page alone  ", "warn"),))
        while len(parts) > 1 and sum(map(wide, parts)) > room:
            parts.pop()
        return tuple(span for part in parts for span in part)

    def empty(self) -> str:
        pages = self.listing
        if self.top.office is None:
            return "a recording has the slots alone: screen 1"
        if self.error:
            return self.error
        if pages.unknown:
            return f"no state {pages.unknown!r}: {' '.join(STATES)}"
        if not self.top.model.link.up:
            return "not connected: it is asked as soon as the link is back"
        if pages.due:
            return "asking the daemon"
        if pages.num_items:
            return f"none on this page is {pages.here}; further pages follow"
        if pages.filter_text:
            typed = pages.filter_text.strip().lower()
            if typed and (state := next((s for s in STATES if s.startswith(typed)), "")):
                return f"no name has {typed!r} in it; did you mean state:{state}?  esc clears it"
            return "no adapter matches the filter; esc clears it"
        return "no adapter is registered: loractl add DIR --name NAME, or put one into the inbox"

    def ink_of(self, key: str, row: Row) -> str:
        return "faint" if row.state in ("registered", "remote") else ""


# ----------------------------------------------------------------- cells
def _state(key: str, row: Row, glyphs: Glyphs) -> Line:
    return ((row.state, STATE_INKS.get(row.state, "")),)


def _pin(key: str, row: Row, glyphs: Glyphs) -> Line:
    return (("P", "strong") if row.pinned else ("-", "faint"),)


def _hit(key: str, row: Row, glyphs: Glyphs) -> Line:
    share = ratio(row.prefix_hit_tokens, row.prefix_query_tokens)
    return ((percent(share), "faint" if share is None else ""),)


def _quiet(number: int) -> Line:
    return ((count(number), "faint" if not number else ""),)


def _said(key: str, row: Row, glyphs: Glyphs) -> Line:
    """Why it is refused, else where it is from."""
    if row.reason:
        return ((f"{row.reason} {row.reason_message or ''}", "bad"),)
    return ((row.source, "faint"),)


def _used(now: str) -> Callable[[str, Row, Glyphs], Line]:
    """Not against the reader's clock: it may be wrong."""

    def cell(key: str, row: Row, glyphs: Glyphs) -> Line:
        if row.running:
            return (("now", "good"),)
        if row.idle_seconds is not None:
            return ((age(row.idle_seconds), ""),)
        return ((age(since(row.last_used_at, now)), "faint"),)

    return cell


def columns(
    now: str, *, several: bool = False, replicas: Column[Row] | None = None
) -> tuple[Column[Row], ...]:
    """`now` is the daemon's time; `several`: there is more than one model; `replicas`: where rows
    are, if one of them has several engines."""
    used = Column("used", "USED", 5, _used(now), right=True, drop=1)
    name, *others, source = _COLUMNS
    model = Column[Row]("model", "MODEL", 12, lambda k, r, g: ((r.model, "faint"),), drop=1)
    more = [*([model] if several else []), *([replicas] if replicas is not None else [])]
    return (name, *more, *others, used, source)


_COLUMNS: tuple[Column[Row], ...] = (
    Column("name", "NAME", 24, lambda k, r, g: ((k, ""),), grow=True),
    Column("state", "STATE", 11, _state),
    Column("pin", "P", 1, _pin),
    Column("prio", "PRIO", 4, lambda k, r, g: ((str(r.priority), ""),), right=True, drop=4),
    Column(
        "rank",
        "RANK",
        4,
        lambda k, r, g: ((UNKNOWN if r.rank is None else str(r.rank), ""),),
        right=True,
        drop=5,
    ),
    Column("size", "SIZE", 5, lambda k, r, g: ((size(r.num_bytes), ""),), right=True, drop=3),
    Column("rev", "REV", 6, lambda k, r, g: (((r.rev or UNKNOWN)[:6], "faint"),), drop=7),
    Column("run", "RUN", 4, lambda k, r, g: _quiet(r.running), right=True),
    Column("wait", "WAIT", 4, lambda k, r, g: _quiet(r.waiting), right=True, drop=2),
    Column("hit", "HIT", 4, _hit, right=True, drop=6),
    Column("loads", "LOADS", 5, lambda k, r, g: _quiet(r.loads), right=True, drop=8),
    Column("source", "SOURCE", 20, _said, drop=9),
)

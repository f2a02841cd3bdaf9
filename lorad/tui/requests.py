"""Screen 3: every request that has not ended, those that run and those that wait.

Goes in: the board's requests.  Comes out: a table.  A daemon tells those that are oldest; how many
more there are is said.
"""

from collections.abc import Callable, Mapping

from textual.app import ComposeResult

from lorad.spelling import split_digest
from lorad.tui.draw import UNKNOWN, Glyphs, age, count, rate
from lorad.tui.drawer import Detail
from lorad.tui.facts import RequestFact
from lorad.tui.grid import Column, Grid
from lorad.tui.model import Listing
from lorad.tui.panel import Line, Span
from lorad.tui.places import places_column
from lorad.tui.view import View
from lorad.wire_stream import RequestRow

Row = RequestRow
BASE = "(base)"  # what the model itself is called: no adapter can be


class RequestsView(View):
    """Who asks for what."""

    key, view_name, about = "3", "Requests", "request"

    def compose(self) -> ComposeResult:
        yield RequestsPanel()

    def show(self) -> None:
        self.query_one(RequestsPanel).show()

    @property
    def target(self) -> str:
        """Of the selected request."""
        row = self.query_one(RequestsPanel).listing.row
        return "" if row is None else split_digest(row.adapter)[0]

    @property
    def request(self) -> RequestRow | None:
        return self.query_one(RequestsPanel).listing.row

    def detail(self) -> Detail | None:
        row = self.query_one(RequestsPanel).listing.row
        return None if row is None else RequestFact(row.id, row)


def fields_of(key: str, row: Row) -> Mapping[str, str]:
    return {
        "id": row.id,
        "state": row.state,
        "model": row.model,
        "tenant": row.tenant,
        "client": row.client,
        "rev": row.rev,
        "route": row.endpoint,
    }


#: What one looks for comes first: the oldest, the longest, the slowest.
SORTS: Mapping[str, Callable[[str, Row], object]] = {
    "id": lambda key, row: row.id,
    "adapter": lambda key, row: row.adapter,
    "rev": lambda key, row: row.rev,
    "state": lambda key, row: row.state,
    "age": lambda key, row: -row.age_seconds,
    "prompt": lambda key, row: -row.prompt_tokens,
    "cached": lambda key, row: -row.cached_tokens,
    "out": lambda key, row: -row.generated_tokens,
    "tok/s": lambda key, row: row.tokens_per_second,
    "prio": lambda key, row: -row.priority,
    "tenant": lambda key, row: row.tenant,
    "client": lambda key, row: row.client,
    "route": lambda key, row: row.endpoint,
}


class RequestsListing(Listing[Row]):
    """A word of the filter is looked for in the adapter's name, the id and the client."""

    def __init__(self) -> None:
        super().__init__(fields_of, SORTS, "age")

    def text_of(self, key: str, row: Row) -> str:
        return f"{_called(row)} {row.id} {row.client}"


class RequestsPanel(Grid[Row]):
    def __init__(self) -> None:
        super().__init__(RequestsListing(), _COLUMNS, id="requests")
        self.title_first = True
        self.bottom = True

    def show(self) -> None:
        board = self.top.shown
        self.listing.show(board.requests if board is not None else {})
        self.repaint()

    def columns_at(self, width: int) -> tuple[Column[Row], ...]:
        """With the replica that has each, where there are several."""
        rows = self.listing.rows.values()
        if not any(row.replica for row in rows):
            return _COLUMNS
        on = places_column(lambda row: (row.replica,), rows, drop=2)
        return (*_COLUMNS[:2], on, *_COLUMNS[2:])

    def title(self) -> Line:
        board = self.top.shown
        if board is None:
            return (("REQUESTS", "title"),)
        running = sum(row.state == "running" for row in board.requests.values())
        waiting = len(board.requests) - running
        said: list[Span] = [("REQUESTS", "title"), (f"  {running} running", "")]
        said.append((f"  {waiting} waiting", "warn" if waiting else ""))
        if board.num_requests > len(board.requests):
            said.append((f"  the oldest {len(board.requests)} of {board.num_requests}", "warn"))
        return tuple(said)

    def empty(self) -> str:
        board = self.top.shown
        if board is None:
            return "waiting for the first data"
        if self.listing.filter_text and board.requests:
            return f"none of {len(board.requests)} matches the filter; esc clears it"
        return "nothing is asked for"

    def ink_of(self, key: str, row: Row) -> str:
        return "faint" if row.state == "queued" else ""


# ----------------------------------------------------------------- cells
def _state(key: str, row: Row, glyphs: Glyphs) -> Line:
    return ((row.state, "warn" if row.state == "queued" else "good"),)


def _count(value: Callable[[Row], int]) -> Callable[[str, Row, Glyphs], Line]:
    def cell(key: str, row: Row, glyphs: Glyphs) -> Line:
        number = value(row)
        return ((count(number), "" if number else "faint"),)

    return cell


def _plain(text: Callable[[Row], str], ink: str = "") -> Callable[[str, Row, Glyphs], Line]:
    return lambda key, row, glyphs: ((text(row), ink),)


def _adapter(key: str, row: Row, glyphs: Glyphs) -> Line:
    return ((_called(row), "name" if row.adapter else "faint"),)


def _called(row: Row) -> str:
    """Its adapter, or the base: of several, which."""
    return row.adapter or (f"({row.model})" if row.model else BASE)


def _pace(key: str, row: Row, glyphs: Glyphs) -> Line:
    known = row.tokens_per_second > 0
    return ((rate(row.tokens_per_second) if known else UNKNOWN, "" if known else "faint"),)


_COLUMNS: tuple[Column[Row], ...] = (
    Column("id", "ID", 9, _plain(lambda r: r.id, "faint"), drop=7),
    Column("adapter", "ADAPTER", 18, _adapter, grow=True),
    Column("rev", "REV", 6, _plain(lambda r: r.rev[:6] or UNKNOWN, "faint"), drop=8),
    Column("state", "STATE", 7, _state),
    Column("age", "AGE", 5, _plain(lambda r: age(r.age_seconds)), right=True),
    Column("prompt", "PROMPT", 6, _count(lambda r: r.prompt_tokens), right=True),
    Column("cached", "CACHED", 6, _count(lambda r: r.cached_tokens), right=True, drop=3),
    Column("out", "OUT", 5, _count(lambda r: r.generated_tokens), right=True),
    Column("tok/s", "TOK/S", 5, _pace, right=True, drop=1, falls=False),
    Column("prio", "PRIO", 4, _plain(lambda r: str(r.priority)), right=True, drop=6),
    Column("tenant", "TENANT", 10, _plain(lambda r: r.tenant or UNKNOWN), drop=4),
    Column("client", "CLIENT", 12, _plain(lambda r: r.client, "faint"), drop=2),
    Column("route", "ROUTE", 20, _plain(lambda r: r.endpoint, "faint"), drop=9),
)

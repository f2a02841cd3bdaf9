"""Screen 6: tenants, what they use and what they may.

Goes in: the board's tenants.  Comes out: a table.  A limit is shown beside what it limits.
"""

from collections.abc import Callable, Mapping

from textual.app import ComposeResult

from lorad.tui.draw import UNKNOWN, Glyphs, age, count, ratio, since
from lorad.tui.drawer import Detail
from lorad.tui.facts import TenantFact
from lorad.tui.grid import Column, Grid
from lorad.tui.model import Listing
from lorad.tui.panel import Line
from lorad.tui.slots import bar_spans
from lorad.tui.view import View
from lorad.wire_stream import TenantRow

Row = TenantRow
#: Whoever is no tenant; no tenant can be called so.
NOBODY = "(no tenant)"
_NEARLY = 0.9  # of a limit


class TenantsView(View):
    """Who shares the daemon."""

    key, view_name, about = "6", "Tenants", ""

    def compose(self) -> ComposeResult:
        yield TenantsPanel()

    def show(self) -> None:
        self.query_one(TenantsPanel).show()

    @property
    def target(self) -> str:
        """No adapter is meant here."""
        return ""

    def detail(self) -> Detail | None:
        listing = self.query_one(TenantsPanel).listing
        return None if listing.row is None else TenantFact(listing.row.name, listing.row)


def fields_of(key: str, row: Row) -> Mapping[str, str]:
    return {"key": " ".join(row.keys), "name": row.name}


SORTS: Mapping[str, Callable[[str, Row], object]] = {
    "name": lambda key, row: key,
    "run": lambda key, row: -row.running,
    "wait": lambda key, row: -row.waiting,
    "req": lambda key, row: -row.requests_per_minute,
    "tok": lambda key, row: -row.tokens_per_minute,
    "refused": lambda key, row: -row.refused_per_minute,
    "queue": lambda key, row: -row.queue,
    "weight": lambda key, row: -row.weight,
    "prio": lambda key, row: -row.max_priority,
}


class TenantsPanel(Grid[Row]):
    def __init__(self) -> None:
        super().__init__(Listing(fields_of, SORTS, "name"), _COLUMNS, id="tenants")
        self.bottom = True

    def show(self) -> None:
        board = self.top.shown
        self.listing.show(board.tenants if board is not None else {})
        self.repaint()

    def columns_at(self, width: int) -> tuple[Column[Row], ...]:
        board = self.top.shown
        return columns(board.time if board is not None else "")

    def title(self) -> Line:
        return (("TENANTS", "title"), (f"  {len(self.listing.rows)}", ""))

    def empty(self) -> str:
        board = self.top.shown
        if board is None:
            return "waiting for the first data"
        if self.listing.filter_text and board.tenants:
            return f"none of {len(board.tenants)} matches the filter; esc clears it"
        return "there are no tenants: loractl tenant add NAME"


# ----------------------------------------------------------------- cells
def _quiet(number: float) -> Line:
    return ((count(number), "faint" if not number else ""),)


def _limited(
    used: Callable[[Row], float], limit: Callable[[Row], int]
) -> Callable[[str, Row, Glyphs], Line]:
    """`1.2k/2.0k` behind a bar; without a limit the number alone."""

    def cell(key: str, row: Row, glyphs: Glyphs) -> Line:
        number, most = used(row), limit(row)
        share = ratio(number, most)
        if share is None:
            return ((" " * 7, ""), (f"{count(number):>5}", "" if number else "faint"))
        ink = "warn" if share >= _NEARLY else "fill"
        said = f"{count(number):>5}/{count(most)}"
        return (*bar_spans(min(share, 1.0), 6, glyphs, ink), (f" {said}", ""))

    return cell


def _refused(key: str, row: Row, glyphs: Glyphs) -> Line:
    number = row.refused_per_minute
    return ((count(number), "warn" if number else "faint"),)


def _name(key: str, row: Row, glyphs: Glyphs) -> Line:
    return ((key, "name"),) if key else ((NOBODY, "faint"),)


def _queue(key: str, row: Row, glyphs: Glyphs) -> Line:
    return ((count(row.queue) if row.queue else UNKNOWN, ""),)


def _used(now: str) -> Callable[[str, Row, Glyphs], Line]:
    return lambda key, row, glyphs: ((age(since(row.last_used_at, now)), "faint"),)


def columns(now: str) -> tuple[Column[Row], ...]:
    """`now` is the board's time: in a recording it is not today's."""
    used = Column("used", "USED", 5, _used(now), right=True, drop=2)
    return (*_COLUMNS, used)


_COLUMNS: tuple[Column[Row], ...] = (
    Column("name", "TENANT", 14, _name, grow=True),
    Column("run", "RUN", 4, lambda k, r, g: _quiet(r.running), right=True),
    Column("wait", "WAIT", 4, lambda k, r, g: _quiet(r.waiting), right=True),
    Column(
        "req", "REQ/MIN", 18, _limited(lambda r: r.requests_per_minute, lambda r: r.rpm), falls=True
    ),
    Column(
        "tok",
        "TOK/MIN",
        18,
        _limited(lambda r: r.tokens_per_minute, lambda r: r.tpm),
        drop=1,
        falls=True,
    ),
    Column("refused", "REFUSED", 7, _refused, right=True),
    Column("queue", "QUEUE", 5, _queue, right=True, drop=4),
    Column("weight", "WEIGHT", 6, lambda k, r, g: ((f"{r.weight:g}", ""),), right=True, drop=3),
    Column("prio", "PRIO", 4, lambda k, r, g: ((f"{r.max_priority}", ""),), right=True, drop=5),
    Column("keys", "KEYS", 9, lambda k, r, g: (("  ".join(r.keys) or UNKNOWN, "faint"),), drop=6),
)

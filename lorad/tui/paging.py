"""One page of a table that is the daemon's: what to ask for, and which row of it is selected.

Goes in: a filter, a sort, moves; pages as they come.  Comes out: `Ask`, and the rows of the page in
sight.  Ten thousand names cost what a page costs.  Pages follow each other by cursors, so they are
counted from the end that was gone to last.  Knows no thread and no widget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lorad import wire
from lorad.tui.filtering import Filter, Term, parse
from lorad.tui.model import Listing

PAGE_ROWS = 100
#: As `engine.adapters.states` has them.
STATES = (
    *("registered", "remote", "ram", "loading", "active", "idle", "draining"),
    *("quarantined", "missing"),
)
#: Columns that the daemon sorts by, and how it calls that; "-" is what is looked for first.
SORTS: Mapping[str, str] = {
    "name": "name",
    "state": "state",
    "pin": "-pinned",
    "prio": "-priority",
    "rank": "-rank",
    "size": "-size",
    "tenant": "tenant",
    "used": "-last_used",
    "created": "-created",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What LoradClient.adapters is given."""

    state: str | None = None
    tenant: str | None = None
    q: str | None = None
    sort: str = "name"
    limit: int = PAGE_ROWS
    cursor: str | None = None


_NOTHING = Filter()


@dataclass(frozen=True, slots=True)
class Split:
    """A filter, by who looks after it."""

    state: str | None = None
    tenant: str | None = None
    q: str | None = None
    here: Filter = _NOTHING  # of the page in sight alone
    unknown: str = ""  # a state that there is none of (yet: it may be half typed)


def split(wanted: Filter) -> Split:
    """The daemon takes one state, one tenant and one word; the rest is left for each page."""
    state = tenant = q = None
    unknown = ""
    here: list[Term] = []
    for term in wanted.terms:
        if term.negative:
            here.append(term)
        elif term.field == "state" and state is None:
            meant = [name for name in STATES if name.startswith(term.text)]
            exact = [name for name in meant if name == term.text] or meant
            if len(exact) == 1:
                state = exact[0]
            else:
                unknown = term.text
        elif term.field == "tenant" and tenant is None:
            tenant = term.text
        elif not term.field and q is None:
            q = term.text
        else:
            here.append(term)
    return Split(state, tenant, q, Filter(tuple(here)), unknown)


def fields_of(key: str, row: wire.Adapter) -> Mapping[str, str]:
    """What a filter can ask of a row; the daemon has `state` and `tenant` of all rows."""
    return {
        "state": row.state,
        "tenant": row.tenant or "",
        "model": row.model,
        "pin": "yes" if row.pinned else "no",
        "rank": "" if row.rank is None else str(row.rank),
        "rev": row.rev or "",
        "source": row.source,
        "reason": row.reason or "",
    }


class Pages(Listing[wire.Adapter]):
    """A listing whose rows are one page of many.  `due`: it wants another page than it has."""

    def __init__(self) -> None:
        super().__init__(fields_of, dict.fromkeys(SORTS, _as_it_came), "name")
        self.total = 0
        self.num_items = 0  # on the page, before what is filtered here
        self.due = True
        self._split = Split()
        self._from_end = False
        self._index = 0  # of the page, from where it is counted
        self._cursors: list[str | None] = [None]
        self._land = ""  # where the selection goes when the page is there: first, last, or stays
        self._items: Sequence[wire.Adapter] = ()

    # ------------------------------------------------------------- what to ask
    def ask(self) -> Ask:
        """The page that should be in sight."""
        word = SORTS[self.sort]
        descending = word.startswith("-") is not self.reverse
        if self._from_end:
            descending = not descending
        sort = ("-" if descending else "") + word.removeprefix("-")
        s = self._split
        return Ask(s.state, s.tenant, s.q, sort, PAGE_ROWS, self._cursors[self._index])

    @property
    def half_typed(self) -> bool:
        """The state in the filter is none yet: asking would be refused."""
        return bool(self._split.unknown)

    def take(self, asked: Ask, page: wire.AdapterPage) -> None:
        """An answer; one to what is not asked for any more is dropped."""
        if asked != self.ask():
            return
        self.due = False
        if not page.items and self._index:  # the last rows of it are gone
            self._index -= 1
            self.due = True
            return
        del self._cursors[self._index + 1 :]
        if page.cursor is not None:
            self._cursors.append(page.cursor)
        self.total = page.total
        items = page.items[::-1] if self._from_end else page.items
        self._items, self.num_items = items, len(items)
        self._arrange()

    def _arrange(self) -> None:
        """Rows in the order of the page, without those that are filtered here."""
        here = self._split.here
        rows = {r.name: r for r in self._items if here.matches(r.name, fields_of(r.name, r))}
        self.rows, self.keys = rows, list(rows)
        land, self._land = self._land, ""
        if land:
            self._place = 0 if land == "first" else len(self.keys) - 1
            self.selected = self.keys[self._place] if self.keys else None
        elif self.selected in rows:
            self._place = self.keys.index(self.selected)
        elif self.keys:
            self._place = max(0, min(self._place, len(self.keys) - 1))
            self.selected = self.keys[self._place]
        else:
            self.selected = None

    # ------------------------------------------------------------- where it is
    @property
    def first_number(self) -> int:
        """Of the page's first row, from 1 of `total`; 0 if there is none."""
        if not self.num_items:
            return 0
        if self._from_end:
            return max(1, self.total - self._index * PAGE_ROWS - self.num_items + 1)
        return self._index * PAGE_ROWS + 1

    @property
    def here(self) -> str:
        """Words of the filter that hold within a page alone."""
        terms = self._split.here.terms
        return " ".join(
            f"{'!' if t.negative else ''}{t.field}{':' if t.field else ''}{t.text}" for t in terms
        )

    @property
    def unknown(self) -> str:
        return self._split.unknown

    # ------------------------------------------------------------- moves
    def show(self, rows: Mapping[str, wire.Adapter]) -> None:
        """The rows are the daemon's: `take` has them."""

    def narrow(self, text: str) -> None:
        before = self._split
        self.filter_text, self._filter = text, parse(text)
        self._split = split(self._filter)
        asked_of_daemon = ("state", "tenant", "q")
        if any(getattr(before, name) != getattr(self._split, name) for name in asked_of_daemon):
            self._begin()
        self._arrange()

    def order_by(self, column: str) -> bool:
        if column not in SORTS:
            return False
        if column == self.sort:
            self.reverse = not self.reverse
        else:
            self.sort, self.reverse = column, False
        self._begin()
        return True

    def order_next(self, columns: Sequence[str]) -> None:
        able = [column for column in columns if column in SORTS] or [self.sort]
        place = able.index(self.sort) + 1 if self.sort in able else 0
        self.sort, self.reverse = able[place % len(able)], False
        self._begin()

    def move(self, by: int) -> None:
        """Past either end of the page the next one is due."""
        target, last = self.place + by, len(self.keys) - 1
        if target > last and self.place >= last and self._turn(1):
            self._land = "first"
        elif target < 0 and self.place <= 0 and self._turn(-1):
            self._land = "last"
        else:
            self.select_place(target)

    def edge(self, by: int) -> None:
        """To the first or the last row of all."""
        self._from_end, self._index, self._cursors = by > 0, 0, [None]
        self._land = "last" if by > 0 else "first"
        self.due = True

    def _turn(self, by: int) -> bool:
        """To the page after or before; False if there is none, or one is on its way."""
        if self.due:
            return False
        index = self._index + (-by if self._from_end else by)
        if not 0 <= index < len(self._cursors):
            return False
        self._index, self.due = index, True
        return True

    def _begin(self) -> None:
        """Another list: from its start."""
        self._from_end, self._index, self._cursors, self.due = False, 0, [None], True
        self._land = "" if self.selected is not None else "first"


def _as_it_came(key: str, row: wire.Adapter) -> int:
    return 0

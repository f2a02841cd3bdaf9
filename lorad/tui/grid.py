"""A table in a panel: rows by key, columns that give way when there is no room, one selected row.

Goes in: a `Listing` of rows and the columns.  Comes out: lines; messages when a row is chosen.  It
keeps no rows of its own: what is painted is compared with what was, so an update costs as much as
it changes, and only what is in sight is drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from textual import events
from textual.binding import Binding
from textual.message import Message

from lorad.tui.draw import Glyphs, fit
from lorad.tui.model import Listing
from lorad.tui.panel import Line, Panel, Span, fitted, merged

R = TypeVar("R")
#: Cells of the growing column when all are shown.
_WIDE_NAME = 60


@dataclass(frozen=True)
class Column(Generic[R]):
    """`cell` gives spans of a row.  `width` without the space that follows; `grow` takes the rest.

    `drop`: which goes first when there is no room, the highest; 0 stays.  `falls`: sorted by it the
    largest comes first; a number's does unless it says otherwise.
    """

    key: str
    heading: str
    width: int
    cell: Callable[[str, R, Glyphs], Line]
    right: bool = False
    grow: bool = False
    drop: int = 0
    falls: bool | None = None

    @property
    def falling(self) -> bool:
        return self.right if self.falls is None else self.falls


def columns_for(columns: Sequence[Column[R]], width: int) -> list[tuple[Column[R], int]]:
    """Those that there is room for, and how wide each is; a growing one's `width` is its least."""
    kept = list(columns)

    def needed() -> int:
        return sum(c.width for c in kept) + len(kept) - 1

    while needed() > width and any(c.drop for c in kept):
        kept.remove(max(kept, key=lambda c: c.drop))
    spare = max(0, width - needed())
    growing = next((c for c in kept if c.grow), None)
    return [(c, c.width + (spare if c is growing else 0)) for c in kept]


class Grid(Panel, Generic[R], can_focus=True):
    """A subclass gives `title` and `empty`; `listing.show` and `repaint` update it."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("down,j", "move(1)", "row down", show=False),
        Binding("up,k", "move(-1)", "row up", show=False),
        Binding("ctrl+d,pagedown", "page(1)", "page down", show=False),
        Binding("ctrl+u,pageup", "page(-1)", "page up", show=False),
        Binding("g,home", "edge(-1)", "first row", show=False),
        Binding("G,end", "edge(1)", "last row", show=False),
        Binding("left", "shift(-8)", "left, when wide", show=False),
        Binding("right", "shift(8)", "right, when wide", show=False),
        Binding("enter", "choose", "detail"),
    ]

    class Chosen(Message):
        """Enter, or a second click: what is this?"""

        def __init__(self, grid: "Grid[Any]", key: str) -> None:
            super().__init__()
            self.grid, self.key = grid, key

    def __init__(
        self, listing: Listing[R], columns: Sequence[Column[R]], *, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self.listing, self._columns = listing, tuple(columns)
        self.first = 0  # the row at the top
        self.wide = False  # all columns, and left and right move
        self.offset_x = 0
        self._fit: list[tuple[Column[R], int]] = []

    def columns_at(self, width: int) -> Sequence[Column[R]]:
        """Those of a panel so wide; which of them fit is seen later."""
        return self._columns

    def note(self) -> Line:
        """Which rows these are, by what they are filtered and sorted."""
        listing, said = self.listing, list[Span]()
        if span := self.span_text():
            said.append((f"{span}  ", "faint"))
        if listing.filter_text:
            said += [("filter ", "faint"), (f"{listing.filter_text}  ", "strong")]
        mark = self.glyphs.down if self._falling() is not listing.reverse else self.glyphs.up
        return (*said, ("sort ", "faint"), (f"{listing.sort.upper()} {mark}", ""))

    def _falling(self) -> bool:
        """Of the column that it is sorted by, also if there is no room for that."""
        columns = self.columns_at(self.size.width)
        return any(c.falling for c in columns if c.key == self.listing.sort)

    def empty(self) -> str:
        """What is said in place of rows."""
        return "nothing"

    def ink_of(self, key: str, row: R) -> str:
        """Of cells that name none."""
        return ""

    # ------------------------------------------------------------- drawing
    @property
    def num_visible(self) -> int:
        return max(1, self.size.height - 2 - self.bottom)

    def body(self, width: int, height: int) -> list[Line]:
        inner = width - 1  # the mark of the selected
        room = 10_000 if self.wide else inner
        self._fit = columns_for(self.columns_at(self.size.width), room)
        if self.wide:
            self._fit = [(c, _WIDE_NAME if c.grow else w) for c, w in self._fit]
        self._scroll(height - 1)
        out = [((" ", ""), *self._shifted(self._heading(), inner))]
        keys = self.listing.keys[self.first : self.first + height - 1]
        if not keys:
            out.append((("  " + self.empty(), "faint"),))
        for key in keys:
            out.append(self._row(key, inner))
        return out

    def _heading(self) -> Line:
        spans: list[Span] = []
        for column, width in self._fit:
            sorted_by = column.key == self.listing.sort
            text = fit(column.heading, width, self.glyphs, right=column.right)
            spans += [(text, "strong" if sorted_by else "head"), (" ", "")]
        return tuple(spans)

    def _row(self, key: str, inner: int) -> Line:
        row, picked = self.listing.rows[key], key == self.listing.selected
        glyphs, spans = self.glyphs, list[Span]()
        plain = self.ink_of(key, row)
        for column, width in self._fit:
            cell = fitted(column.cell(key, row, glyphs), width, glyphs)
            if column.right:
                cell = _to_the_right(cell)
            spans += [(text, ink or plain) for text, ink in cell]
            spans.append((" ", plain))
        mark = glyphs.here if picked else " "
        line = ((mark, "focus" if picked else ""), *self._shifted(merged(spans[:-1]), inner))
        if not (picked and self.has_focus):
            return line
        return tuple((text, f"{ink or 'name'}+pick") for text, ink in line)

    def _shifted(self, line: Line, width: int) -> Line:
        if not (self.wide and self.offset_x):
            return fitted(line, width, self.glyphs)
        skip, kept = self.offset_x, []
        for text, ink in line:
            kept.append((text[skip:], ink))
            skip = max(0, skip - len(text))
        return fitted(tuple(kept), width, self.glyphs)

    def _scroll(self, visible: int) -> None:
        """The selected row is in sight, and no room is wasted at the end."""
        place, total = self.listing.place, len(self.listing.keys)
        visible = max(1, visible)
        self.first = max(min(self.first, place), place - visible + 1, 0)
        self.first = min(self.first, max(0, total - visible))

    def span_text(self) -> str:
        """`1-11 of 16`, or "" when all are in sight."""
        total, visible = len(self.listing.keys), self.num_visible
        if total <= visible:
            return ""
        return f"{self.first + 1}-{min(total, self.first + visible)} of {total}"

    # ------------------------------------------------------------- keys and mouse
    def action_move(self, by: int) -> None:
        self.listing.move(by)
        self.repaint()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.num_visible - 1))

    def action_edge(self, by: int) -> None:
        if by < 0:
            self._from_the_top()
        else:
            self.action_move(by * len(self.listing.keys))

    def action_shift(self, by: int) -> None:
        if self.wide:
            self.offset_x = max(0, self.offset_x + by)
            self.repaint()

    def action_choose(self) -> None:
        if self.listing.selected is not None:
            self.listing.leads = False
            self.post_message(self.Chosen(self, self.listing.selected))

    def toggle_wide(self) -> None:
        self.wide, self.offset_x = not self.wide, 0
        self.repaint()

    def narrow(self, text: str) -> None:
        """Show rows that match; "" shows all."""
        self.listing.narrow(text)
        self.repaint()

    def sort_by(self, column: str) -> bool:
        """False: it cannot be sorted by that."""
        known = self.listing.order_by(column)
        self._from_the_top()
        return known

    def sort_next(self) -> None:
        self.listing.order_next([column.key for column, _ in self._fit])
        self._from_the_top()

    def sort_reverse(self) -> None:
        self.listing.order_by(self.listing.sort)
        self._from_the_top()

    def _from_the_top(self) -> None:
        """Who sorts wants to see what comes first, wherever the selected row has gone."""
        self.listing.to_top()
        self.repaint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-3)

    def on_click(self, event: events.Click) -> None:
        event.stop()
        if event.y == 1:
            self._sort_at(event.x - 3)
        elif 2 <= event.y < 2 + self.num_visible:
            place = self.first + event.y - 2
            if place < len(self.listing.keys):
                self.listing.select_place(place)
                self.repaint()
                if event.chain > 1:
                    self.action_choose()

    def _sort_at(self, x: int) -> None:
        x += self.offset_x if self.wide else 0
        for column, width in self._fit:
            if 0 <= x <= width:
                self.sort_by(column.key)
                break
            x -= width + 1

    def on_focus(self) -> None:
        self.repaint()

    def on_blur(self) -> None:
        self.repaint()


def _to_the_right(cell: Line) -> Line:
    """Spaces that a cell was filled up with go before it."""
    if cell and not cell[-1][0].strip(" "):
        return (cell[-1], *cell[:-1])
    return cell

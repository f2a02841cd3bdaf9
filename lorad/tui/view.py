"""A screen of the dashboard, 1 to 7: panels under the header.

A view of its own is a subclass in a file of its own and one line in `views.py`.  It is made when it
is first shown.
"""

from typing import Any, ClassVar, cast

import msgspec
from textual import events
from textual.containers import Vertical

from lorad.tui.acts import Subject
from lorad.tui.details import of_adapter
from lorad.tui.drawer import Detail
from lorad.tui.grid import Grid
from lorad.tui.panel import Painted
from lorad.tui.stage import Stage
from lorad.wire_stream import RequestRow


class View(Vertical):
    """`key` and `name` are how it is asked for."""

    key: ClassVar[str]
    view_name: ClassVar[str]
    #: What a row is to the keys: an "adapter", a "request", or "" for neither.
    about: ClassVar[str] = "adapter"

    @property
    def top(self) -> Stage:
        return cast(Stage, self.app)

    def show(self) -> None:
        """Take the board as it is now; called when something changed, at the pace of the screen."""
        for painted in self.query(Painted):
            painted.repaint()

    def on_resize(self, event: events.Resize) -> None:
        """Panels are placed by how large it is, which is not known before."""
        if self.display and self.is_attached:
            self.show()

    def shown(self) -> None:
        """It came into sight."""
        grid = self.grid
        if grid is not None:
            grid.focus()

    @property
    def grid(self) -> "Grid[Any] | None":
        """The table that filter, sort and selection are of: the focused one, else the first."""
        grids = list(self.query(Grid))
        return next((grid for grid in grids if grid.has_focus), grids[0] if grids else None)

    @property
    def target(self) -> str:
        """The adapter's name that actions are about; "" for none."""
        grid = self.grid
        return (grid.listing.selected or "") if grid is not None else ""

    @property
    def request(self) -> RequestRow | None:
        """The selected request; None where rows are none."""
        return None

    def subject(self, name: str) -> Subject | None:
        """What this screen knows of an adapter; None where it knows no more than the board."""
        return None

    def detail(self) -> Detail | None:
        """What the drawer tells about the selected row; None: nothing is selected."""
        return of_adapter(self.top, self.target) if self.target else None

    def row_json(self) -> str:
        """The selected row, for the clipboard."""
        grid = self.grid
        row = grid.listing.row if grid is not None else None
        return "" if row is None else msgspec.json.encode(row).decode()

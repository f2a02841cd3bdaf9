"""Screen 1: slots, churn, drains and loads, prefix cache, events.

Goes in: the size and how many slots there are.  Comes out: `Plan`, which panel is where; the rest
is the panels' own.  From 100 columns on the small panels are side by side, below they are stacked.
"""

from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal

from lorad.tui.panels import ChurnPanel, DrainPanel, EventsPanel, PrefixPanel
from lorad.tui.slots import SlotsPanel
from lorad.tui.view import View

SIDE_BY_SIDE = 100  # columns
_SMALL_ROWS = 6  # of a panel in the row of three, without its frame
_LEAST_ROWS = 4  # of slots


@dataclass(frozen=True)
class Plan:
    """Lines of each panel, frames included; 0 is not shown.  `churn` is the whole row if beside."""

    slots: int
    drain: int
    churn: int
    events: int
    beside: bool


def plan(width: int, height: int, num_slots: int) -> Plan:
    """Who gets how many of `height` lines: slots first, but the rest keeps its least."""
    wanted = max(num_slots, _LEAST_ROWS) + 2
    if width >= SIDE_BY_SIDE and height >= 24:
        row = _SMALL_ROWS + 1
        events = max(5, min(10, height - row - wanted))
        slots = height - row - events
        return Plan(slots, row, row, events, beside=True)
    if height >= 18:
        drain = 3
        events = 4 + max(0, min(6, height - drain - 2 - 4 - wanted))
        return Plan(height - events - drain - 2, drain, 2, events, beside=False)
    events = 3 if height >= 12 else 0
    churn = 2 if height >= 9 else 0
    return Plan(height - events - churn, 0, churn, events, beside=False)


class Overview(View):
    """The screen that is left open all day."""

    key, view_name = "1", "Overview"

    def compose(self) -> ComposeResult:
        yield SlotsPanel()
        with Horizontal(id="middle"):
            yield ChurnPanel()
            yield DrainPanel()
            yield PrefixPanel()
        yield EventsPanel()

    def on_resize(self, event: events.Resize) -> None:
        self.place_panels()

    def show(self) -> None:
        self.place_panels()
        self.query_one(SlotsPanel).show()
        for panel in (ChurnPanel, DrainPanel, PrefixPanel, EventsPanel):
            self.query_one(panel).repaint()

    def place_panels(self) -> None:
        """Give each panel its place; corners meet the neighbours' edges."""
        width, height = self.size
        if not width or not height:
            return
        board = self.top.shown
        p = plan(width, height, board.status.slots_total if board is not None else 16)
        if (p, width) == getattr(self, "_arranged", None):
            return
        self._arranged = (p, width)
        slots, churn = self.query_one(SlotsPanel), self.query_one(ChurnPanel)
        drain, prefix = self.query_one(DrainPanel), self.query_one(PrefixPanel)
        events_panel, middle = self.query_one(EventsPanel), self.query_one("#middle")
        slots.styles.height = p.slots
        middle.styles.layout = "horizontal" if p.beside else "vertical"
        middle.styles.height = p.churn if p.beside else p.churn + p.drain
        prefix.display = p.beside
        drain.display, churn.display = bool(p.drain), bool(p.churn)
        events_panel.display = bool(p.events)
        events_panel.styles.height = p.events
        if p.beside:
            third = width // 3
            churn.styles.width, drain.styles.width = third, third
            prefix.styles.width = width - 2 * third
            churn.corners, drain.corners, prefix.corners = "├┬", "┬┬", "┬┤"
            churn.right_edge = drain.right_edge = False
            events_panel.joins = (third, 2 * third)
        else:
            churn.styles.width = drain.styles.width = "100%"
            churn.corners = drain.corners = "├┤"
            churn.right_edge = drain.right_edge = True
            events_panel.joins = ()
        churn.styles.height = p.churn
        drain.styles.height = p.drain
        prefix.styles.height = p.churn
        events_panel.corners = "├┤"
        slots.bottom = not p.events
        events_panel.bottom = p.beside or height > 30

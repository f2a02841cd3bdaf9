"""The dashboard as a Textual app: header, one of seven screens, footer, and what keys do.

Goes in: a source of messages and how to look.  Comes out: a terminal that shows the board, one
picture a second.  It knows no socket: the source's thread wakes it, and it takes what is there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.filter import LineFilter, Monochrome, NoColor
from textual.message import Message
from textual.widgets import Input

from lorad.tui.draw import ASCII, UNICODE, Glyphs
from lorad.tui.feed import Feed
from lorad.tui.footer import Banner, Footer
from lorad.tui.grid import Grid
from lorad.tui.header import Header
from lorad.tui.ink import LOOKS, Look
from lorad.tui.keys import KEYS
from lorad.tui.messages import Source
from lorad.tui.model import Model
from lorad.tui.panel import Line, Painted
from lorad.tui.view import View
from lorad.tui.views import VIEWS
from lorad.wire_stream import Board

LEAST = (60, 16)
INTERVALS = (0.5, 1.0, 2.0, 5.0, 10.0)
#: Without news for so many intervals the screen says how old it is.
STALE = 5.0


@dataclass(frozen=True)
class Settings:
    """What `loractl top` was asked for."""

    ascii: bool = False
    theme: str = "dusk"
    interval: float = 1.0
    read_only: bool = False
    screen: str = "1"


class TooSmall(Painted):
    """Instead of everything."""

    def __init__(self) -> None:
        super().__init__(id="too-small")

    def lines(self, width: int, height: int) -> list[Line]:
        size = self.app.size
        said = f"{size.width}x{size.height} is too small: {LEAST[0]}x{LEAST[1]} at least; q quits"
        return [((said, "strong"),)]


class TopApp(App[None]):
    """`source` tells what happens; `clock` is seconds that only go up."""

    TITLE = "lorad"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: $background; color: $foreground; overflow: hidden; }
    #header { height: 2; }
    #views { height: 1fr; }
    View { height: 100%; width: 100%; }
    #middle { height: 7; }
    #banner, #footer, #too-small { height: 1; }
    #prompt { height: 1; border: none; padding: 0 1; background: $panel; display: none; }
    #prompt:focus { border: none; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        *(Binding(k.keys, k.action, k.does, show=False) for k in KEYS if k.keys != "enter"),
        *(Binding(str(n), f"view('{n}')", f"screen {n}", show=False) for n in range(1, 8)),
    ]

    class News(Message):
        """The source said something."""

    def __init__(
        self,
        source: Source,
        settings: Settings = Settings(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.glyphs: Glyphs = ASCII if settings.ascii else UNICODE
        self.read_only = settings.read_only
        self.interval = settings.interval
        self.model = Model(clock)
        self.shown: Board | None = None  # with the ages of the last picture
        self.num_taken = 0  # messages
        self.said = ""  # in the footer, for a moment
        self._source = source
        self._feed = Feed(source, self._wake)
        self._view: View | None = None
        self._painted_at = float("-inf")
        self._clock = clock
        self._prompt_for: Callable[[str, bool], None] | None = None
        for look in LOOKS.values():
            self.register_theme(look.theme)
        self._mono = self.no_color
        self.theme = "mono" if self.no_color else settings.theme

    # ------------------------------------------------------------- what views ask
    @property
    def look(self) -> Look:
        return LOOKS.get(self.theme, LOOKS["dusk"])

    @property
    def title_of_source(self) -> str:
        return self._source.title

    @property
    def faded(self) -> bool:
        """What is shown is not what is."""
        return not self.model.link.up and self.model.board is not None

    @property
    def stale(self) -> bool:
        return self.model.board is not None and self.model.age() > STALE * max(1.0, self.interval)

    @property
    def view(self) -> View | None:
        return self._view

    def say(self, text: str, *, seconds: float = 3.0) -> None:
        """In place of the key hints, for a moment."""
        self.said = text
        self.query_one(Footer).repaint()
        self.set_timer(seconds, lambda: self._unsay(text))

    def _unsay(self, text: str) -> None:
        if self.said == text:
            self.said = ""
            self.query_one(Footer).repaint()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's own answer to NO_COLOR is grey; the mono look has no colour to begin with."""
        filters = super().get_line_filters()
        kept = [f for f in filters if not isinstance(f, Monochrome | NoColor)]
        return [*kept, Bare()] if self.look.mono else kept

    # ------------------------------------------------------------- life
    def _wake(self) -> None:
        """From the feed's thread."""
        self.post_message(self.News())

    def compose(self) -> ComposeResult:
        yield TooSmall()
        yield Header()
        yield Container(id="views")
        yield Banner()
        yield Input(id="prompt", select_on_focus=False)
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one(Banner).display = False
        await self.action_view(VIEWS[0].key)
        if self.settings.screen != VIEWS[0].key:
            await self.action_view(self.settings.screen)
        self._measure()
        self._feed.start()
        self.set_interval(0.5, self._tick)

    def on_unmount(self) -> None:
        self._feed.stop()

    def on_resize(self, event: events.Resize) -> None:
        self._measure()

    def _measure(self) -> None:
        width, height = self.size
        small = width < LEAST[0] or height < LEAST[1]
        self.query_one(TooSmall).display = small
        for name in ("#header", "#views", "#footer"):
            self.query_one(name).display = not small
        self.query_one(Header).styles.height = 3 if height >= 22 else 2
        self.paint()

    # ------------------------------------------------------------- news
    def on_top_app_news(self) -> None:
        """Take what came; a broken or mended link is shown at once, the rest at the pace."""
        was_up, had = self.model.link.up, self.model.board is not None
        for message in self._feed.take():
            self.model.take(message)
            self.num_taken += 1
        if was_up != self.model.link.up or not had:
            self.paint(all=True)
        elif self._clock() - self._painted_at >= self.interval * 0.9:
            self.paint()

    def _tick(self) -> None:
        """Ages grow when nothing comes."""
        if self._clock() - self._painted_at >= self.interval * 0.9:
            self.paint()

    def paint(self, *, all: bool = False) -> None:
        """Show the board as it is now, where it differs."""
        self._painted_at = self._clock()
        self.shown = self.model.shown()
        self.query_one(Header).repaint(all=all)
        self.query_one(Banner).refresh_height()
        self.query_one(Footer).repaint(all=all)
        if self._view is not None:
            self._view.show()
            if all:
                for painted in self._view.query(Painted):
                    painted.repaint(all=True)

    # ------------------------------------------------------------- keys
    async def action_view(self, key: str) -> None:
        """Show a screen; it is made when it is first asked for."""
        kind = next((kind for kind in VIEWS if kind.key == key), None)
        if kind is None:
            self.say(f"there is no screen {key}")
            return
        views = self.query_one("#views")
        found = next((view for view in views.query(kind)), None)
        if found is None:
            found = kind()
            await views.mount(found)
        for view in views.query(View):
            view.display = view is found
        self._view = found
        found.shown()
        self.paint()

    @property
    def _grid(self) -> Grid[Any] | None:
        return self._view.grid if self._view is not None else None

    def action_sort_next(self) -> None:
        if self._grid is not None:
            self._grid.sort_next()

    def action_sort_reverse(self) -> None:
        if self._grid is not None:
            self._grid.sort_reverse()

    def action_wide(self) -> None:
        if self._grid is not None:
            self._grid.toggle_wide()

    def action_freeze(self) -> None:
        self.model.freeze()
        self.paint(all=True)

    def action_faster(self, by: int) -> None:
        nearest = min(INTERVALS, key=lambda each: abs(each - self.interval))
        place = INTERVALS.index(nearest) + by
        self.interval = INTERVALS[max(0, min(place, len(INTERVALS) - 1))]
        self._source.pace(self.interval)
        self.say(f"a picture every {self.interval:g} s")
        self.paint()

    def action_refresh(self) -> None:
        self.paint(all=True)
        self.refresh(layout=True)

    def action_theme_next(self) -> None:
        names = list(LOOKS)
        self.theme = names[(names.index(self.look.theme.name) + 1) % len(names)]
        self.paint(all=True)
        self.say(f"theme {self.theme}")

    def action_copy_name(self) -> None:
        self._copy(self._view.target if self._view is not None else "", "the name")

    def action_copy_row(self) -> None:
        self._copy(self._view.row_json() if self._view is not None else "", "the row as JSON")

    def _copy(self, text: str, what: str) -> None:
        if not text:
            self.say("nothing is selected")
            return
        self.copy_to_clipboard(text)
        self.say(f"copied {what}")

    def action_escape(self) -> None:
        grid = self._grid
        if grid is not None and grid.listing.filter_text:
            grid.listing.narrow("")
            grid.repaint()

    def action_leave(self) -> None:
        self.exit()

    def action_detail(self) -> None:
        self.say("detail comes with its screen")

    def on_grid_chosen(self, message: Grid.Chosen) -> None:
        self.action_detail()

    def action_act(self, verb: str) -> None:
        """Ask, then do: pin, load, evict, drain, cancel."""
        if self.read_only:
            self.say("read-only: nothing is changed from here")
            return
        self.say(f"{verb}: no dialog yet")

    # ------------------------------------------------------------- the line that one types in
    def ask_line(self, start: str, take: Callable[[str, bool], None]) -> None:
        """`take(text, done)` for every change, and at the end; "" when it was given up."""
        prompt = self.query_one("#prompt", Input)
        self._prompt_for = None
        prompt.value = start
        prompt.display = True
        prompt.focus()
        self._prompt_for = take

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._prompt_for is not None:
            self._prompt_for(event.value, False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_prompt(event.value)

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape" and self._prompt_for is not None:
            event.stop()
            self._close_prompt("")

    def _close_prompt(self, text: str) -> None:
        take, self._prompt_for = self._prompt_for, None
        self.query_one("#prompt").display = False
        if self._view is not None:
            self._view.shown()
        if take is not None:
            take(text, True)

    def action_filter(self) -> None:
        grid = self._grid
        if grid is None:
            return

        def narrow(text: str, done: bool) -> None:
            grid.listing.narrow(text)
            grid.repaint()

        self.ask_line(grid.listing.filter_text, narrow)


class Bare(LineFilter):
    """Bold and reverse, and nothing else, whatever a widget wished for."""

    def apply(self, segments: list[Any], background: Any) -> list[Any]:
        return [
            Segment(text, None if style is None else _bare(style.bold, style.reverse), control)
            for text, style, control in segments
        ]


def _bare(bold: bool | None, reverse: bool | None) -> Any:
    return Style(bold=bold or None, reverse=reverse or None)

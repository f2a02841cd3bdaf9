"""The dashboard's shell as a Textual app: header, a screen, banner, footer; when to paint.

Goes in: a source of messages and how to look.  Comes out: a terminal that shows the board, one
picture an interval.  It knows no socket: the source's thread wakes it, and it takes what is there.
What keys do is in `app`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.containers import Container
from textual.filter import LineFilter, Monochrome, NoColor
from textual.geometry import Size
from textual.message import Message

from lorad.tui.draw import ASCII, Glyphs
from lorad.tui.feed import Feed
from lorad.tui.footer import Banner, Footer
from lorad.tui.header import Header
from lorad.tui.ink import LOOKS, Look
from lorad.tui.messages import Source
from lorad.tui.model import Model
from lorad.tui.office import Office
from lorad.tui.panel import CALM, Line, Painted
from lorad.tui.prompt import Prompt
from lorad.tui.sheet import Sheet
from lorad.tui.stage import Stage
from lorad.tui.view import View
from lorad.tui.views import VIEWS
from lorad.wire_stream import Board

LEAST = (60, 16)
#: Lines from which on the pool has one of its own.
POOL_HEIGHT = 22
#: Ages and the banner are looked after this often, whatever comes.
TICK_SECONDS = 0.5
#: A picture may come so much before its interval is over: clocks of two processes are never even.
_EARLY = 0.9
#: Without news for so many intervals the screen says how old it is.
STALE = 5.0


@dataclass(frozen=True)
class Settings:
    """What `loractl top` was asked for."""

    ascii: bool = False
    theme: str = "dusk"
    interval: float = 1.0
    read_only: bool = False
    screen: str = "1"  # the key of the one to begin with


class TooSmall(Painted):
    """Instead of everything."""

    def __init__(self) -> None:
        super().__init__(id="too-small")

    def lines(self, width: int, height: int) -> list[Line]:
        size = self.app.size
        said = f"{size.width}x{size.height}: at least {LEAST[0]}x{LEAST[1]} is needed; q quits"
        return [((said, "strong"),)]


class Shell(App[None]):
    """`source` tells what happens; `clock` is seconds that only go up."""

    TITLE = "lorad"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: $background; color: $foreground; overflow: hidden; }
    Sheet { background: transparent; align: center middle; }
    #views { height: 1fr; }
    View { height: 100%; width: 100%; }
    #banner, #footer, #too-small { height: 1; }
    """

    class News(Message):
        """The source said something."""

    class Answered(Message):
        """The office has an answer; `run` takes it."""

        def __init__(self, run: Callable[[], None]) -> None:
            super().__init__()
            self.run = run

    def __init__(
        self,
        source: Source,
        settings: Settings | None = None,
        *,
        office: Office | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.office = office  # None: there is no daemon that one could ask
        self.settings = settings or Settings()
        self.glyphs: Glyphs = ASCII if self.settings.ascii else CALM
        self.read_only = self.settings.read_only
        self.interval = self.settings.interval
        self.model = Model(clock)
        self.shown: Board | None = None  # with the ages of the last picture
        self.num_taken = 0  # messages
        self.said = ""  # in the footer, for a moment
        self._source, self._clock = source, clock
        self._feed = Feed(source, self._wake)
        self._view: View | None = None
        self._painted_at = float("-inf")
        for look in LOOKS.values():
            self.register_theme(look.theme)
        self.theme = "mono" if self.no_color else self.settings.theme

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
    def screens(self) -> list[tuple[str, str]]:
        """Keys and names of all there are."""
        return [(kind.key, kind.view_name) for kind in VIEWS]

    @property
    def view(self) -> View | None:
        """The one in sight."""
        return self._view

    @property
    def screen_key(self) -> str:
        return self._view.key if self._view is not None else ""

    @property
    def about(self) -> str:
        return self._view.about if self._view is not None else ""

    @property
    def target(self) -> str:
        """The adapter that keys are about; "" for none."""
        return self._view.target if self._view is not None else ""

    @property
    def height_above(self) -> int:
        """Lines above the screens."""
        return self._header.size.height

    def say(self, text: str, *, seconds: float = 3.0) -> None:
        """In place of the key hints, for a moment."""
        self.said = text
        self._footer.repaint()
        self.set_timer(seconds, lambda: self._unsay(text))

    def _unsay(self, text: str) -> None:
        if self.said == text:
            self.said = ""
            self._footer.repaint()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's own answer to NO_COLOR is grey; the mono look has no colour to begin with."""
        filters = super().get_line_filters()
        kept = [f for f in filters if not isinstance(f, Monochrome | NoColor)]
        return [*kept, Bare()] if self.look.mono else kept

    # ------------------------------------------------------------- life
    def compose(self) -> ComposeResult:
        self._too_small, self._header, self._banner = TooSmall(), Header(), Banner()
        self._views, self._prompt, self._footer = Container(id="views"), Prompt(), Footer()
        yield self._too_small
        yield self._header
        yield self._views
        yield self._banner
        yield self._prompt
        yield self._footer

    async def on_mount(self) -> None:
        self._banner.display = False
        await self.action_view(VIEWS[0].key)
        if self.settings.screen != VIEWS[0].key:
            await self.action_view(self.settings.screen)
        self._measure(self.size)
        if self.office is not None:
            self.office.open(self._deliver)
        self._feed.start()
        self.set_interval(TICK_SECONDS, self._tick)

    def on_unmount(self) -> None:
        self._feed.stop()
        if self.office is not None:
            self.office.close()

    def on_resize(self, event: events.Resize) -> None:
        self._measure(event.size)  # `self.size` is still that of before

    async def on_event(self, event: events.Event) -> None:
        """Who touches anything has seen the newest events."""
        if isinstance(event, events.Key | events.MouseDown):
            self.model.looked()
        await super().on_event(event)

    def _measure(self, size: Size) -> None:
        width, height = size
        small = width < LEAST[0] or height < LEAST[1]
        self._too_small.display = small
        for part in (self._header, self._views, self._footer):
            part.display = not small
        if not small and self._view is not None and self.screen_stack[0].focused is None:
            self._view.shown()  # what is hidden loses its keys
        self._header.styles.height = 3 if height >= POOL_HEIGHT else 2
        self.paint()

    async def action_view(self, key: str) -> None:
        """Show a screen; it is made when it is first asked for."""
        kind = next((kind for kind in VIEWS if kind.key == key), None)
        if kind is None:
            self.say(f"there is no screen {key}")
            return
        while isinstance(self.screen, Sheet):  # what lies over the screen was about another one
            self.pop_screen()
        found = next((view for view in self._views.query(kind)), None)
        if found is None:
            found = kind()
            await self._views.mount(found)
        for view in self._views.query(View):
            view.display = view is found
        self._view = found
        found.shown()
        self.paint()

    # ------------------------------------------------------------- news
    def _wake(self) -> None:
        """From the feed's thread."""
        self.post_message(self.News())

    def on_shell_news(self) -> None:
        """Take what came; a broken or mended link is shown at once, the rest at the pace."""
        was_up, had = self.model.link.up, self.model.board is not None
        for message in self._feed.take():
            self.model.take(message)
            self.num_taken += 1
        if was_up != self.model.link.up or not had:
            self.paint(all=True)
        else:
            self._paint_if_due()

    def _deliver(self, run: Callable[[], None]) -> None:
        """From a thread of the office; the loop may have ended by then."""
        with suppress(RuntimeError):
            self.post_message(self.Answered(run))

    def on_shell_answered(self, message: Answered) -> None:
        message.run()

    def _tick(self) -> None:
        """Ages grow when nothing comes."""
        if self.model.link.up:
            self._paint_if_due()
        else:
            self._banner.refresh_height()

    def _paint_if_due(self) -> None:
        if self._clock() - self._painted_at >= self.interval * _EARLY:
            self.paint()

    def paint(self, *, all: bool = False) -> None:
        """Show the board as it is now, where it differs; `all`: everything, as after a theme."""
        self._painted_at = self._clock()
        self.shown = self.model.shown()
        if self._view is not None:
            self._view.show()
        self._banner.refresh_height()
        self._header.repaint()
        self._footer.repaint()
        for sheet in self.screen_stack[1:]:
            if isinstance(sheet, Sheet) and sheet.is_mounted:  # it shows itself when it is made
                sheet.show()
        if all:
            for painted in self.screen.query(Painted):
                painted.refresh()
            for painted in self.screen_stack[0].query(Painted):
                painted.refresh()


class Bare(LineFilter):
    """Bold and reverse, and nothing else, whatever a widget wished for."""

    def apply(self, segments: list[Segment], background: Any) -> list[Segment]:
        return [
            Segment(
                text, None if style is None else _BARE[bool(style.bold), bool(style.reverse)], c
            )
            for text, style, c in segments
        ]


_BARE = {
    (bold, reverse): Style(bold=bold or None, reverse=reverse or None)
    for bold in (False, True)
    for reverse in (False, True)
}


if TYPE_CHECKING:  # parts cast the app to a stage: here it is seen to be one

    def _stage_of(shell: Shell) -> Stage:
        return shell

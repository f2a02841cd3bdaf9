"""A sheet over the screen: framed lines, closed by escape, scrolled where they are too many.

Goes in: a title and lines.  Comes out: what it was dismissed with.  For help, and for whoever needs
to say or ask something; a subclass may have an input between the lines and the bottom.
"""

from typing import Any, ClassVar, Generic, TypeVar, cast

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget

from lorad.tui.panel import Line, Panel
from lorad.tui.stage import Stage

T = TypeVar("T")


class SheetPanel(Panel, can_focus=True):
    """The frame and what is in it."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("down,j", "scroll_by(1)", show=False),
        Binding("up,k", "scroll_by(-1)", show=False),
        Binding("pagedown,ctrl+d,space", "scroll_by(10)", show=False),
        Binding("pageup,ctrl+u", "scroll_by(-10)", show=False),
        Binding("g,home", "scroll_by(-100000)", show=False),
        Binding("G,end", "scroll_by(100000)", show=False),
    ]

    def __init__(self, said: Line, hint: Line = ()) -> None:
        super().__init__(id="sheet-panel")
        self.said, self.hint = said, hint
        self.content: list[Line] = []
        self.first = 0
        self.bottom = True

    def title(self) -> Line:
        return self.said

    def note(self) -> Line:
        rows = self.size.height - 2
        if len(self.content) <= rows:
            return self.hint
        last = min(self.first + rows, len(self.content))
        return ((f"{self.first + 1}-{last} of {len(self.content)}  ", "faint"), *self.hint)

    def body(self, width: int, height: int) -> list[Line]:
        self.first = max(0, min(self.first, len(self.content) - height))
        return self.content[self.first : self.first + height]

    def action_scroll_by(self, rows: int) -> None:
        self.first += rows
        self.repaint()

    def on_mouse_scroll_down(self) -> None:
        self.action_scroll_by(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_scroll_by(-3)


class Sheet(ModalScreen[T], Generic[T]):
    """`WIDTH` and the lines decide how large it is; never larger than the terminal."""

    WIDTH: ClassVar[int] = 72
    DEFAULT_CSS = """
    Sheet > #sheet { height: auto; width: auto; }
    """
    BINDINGS: ClassVar[list[Any]] = [Binding("escape,q", "close", "close", show=False)]

    def __init__(self, title: str, *, hint: str = "esc closes") -> None:
        super().__init__()
        self.panel = SheetPanel(((title, "title"),), ((hint, "faint"),))

    @property
    def top(self) -> Stage:
        return cast(Stage, self.app)

    def content(self, width: int) -> list[Line]:
        """The lines within the frame, for so many cells."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet"):
            yield self.panel

    def on_mount(self) -> None:
        self.show()
        self.first_focus().focus()

    def first_focus(self) -> Widget:
        """Where keys go to."""
        return self.panel

    def on_resize(self) -> None:
        self.show()

    def show(self) -> None:
        """Take the lines anew."""
        space = self.app.size
        width = max(1, min(self.WIDTH, space.width - 2))
        panel = self.panel
        panel.content = self.content(width - 4)
        panel.styles.width = width
        panel.styles.height = max(1, min(len(panel.content) + 2, space.height - 2))
        panel.repaint(all=True)

    def action_close(self) -> None:
        self.dismiss(None)

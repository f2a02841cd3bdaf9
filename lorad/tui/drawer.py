"""The drawer at the right: all about one thing, an adapter or another row.

Goes in: a `Detail`.  Comes out: its lines, asked anew every few seconds where they are the
daemon's.  What is about an adapter keeps the keys that act on it.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical

from lorad.tui.draw import Glyphs
from lorad.tui.keys import KEYS
from lorad.tui.office import Office
from lorad.tui.panel import Line
from lorad.tui.sheet import Sheet
from lorad.wire_stream import Board

#: Between two questions about the same thing.
AGAIN_SECONDS = 2.0
_NARROW = 100  # columns: below it takes all of them
_LEAST = 64
#: Keys of the app that have nothing to do with what is below, or that the sheet has itself.
_NOT_HERE = ("slash", "s", "S", "enter", "colon", "w", "q", "tab", "shift+tab", "escape", "space")


class Detail(Protocol):
    """What a drawer tells about.  `tall`: it takes all the height, as what it tells comes later."""

    tall: bool

    @property
    def target(self) -> str:
        """The adapter that keys act on; "" is none."""
        ...

    def title(self) -> Line: ...
    def told(self, board: Board | None, width: int, glyphs: Glyphs) -> list[Line]: ...
    def ask(self, office: Office, then: Callable[[], None]) -> None:
        """Ask for what is not on the board, if anything; `then()` when it is there."""
        ...

    def as_json(self) -> str:
        """For the clipboard."""
        ...


class Drawer(Sheet[None]):
    """Over whatever screen."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("enter,left,h", "close", "close", show=False),
        *(
            Binding(key.keys, f"app.{key.action}", key.does, show=False)
            for key in KEYS
            if key.keys not in _NOT_HERE
        ),
        *(Binding(str(n), f"app.view('{n}')", f"screen {n}", show=False) for n in range(1, 8)),
    ]

    def __init__(self, detail: Detail) -> None:
        super().__init__("")
        self.styles.align = ("right", "top")  # a sheet's own is the middle
        self.detail = detail
        self._asked_at = float("-inf")

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet"):
            yield self.panel

    def content(self, width: int) -> list[Line]:
        return self.detail.told(self.top.shown, width, self.top.glyphs)

    def show(self) -> None:
        """Take the lines anew; and ask, if it is time to."""
        top, space, panel = self.top, self.app.size, self.panel
        now = top.model.now()
        due = now - self._asked_at >= max(AGAIN_SECONDS, top.interval)
        if top.office is not None and due and top.model.live:
            self._asked_at = now
            self.detail.ask(top.office, self._answered)
        above, below = top.height_above, 1
        wide = space.width if space.width < _NARROW else max(_LEAST, space.width * 9 // 16)
        self.query_one("#sheet").styles.margin = (above, 0, 0, 0)
        panel.said = self.detail.title()
        panel.content = self.content(wide - 4)
        panel.styles.width = wide
        room = max(3, space.height - above - below)
        panel.styles.height = room if self.detail.tall else min(room, len(panel.content) + 2)
        panel.repaint()

    def _answered(self) -> None:
        if self.is_attached:
            self.show()

    def on_resize(self) -> None:
        self.show()

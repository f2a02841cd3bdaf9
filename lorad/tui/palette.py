"""ctrl+p: every command, narrowed by what is typed."""

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input

from lorad.tui.ink import LOOKS
from lorad.tui.keys import keys_for
from lorad.tui.panel import Line
from lorad.tui.sheet import Sheet

_ROWS = 12


class Palette(Sheet[str]):
    """Dismissed with the action that was chosen, or None."""

    WIDTH = 64
    DEFAULT_CSS = """
    Palette Input { padding: 0 2; background: $panel; width: 64; }
    """

    def __init__(self) -> None:
        super().__init__("COMMANDS", hint="enter does it, esc closes")
        self._place = 0
        self._input = Input(placeholder="type to narrow", compact=True)

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet"):
            yield self._input
            yield self.panel

    def first_focus(self) -> Widget:
        return self._input

    def rows(self) -> list[tuple[str, str, str]]:
        """(what it does, its key, its action) of all that match."""
        keys = keys_for(read_only=self.top.read_only)
        rows = [(key.does, key.shown, key.action) for key in keys if not key.moves]
        rows += [(f"screen {name}", key, f"view('{key}')") for key, name in self.top.screens]
        rows += [(f"theme {name}", "", f"theme('{name}')") for name in LOOKS]
        words = self._input.value.lower().split()
        return [row for row in rows if all(word in row[0].lower() for word in words)]

    def content(self, width: int) -> list[Line]:
        rows = self.rows()
        self._place = max(0, min(self._place, len(rows) - 1))
        first = max(0, min(self._place - _ROWS // 2, len(rows) - _ROWS))
        out: list[Line] = []
        for place, (does, key, _) in enumerate(rows[first : first + _ROWS], start=first):
            over = "+pick" if place == self._place else ""
            mark = self.top.glyphs.here if over else " "
            said = f"{mark} {does}"
            said = f"{said:<{max(0, width - 8)}}"
            out.append(((said, f"text{over}"), (f"{key:>8}", f"key{over}")))
        return out or [(("no such command", "faint"),)]

    def on_input_changed(self, event: Input.Changed) -> None:
        self._place = 0
        self.show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        rows = self.rows()
        self.dismiss(rows[self._place][2] if rows else None)

    def on_key(self, event: Key) -> None:
        if event.key in ("down", "up"):
            event.stop()
            self._place += 1 if event.key == "down" else -1
            self.show()

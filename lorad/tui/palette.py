"""ctrl+p: every command and every adapter, narrowed by what is typed.

Goes in: words.  Comes out: an action.  Adapters that are not on the GPU are asked for by name.
"""

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input

from lorad.tui.ink import LOOKS
from lorad.tui.keys import keys_for
from lorad.tui.office import Answer, Client
from lorad.tui.panel import Line
from lorad.tui.sheet import Sheet

_ROWS = 12


#: What to do, as Textual runs it: words, or (namespace, name, arguments).
Action = str | tuple[str, str, tuple[object, ...]]
Row = tuple[str, str, Action]
#: Of the daemon itself: what is said, and the verb.
_DAEMON = (
    ("drain the daemon: no new requests", "drain"),
    ("cancel the drain of the daemon", "resume"),
    ("reload the configuration", "reload"),
)
_MAX_NAMES = 8
_MAX_WORDS, _MAX_FOUND = 3, 50  # that are asked for, and of each


class Palette(Sheet[Action]):
    """Dismissed with the action that was chosen, or None."""

    WIDTH = 64
    DEFAULT_CSS = """
    Palette Input { padding: 0 2; background: $panel; width: 64; }
    """

    def __init__(self) -> None:
        super().__init__("COMMANDS", hint="enter does it, esc closes")
        self._place = 0
        what = "type to narrow; an adapter's name opens it"
        self._input = Input(placeholder=what, compact=True)
        self._found: tuple[str, ...] = ()  # names that the daemon told

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet"):
            yield self._input
            yield self.panel

    def first_focus(self) -> Widget:
        return self._input

    def rows(self) -> list[Row]:
        """(what it does, its key, its action) of all that match."""
        keys = keys_for(read_only=self.top.read_only)
        rows: list[Row] = [(key.does, key.shown, key.action) for key in keys if not key.moves]
        rows += [(f"screen {name}", key, f"view('{key}')") for key, name in self.top.screens]
        rows += [(f"theme {name}", "", f"theme('{name}')") for name in LOOKS]
        if not self.top.read_only:
            rows += [(said, "", ("", "act", (verb, ""))) for said, verb in _DAEMON]
        words = self._input.value.lower().split()
        number = next((word for word in words if word.isdecimal() and len(word) < 4), "")
        name = self.top.target
        if number and name and not self.top.read_only:
            what = f"priority {number} for {name}"
            rows.append((what, "", ("", "act", ("priority", name, int(number)))))
        rows = [row for row in rows if all(word in row[0].lower() for word in words)]
        return rows + [(name, "adapter", ("", "adapter", (name,))) for name in self._names(words)]

    def _names(self, words: list[str]) -> list[str]:
        """Adapters whose names have all the words in them, those on the GPU first."""
        if not words:
            return []
        board = self.top.shown
        known = [*(board.slots if board is not None else ()), *self._found]
        names = dict.fromkeys(name for name in known if all(word in name for word in words))
        return list(names)[:_MAX_NAMES]

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
        self._search(event.value.lower().split())
        self.show()

    def _search(self, words: list[str]) -> None:
        office = self.top.office
        if office is None or not words or not self.top.model.link.up:
            return

        def call(client: Client) -> tuple[str, ...]:
            """The daemon looks for one word at a time."""
            pages = [client.adapters(q=word, limit=_MAX_FOUND) for word in words[:_MAX_WORDS]]
            return tuple(row.name for page in pages for row in page.items)

        def take(answer: Answer[tuple[str, ...]]) -> None:
            self._found = answer.value or ()
            if self.is_attached:
                self.show()

        office.ask("names", call, take)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        rows = self.rows()
        self.dismiss(rows[self._place][2] if rows else None)

    def on_key(self, event: Key) -> None:
        if event.key in ("down", "up"):
            event.stop()
            self._place += 1 if event.key == "down" else -1
            self.show()

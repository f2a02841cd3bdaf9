"""What keys do, as a sheet: made from the table that the bindings are made from."""

from lorad.tui.keys import COMMANDS, MOVES, keys_for
from lorad.tui.panel import Line
from lorad.tui.sheet import Sheet

_KEY_CELLS = 15


class Help(Sheet[None]):
    """`?`."""

    def __init__(self) -> None:
        super().__init__("KEYS")

    def content(self, width: int) -> list[Line]:
        keys = keys_for(read_only=self.top.read_only)
        groups = (
            ("", [(key.shown, key.does) for key in keys if not key.changes and not key.moves]),
            ("The selected adapter", [(key.shown, key.does) for key in keys if key.changes]),
            ("Moving about", [*MOVES, *((key.shown, key.does) for key in keys if key.moves)]),
            ("Commands, after :", [(word, does) for word, does in COMMANDS]),
        )
        out: list[Line] = []
        if self.top.read_only:
            out += [(("read-only: nothing can be changed from here", "warn"),), ()]
        for heading, rows in groups:
            if heading and rows:
                out += [(), ((heading, "strong"),)]
            out += [((f"{shown:<{_KEY_CELLS}}", "key"), (does, "")) for shown, does in rows]
        screens = "  ".join(f"{key} {name}" for key, name in self.top.screens)
        return [*out, (), (("screens  ", "faint"), (screens, ""))]

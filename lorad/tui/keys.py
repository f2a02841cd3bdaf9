"""What keys do: one table, from which bindings, footer, help and palette are made."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Key:
    """`keys` as Textual names them; `shown` as people do.  `footer`: rank there, 0 is not shown.

    `changes` what is served, so not with --read-only.  `moves`: about the screen, no command.
    `first`: done before the keys after it are looked at, which are typed into what it opens.
    """

    keys: str
    shown: str
    action: str
    does: str
    footer: int = 0
    short: str = ""  # in the footer
    changes: bool = False
    moves: bool = False
    first: bool = False

    @property
    def hint(self) -> str:
        """The first of several keys."""
        return self.shown.split()[0]


KEYS: tuple[Key, ...] = (
    Key("question_mark,f1", "?  F1", "help", "help", 1, "help"),
    Key(
        "slash",
        "/",
        "filter",
        "filter: word, !word, state:idle; esc clears",
        2,
        "filter",
        first=True,
    ),
    Key("s", "s", "sort_next", "sort by the next column", 3, "sort"),
    Key("S", "S", "sort_reverse", "sort the other way round"),
    Key("enter", "enter", "detail", "all about the selected row", 4, "detail"),
    Key("p", "p", "act('pin')", "pin or unpin", 5, "pin", changes=True),
    Key("l", "l", "act('load')", "load it onto the GPU", 6, "load", changes=True),
    Key("e", "e", "act('evict')", "evict it from the GPU", 7, "evict", changes=True),
    Key("d", "d", "act('drain')", "drain: no new requests for it", 8, "drain", changes=True),
    Key(
        "x",
        "x",
        "act('cancel')",
        "cancel the request, on screen 3; else its drain",
        9,
        "cancel",
        changes=True,
    ),
    Key("space", "space", "freeze", "freeze what is shown, or go on", 10, "freeze"),
    Key("y", "y", "copy_name", "copy the name", 11, "copy"),
    Key("Y", "Y", "copy_row", "copy the row as JSON"),
    Key("ctrl+p", "ctrl+p", "palette", "all commands", 12, "commands"),
    Key("colon", ":", "command", "a command by its name", first=True),
    Key("plus,equals_sign", "+", "pace(1)", "show news less often"),
    Key("minus", "-", "pace(-1)", "show news more often"),
    Key("w", "w", "wide", "all columns; left and right move"),
    Key("r", "r", "refresh", "draw everything anew"),
    Key("ctrl+s", "ctrl+s", "save", "save what is shown: JSON and SVG"),
    Key("t", "t", "theme_next", "next theme"),
    Key("m", "m", "mouse", "mouse on or off"),
    Key("q", "q", "leave", "quit", 13, "quit"),
    Key("ctrl+q", "ctrl+q", "leave", "quit at once", first=True),
    Key("ctrl+z", "ctrl+z", "suspend_process", "back to the shell; fg goes on", moves=True),
    Key("tab", "tab", "app.focus_next", "next panel", moves=True),
    Key("shift+tab", "shift+tab", "app.focus_previous", "panel before", moves=True),
    Key("escape", "esc", "escape", "clear the filter, close what is open", moves=True),
)
#: Of every table, for the help.
MOVES = (
    ("j k  arrows", "row down, row up"),
    ("g G  home end", "first row, last row"),
    ("ctrl+d ctrl+u", "page down, page up"),
    ("1-7", "screens"),
    ("click", "a heading sorts, a row is selected, a second click opens it"),
    ("shift+drag", "selects text, as the terminal does it"),
)
#: After a colon: words, and what they do.
COMMANDS = (
    (":filter TEXT", "as /"),
    (":sort COLUMN", "by that column; again for the other way round"),
    (":theme NAME", "dusk, paper, terminal, mono"),
    (":interval S", "a picture every S seconds"),
    (":2, :adapters", "a screen by its number or name"),
    (":adapter NAME", "all about it"),
    (":pin NAME", "also unpin, load, evict, drain, resume; without a name: the selected"),
    (":priority N NAME", "0 to 100; a higher one makes way later"),
    (":drain daemon", "also resume; :reload reads the configuration anew"),
    (":pause, :step", "a recording: stand still or go on; one message"),
    (":seek S, :speed N", "a recording: to second S, by +S or -S; N times as fast"),
    (":q", "quit"),
)


#: What a row must be for a key to be named in the footer; others do something everywhere.  On the
#: screen of requests `p` and its like are about the request's adapter, which the help says.
_ABOUT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("p", "l", "e", "d"), ("adapter",)),
    **dict.fromkeys(("x", "y"), ("adapter", "request")),
}
#: On screens of adapters, where `x` ends what `d` began.
_UNDRAIN = "undrain"


def in_footer(about: str, *, read_only: bool) -> tuple[Key, ...]:
    """Those that do something on a screen whose rows are an "adapter" or a "request", or "" for
    neither; by rank."""
    keys = []
    for key in keys_for(read_only=read_only):
        if key.keys == "x" and about == "adapter":
            key = replace(key, short=_UNDRAIN)
        if key.footer and about in _ABOUT.get(key.keys, (about,)):
            keys.append(key)
    return tuple(sorted(keys, key=lambda key: key.footer))


def keys_for(*, read_only: bool) -> tuple[Key, ...]:
    return tuple(key for key in KEYS if not (read_only and key.changes))

"""Longer text in few columns: words wrapped, fields under each other.

Goes in: foreign text and a width.  Comes out: lines of spans that are never wider.
"""

from collections.abc import Iterable

from lorad.tui.draw import Glyphs, inert, width_of
from lorad.tui.panel import Line

LABEL = 10  # cells of a field's name, with the space behind it


def wrapped(text: str, width: int) -> list[str]:
    """At spaces where there are some, else where the room ends; at least one line."""
    out: list[str] = []
    line, width = "", max(1, width)  # of a terminal of three columns nothing may be left
    for word in inert(text).split(" "):
        if line and width_of(line) + 1 + width_of(word) <= width:
            line = f"{line} {word}"
            continue
        if line:
            out.append(line)
        while width_of(word) > width:
            head = _head(word, width)
            out.append(head)
            word = word[len(head) :]
        line = word
    return [*out, line] if line or not out else out


def _head(word: str, width: int) -> str:
    """As much of it as fits, one character at least."""
    end = 1
    while end < len(word) and width_of(word[: end + 1]) <= width:
        end += 1
    return word[:end]


def field(name: str, text: str, width: int, ink: str = "") -> list[Line]:
    """`name     text`, further lines below the text."""
    room = max(8, width - LABEL)
    first, *rest = wrapped(text, room)
    lines: list[Line] = [((name.ljust(LABEL), "faint"), (first, ink))]
    return lines + [((" " * LABEL, ""), (line, ink)) for line in rest]


def fields(pairs: Iterable[tuple[str, str, str]], width: int) -> list[Line]:
    """Of (name, text, ink); those without a text are left out."""
    return [line for name, text, ink in pairs if text for line in field(name, text, width, ink)]


def heading(text: str, width: int, glyphs: Glyphs) -> Line:
    """`TEXT ------`."""
    flat = "-" if glyphs.border == "ascii" else "─"
    return ((text, "title"), (" ", ""), (flat * max(0, width - len(text) - 1), "edge"))

"""A framed panel that is painted line by line, and only where it differs from before.

Goes in: lines of spans, which are text and the name of an ink.  Comes out: strips of the terminal.
Foreign text is only ever a span, so no markup is read in it.  Panels share their edges: one draws
its top and its left, and the bottom and the right where nobody else is.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import cast

from rich.segment import Segment
from textual.events import Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from lorad.tui.draw import ASCII, UNICODE, Glyphs, cut, inert, width_of
from lorad.tui.ink import Look
from lorad.tui.stage import Stage

#: Thin bars, and sparklines that leave a gap to the line above: rows of blocks would grow together.
CALM = replace(UNICODE, fill="━", rest="─", parts="╸", spark="▁▂▃▄▅▆▇", here="▌")

Span = tuple[str, str]  # text, ink
Line = tuple[Span, ...]


@lru_cache(4096)
def shown(text: str, ascii: bool) -> str:
    """What a terminal can be given: every span passes here before it is painted."""
    if not (text.isascii() and text.isprintable()):
        text = " ".join(map(inert, text.split(" ")))  # spaces stay: they are ours
    return text.encode("ascii", "replace").decode() if ascii else text


def wide(line: Iterable[Span]) -> int:
    """Cells that a line takes."""
    return sum(width_of(text) for text, _ in line)


def fitted(line: Line, width: int, glyphs: Glyphs) -> Line:
    """A line of exactly `width` cells: cut off, or filled up with spaces."""
    return _fitted(line, width, glyphs.border == "ascii")


@lru_cache(8192)
def _fitted(line: Line, width: int, ascii: bool) -> Line:
    """Most cells are what they were a second ago, and many are alike."""
    room, kept = width, []
    for raw, ink in line:
        text = shown(raw, ascii)
        size = width_of(text)
        if size > room:
            if room:
                kept.append((cut(text, room, ASCII if ascii else CALM), ink))
                room -= width_of(kept[-1][0])
            break
        kept.append((text, ink))
        room -= size
    if room:
        kept.append((" " * room, ""))
    return tuple(kept)


def merged(spans: Iterable[Span]) -> Line:
    """The same text in as few spans as there are changes of ink: each one costs at every paint."""
    out: list[Span] = []
    for text, ink in spans:
        if out and out[-1][1] == ink:
            out[-1] = (out[-1][0] + text, ink)
        elif text:
            out.append((text, ink))
    return tuple(out)


def both_ends(left: Line, right: Line, width: int, glyphs: Glyphs, fill: Span = (" ", "")) -> Line:
    """One line with something at either end; the right one goes first when there is no room."""
    room = width - wide(left)
    if wide(right) + 1 > room:
        right = ()
    gap = room - wide(right)
    if gap < 0:
        return fitted(left, width, glyphs)
    return (*left, (fill[0] * gap, fill[1]), *right)


class Painted(Widget):
    """A widget that is lines of spans.  A subclass gives `lines`; `repaint` shows what changed."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._painted: list[Line] = []

    @property
    def top(self) -> Stage:
        return cast(Stage, self.app)

    @property
    def glyphs(self) -> Glyphs:
        return self.top.glyphs

    @property
    def look(self) -> Look:
        return self.top.look

    def lines(self, width: int, height: int) -> list[Line]:
        """At most `height` lines; shorter ones are filled up."""
        raise NotImplementedError

    def repaint(self, *, all: bool = False) -> int:
        """Draw what is not as it was; how many lines those are."""
        width, height = self.size
        if not width or not height or not self.is_attached:
            return 0
        new = [fitted(line, width, self.glyphs) for line in self.lines(width, height)][:height]
        new += [((" " * width, ""),)] * (height - len(new))
        old, self._painted = self._painted, new
        if all or len(old) != len(new):
            self.refresh()
            return len(new)
        changed = [y for y, line in enumerate(new) if line != old[y]]
        self.refresh(*(Region(0, y, width, 1) for y in changed)) if changed else None
        return len(changed)

    def on_resize(self, event: Resize) -> None:
        self.repaint(all=True)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._painted):
            return Strip.blank(width, self.look.style(""))
        style, faded = self.look.style, self.top.faded
        line = self._painted[y]
        return Strip([Segment(text, style(ink, faded=faded)) for text, ink in line], width)


class Panel(Painted):
    """Painted within a frame: `+- title ---- note -+`, sides, and a bottom if it is the last."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.corners = "╭╮"  # "├┤" below another, "┬" beside one
        self.bottom = False
        self.right_edge = True
        self.title_first = False  # if both do not fit, the note goes, not what is beside the title
        self.joins: tuple[int, ...] = ()  # columns where an edge from above ends

    # ------------------------------------------------------------- of a subclass
    def title(self) -> Line:
        raise NotImplementedError

    def note(self) -> Line:
        """At the right end of the top line."""
        return ()

    def body(self, width: int, height: int) -> list[Line]:
        """Lines within the frame, without the space at its sides."""
        raise NotImplementedError

    # ------------------------------------------------------------- frame
    def lines(self, width: int, height: int) -> list[Line]:
        edge = "focus" if self.has_focus else "edge"
        ascii = self.glyphs.border == "ascii"
        side = "|" if ascii else "│"
        inner = width - 3 - self.right_edge
        rows = height - 1 - self.bottom
        body = self.body(inner, rows)[:rows] if rows > 0 else []
        body += [()] * (rows - len(body))
        out = [self._top(width, edge, ascii)]  # after the body: it says which rows these are
        closing: Line = ((" " + side, "edge"),) if self.right_edge else ((" ", ""),)
        for line in body:
            out.append(((side + " ", "edge"), *fitted(line, inner, self.glyphs), *closing))
        if self.bottom:
            left, right, flat = ("+", "+", "-") if ascii else ("╰", "╯", "─")
            out.append(((left + flat * (width - 2) + right, "edge"),))
        return out

    def _top(self, width: int, edge: str, ascii: bool) -> Line:
        flat = "-" if ascii else "─"
        left, right = ("+", "+") if ascii else (self.corners[0], self.corners[1])
        end = width - self.right_edge
        title, note = self.title(), self.note()
        while not self.title_first and len(title) > 1 and wide(title) + wide(note) + 9 > end:
            title = title[:-1]  # what is beside the name says less than the note
        if wide(title) + wide(note) + 9 > end:
            note = ()
        title = fitted(title, min(wide(title), max(0, end - 5)), self.glyphs)
        line: list[Span] = [(left + flat + " ", edge), *title, (" ", "")]
        gap = end - wide(line) - (wide(note) + 3 if note else 0)
        line.append((self._rule(wide(line), gap, flat, ascii), edge))
        if note:
            line += [(" ", ""), *note, (" " + flat, edge)]
        if self.right_edge:
            line.append((right, edge))
        return tuple(line)

    def _rule(self, start: int, length: int, flat: str, ascii: bool) -> str:
        """The line, with marks where edges of panels above end."""
        rule = [flat] * max(0, length)
        for place in self.joins:
            if 0 <= place - start < len(rule):
                rule[place - start] = "+" if ascii else "┴"
        return "".join(rule)

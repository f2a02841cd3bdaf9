"""The small panels of the overview: churn, drains and loads, prefix cache, events.

Goes in: the board.  Comes out: lines.  Each panel has a short form for where panels are stacked.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding

from lorad.tui.draw import (
    UNKNOWN,
    age,
    clock,
    count,
    cut,
    duration,
    fit,
    pace,
    percent,
    ratio,
    size,
    sparkline,
)
from lorad.tui.panel import Line, Panel, Span, fitted
from lorad.tui.slots import bar_spans
from lorad.wire import EventItem
from lorad.wire_stream import CHURN_BUCKET_SECONDS, Board, Drain, Slot

LEVEL_INKS = {"info": "faint", "warn": "warn", "error": "bad"}
_BRIEF_ROWS = 2  # so low, a panel is in its short form
_BAR = 8
_LOAD_BAR = 6


class BoardPanel(Panel):
    """One that shows part of the board, and nothing while there is none."""

    def body(self, width: int, height: int) -> list[Line]:
        board = self.top.shown
        if board is None:
            return []
        how = self.brief if height <= _BRIEF_ROWS else self.told
        return how(board, width, height)

    def told(self, board: Board, width: int, height: int) -> list[Line]:
        raise NotImplementedError

    def brief(self, board: Board, width: int, height: int) -> list[Line]:
        """In one or two wide lines."""
        return self.told(board, width, height)


class ChurnPanel(BoardPanel):
    """Loads and evictions of ten minutes, and whether they undo each other."""

    def __init__(self) -> None:
        super().__init__(id="churn")

    def title(self) -> Line:
        return (("CHURN", "title"), (" 10 min", "faint"))

    def note(self) -> Line:
        board = self.top.shown
        if board is None or not board.churn.thrashes:
            return ()
        return ((f"THRASH {board.churn.thrashes}", "bad"),)

    def told(self, board: Board, width: int, height: int) -> list[Line]:
        churn = board.churn
        said = "came back too soon" if width >= 30 else "too soon"
        names = "  ".join(f"{name} {n}" for name, n in churn.top)
        thrashed: Span = (str(churn.thrashes), "bad" if churn.thrashes else "")
        return [
            self._run("load   ", churn.loads, "spark", width),
            self._run("evict  ", churn.evictions, "spark2", width),
            (("thrash ", "faint"), thrashed, (f" {said}", "faint")),
            (("why    ", "faint"), (_most(churn.reasons, "  "), "")),
            (("top    ", "faint"), (names or UNKNOWN, "")),
            (("moved  ", "faint"), (size(churn.load_bytes), "")),
        ]

    def brief(self, board: Board, width: int, height: int) -> list[Line]:
        churn = board.churn
        each = max(8, min(24, (width - 46) // 2))
        line: list[Span] = []
        for word, counts, ink in (
            ("load ", churn.loads, "spark"),
            ("  evict ", churn.evictions, "spark2"),
        ):
            line += [(word, "faint"), (self._spark(counts, each), ink)]
            line.append((f" {_per_minute(counts)}/m", ""))
        return [(*line, ("  why ", "faint"), (_most(churn.reasons, " "), ""))]

    def _run(self, word: str, counts: Sequence[int], ink: str, width: int) -> Line:
        rest = f" {_per_minute(counts):>4}/min"
        room = max(4, width - len(word) - len(rest))
        return ((word, "faint"), (self._spark(counts, room), ink), (rest, ""))

    def _spark(self, counts: Sequence[int], width: int) -> str:
        """Counts are added where there is less room than there are, so that none is lost."""
        if len(counts) > width:
            edges = [len(counts) * i // width for i in range(width + 1)]
            counts = [sum(counts[a:b]) for a, b in pairwise(edges)]
        return sparkline(counts, width, self.glyphs)


def _most(reasons: Mapping[str, int], between: str) -> str:
    items = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return between.join(f"{why} {n}" for why, n in items) or UNKNOWN


def _per_minute(counts: Sequence[int]) -> str:
    """Of the last minute."""
    return count(sum(counts[-60 // CHURN_BUCKET_SECONDS :]))


class DrainPanel(BoardPanel):
    """What runs down, and what is on its way in."""

    def __init__(self) -> None:
        super().__init__(id="drain")

    def title(self) -> Line:
        board = self.top.shown
        drains = len(board.drains) if board else 0
        loads = len(loading(board)) if board else 0
        return (
            ("DRAINS", "title"),
            (f" {drains}  ", "warn" if drains else "faint"),
            ("LOADS", "title"),
            (f" {loads}", "busy" if loads else "faint"),
        )

    def told(self, board: Board, width: int, height: int) -> list[Line]:
        out: list[Line] = []
        for drain in draining(board):
            out += [self._who(drain, width), self._progress(drain, width)]
        out += [self._load(row, width) for row in loading(board)]
        if not out:
            out.append((("nothing drains, nothing loads", "faint"),))
        if len(out) > height:
            return [*out[: height - 1], ((f"and {len(out) - height + 1} lines more", "faint"),)]
        if board.churn.recent and len(out) < height:
            out.append(self._done(board, width))
        return out

    def brief(self, board: Board, width: int, height: int) -> list[Line]:
        """A drain, a load: one of each where there are both and two lines."""
        drains = [self._drain_line(drain, width) for drain in draining(board)]
        loads = [self._load(row, width) for row in loading(board)]
        lines = [*drains[:1], *loads[:1], *drains[1:], *loads[1:]]
        if not lines and board.churn.recent:
            return [self._done(board, width)]
        return lines[:height] or [(("nothing drains, nothing loads", "faint"),)]

    def _who(self, drain: Drain, width: int) -> Line:
        revs = f" {drain.rev[:6]}" if drain.rev else ""
        if drain.next_rev:
            revs += f" {self.glyphs.to} {drain.next_rev[:6]}"
        name = cut(drain.name or "the daemon", max(8, width - len(revs)), self.glyphs)
        return ((name, "name"), (revs, "faint"))

    def _progress(self, drain: Drain, width: int) -> Line:
        if drain.held:
            return ((f"{drain.running} in flight, held until resumed", "warn"),)
        limit = f" of {age(drain.limit_seconds)}" if drain.limit_seconds is not None else ""
        said = f"  {drain.running} left  {age(drain.seconds)}{limit}"
        left = ratio(drain.running, drain.begun_with)
        share = None if left is None else 1 - left
        room = max(6, width - len(said) - 5)
        drawn = bar_spans(share, room, self.glyphs, "warn")
        return (*drawn, (f" {percent(share):>4}{said}", ""))

    def _drain_line(self, drain: Drain, width: int) -> Line:
        half = width // 2
        name = fitted(self._who(drain, half), half, self.glyphs)
        return (*name, (" ", ""), *self._progress(drain, width - half - 1))

    def _load(self, row: Slot, width: int) -> Line:
        speed = pace(row.load_bytes_per_second)
        since = age(row.load_seconds) if row.load_seconds >= 2 or not speed else ""
        rest = "".join(f" {word}" for word in (row.load_source or "waits", speed, since) if word)
        room = _LOAD_BAR if width >= 36 else 0
        name = fit(row.name, max(6, width - len(rest) - room - 1), self.glyphs)
        drawn = bar_spans(row.load_fraction, room, self.glyphs, "busy") if room else ()
        return ((name + " ", "name"), *drawn, (rest, "busy"))

    def _done(self, board: Board, width: int) -> Line:
        last = board.churn.recent[0]
        speed = pace(ratio(last.num_bytes, last.seconds))
        said = f" {last.source} {duration(last.seconds)} {speed}".rstrip()
        name = cut(last.name, max(6, width - 5 - len(said)), self.glyphs)
        return ((f"last {name}{said}", "faint"),)


def draining(board: Board) -> list[Drain]:
    """Those that something still runs in first: what is held, and empty, can wait for days."""
    return sorted(board.drains.values(), key=lambda drain: drain.running == 0)


def loading(board: Board) -> list[Slot]:
    return [row for row in board.slots.values() if row.state == "loading"]


class PrefixPanel(BoardPanel):
    """Who finds its prompts cached."""

    def __init__(self) -> None:
        super().__init__(id="prefix")

    def title(self) -> Line:
        return (("PREFIX CACHE", "title"), (" 60 s", "faint"))

    def note(self) -> Line:
        board = self.top.shown
        if board is None:
            return ()
        life = ratio(board.status.prefix.hit_tokens, board.status.prefix.query_tokens)
        return (("life ", "faint"), (percent(life), ""))

    def told(self, board: Board, width: int, height: int) -> list[Line]:
        out = [self._share("all", board.load.hit_tokens, board.load.query_tokens, width, "strong")]
        asked = [row for row in board.slots.values() if row.query_tokens]
        asked.sort(key=lambda row: (-row.query_tokens, row.name))
        for row in asked[: height - 1]:
            out.append(self._share(row.name, row.hit_tokens, row.query_tokens, width, ""))
        return out if asked else [*out, (("no prompt was looked up", "faint"),)]

    def _share(self, name: str, hit: int, asked: int, width: int, ink: str) -> Line:
        share = ratio(hit, asked)
        rest = f"{percent(share):>5} {count(hit) if asked else '':>5}"
        room = _BAR if width >= 36 else 0
        label = fit(name, max(4, width - len(rest) - room - 1), self.glyphs)
        drawn: Line = ((" " * room, ""),)
        if share is not None and room:
            drawn = bar_spans(share, room, self.glyphs)
        return ((label + " ", ink), *drawn, (rest, ink))


#: What the table of slots and the panel of loads show, or what follows from another event; there
#: would be room for nothing else.  Screen 5 has them.
PASSING = frozenset({"ram.loading", "ram.load", "ram.drop", "slot.loading"})


class EventsPanel(Panel, can_focus=True):
    """The newest events, the last on top, but for `PASSING`.  Scrolled back, it stays at what it
    shows."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("down,j", "back(1)", show=False),
        Binding("up,k", "back(-1)", show=False),
        Binding("pagedown,ctrl+d", "back(10)", show=False),
        Binding("pageup,ctrl+u", "back(-10)", show=False),
        Binding("g,home", "back(-100000)", show=False),
        Binding("G,end", "back(100000)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="events")
        self._back = 0  # events that are newer than those in sight
        self._num_events = 0

    def title(self) -> Line:
        return (("EVENTS", "title"),)

    def note(self) -> Line:
        new = self.top.model.num_new
        said: list[Span] = []
        if self._back:
            said.append((f"{self._back} above" + ("  " if new else ""), "faint"))
        if new:
            said.append((f"{new} new", "strong"))
        return tuple(said)

    def body(self, width: int, height: int) -> list[Line]:
        model = self.top.model
        known = [event for event in model.events if event.type not in PASSING]
        if self._back:
            fresh = list(model.events)[max(0, self._num_events - model.first_event) :]
            self._back += sum(event.type not in PASSING for event in fresh)
        self._num_events = model.first_event + len(model.events)
        self._back = max(0, min(self._back, len(known) - height))
        end = len(known) - self._back
        seen = known[max(0, end - height) : end]
        if not seen:
            return [(("nothing happened yet", "faint"),)]
        return [event_line(event, width, self) for event in reversed(seen)]

    def action_back(self, rows: int) -> None:
        self._back = max(0, self._back + rows)
        self.repaint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_back(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_back(-3)

    def on_focus(self) -> None:
        self.repaint()

    def on_blur(self) -> None:
        self.repaint()


def event_line(event: EventItem, width: int, panel: Panel) -> Line:
    """One event: time, level where it matters, type, name, and what it says."""
    where = event.replica and f"replica {event.replica}"
    said = " ".join(filter(None, (where, event.message, event.cause and f"({event.cause})")))
    rev = f"{event.rev[:6]} " if event.rev else ""
    level, ink = event.level.upper(), LEVEL_INKS.get(event.level, "")
    time: Span = (f"{clock(event.time)} ", "faint")
    if width >= 90:
        name = fit(event.name, 26, panel.glyphs)
        what = fit(event.type, 18, panel.glyphs)
        line = (time, (f"{level:<6}", ink), (f"{what} ", ""), (f"{name} ", "name"))
        return (*line, (rev, "faint"), (said, ""))
    mark = " " if event.level == "info" else level[:1]
    what = fit(event.type, 17, panel.glyphs)
    name = f"{cut(event.name, 26, panel.glyphs)} " if event.name else ""
    return time, (f"{mark} ", ink), (f"{what} ", ""), (name, "name"), (rev, "faint"), (said, "")

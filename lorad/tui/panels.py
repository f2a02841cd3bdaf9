"""The small panels of the overview: churn, drains and loads, prefix cache, events.

Goes in: the board.  Comes out: lines.  Each panel has a short form for where panels are stacked.
"""

from lorad.tui.draw import (
    UNKNOWN,
    age,
    clock,
    count,
    cut,
    duration,
    fit,
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


class BoardPanel(Panel):
    """One that shows part of the board, and nothing while there is none."""

    def body(self, width: int, height: int) -> list[Line]:
        board = self.top.shown
        if board is None:
            return []
        if width < 60 and height > 2:
            return self.told(board, width, height)
        return self.brief(board, width, height) if height <= 2 else self.told(board, width, height)

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
        return (("2 ", "key"), ("CHURN", "title"), (" 10 min", "faint"))

    def note(self) -> Line:
        board = self.top.shown
        if board is None or not board.churn.thrashes:
            return ()
        return ((f"THRASH {board.churn.thrashes}", "bad"),)

    def told(self, board: Board, width: int, height: int) -> list[Line]:
        churn = board.churn
        out = [self._row("load ", churn.loads, width), self._row("evict", churn.evictions, width)]
        thrash = churn.thrashes
        said = "after an evict < 60 s" if width >= 34 else "reloads < 60 s"
        out.append(
            (("thrash ", "faint"), (f"{thrash}", "bad" if thrash else ""), (f"  {said}", "faint"))
        )
        reasons = "  ".join(f"{why} {n}" for why, n in _most(churn.reasons))
        out.append((("why    ", "faint"), (reasons or UNKNOWN, "")))
        names = "  ".join(f"{name} {n}" for name, n in churn.top)
        out.append((("top    ", "faint"), (names or UNKNOWN, "")))
        out.append((("moved  ", "faint"), (size(churn.load_bytes), "")))
        return out

    def brief(self, board: Board, width: int, height: int) -> list[Line]:
        churn = board.churn
        each = max(8, min(24, (width - 40) // 2))
        line: list[Span] = [("load ", "faint")]
        line.append((sparkline(churn.loads, each, self.glyphs), "spark"))
        line.append((f" {_per_minute(churn.loads)}/m", ""))
        line += [("   evict ", "faint")]
        line.append((sparkline(churn.evictions, each, self.glyphs), "spark"))
        line.append((f" {_per_minute(churn.evictions)}/m", ""))
        reasons = " ".join(f"{why} {n}" for why, n in _most(churn.reasons))
        line += [("   why ", "faint"), (reasons or UNKNOWN, "")]
        return [tuple(line)]

    def _row(self, word: str, counts: tuple[int, ...], width: int) -> Line:
        rest = f" {_per_minute(counts):>4}/min"
        room = max(4, width - len(word) - 2 - len(rest))
        return (
            (f"{word}  ", "faint"),
            (sparkline(counts, room, self.glyphs), "spark"),
            (rest, ""),
        )


def _most(reasons: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))


def _per_minute(counts: tuple[int, ...]) -> str:
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
            ("3 ", "key"),
            ("DRAINS", "title"),
            (f" {drains}  ", "warn" if drains else "faint"),
            ("LOADS", "title"),
            (f" {loads}", "busy" if loads else "faint"),
        )

    def told(self, board: Board, width: int, height: int) -> list[Line]:
        out: list[Line] = []
        for drain in board.drains.values():
            out += self._drain(drain, width)
        for row in loading(board):
            out.append(self._load(row, width))
        if len(out) < height:
            out += [self._done(board, width)] if board.churn.recent else []
        if not out:
            out.append((("nothing drains, nothing loads", "faint"),))
        if len(out) > height:
            hidden = len(out) - height + 1
            out = [*out[: height - 1], ((f"and {hidden} more lines", "faint"),)]
        return out

    def brief(self, board: Board, width: int, height: int) -> list[Line]:
        lines = [self._drain_line(drain, width) for drain in board.drains.values()]
        lines += [self._load(row, width) for row in loading(board)]
        if not lines:
            return [(("nothing drains, nothing loads", "faint"),)]
        if len(lines) > height:
            lines = lines[:height]
        return lines

    def _drain(self, drain: Drain, width: int) -> list[Line]:
        name = drain.name or "the daemon"
        revs = f" {drain.rev[:6]}" if drain.rev else ""
        if drain.next_rev:
            revs += f"{self.glyphs.to}{drain.next_rev[:6]}"
        head: Line = ((cut(name, max(8, width - len(revs)), self.glyphs), ""), (revs, "faint"))
        return [head, self._progress(drain, width)]

    def _progress(self, drain: Drain, width: int) -> Line:
        if drain.held:
            return ((f"{drain.running} in flight, held until resumed", "warn"),)
        limit = f" of {age(drain.limit_seconds)}" if drain.limit_seconds is not None else ""
        said = f" {drain.running} left  {age(drain.seconds)}{limit}"
        share = None
        if drain.begun_with:
            share = 1 - drain.running / drain.begun_with
        room = max(6, width - len(said) - 5)
        drawn = bar_spans(share, room, self.glyphs, "warn")
        return (*drawn, (f" {percent(share):>4}{said}", ""))

    def _drain_line(self, drain: Drain, width: int) -> Line:
        half = width // 2
        name = fitted(self._drain(drain, half)[0], half, self.glyphs)
        return (*name, (" ", ""), *self._progress(drain, width - half - 1))

    def _load(self, row: Slot, width: int) -> Line:
        tier = row.load_source or "wait"
        speed = row.load_bytes_per_second
        pace = "" if not speed else f" {speed / 1e9:.1f}GB/s"
        rest = f" {tier}{pace} {age(row.load_seconds)}"
        bar_room = 8 if width >= 36 else 0
        name = fit(row.name, max(6, width - len(rest) - bar_room - 1), self.glyphs)
        drawn = bar_spans(row.load_fraction, bar_room, self.glyphs, "busy") if bar_room else ()
        return ((name + " ", ""), *drawn, (rest, "busy"))

    def _done(self, board: Board, width: int) -> Line:
        last = board.churn.recent[0]
        pace = last.num_bytes / last.seconds / 1e9 if last.seconds > 0 else 0.0
        said = f" {last.source} {duration(last.seconds)} {pace:.1f}GB/s"
        name = cut(last.name, max(6, width - 5 - len(said)), self.glyphs)
        return (("last ", "faint"), (name, "faint"), (said, "faint"))


def loading(board: Board) -> list[Slot]:
    return [row for row in board.slots.values() if row.state == "loading"]


class PrefixPanel(BoardPanel):
    """Who finds its prompts cached."""

    def __init__(self) -> None:
        super().__init__(id="prefix")

    def title(self) -> Line:
        return (("4 ", "key"), ("PREFIX CACHE", "title"), (" 60 s", "faint"))

    def note(self) -> Line:
        board = self.top.shown
        if board is None:
            return ()
        life = ratio(board.status.prefix.hit_tokens, board.status.prefix.query_tokens)
        return (("life ", "faint"), (percent(life), ""))

    def told(self, board: Board, width: int, height: int) -> list[Line]:
        load = board.load
        out = [self._row("all", load.hit_tokens, load.query_tokens, width, "strong")]
        asked = sorted(board.slots.values(), key=lambda r: (-r.query_tokens, r.name))
        for row in asked[: height - 1]:
            if row.query_tokens:
                out.append(self._row(row.name, row.hit_tokens, row.query_tokens, width, ""))
        if len(out) == 1:
            out.append((("no prompt was looked up", "faint"),))
        return out

    def _row(self, name: str, hit: int, asked: int, width: int, ink: str) -> Line:
        share = ratio(hit, asked)
        rest = f"{percent(share):>5} {count(hit):>5}"
        room = 8 if width >= 36 else 0
        label = fit(name, max(4, width - len(rest) - room - 1), self.glyphs)
        drawn = bar_spans(share, room, self.glyphs) if room else ()
        return ((label + " ", ink), *drawn, (rest, ink))


class EventsPanel(Panel, can_focus=True):
    """The newest events."""

    def __init__(self) -> None:
        super().__init__(id="events")

    def title(self) -> Line:
        return (("5 ", "key"), ("EVENTS", "title"))

    def note(self) -> Line:
        new = self.top.model.num_new
        return ((f"{new} new", "strong"),) if new else ()

    def body(self, width: int, height: int) -> list[Line]:
        newest = self.top.model.events[-height:]
        if not newest:
            return [(("nothing happened yet", "faint"),)]
        return [event_line(event, width, self) for event in reversed(newest)]


def event_line(event: EventItem, width: int, panel: Panel) -> Line:
    """One event: time, level where it matters, type, name, and what it says."""
    said = " ".join(filter(None, (event.message, event.cause and f"({event.cause})")))
    rev = f"{event.rev[:6]} " if event.rev else ""
    ink = LEVEL_INKS.get(event.level, "")
    level = event.level.upper()
    if width >= 100:
        return (
            (f"{clock(event.time)} ", "faint"),
            (f"{level:<6}", ink),
            (fit(event.type, 20, panel.glyphs) + " ", ""),
            (fit(event.name, 24, panel.glyphs) + " ", "strong" if event.name else ""),
            (rev, "faint"),
            (said, ""),
        )
    mark = f"{level} " if event.level != "info" else ""
    return (
        (f"{clock(event.time)} ", "faint"),
        (mark, ink),
        (fit(event.type, 20 - len(mark), panel.glyphs) + " ", ""),
        (event.name + "  " if event.name else "", "strong"),
        (rev, "faint"),
        (said, ""),
    )

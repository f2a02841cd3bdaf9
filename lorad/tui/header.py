"""The lines above every screen: who this is, how it fares, what the memory is used for.

Goes in: the board.  Comes out: lines that fit the width, the least needed left out first.
"""

from collections.abc import Sequence
from dataclasses import replace

from textual import events

from lorad.tui.draw import (
    ASCII,
    UNKNOWN,
    Glyphs,
    age,
    clock,
    count,
    duration,
    percent,
    rate,
    ratio,
    size_of,
    stacked,
)
from lorad.tui.draw import size as bytes_of
from lorad.tui.panel import Line, Painted, Span, both_ends, fitted, wide
from lorad.tui.served import generates, pools
from lorad.wire_status import PoolPicture, ReplicaStatus, Status
from lorad.wire_stream import Board, Spread

STATE_INKS = {"ready": "good", "stopped": "bad", "engine_stalled": "bad"}
#: Fields of a PoolPicture, what they are called, their ink.
POOL = (
    ("kv_active", "KV", "kv_used"),
    ("kv_cached", "cached", "kv_cached"),
    ("adapter_active", "LoRA", "adapter_used"),
    ("adapter_idle", "LoRA idle", "adapter_idle"),
    ("free", "free", "free"),
)
ROOMY = 100  # columns: names of things in full, the legend beside the bar
Part = tuple[int, Line]  # how soon it may go, the highest first; its spans


class Header(Painted):
    """Two lines, and the pool as a third where there is room."""

    def __init__(self) -> None:
        super().__init__(id="header")

    def lines(self, width: int, height: int) -> list[Line]:
        board, tabs = self.top.shown, self._tabs()
        if board is None:
            said = ((" lorad  ", "strong"), (f"{self.top.title_of_source}  ", "faint"))
            return [said, both_ends(((" waiting for data", "faint"),), tabs, width, self.glyphs)]
        now: Line = ((clock(board.time) + " ", "strong"),)
        who = _identity(board, width, self.top.title_of_source, self._doubt())
        how = _figures(board, height < 3, roomy=width >= ROOMY)
        out = [joined(who, now, width, self.glyphs), joined(how, tabs, width, self.glyphs)]
        if height > 2:
            glyphs = self.glyphs
            if not self.look.mono and glyphs is not ASCII:
                glyphs = replace(glyphs, pool=glyphs.pool[0])  # colours tell the parts apart
            out.append(pool_line(board.status.pool, width, glyphs))
        return out

    def _doubt(self) -> str:
        """Why the state that was told last may be no more; "" if it is as told."""
        link = self.top.model.link
        if not (link.up or link.final) and link.why != "connecting":
            return "DISCONNECTED"
        return "NO NEWS" if self.top.stale else ""

    def _tabs(self) -> Line:
        """`1 Overview 2 3 4`: which screen this is, and that there are others."""
        spans: list[Span] = []
        for key, name in self.top.screens:
            here = key == self.top.screen_key
            spans += [(key, "key" if here else "faint"), (f" {name} " if here else " ", "")]
        return tuple(spans)

    async def on_click(self, event: events.Click) -> None:
        """On the number of a screen."""
        x = event.x - (self.size.width - wide(self._tabs()))
        for text, _ in self._tabs() if event.y == 1 else ():
            if 0 <= x < len(text) and text.isdigit():
                await self.top.action_view(text)
            x -= len(text)


def joined(parts: Sequence[Part], right: Line, width: int, glyphs: Glyphs) -> Line:
    """Parts two spaces apart; while they do not fit, the one that matters least goes."""
    kept = [part for part in parts if part[1]]
    room = width - wide(right) - 1
    while len(kept) > 1 and sum(wide(line) + 2 for _, line in kept) > room:
        kept.remove(max(kept, key=lambda part: part[0]))
    left: list[Span] = [(" ", "")]
    for _, line in kept:
        left += [*line, ("  ", "")]
    return both_ends(tuple(left[:-1]), right, width, glyphs)


def _said(word: str, value: str, ink: str = "") -> Line:
    return ((f"{word} ", "faint"), (value, ink))


def _identity(board: Board, width: int, source: str, doubt: str) -> list[Part]:
    s, roomy = board.status, width >= ROOMY
    busy = board.machine.gpu_busy
    state: Line = ((s.state.upper(), STATE_INKS.get(s.state, "warn")),)
    if doubt:
        state = ((doubt, "bad"),)
    elif s.state != "ready" and s.reason:
        state = (*state, (f" {s.reason}", "faint"))
    refused = s.adapters.get("quarantined", 0)
    refusals: Line = ((f"{refused} quarantined", "bad"),) if refused else ()
    return [
        (0, (("lorad", "strong"), (f" {s.version}" if roomy else "", "faint"))),
        (0, state),
        (1, refusals),
        (7, _said("pid", str(s.pid))),
        (3, _said("up", age(s.uptime_seconds))),
        (2, _models(s, roomy=roomy)),
        (
            4,
            (
                (s.device_name or s.device, "faint"),
                (f" {percent(busy)}" if busy is not None else "", ""),
            ),
        ),
        (9, ((source, "faint"),)),
    ]


def _models(s: Status, *, roomy: bool) -> Line:
    """The one that is served, or all of them; one that is not ready says so by its ink."""
    if len(s.models) < 2:
        each = [_replica(one) for model in s.models for one in model.replicas]
        dtype = (f" {s.dtype}" if roomy else "", "faint")
        return ((s.model or s.base, "strong"), dtype, *each)
    spans: list[Span] = []
    for one in s.models:
        ink = "strong" if one.state == "ready" else STATE_INKS.get(one.state, "warn")
        spans += [(one.name, ink), (" ", "")]
    return tuple(spans[:-1])


def _replica(one: ReplicaStatus) -> Span:
    """Its number, in the ink of its state."""
    ink = "faint" if one.state == "ready" else STATE_INKS.get(one.state, "warn")
    return f" {one.name}", ink


def _figures(board: Board, no_pool: bool, *, roomy: bool) -> list[Part]:
    s, load, m = board.status, board.load, board.machine
    pool = s.pool
    used = ratio(pool.kv_active + pool.kv_cached, pool.total)
    return [
        (5, _said("req/s", rate(load.requests_per_second))),
        *((1, pace) for pace in _paces(board, roomy=roomy)),
        (0, _said("run", count(s.running), "strong")),
        (0, _said("wait", count(s.waiting), "warn" if s.waiting else "")),
        (2, _said("TTFT", both_percentiles(load.first_token))),
        (6, _said("ITL", both_percentiles(load.inter_token))),
        (3, _said("KV", percent(used)) if no_pool else ()),
        (4, _said("prefix", percent(ratio(load.hit_tokens, load.query_tokens)))),
        (5, _said("VRAM", size_of(m.gpu_used_bytes, m.gpu_total_bytes))),
        (7, _said("ram", bytes_of(s.ram_used_bytes))),
        (8, _said("cpu", f"{percent(m.daemon_cpu)}+{percent(m.engine_cpu)}")),
        (9, _said("host", size_of(m.host_used_bytes, m.host_total_bytes))),
    ]


def _paces(board: Board, *, roomy: bool) -> list[Line]:
    """Tokens a second: those that are generated, and those of inputs for vectors and scores, by
    what is done with them; each where a model is served for it."""
    load, said = board.load, list[Line]()
    if writes := generates(board.status):
        said.append(_said("tok/s", rate(load.tokens_per_second), "strong"))
    if word := pools(board.status):
        shown = word if writes and not roomy else f"{word} tok/s"  # as the one before it
        said.append(_said(shown, rate(load.pooled_tokens_per_second), "strong"))
    return said


def both_percentiles(spread: Spread) -> str:
    """`82/410ms`: the median and the 99th, in one unit where that is the same."""
    if not spread.count:
        return UNKNOWN
    middle, high = duration(spread.p50), duration(spread.p99)
    for unit in ("ms", "s"):
        if middle.endswith(unit) and high.endswith(unit):
            short = middle.removesuffix(unit)
            return f"{short}/{high}" if not short.endswith("m") else f"{middle}/{high}"
    return f"{middle}/{high}"


# ----------------------------------------------------------------- the pool
def pool_line(pool: PoolPicture, width: int, glyphs: Glyphs) -> Line:
    """The one arena as a bar of five parts: named beside it, or within it where that is narrow."""
    start: Line = ((" pool  ", "faint"),)
    if not pool.total:
        return (*start, (UNKNOWN, "faint"))
    amounts = [getattr(pool, name) for name, _, _ in POOL]
    shares = [percent(ratio(amount, pool.total)) for amount in amounts]
    if width < ROOMY:
        return (*start, *_named_bar(amounts, shares, width - 8, glyphs), (" ", ""))
    legend: list[Span] = []
    for place, (_, word, ink) in enumerate(POOL):
        mark = glyphs.pool[place % len(glyphs.pool)]
        legend += [("  ", ""), (mark, ink), (f" {word} ", "faint"), (shares[place], "")]
    pieces = stacked(amounts, width - wide(legend) - wide(start) - 1, glyphs)
    drawn = ((piece, ink) for piece, (_, _, ink) in zip(pieces, POOL, strict=True))
    return (*start, *drawn, *legend)


def _named_bar(amounts: Sequence[int], shares: Sequence[str], width: int, glyphs: Glyphs) -> Line:
    """Each part has its name in it; a part that is too short for that has its share, or nothing."""
    spans: list[Span] = []
    pieces = stacked(amounts, width, glyphs)
    for piece, share, (_, word, ink) in zip(pieces, shares, POOL, strict=True):
        labels = (f" {word} {share} ", f" {word.split()[-1]} {share} ", f" {share} ")
        label = next((text for text in labels if len(text) < len(piece)), "")
        if label:
            spans += [(piece[0], ink), (label, f"{ink}_label")]
        spans.append((piece[1 + len(label) :] if label else piece, ink))
    return fitted(tuple(spans), width, glyphs)

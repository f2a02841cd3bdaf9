"""The lines above every screen: who this is, how it fares, what the memory is used for.

Goes in: the board.  Comes out: lines that fit the width, the least needed left out first.
"""

from collections.abc import Sequence

from lorad.tui.draw import (
    Glyphs,
    age,
    bar,
    clock,
    count,
    duration,
    inert,
    percent,
    rate,
    ratio,
    size,
    size_of,
    stacked,
)
from lorad.tui.panel import Line, Painted, both_ends, wide
from lorad.wire import PoolPicture
from lorad.wire_stream import Board

STATE_INKS = {"ready": "good", "draining": "warn", "stopped": "bad", "engine_stalled": "bad"}
POOL = (
    ("kv_active", "KV", "kv_used"),
    ("kv_cached", "cached", "kv_cached"),
    ("adapter_active", "adapters", "adapter_used"),
    ("adapter_idle", "idle", "adapter_idle"),
    ("free", "free", "free"),
)


class Header(Painted):
    """Two lines, and the pool as a third where there is room."""

    def __init__(self) -> None:
        super().__init__(id="header")

    def lines(self, width: int, height: int) -> list[Line]:
        board = self.top.shown
        if board is None:
            said = f" lorad  {self.top.title_of_source}  waiting for the first data"
            return [((said, "faint"),)]
        who = _identity(board, width, self.top.title_of_source)
        now = (clock(board.time) + " ", "strong")
        out = [
            joined(who, now, width, self.glyphs),
            joined(_figures(board, width, self.glyphs), ("", ""), width, self.glyphs),
        ]
        if height > 2:
            out.append(pool_line(board.status.pool, width, self.glyphs))
        return out


Part = tuple[int, Line]  # how soon it may go, the highest first; spans


def joined(parts: Sequence[Part], right: tuple[str, str], width: int, glyphs: Glyphs) -> Line:
    """Parts two spaces apart; as long as they do not fit, the one that matters least goes."""
    kept = [part for part in parts if part[1]]
    room = width - len(right[0]) - 2
    while len(kept) > 1 and sum(wide(line) + 2 for _, line in kept) > room:
        kept.remove(max(kept, key=lambda part: part[0]))
    left: list[tuple[str, str]] = [(" ", "")]
    for _, line in kept:
        left += [*line, ("  ", "")]
    return both_ends(tuple(left), (right,), width, glyphs)


def _identity(board: Board, width: int, source: str) -> list[Part]:
    s = board.status
    gpu = board.machine.gpu_busy
    busy = "" if gpu is None else f" {percent(gpu)}"
    return [
        (0, (("lorad", "strong"), (f" {s.version}" if width >= 100 else "", "faint"))),
        (0, ((s.state.upper(), f"{STATE_INKS.get(s.state, 'warn')}"),)),
        (7, (("pid ", "faint"), (str(s.pid), ""))),
        (3, (("up ", "faint"), (age(s.uptime_seconds), ""))),
        (2, ((inert(s.base), "strong"), (f" {s.dtype}" if width >= 100 else "", "faint"))),
        (4, ((inert(s.device), "faint"), (busy, ""))),
        (8, ((inert(s.device_name), "faint"),)),
        (9, ((inert(source), "faint"),)),
    ]


def _figures(board: Board, width: int, glyphs: Glyphs) -> list[Part]:
    s, load, m = board.status, board.load, board.machine
    first, inter = load.first_token, load.inter_token
    pool = s.pool
    used = ratio(pool.kv_active + pool.kv_cached, pool.total)
    parts: list[Part] = [
        (3, (("req/s ", "faint"), (rate(load.requests_per_second), ""))),
        (1, (("tok/s ", "faint"), (rate(load.tokens_per_second), "strong"))),
        (0, (("run ", "faint"), (count(s.running), "strong"))),
        (0, (("wait ", "faint"), (count(s.waiting), "warn" if s.waiting else ""))),
        (2, (("TTFT ", "faint"), (f"{duration(first.p50)}/{duration(first.p99)}", ""))),
        (4, (("ITL ", "faint"), (f"{duration(inter.p50)}/{duration(inter.p99)}", ""))),
    ]
    parts.append((5, (("KV ", "faint"), (percent(used), ""))))
    parts.append((5, (("VRAM ", "faint"), (size_of(m.gpu_used_bytes, m.gpu_total_bytes), ""))))
    parts.append((6, (("ram ", "faint"), (size(s.ram_used_bytes), ""))))
    parts.append((8, (("host ", "faint"), (size_of(m.host_used_bytes, m.host_total_bytes), ""))))
    parts.append((7, (("cpu ", "faint"), (f"{percent(m.daemon_cpu)}+{percent(m.engine_cpu)}", ""))))
    return parts


def pool_line(pool: PoolPicture, width: int, glyphs: Glyphs) -> Line:
    """The one arena as a bar of five parts, each named with its share."""
    amounts = [getattr(pool, name) for name, _, _ in POOL]
    legend: list[tuple[str, str]] = []
    for place, (_, word, ink) in enumerate(POOL):
        share = percent(ratio(amounts[place], pool.total))
        mark = glyphs.pool[place % len(glyphs.pool)]
        legend += [("  ", ""), (mark, ink), (f" {word} ", "faint"), (share, "")]
    room = width - wide(legend) - 8
    if room < 8:
        legend = [span for span in legend if span[1] != "faint" or len(span[0]) <= 3]
        room = width - wide(legend) - 8
    parts = stacked(amounts, max(4, room), glyphs)
    drawn = [(text, ink) for text, (_, _, ink) in zip(parts, POOL, strict=True)]
    if not pool.total:
        drawn = [(bar(None, max(4, room), glyphs), "faint")]
    return ((" pool  ", "faint"), *drawn, *legend)

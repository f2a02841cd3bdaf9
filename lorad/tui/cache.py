"""Screen 4: the prefix cache, as a whole and by adapter.

Goes in: the board.  Comes out: what was asked and found, in 60 s and in a life; how far apart uses
of a block are; a table.  Nothing asked is `--`, never 0%.
"""

from collections.abc import Callable, Mapping, Sequence

from textual.app import ComposeResult

from lorad.tui.draw import UNKNOWN, Glyphs, count, duration, percent, ratio, size, sparkline
from lorad.tui.grid import Column, Grid
from lorad.tui.model import Listing
from lorad.tui.panel import Line, Panel
from lorad.tui.slots import SORTS as SLOT_SORTS
from lorad.tui.slots import bar_spans, fields_of
from lorad.tui.view import View
from lorad.wire_stream import Board, Slot

_LOW_HIT = 0.25
_TREND = 24  # cells: one of 5 s, for two minutes
_SUMMARY_ROWS = 6


class CacheView(View):
    """The whole above, adapters below."""

    key, view_name = "4", "Cache"

    def compose(self) -> ComposeResult:
        yield CacheSummary()
        yield CachePanel()

    def show(self) -> None:
        summary, panel = self.query_one(CacheSummary), self.query_one(CachePanel)
        rows = _SUMMARY_ROWS if self.size.height >= 18 else 4
        summary.styles.height = rows
        panel.styles.height = "1fr"
        summary.repaint()
        panel.show()


class CacheSummary(Panel):
    """Since the engine's start, and of the last minute."""

    def __init__(self) -> None:
        super().__init__(id="cache-summary")

    def title(self) -> Line:
        return (("PREFIX CACHE", "title"),)

    def note(self) -> Line:
        board = self.top.shown
        if board is None or not board.status.pool.total:
            return ()
        pool = board.status.pool
        cached = pool.kv_cached * pool.block_bytes
        return (
            (f"{count(pool.kv_cached)} blocks cached, {size(cached)}, ", "faint"),
            (percent(ratio(pool.kv_cached, pool.total)), ""),
            (" of the pool", "faint"),
        )

    def body(self, width: int, height: int) -> list[Line]:
        board = self.top.shown
        if board is None:
            return [(("waiting for the first data", "faint"),)]
        return self._rates(board, width) + self._distances(board, width)

    def _rates(self, board: Board, width: int) -> list[Line]:
        load, life = board.load, board.status.prefix
        lost = f"  lost {count(life.lost_tokens)}" if life.lost_tokens else ""
        saved = f"  saved {duration(life.saved_seconds)} of prefill" if life.saved_seconds else ""
        return [
            self._rate("60 s", load.hit_tokens, load.query_tokens, "", width),
            self._rate("life", life.hit_tokens, life.query_tokens, lost + saved, width),
        ]

    def _rate(self, word: str, hit: int, asked: int, rest: str, width: int) -> Line:
        share = ratio(hit, asked)
        if share is None:
            return ((f"{word:<6}", "faint"), (UNKNOWN, ""), ("  nothing was asked", "faint"))
        said = f"{count(hit)} of {count(asked)} tokens{rest}"
        room = max(8, min(30, width - len(said) - 14))
        return (
            (f"{word:<6}", "faint"),
            *bar_spans(share, room, self.glyphs),
            (f" {percent(share):>4}  ", "strong"),
            (said, ""),
        )

    def _distances(self, board: Board, width: int) -> list[Line]:
        """How many blocks were filed between two uses of one: near is found, far is lost."""
        prefix = board.status.prefix
        if not any(prefix.found_blocks) and not any(prefix.lost_blocks):
            return []
        number = max(len(prefix.found_blocks), len(prefix.lost_blocks))
        farthest = count(1 << max(0, number - 2))
        out: list[Line] = []
        rows: Sequence[tuple[str, tuple[int, ...], str]] = (
            ("found", prefix.found_blocks, "spark"),
            ("lost", prefix.lost_blocks, "bad"),
        )
        top = max((*prefix.found_blocks, *prefix.lost_blocks), default=0)
        for word, blocks, ink in rows:
            drawn = sparkline((*blocks, *(0,) * (number - len(blocks))), number, self.glyphs,
                              top=top)  # fmt: skip
            said = f"  {count(sum(blocks))} blocks"
            said += f", by how many were filed since: 0 to {farthest}" if any(blocks) else ""
            out.append(((f"{word:<6}", "faint"), (drawn, ink), (said, "faint")))
        return out


#: The most asked for first; of the rest the best.
SORTS: Mapping[str, Callable[[str, Slot], object]] = {
    "name": lambda key, row: key,
    "hit": SLOT_SORTS["hit"],
    "asked": lambda key, row: (-row.query_tokens, -row.life_query_tokens),
    "found": lambda key, row: -row.hit_tokens,
    "life": SLOT_SORTS["life"],
    "lasked": lambda key, row: -row.life_query_tokens,
    "lost": lambda key, row: -row.life_lost_tokens,
    "saved": lambda key, row: -row.saved_seconds,
    "vram": lambda key, row: -row.gpu_bytes,
    "blocks": lambda key, row: -row.gpu_bytes,
}


class CachePanel(Grid[Slot]):
    """By adapter."""

    def __init__(self) -> None:
        super().__init__(Listing(fields_of, SORTS, "asked"), (), id="cache")
        self.bottom = True
        self.corners = "├┤"

    def show(self) -> None:
        board = self.top.shown
        self.listing.show(board.slots if board is not None else {})
        self.repaint()

    def columns_at(self, width: int) -> tuple[Column[Slot], ...]:
        board = self.top.shown
        return columns(board.status.pool.block_bytes if board is not None else 0)

    def title(self) -> Line:
        board = self.top.shown
        rows = board.slots.values() if board is not None else ()
        asked = sum(row.query_tokens > 0 for row in rows)
        return (("BY ADAPTER", "title"), (f"  {asked} asked in 60 s", ""))

    def empty(self) -> str:
        board = self.top.shown
        if board is None:
            return "waiting for the first data"
        if self.listing.filter_text and board.slots:
            return f"none of {len(board.slots)} matches the filter; esc clears it"
        return "no adapter is on the GPU, so none has prompts cached"

    def ink_of(self, key: str, row: Slot) -> str:
        return "" if row.query_tokens else "faint"


# ----------------------------------------------------------------- cells
def _hit(key: str, row: Slot, glyphs: Glyphs) -> Line:
    share = ratio(row.hit_tokens, row.query_tokens)
    if share is None:
        return ((UNKNOWN.rjust(13), "faint"),)
    ink = "warn" if share < _LOW_HIT else "fill"
    return (*bar_spans(share, 8, glyphs, ink), (f"{percent(share):>5}", ""))


def _life(key: str, row: Slot, glyphs: Glyphs) -> Line:
    return ((percent(ratio(row.life_hit_tokens, row.life_query_tokens)), ""),)


def _trend(key: str, row: Slot, glyphs: Glyphs) -> Line:
    """Of 0 to 100%; gaps where nothing was asked."""
    newest = row.hits_history[-_TREND:]
    return ((sparkline(newest, _TREND, glyphs, top=100.0), "spark"),)


def _saved(key: str, row: Slot, glyphs: Glyphs) -> Line:
    known = row.life_query_tokens > 0
    return (
        (duration(row.saved_seconds) if known else UNKNOWN, "" if row.saved_seconds else "faint"),
    )


def columns(block_bytes: int) -> tuple[Column[Slot], ...]:
    """`block_bytes` of the pool: what an adapter itself takes of it."""

    def blocks(key: str, row: Slot, glyphs: Glyphs) -> Line:
        return ((count(ratio(row.gpu_bytes, block_bytes)), "faint"),)

    def asked(row: Slot) -> int:
        return row.query_tokens

    def ever(row: Slot) -> int:
        return row.life_query_tokens

    return (
        Column("name", "NAME", 20, lambda k, r, g: ((k, ""),), grow=True),
        Column("hit", "HIT 60s".rjust(13), 13, _hit, falls=True),
        Column("found", "FOUND", 5, _cell(lambda r: r.hit_tokens, asked), right=True, drop=3),
        Column("asked", "ASKED", 5, _cell(asked, asked), right=True),
        Column("trend", "2 MIN", _TREND, _trend, drop=5),
        Column("life", "LIFE", 4, _life, right=True),
        Column("lasked", "OF", 5, _cell(ever, ever), right=True, drop=4),
        Column("lost", "LOST", 5, _cell(lambda r: r.life_lost_tokens, ever), right=True, drop=2),
        Column("saved", "SAVED", 6, _saved, right=True, drop=1),
        Column("vram", "VRAM", 5, lambda k, r, g: ((size(r.gpu_bytes), "faint"),), True, drop=6),
        Column("blocks", "BLOCKS", 6, blocks, right=True, drop=7),
    )


def _cell(
    value: Callable[[Slot], int], of: Callable[[Slot], int]
) -> Callable[[str, Slot, Glyphs], Line]:
    """A number of tokens; `--` where nothing was asked."""

    def cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
        return ((count(value(row)) if of(row) else UNKNOWN, ""),)

    return cell

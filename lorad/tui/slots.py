"""The table of slots: every name that is resident, loading or draining.

Goes in: the board's slots.  Comes out: cells.  A state is a word before it is a colour.
"""

from collections.abc import Mapping
from typing import Any

from lorad.tui.draw import UNKNOWN, Glyphs, age, bar, percent, rate, ratio, size
from lorad.tui.grid import Column, Grid
from lorad.tui.model import Listing
from lorad.tui.panel import Line
from lorad.wire_stream import Slot

STATE_INKS: Mapping[str, str] = {
    "active": "good",
    "idle": "",
    "resident": "",
    "loading": "busy",
    "draining": "warn",
    "quarantined": "bad",
    "missing": "bad",
}
#: Where a load comes from, and what it is called.
TIERS = {"disk": "disk>ram", "ram": "ram>gpu", "": ""}
_LOW_HIT = 0.25


def fields_of(key: str, row: Slot) -> Mapping[str, str]:
    """What a filter can ask for: `state:idle`, `pin:yes`, `tenant:acme`."""
    return {
        "state": row.state,
        "pin": "yes" if row.pinned else "no",
        "tenant": row.tenant or "",
        "rev": row.rev,
        "slot": "" if row.slot is None else str(row.slot),
        "rank": "" if row.rank is None else str(row.rank),
    }


SORTS = {
    "slot": lambda key, row: (row.slot is None, row.slot or 0),
    "name": lambda key, row: key,
    "rev": lambda key, row: row.rev,
    "state": lambda key, row: row.state,
    "pin": lambda key, row: not row.pinned,
    "prio": lambda key, row: -row.priority,
    "rank": lambda key, row: -(row.rank or 0),
    "vram": lambda key, row: -row.gpu_bytes,
    "run": lambda key, row: -row.running,
    "wait": lambda key, row: -row.waiting,
    "hit": lambda key, row: _share_first(row.hit_tokens, row.query_tokens),
    "life": lambda key, row: _share_first(row.life_hit_tokens, row.life_query_tokens),
    "tok/s": lambda key, row: -row.tokens_per_second,
    "idle": lambda key, row: -(row.idle_seconds or 0.0),
}


def _share_first(hit: int, asked: int) -> float:
    """The highest first, and last of all what was not asked."""
    share = ratio(hit, asked)
    return 1.0 if share is None else -share


def listing() -> Listing[Slot]:
    return Listing(fields_of, SORTS, "slot")


# ----------------------------------------------------------------- cells
def state_cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
    return ((row.state, STATE_INKS.get(row.state, "")),)


def pin_cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
    return (("P", "strong") if row.pinned else ("-", "faint"),)


def hit_cell(width: int) -> Any:
    """The hit rate of the last minute, after a bar where there is room; of a load how far it is."""

    def cell(key: str, row: Slot, glyphs: Glyphs) -> Line:
        if row.state == "loading":
            return load_spans(row, width, glyphs)
        share = ratio(row.hit_tokens, row.query_tokens)
        if share is None:
            return ((UNKNOWN.ljust(width) if width > 5 else UNKNOWN, "faint"),)
        ink = "warn" if share < _LOW_HIT else "fill"
        if width <= 5:
            return ((percent(share), ""),)
        return (*bar_spans(share, width - 5, glyphs, ink), (f"{percent(share):>5}", ""))

    return cell


def load_spans(row: Slot, width: int, glyphs: Glyphs) -> Line:
    """`[##--] 62%`; without a known share the tier that it comes from."""
    tier = row.load_source or "wait"
    if width <= 5:
        known = row.load_fraction is not None
        return ((percent(row.load_fraction) if known else tier, "busy"),)
    if row.load_fraction is None:
        return ((tier.ljust(width), "busy"),)
    return (*bar_spans(row.load_fraction, width - 5, glyphs, "busy"), (f"{tier:>5}", "busy"))


def bar_spans(share: float | None, width: int, glyphs: Glyphs, ink: str = "fill") -> Line:
    """A bar, its rest in an ink of its own."""
    drawn = bar(share, width, glyphs)
    start = drawn.find(glyphs.rest)
    if start < 0:
        return ((drawn, ink),)
    end = drawn.rfind(glyphs.rest) + 1
    return ((drawn[:start], ink), (drawn[start:end], "rest"), (drawn[end:], ink))


def _quiet(number: int) -> Line:
    """Noughts stand back."""
    return ((str(number), "faint" if not number else ""),)


def slot_columns(*, narrow: bool) -> tuple[Column[Slot], ...]:
    """All of them; `narrow` has the short forms of two."""
    pin, hit = (1, 5) if narrow else (3, 13)
    return (
        Column(
            "slot",
            "SLOT",
            4,
            lambda k, r, g: ((UNKNOWN if r.slot is None else str(r.slot), "faint"),),
        ),
        Column("name", "NAME", 22, lambda k, r, g: ((k, ""),), grow=True),
        Column("rev", "REV", 6, lambda k, r, g: ((r.rev[:6], "faint"),), drop=1),
        Column("state", "STATE", 9, state_cell),
        Column("pin", "PIN"[:pin], pin, pin_cell),
        Column("prio", "PRIO", 4, lambda k, r, g: ((str(r.priority), ""),), right=True, drop=2),
        Column("rank", "RANK", 4, lambda k, r, g: ((str(r.rank or UNKNOWN), ""),), True, drop=3),
        Column("vram", "VRAM", 5, lambda k, r, g: ((size(r.gpu_bytes), ""),), True, drop=4),
        Column("run", "RUN", 4, lambda k, r, g: _quiet(r.running), right=True),
        Column("wait", "WAIT", 4, lambda k, r, g: _quiet(r.waiting), right=True),
        Column("hit", "HIT 60s" if not narrow else " HIT", hit, hit_cell(hit), right=narrow),
        Column(
            "life",
            "LIFE",
            5,
            lambda k, r, g: ((percent(ratio(r.life_hit_tokens, r.life_query_tokens)), "faint"),),
            right=True,
            drop=6,
        ),
        Column(
            "tok/s",
            "TOK/S",
            5,
            lambda k, r, g: ((rate(r.tokens_per_second), "" if r.tokens_per_second else "faint"),),
            right=True,
            drop=5,
        ),
        Column("idle", "IDLE", 5, lambda k, r, g: ((age(r.idle_seconds), "faint"),), right=True),
    )


class SlotsPanel(Grid[Slot]):
    """Panel 1."""

    def __init__(self) -> None:
        super().__init__(listing(), slot_columns(narrow=False), id="slots")

    def show(self) -> None:
        """Take the rows of the board."""
        board = self.top.shown
        self.listing.show(board.slots if board is not None else {})
        self.repaint()

    def body(self, width: int, height: int) -> list[Line]:
        self.columns = slot_columns(narrow=self.size.width < 100)
        return super().body(width, height)

    def title(self) -> Line:
        board = self.top.shown
        if board is None:
            return (("1 SLOTS", "title"),)
        status = board.status
        draining = sum(row.state == "draining" for row in board.slots.values())
        said: list[tuple[str, str]] = [("1 ", "key"), ("SLOTS ", "title")]
        said.append((f" {status.slots_used}/{status.slots_total} used", ""))
        if status.pinned:
            said.append((f"  {status.pinned} pinned", ""))
        if draining:
            said.append((f"  {draining} draining", "warn"))
        return tuple(said)

    def note(self) -> Line:
        listing = self.listing
        mark = self.glyphs.down if listing.reverse else self.glyphs.up
        said: list[tuple[str, str]] = []
        span = self.span_text()
        if span:
            said.append((f"{span}  ", "faint"))
        if listing.filter_text:
            said += [("filter ", "faint"), (f"{listing.filter_text}  ", "strong")]
        said += [("sort ", "faint"), (f"{listing.sort.upper()} {mark}", "")]
        return tuple(said)

    def empty(self) -> str:
        board = self.top.shown
        if board is None:
            return "waiting for the first data"
        if self.listing.filter_text and board.slots:
            return f"none of {len(board.slots)} matches the filter; esc clears it"
        return "no adapter is on the GPU; the first request for one loads it"

    def ink_of(self, key: str, row: Slot) -> str:
        return "faint" if row.state == "idle" else ""

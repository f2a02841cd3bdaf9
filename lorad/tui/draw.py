"""How numbers and names are drawn in a terminal: bars, sparklines, short figures, text that fits.

Goes in: plain values and how many cells there are.  Comes out: strings that are never wider.  Knows
no widget, no board and no colour.  None is "nothing was measured": it is drawn `--`, never as 0.
Cells are those of the terminal: a wide character takes two, a combining one none.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len, get_character_cell_size

from lorad.cli.output import human_bytes, moment, plain

UNKNOWN = "--"

_LINE_END = re.compile("\r\n|[\t\n\v\f\r\x85\u2028\u2029]")
#: More marks than this on one character are left out: each of them takes a line's height.
_MAX_MARKS = 3


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What things are drawn with; all of one cell, but `to` and the brackets."""

    fill: str
    rest: str
    parts: str  # of one cell, from the least filled to the most; "" is none
    opening: str  # of a bar
    closing: str
    spark: str  # from the lowest to the highest
    pool: str  # of a stacked bar, part by part
    cut: str  # where text was cut off
    up: str  # sorted upwards
    down: str
    here: str  # the row that is meant
    to: str  # from one to the next
    dot: str  # between two things
    border: str  # the kind of line around a panel, as Textual names it


ASCII = Glyphs(
    fill="#",
    rest="-",
    parts="",
    opening="[",
    closing="]",
    spark="_.:|",
    pool="#=+-.",
    cut=">",
    up="^",
    down="v",
    here=">",
    to="->",
    dot="-",
    border="ascii",
)
UNICODE = Glyphs(
    fill="█",
    rest="░",
    parts="▏▎▍▌▋▊▉",
    opening="",
    closing="",
    spark="▁▂▃▄▅▆▇█",
    pool="█▓▒░·",
    cut="…",
    up="▲",
    down="▼",
    here="▶",
    to="→",
    dot="·",
    border="round",
)


def glyphs_for(encoding: str | None, *, ascii: bool = False) -> Glyphs:
    """Those that a terminal of this encoding can show; `ascii` when that was asked for."""
    name = (encoding or "").lower().replace("-", "").replace("_", "")
    return UNICODE if name.startswith("utf") and not ascii else ASCII


# ----------------------------------------------------------------- text
def inert(text: object) -> str:
    """One line that cannot drive the terminal: control and bidi characters become `?`, line ends
    and tabs a space; what only changes how its neighbour is drawn goes."""
    shown = str(text)
    if not shown.isprintable():
        shown = plain(_LINE_END.sub(" ", shown))
    return shown if shown.isascii() else "".join(_calm(shown))


def _calm(text: str) -> list[str]:
    kept: list[str] = []
    marks = 0
    for character in unicodedata.normalize("NFC", text):
        # Selectors of variants make a character wider in some terminals and not in others.
        if "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef":
            continue
        marks = marks + 1 if get_character_cell_size(character) == 0 else 0
        if marks <= _MAX_MARKS:
            kept.append(character)
    return kept


def width_of(text: str) -> int:
    """Cells that it takes, as the widgets count them."""
    return len(text) if text.isascii() else cell_len(text)


def cut(text: object, width: int, glyphs: Glyphs = ASCII) -> str:
    """Inert, and at most `width` cells; what was cut off ends in the glyph for it."""
    shown = inert(text)
    if width <= 0:
        return ""
    if width_of(shown) <= width:
        return shown
    if shown.isascii():
        return shown[: width - 1] + glyphs.cut
    room, kept = width - 1, []
    for character in shown:
        room -= get_character_cell_size(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + glyphs.cut


def fit(text: object, width: int, glyphs: Glyphs = ASCII, *, right: bool = False) -> str:
    """Inert, and exactly `width` cells: cut, or filled up with spaces."""
    shown = cut(text, width, glyphs)
    space = " " * (width - width_of(shown))
    return space + shown if right else shown + space


# ----------------------------------------------------------------- bars
def bar(share: float | None, width: int, glyphs: Glyphs) -> str:
    """`[####--]`: a share of 0 to 1 in `width` cells, brackets included; not known is `--`.

    More than nothing is seen, and so is less than all.
    """
    share = _finite(share)
    if width <= 0:
        return ""
    if share is None:
        return fit(UNKNOWN, width, glyphs)
    inner = width - len(glyphs.opening) - len(glyphs.closing)
    if inner <= 0:
        return _bare_bar(share, width, glyphs)
    return f"{glyphs.opening}{_bare_bar(share, inner, glyphs)}{glyphs.closing}"


def _bare_bar(share: float, width: int, glyphs: Glyphs) -> str:
    steps = len(glyphs.parts) + 1  # of one cell
    filled = round(min(max(share, 0.0), 1.0) * width * steps)
    if share > 0:
        filled = max(filled, 1)
    if share < 1:
        filled = min(filled, width * steps - 1)
    whole, part = divmod(filled, steps)
    drawn = glyphs.fill * whole + (glyphs.parts[part - 1] if part else "")
    return drawn + glyphs.rest * (width - len(drawn))


def shares(parts: Sequence[float], width: int) -> tuple[int, ...]:
    """Cells of each part of a whole: `width` in all, and one at least for what is not nothing,
    as far as there are so many.  All nothing: all 0."""
    amounts = [max(_finite(p) or 0.0, 0.0) for p in parts]
    present = [i for i, amount in enumerate(amounts) if amount > 0]
    if width <= 0 or not present:
        return (0,) * len(amounts)
    largest = sorted(present, key=lambda i: -amounts[i])[:width]
    cells = [0] * len(amounts)
    total = math.fsum(amounts[i] / max(amounts) for i in largest)
    wanted = {i: width * (amounts[i] / max(amounts)) / total for i in largest}
    for place, want in wanted.items():
        cells[place] = max(1, int(want))
    # Cells that rounding left over go to who lost most by it; those given in excess are taken back.
    while (spare := width - sum(cells)) != 0:
        step = 1 if spare > 0 else -1
        able = [i for i in largest if step > 0 or cells[i] > 1]
        cells[max(able, key=lambda i: step * (wanted[i] - cells[i]))] += step
    return tuple(cells)


def stacked(parts: Sequence[float], width: int, glyphs: Glyphs) -> tuple[str, ...]:
    """The parts of a whole one behind the other, each in its glyph and `width` cells in all.

    Each by itself, so that they can be coloured; the glyphs tell them apart without.
    """
    pattern = glyphs.pool
    cells = shares(parts, width)
    return tuple(pattern[i % len(pattern)] * count for i, count in enumerate(cells))


def sparkline(
    values: Sequence[float | None], width: int, glyphs: Glyphs, *, top: float | None = None
) -> str:
    """The run of some values in `width` cells, the newest at the right.

    The highest glyph is `top`, or the highest value.  More values than cells: each cell is the
    highest of its share of them, so that a peak stays.  None is a gap, and so is what is missing.
    """
    if width <= 0:
        return ""
    known = [_finite(v) for v in values]
    columns = [_highest(chunk) for chunk in _chunks(known, width)]
    given = _finite(top)
    ceiling = (
        given if given is not None else max((v for v in columns if v is not None), default=0.0)
    )
    return "".join(_level(v, ceiling, glyphs) for v in columns).rjust(width)


def _chunks(values: Sequence[float | None], width: int) -> Sequence[Sequence[float | None]]:
    if len(values) <= width:
        return [(v,) for v in values]
    edges = [len(values) * i // width for i in range(width + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def _highest(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _level(value: float | None, ceiling: float, glyphs: Glyphs) -> str:
    """The lowest glyph is nothing, and nothing else is."""
    if value is None:
        return " "
    if value <= 0 or ceiling <= 0:
        return glyphs.spark[0]
    last = len(glyphs.spark) - 1
    return glyphs.spark[max(1, round(last * min(value / ceiling, 1.0)))]


# ----------------------------------------------------------------- figures
def percent(share: float | None) -> str:
    """`82%` of a share of 0 to 1; 100% is all, 0% nothing, and not known is `--`."""
    share = _finite(share)
    if share is None:
        return UNKNOWN
    shown = round(100 * min(max(share, -10.0), 1e4))
    if 0 < share < 1:
        shown = min(max(shown, 1), 99)
    return f"{shown}%"


def ratio(part: float, whole: float) -> float | None:
    """The share that `part` is of `whole`; None when there was nothing to be a share of."""
    with suppress(OverflowError):
        return part / whole if whole > 0 else None
    return None


def size(num_bytes: float | None) -> str:
    """`336M`, `1.2G`; four cells or five."""
    return human_bytes(_finite(num_bytes))


def size_of(used: float | None, total: float | None) -> str:
    """`52.1/79.6G`: both in the unit of the whole."""
    used, total = _finite(used), _finite(total)
    if used is None or total is None:
        return UNKNOWN
    whole = human_bytes(total)
    unit = whole[-1] if whole[-1].isalpha() else ""
    power = " KMGT".index(unit) if unit else 0
    part = used / 1024**power
    return f"{part:.3g}/{whole}" if part < 1000 else f"{part:.0f}/{whole}"


def age(seconds: float | None) -> str:
    """`0s`, `41s`, `2m`, `5h07m`, `3d04h`, `120d`: five cells at most, for 27 years."""
    seconds = _finite(seconds)
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    hours = whole // 3600
    if hours < 24:
        return f"{hours}h{whole % 3600 // 60:02}m" if hours < 10 else f"{hours}h"
    days = hours // 24
    return f"{days}d{hours % 24:02}h" if days < 10 else f"{days}d"


def duration(seconds: float | None) -> str:
    """`0.4ms`, `82ms`, `1.2s`, `41s`, then as `age`."""
    seconds = _finite(seconds)
    if seconds is None:
        return UNKNOWN
    milliseconds = max(seconds, 0.0) * 1000
    if milliseconds < 0.05:
        return "0ms"
    if milliseconds < 9.95:
        return f"{milliseconds:.1f}ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    return age(seconds + 0.5)


def rate(value: float | None) -> str:
    """`0`, `4.2`, `510`, `2.4k`, `14.2k`, `128k`, `1.2M`: five cells at most, below 10^18."""
    value = _finite(value)
    if value is None:
        return UNKNOWN
    value = max(value, 0.0)
    if value < 0.05:
        return "0"
    if value < 9.95:
        return f"{value:.1f}"
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 99.95 and unit:
            return f"{value:.1f}{unit}"
        if value < 999.5:
            return f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}E"


def pace(bytes_per_second: float | None) -> str:
    """`2.1GB/s`; of little ones `18M/s`; "" where nothing moves, or it is not known."""
    speed = _finite(bytes_per_second)
    if not speed or speed < 0:
        return ""
    return f"{size(speed)}/s" if speed < 5e7 else f"{speed / 1e9:.1f}GB/s"


def count(value: float | None) -> str:
    """As `rate`, but of whole things: `0`, `4`, `510`, `2.4k`."""
    value = _finite(value)
    return f"{value:.0f}" if value is not None and 0 <= value < 9.95 else rate(value)


def since(time: str | None, now: str) -> float | None:
    """Seconds from one time of the wire to another; None if either is none."""
    then, end = moment(time) if time else None, moment(now)
    return None if then is None or end is None else (end - then).total_seconds()


def clock(time: str | None) -> str:
    """`16:32:07` in the reader's own zone; what is no time is `--`."""
    return here(time, "%H:%M:%S") or UNKNOWN


def here(time: str | None, form: str) -> str:
    """A time of the wire in the reader's own zone; "" for what is none, or is before all days."""
    then = moment(time) if time else None
    with suppress(OverflowError):
        return "" if then is None else then.astimezone().strftime(form)
    return ""


def _finite(value: float | None) -> float | None:
    """Nothing that a daemon means has more digits than a float has room for."""
    try:
        return value if value is not None and math.isfinite(value) else None
    except OverflowError:
        return None

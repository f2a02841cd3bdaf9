"""The one place that prints results: table, wide, json, jsonl, name.

Goes in: wire Structs and columns.  Comes out: text on stdout, one record a line, no box drawing.
Tables show sizes and ages for people; JSON shows bytes and RFC 3339.  Every foreign string passes
`plain` or `json_text`, so that nothing that an adapter's folder contains can drive the terminal.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from lorad.cli.options import Options

T = TypeVar("T")
UNKNOWN = "-"
#: Characters of a name that a narrow terminal shows at the least.
LEAST = 24

_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column: its heading and how an item's cell reads.  `wide` ones need `-o wide`.

    `drop`: which goes first where the terminal has no room for all, the highest; 0 stays.  Before
    any goes, cells of one that `shrinks` lose their ends, down to LEAST characters.
    """

    heading: str
    cell: Callable[[T], str]
    wide: bool = False
    right: bool = False
    drop: int = 0
    shrinks: bool = False


# ----------------------------------------------------------------- text that cannot harm
def plain(text: object) -> str:
    """Printable: control characters, and what a terminal would take as one, become `?`."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else "?" for c in shown)


def one_line(text: object) -> str:
    """The same, with line ends and tabs as spaces."""
    return plain(" ".join(str(text).split()))


def json_text(document: Any, encoding: str | None, *, indent: int) -> str:
    """JSON; what a terminal would obey or the locale cannot show is `\\uXXXX`, which is JSON too.

    `indent` -1 is one line.
    """
    text = msgspec.json.format(msgspec.json.encode(document), indent=indent).decode()
    wide = (encoding or "utf-8").lower().replace("-", "").startswith("utf")

    def escaped(match: re.Match[str]) -> str:
        if wide and match[0].isprintable():
            return match[0]
        return "".join(f"\\u{unit:04x}" for unit in _utf16(match[0]))

    return _NOT_ASCII.sub(escaped, text)


def _utf16(character: str) -> tuple[int, ...]:
    number = ord(character)
    if number < 0x10000:
        return (number,)
    return (0xD7C0 + (number >> 10), 0xDC00 + (number & 0x3FF))


# ----------------------------------------------------------------- cells
def human_bytes(count: float | None) -> str:
    """`0`, `512`, `84M`, `1.2G`: three digits and a binary unit."""
    if count is None:
        return UNKNOWN
    for unit in ("", "K", "M", "G"):
        if count < 1000:
            digits = f"{count:.3g}" if count >= 1 else f"{count:.2f}"  # of 1000 to 1023 below it
            return f"{digits}{unit}" if unit else str(int(count))
        count /= 1024
    return f"{count:.3g}T"


def human_age(age: float | None) -> str:
    """`0s`, `41s`, `6m`, `3h`, `12d`."""
    if age is None:
        return UNKNOWN
    for limit, scale, unit in ((60, 1, "s"), (3600, 60, "m"), (172800, 3600, "h")):
        if age < limit:
            return f"{int(age / scale)}{unit}"
    return f"{int(age / 86400)}d"


def moment(time: str) -> datetime | None:
    """An RFC 3339 time; None for what is not one."""
    with suppress(ValueError):
        then = datetime.fromisoformat(time.replace("Z", "+00:00"))
        return then if then.tzinfo else then.replace(tzinfo=UTC)
    return None


def age_of(time: str | None) -> float | None:
    """Seconds since an RFC 3339 time; None if that is not known."""
    then = moment(time) if time else None
    return None if then is None else max(0.0, (datetime.now(UTC) - then).total_seconds())


def human_ratio(part: int, whole: int) -> str:
    """A percentage; `--` when nothing was asked, which is not 0%."""
    return f"{100 * part / whole:.0f}%" if whole else "--"


def human_prefix(asked: int, hit: int, lost: int, saved_seconds: float) -> str:
    """What the prefix cache did for `asked` prompt tokens; `--` when nothing was asked."""
    if not asked:
        return "--"
    saved = human_age(saved_seconds) if saved_seconds >= 60 else f"{saved_seconds:.1f}s"
    return (
        f"{human_ratio(hit, asked)} of {asked} tokens hit, {saved} of prefill saved, "
        f"{human_ratio(lost, asked)} lost to evictions"
    )


# ----------------------------------------------------------------- results
def print_items(
    items: Sequence[T],
    columns: Sequence[Column[T]],
    options: Options,
    *,
    document: msgspec.Struct,
    name: Callable[[T], str],
) -> None:
    """Print a list in the chosen form.  `document` is the JSON root that holds the items."""
    if options.output == "json":
        print_document(document, options)
    elif options.output == "jsonl":
        for item in items:
            print_document(item, options)
    elif options.output == "name":
        for item in items:
            print_line(plain(name(item)))
    else:
        wide = options.output == "wide"
        wanted = [c for c in columns if wide or not c.wide]
        kept = wanted if wide else fitting(wanted, items, terminal_width())
        Table(kept, options, cut=not wide).print(items)
        if left_out := [c.heading for c in wanted if c not in kept]:
            note(f"no room for {' '.join(left_out)}: -o wide has all", options)


def print_document(document: Any, options: Options) -> None:
    """One JSON document: indented, or with `-o jsonl` on one line."""
    indent = -1 if options.output == "jsonl" else 2
    print_line(json_text(document, _encoding(), indent=indent))


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """`key   value` lines for one thing."""
    rows = [(key, plain(value)) for key, value in pairs]
    width = max((len(key) for key, _ in rows), default=0)
    for key, value in rows:
        print_line(f"{key:<{width}}  {value}".rstrip())


def print_line(text: str, end: str = "\n") -> None:
    """A line on stdout; what the locale cannot show is escaped, never a traceback."""
    encoding = _encoding()
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end)


def print_text(text: str) -> None:
    """Generated text, at once: line ends and tabs stay, what would drive the terminal does not."""
    print_line("".join(c if c in "\n\t" or c.isprintable() else "?" for c in text), end="")
    flush()


def flush() -> None:
    """Let a reader of a pipe have what was printed."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def fitting(columns: Sequence[Column[T]], items: Sequence[T], room: int) -> list[Column[T]]:
    """Those that a line of `room` characters has place for, as far as others may go; 0: all."""
    kept = list(columns)
    widths = {
        c: max([len(c.heading), *(len(plain(c.cell(item)) or UNKNOWN) for item in items)])
        for c in columns
    }
    widths |= {c: min(widths[c], LEAST) for c in columns if c.shrinks}
    while room and sum(widths[c] + 2 for c in kept) - 2 > room:
        first = max(kept, key=lambda c: c.drop)
        if not first.drop:
            break
        kept.remove(first)
    return kept


class Table(Generic[T]):
    """Rows under headings.  Later rows of the same table keep to the widths of the first.

    `cut`: a row that is longer than the terminal is wide ends in `>`, else it goes on below; a cell
    that shrinks for it does, too.
    """

    def __init__(self, columns: Sequence[Column[T]], options: Options, *, cut: bool = True) -> None:
        self._columns, self._headers, self._cut = columns, options.headers, cut
        self._widths = [0] * len(columns)

    def widen(self, items: Sequence[T]) -> None:
        """Make room for these rows, which are printed later, some lines between them."""
        self._fit([[plain(c.cell(item)) or UNKNOWN for c in self._columns] for item in items])

    def print(self, items: Sequence[T], *, headings: bool = True) -> None:
        grid = [[plain(c.cell(item)) or UNKNOWN for c in self._columns] for item in items]
        if headings and self._headers:
            grid.insert(0, [c.heading for c in self._columns])
        self._fit(grid)
        limit = terminal_width() if self._cut else 0
        if limit:
            self._shrink(limit)
        for row in grid:
            line = "  ".join(map(self._pad, row, self._widths, self._columns)).rstrip()
            print_line(line[: limit - 1] + ">" if limit and len(line) > limit else line)

    def _fit(self, grid: Sequence[Sequence[str]]) -> None:
        for place in range(len(self._columns)):
            cells = (len(row[place]) for row in grid)
            self._widths[place] = max(self._widths[place], *cells, 0)

    def _shrink(self, limit: int) -> None:
        """Take what is too much from the columns that can give, the first one first."""
        over = sum(self._widths) + 2 * (len(self._widths) - 1) - limit
        for place, column in enumerate(self._columns):
            if column.shrinks and over > 0:
                least = min(self._widths[place], LEAST)
                given = min(over, self._widths[place] - least)
                self._widths[place], over = self._widths[place] - given, over - given

    def _pad(self, text: str, width: int, column: Column[T]) -> str:
        if column.shrinks and len(text) > width:
            text = text[: width - 1] + ">"
        return f"{text:>{width}}" if column.right else f"{text:<{width}}"


def terminal_width() -> int:
    """Columns of the terminal; 0 when stdout is none, so that nothing is cut."""
    if sys.stdout is None or not sys.stdout.isatty():
        return 0
    return shutil.get_terminal_size().columns


# ----------------------------------------------------------------- all else
def note(text: str, options: Options) -> None:
    """Something that is not the result: stderr; silent with --quiet, and for a program."""
    if not (options.quiet or options.machine):
        complain(one_line(text))


def complain(text: str) -> None:
    """A line on stderr, if there is anybody to read it."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)

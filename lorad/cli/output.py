"""The one place that prints results: table, wide, json, jsonl, name.

Goes in: wire Structs and columns.  Comes out: text on stdout, one record a line, no box drawing.
Tables show sizes and ages for people; JSON shows bytes and RFC 3339.  Every foreign string passes
`plain`, so that nothing that an adapter's folder contains can drive the terminal.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from lorad.cli.options import Options

T = TypeVar("T")
UNKNOWN = "-"


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column: its heading and how an item's cell reads.  `wide` ones need `-o wide`."""

    heading: str
    cell: Callable[[T], str]
    wide: bool = False
    right: bool = False


def plain(text: object) -> str:
    """Printable: control characters, and what a terminal would take as one, become `?`."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def human_bytes(count: float | None) -> str:
    """`0`, `512`, `84M`, `1.2G`: three digits and a binary unit."""
    if count is None:
        return UNKNOWN
    for unit in ("", "K", "M", "G"):
        if count < 1000:
            return f"{count:.3g}{unit}" if unit else str(int(count))
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


def age_of(time: str | None) -> float | None:
    """Seconds since an RFC 3339 time; None for None."""
    if time is None:
        return None
    then = datetime.fromisoformat(time.replace("Z", "+00:00"))
    return max(0.0, (datetime.now(UTC) - then).total_seconds())


def human_ratio(part: int, whole: int) -> str:
    """A percentage; `--` when nothing was asked, which is not 0%."""
    return f"{100 * part / whole:.0f}%" if whole else "--"


def print_items(
    items: Sequence[T],
    columns: Sequence[Column[T]],
    options: Options,
    *,
    document: msgspec.Struct | None = None,
    name: Callable[[T], str],
) -> None:
    """Print a list in the chosen form.  `document` is the JSON root; default: the items."""
    if options.output == "json":
        print_json(document if document is not None else list(items))
    elif options.output == "jsonl":
        for item in items:
            print_line(msgspec.json.encode(item).decode())
    elif options.output == "name":
        for item in items:
            print_line(plain(name(item)))
    else:
        _print_table(items, [c for c in columns if options.output == "wide" or not c.wide], options)


def print_json(document: Any) -> None:
    """One indented JSON document."""
    print_line(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """`key   value` lines for one thing."""
    rows = [(key, plain(value)) for key, value in pairs]
    width = max((len(key) for key, _ in rows), default=0)
    for key, value in rows:
        print_line(f"{key:<{width}}  {value}".rstrip())


def print_line(text: str) -> None:
    """A line on stdout; what the locale cannot show is escaped, never a traceback."""
    print(_encodable(text))


def printable(text: str) -> str:
    """Generated text: line ends and tabs stay, what would drive the terminal does not."""
    return _encodable("".join(c if c in "\n\t" or c.isprintable() else "?" for c in text))


def _encodable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def note(text: str, options: Options) -> None:
    """Something that is not the result: stderr, and silent with --quiet."""
    if not options.quiet:
        print(plain(text), file=sys.stderr)


def _print_table(items: Sequence[T], columns: Sequence[Column[T]], options: Options) -> None:
    grid = [[plain(c.cell(item)) or UNKNOWN for c in columns] for item in items]
    if options.headers:
        grid.insert(0, [c.heading for c in columns])
    if not grid:
        return
    widths = [max(len(row[i]) for row in grid) for i in range(len(columns))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for row in grid:
        cells = (
            f"{text:>{width}}" if column.right else f"{text:<{width}}"
            for text, width, column in zip(row, widths, columns, strict=True)
        )
        line = "  ".join(cells).rstrip()
        print_line(line[: limit - 1] + ">" if limit and len(line) > limit else line)

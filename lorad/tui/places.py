"""The column that says on which replicas a row is, as wide as their names need.

Goes in: the names of each row.  Comes out: a column.  Names are digits of one daemon's engines, and
of a cluster's members whatever those are called: eight characters where Ray gives them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lorad.tui.draw import Glyphs
from lorad.tui.grid import Column
from lorad.tui.panel import Line

R = TypeVar("R")

#: Characters, from "REPL" on; no more than an adapter's own name has.
LEAST, MOST = 4, 20


def places_column(
    where: Callable[[R], Sequence[str]], rows: Iterable[R], *, drop: int = 0
) -> Column[R]:
    """Each row's in one cell: all of them, or the first and how many more there are."""
    told = [tuple(where(row)) for row in rows]
    alone = max((len(_short(names)) for names in told if names), default=0)
    width = min(max(LEAST, alone, *(len(",".join(names)) for names in told if _few(names))), MOST)

    def cell(key: str, row: R, glyphs: Glyphs) -> Line:
        names = tuple(where(row))
        whole = ",".join(names)
        return ((whole if len(whole) <= width else _short(names), "faint"),)

    return Column("replica", "REPLICA" if width > LEAST + 2 else "REPL", width, cell, drop=drop)


def _few(names: Sequence[str]) -> bool:
    """Of many a cell tells the first alone, so that one row does not make room for all."""
    return len(",".join(names)) <= MOST // 2


def _short(names: Sequence[str]) -> str:
    return f"{names[0]}+{len(names) - 1}" if len(names) > 1 else "".join(names)

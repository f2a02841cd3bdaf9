"""Joining: a daemon that has just started comes to what the catalog says, before it is asked.

Goes in: the table, and what the daemon has of it from before.  Comes out: the same names with the
same revisions; names that are gone are removed.  Of thousands only what it had, and what is pinned:
the rest comes when it is first asked for.  What was not added from the catalog is left alone.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlencode

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet.catalog import Catalog
from lorad.fleet.line import Line
from lorad.fleet.members import Order
from lorad.fleet.table import Table
from lorad.fleet.taking import SOURCE, V1, call, order_for, read

log = logging.getLogger("lorad.fleet")

#: A catalog of so few is taken in as a whole.
FEW = 32
#: These say that the catalog cannot be read: nobody is ready without it.
_BLIND = ("source_unreachable", "source_denied", "source_busy", "source_corrupt")


class Steps(NamedTuple):
    take: tuple[str, ...]
    remove: tuple[str, ...]


def steps(table: Table, there: Mapping[str, str]) -> Steps:
    """What is to be done where `there` is name -> revision.  Pure."""
    few = len(table.entries) <= FEW
    take = tuple(
        name
        for name, entry in table.entries.items()
        if there.get(name, entry.rev) != entry.rev or (name not in there and (few or entry.pin))
    )
    # An empty place is a new catalog, or one that is not mounted: nothing is removed for its sake.
    gone = tuple(name for name in there if name not in table.entries) if table.generation else ()
    return Steps(take, gone)


async def join(
    line: Line, catalog: Catalog, take_in: Callable[[Order], Awaitable[wire.Added]]
) -> None:
    """Raises Lost, and LoradError if the catalog cannot be read.  An adapter that the daemon
    refuses is refused to who asks for it, too: that keeps nobody from the others."""
    table = await catalog.look()
    there = {row.name: row.rev or "" async for row in rows(line) if row.source == SOURCE}
    todo = steps(table, there)
    for name in todo.remove:
        await call(line, "DELETE", f"{V1}/adapters/{quote(name)}")
    for name in todo.take:
        try:
            await take_in(order_for(table.entries[name]))
        except LoradError as error:
            if error.code in _BLIND:
                raise
            log.warning("%s does not take %r: %s", line.site.name, name, error.message)


async def rows(line: Line) -> AsyncIterator[wire.Adapter]:
    """Every name that a daemon has."""
    cursor: str | None = None
    while True:
        query = {"limit": "1000"} | ({"cursor": cursor} if cursor else {})
        answer = await call(line, "GET", f"{V1}/adapters", query=urlencode(query))
        page = read(answer, wire.AdapterPage)
        for row in page.items:
            yield row
        cursor = page.cursor
        if cursor is None:
            return
